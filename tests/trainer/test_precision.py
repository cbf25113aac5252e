"""In which precision a run multiplies, and that it keeps to it."""

from pathlib import Path

import pytest
import torch
import yaml

from hiddenstore.targets.matmul import FEWEST_TIMES, bf16_speedup
from tests.trainer.runs import ON_CPU, tiny_store
from tests.trainer.test_ttt_attention import problem
from trainer.attention.ttt import ttt_attention
from trainer.config import TrainConfig
from trainer.settings import BF16_ROWS, load_config, with_precision
from trainer.train.loop import train
from trainer.train.optim import orthogonal


def written(run: Path) -> str:
    return str(yaml.safe_load((run / "config.yaml").read_text())["train"]["precision"])


def test_auto_on_a_cpu_becomes_what_was_measured_once_and_a_resume_keeps_it(tmp_path: Path) -> None:
    store = tiny_store(tmp_path)
    words = [*ON_CPU, "train.max_steps=2", "train.validate_every=0"]
    train(store.path, tmp_path / "run", words=words)
    assert written(tmp_path / "run") == "fp32"
    train(store.path, tmp_path / "run", words=["train.max_steps=3"], resume=True)
    assert written(tmp_path / "run") == "fp32"
    train(store.path, tmp_path / "half", words=[*words, "train.precision=bf16"])
    assert written(tmp_path / "half") == "bf16"


def config_of(tmp_path: Path, **drafter: int) -> TrainConfig:
    config = load_config(tiny_store(tmp_path), words=["train.device=cpu"])
    return config.model_copy(update={"drafter": config.drafter.model_copy(update=drafter)})


def test_a_cpu_that_multiplies_wide_drafters_markedly_faster_in_bf16_does_so(tmp_path: Path) -> None:
    wide = config_of(tmp_path, hidden_size=768, intermediate_size=2048)
    times = bf16_speedup(768, 2048, BF16_ROWS)
    if times > 1.2 * FEWEST_TIMES:
        assert with_precision(wide).train.precision == "bf16"
    elif times < FEWEST_TIMES / 1.2:
        assert with_precision(wide).train.precision == "fp32"
    else:
        pytest.skip(f"bf16 is {times:.2f} times as fast here: too close to the limit to say which it will be")


def test_narrow_drafters_stay_in_fp32_and_what_was_set_stays(tmp_path: Path) -> None:
    narrow = config_of(tmp_path)
    assert with_precision(narrow).train.precision == "fp32"
    for precision in ("fp32", "bf16"):
        set_so = narrow.model_copy(update={"train": narrow.train.model_copy(update={"precision": precision})})
        assert with_precision(set_so).train.precision == precision


def test_attention_takes_half_precision_in_the_kernel_of_full_precision() -> None:
    tensors, ranges = problem(2, torch.bfloat16)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    outs = []
    for q, k0, v0, *later in (tensors, wide):
        out = ttt_attention(q, k0, v0, list(zip(later[0::2], later[1::2], strict=True)), ranges)
        out.float().square().sum().backward()
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    for half, full in zip(tensors, wide, strict=True):
        assert half.grad is not None
        assert full.grad is not None
        assert torch.equal(half.grad, full.grad.bfloat16())


def test_muon_iterated_in_bf16_turns_a_matrix_as_in_fp32_to_a_part_in_a_hundred() -> None:
    matrix = torch.randn(96, 64)
    half, full = orthogonal(matrix, bf16=True), orthogonal(matrix, bf16=False)
    assert half.dtype is torch.float32
    assert not torch.equal(half, full)
    assert (half - full).norm() < 0.02 * full.norm()

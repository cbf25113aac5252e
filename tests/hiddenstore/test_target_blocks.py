"""Decoder blocks out of a checkpoint: what they compute is the target's own, and what cannot be rebuilt is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load, save
from transformers.models.llama.modeling_llama import LlamaMLP

from collectors.engines import CaptureRequest, EngineOptions
from collectors.engines.hf import HfEngine
from hiddenstore.errors import ConfigError, CorruptionError
from hiddenstore.targets import blocks as module
from hiddenstore.targets.blocks import BLOCKS_FILE, TargetBlocks, block_files, require_blocks, require_plain_blocks
from hiddenstore.targets.folder import open_target
from tests.collectors.tiny import LAYERS, VOCAB, WIDTH, save_target, tiny_target

ALL_LAYERS = tuple(range(-1, LAYERS))
REBUILT_FAMILIES = [
    *("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "granite-swa", "cohere", "olmo2"),
]


def blocks_of(folder: Path, layers: range = range(LAYERS)) -> TargetBlocks:
    files = block_files(open_target(str(folder)), layers, "float32")
    return TargetBlocks.from_bytes((folder / "config.json").read_bytes(), files[BLOCKS_FILE])


@pytest.mark.parametrize("family", REBUILT_FAMILIES)
def test_blocks_of_every_family_give_back_what_an_engine_captured(family: str, tmp_path: Path) -> None:
    blocks, target = blocks_of(save_target(tmp_path, family)), tiny_target(family)
    ids = np.random.default_rng(3).integers(3, VOCAB, 40).astype(np.int32)
    rows = np.arange(40, dtype=np.int32)
    captured = HfEngine(target, EngineOptions(ALL_LAYERS, 64)).capture([CaptureRequest(ids, rows)])
    embedded = target.head.embed(torch.from_numpy(ids).long())
    for stop in range(1, LAYERS + 1):
        assert (blocks.run(embedded, 0, stop).float() - captured.aux[stop].float()).abs().max() < 0.02 * captured.aux[
            stop
        ].float().abs().max(), f"blocks 0 to {stop}"
    last = blocks.run(captured.aux[-2], LAYERS - 1, LAYERS).float()
    assert torch.linalg.norm(last - captured.final.float()) < 0.01 * torch.linalg.norm(captured.final.float())


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_that_a_checkpoint_stores_apart_are_refused_by_name(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stored in another form than they run") as error:
        blocks_of(save_target(tmp_path, family))
    assert (error.value.kind, error.value.hint) == ("blocks-unsupported", "--recipe compact, which stores every layer")


def test_a_sample_alone_and_among_threads_has_the_same_bits(tmp_path: Path) -> None:
    blocks = blocks_of(save_target(tmp_path))
    states = torch.randn(3, 17, WIDTH).bfloat16()
    alone = [blocks.run(sample, 1, 3) for sample in states]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda index: blocks.run(states[index % 3], 1, 3), range(24)))
    assert all(torch.equal(result, alone[index % 3]) for index, result in enumerate(again))


def test_rows_do_not_depend_on_what_follows_them(tmp_path: Path) -> None:
    blocks = blocks_of(save_target(tmp_path))
    states = torch.randn(20, WIDTH).bfloat16()
    short, long = blocks.run(states[:9], 0, 2).float(), blocks.run(states, 0, 2)[:9].float()
    assert torch.allclose(short, long, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("member", ["num_kv_shared_layers", "hidden_size_per_layer_input", "cross_attention_layers"])
def test_blocks_that_read_more_than_states_are_refused_by_name(member: str) -> None:
    config = hf.LlamaConfig()
    setattr(config, member, 4)
    with pytest.raises(ConfigError, match=f"{member} is 4") as error:
        require_plain_blocks(config)
    assert (error.value.kind, error.value.hint) == ("blocks-unsupported", "--recipe compact, which stores every layer")


def test_rotary_frequencies_that_remember_other_samples_are_refused() -> None:
    config = hf.LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ConfigError, match="dynamic rotary embedding") as error:
        require_plain_blocks(config)
    assert error.value.kind == "blocks-unsupported"


def test_blocks_above_the_stated_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_target(str(save_target(tmp_path)))
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"blocks 0, 1 take .* more than the .* that a store keeps") as error:
        block_files(folder, [0, 1], "bfloat16")
    assert error.value.kind == "blocks-unsupported"


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised") as error:
        block_files(open_target(str(folder)), [0], "bfloat16")
    assert error.value.kind == "blocks-unsupported"


def test_blocks_with_buffers_that_no_checkpoint_holds_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = save_target(tmp_path), LlamaMLP.__init__

    def with_slopes(self: LlamaMLP, config: hf.LlamaConfig) -> None:
        plain(self, config)
        self.register_buffer("slopes", torch.zeros(2), persistent=False)

    monkeypatch.setattr(LlamaMLP, "__init__", with_slopes)
    with pytest.raises(ConfigError, match=r"block 1 computes mlp\.slopes when it is made") as error:
        require_blocks(open_target(str(folder)), [1], 2)
    assert error.value.kind == "blocks-unsupported"


def test_tensors_that_transformers_keeps_in_float32_are_kept_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_target(tmp_path)
    monkeypatch.setattr(hf.LlamaModel, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    data = block_files(open_target(str(folder)), [0], "bfloat16")[BLOCKS_FILE]
    dtypes = {name: tensor.dtype for name, tensor in load(data).items()}
    assert dtypes.pop("0.input_layernorm.weight") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert TargetBlocks.from_bytes((folder / "config.json").read_bytes(), data)._dtype == torch.bfloat16


def test_an_architecture_that_transformers_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="nonesuch") as error:
        TargetBlocks.from_bytes(b'{"model_type": "nonesuch"}', None)
    assert error.value.kind == "blocks-unsupported"


def test_blocks_that_are_not_those_of_the_config_are_damage(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    config = (folder / "config.json").read_bytes()
    data = block_files(open_target(str(folder)), [0], "float32")[BLOCKS_FILE]
    other = {name: tensor[..., :-1].contiguous() for name, tensor in load(data).items()}
    for damaged in (save(other), data[:100]):
        with pytest.raises(CorruptionError, match=BLOCKS_FILE) as error:
            TargetBlocks.from_bytes(config, damaged)
        assert error.value.kind == "head-corrupt"

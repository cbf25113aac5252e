"""The script of docs/huggingface-trainer.md, run as it is printed."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import tiny_store
from trainer.train.loop import train

PAGE = Path(__file__).parents[2] / "docs/huggingface-trainer.md"
WORDS = [
    "data.batch_tokens=160", "data.pack_tokens=80", "drafter.intermediate_size=32", "loss.steps=3", "optim.lr=3e-3",
    "optim.kind=adamw", "optim.schedule=constant", "optim.warmup_ratio=0", "train.max_steps=8",
    "train.validate_every=0", "train.precision=fp32", "data.seed=3", "data.max_tokens=24", "drafter.vocab_size=40",
    "train.seed=1",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_script_trains_step_by_step_as_our_own_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tiny_store(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "drafter.py").write_text(script)
    monkeypatch.setattr(sys, "argv", ["drafter.py", store.path, str(tmp_path / "out"), *WORDS])
    found: dict[str, Any] = runpy.run_path(str(tmp_path / "drafter.py"))
    history = [line for line in found["trainer"].state.log_history if "loss" in line]
    train(store.path, tmp_path / "run", words=WORDS)
    ours = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [float(line["loss"]) for line in history] == pytest.approx([line["loss"] for line in ours], rel=2e-3)
    assert [float(line["grad_norm"]) for line in history] == pytest.approx([o["grad_norm"] for o in ours], rel=2e-3)
    assert all(isinstance(value, torch.Tensor) for value in found["trainer"].model.state_dict().values())
    capsys.readouterr()

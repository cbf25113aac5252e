"""The training benchmark in a tiny form: engines on one case, growth, its page, two checkouts, and large shapes."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train import __main__ as suite
from benchmarks.train import device, worker
from benchmarks.train.case import Case
from benchmarks.train.ours import Ours, OursInMemory
from benchmarks.workers import Timing, serve

TINY = Case("eagle3", 24, vocab=96, draft=48, width=64, wider=96, heads=1, kv_heads=1, supervised=0.5, steps=2)
SMALL = {
    "width": 64, "wider": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512, "draft": 256, "tokens": 96,
    "steps": 3, "layers": 2, "block": 4, "anchors": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    TINY.save(folder)
    Ours(*Case.load(folder), folder / "fresh").save_weights(folder)
    return folder


def test_reading_the_store_trains_the_same_steps_as_the_batch_in_memory(folder: Path, tmp_path: Path) -> None:
    loaded = Case.load(folder)
    reading, in_memory = Ours(*loaded, tmp_path / "reading"), OursInMemory(*loaded, tmp_path / "memory")
    losses = [reading.step() for _ in range(3)]
    assert losses == [in_memory.step() for _ in range(3)]
    assert losses[2] < losses[0]


def test_a_loss_is_that_of_the_weights_in_the_file(folder: Path, tmp_path: Path) -> None:
    case, tensors = Case.load(folder)
    engine = Ours(case, tensors, tmp_path / "first")
    settings = {"steps": 2, "mask_offset": 0}
    loss = engine.loss(settings, [])
    tensors.weights["lm_head.weight"].mul_(2)
    assert Ours(case, tensors, tmp_path / "second").loss(settings, []) != pytest.approx(loss, rel=1e-3)
    assert engine.loss(settings, []) == loss


def test_a_case_in_bf16_is_trained_so(folder: Path, tmp_path: Path) -> None:
    case, tensors = Case.load(folder)
    cases = [replace(case, precision=name) for name in ("fp32", "bf16")]
    fp32, bf16 = (Ours(one, tensors, tmp_path / one.precision).step() for one in cases)
    assert fp32 != bf16 == pytest.approx(fp32, rel=0.02)


def test_a_worker_that_cannot_do_its_work_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = json.dumps({"op": "open", "folder": str(tmp_path / "nowhere")})
    answers = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["worker", "OursInMemory"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(request + "\n"))
    monkeypatch.setattr(sys, "stdout", answers)
    serve(worker.make)
    assert "FileNotFoundError" in json.loads(answers.getvalue())["failed"]


def timing(row: Any, cpu: list[float], **more: Any) -> Timing:
    return Timing(row, {"steps": cpu}, {"steps": cpu}, **more)


def test_the_page_names_every_row_and_says_whether_a_bar_is_met() -> None:
    best = timing(suite.EAGLE3[0], [3.0, 2.0, 2.4], facts={"loss": 1.0, "our_loss": 1.0 + 1e-6})
    slow = Timing(suite.EAGLE3[3], failed="ModuleNotFoundError: modelopt")
    ours = timing(suite.OURS, [1.9, 2.1, 2.0])
    full, half, _ = suite.CASES
    bars = suite.judged({full: [ours, best, slow], half: [ours, best]}, {})
    assert bars[0][1:] == ("1.20x", ">= 1.20x", "yes")
    assert bars[1][1:] == ("1.20x", ">= 1.50x", "no")
    (title,) = suite.BF16
    only = "\n".join(suite.page({title: [ours, best]}, {"rounds": 3}))
    assert f"{title}; against {best.row.label}" in only
    assert "Growth" not in only
    page = suite.speed_table([ours, best, slow])
    assert "ModuleNotFoundError" in page
    assert "1.20x" in page


def test_growth_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    (point,) = suite.growth(suite.Bench(tmp_path), [TINY])
    assert point["cpu"] > 0
    assert point["bytes"] > 0
    assert "| 24 | 2 |" in suite.points_table([point])


@pytest.mark.slow
def test_two_checkouts_train_the_same_steps_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "CASES", {"tiny": (TINY, 1.0)})
    document, page = suite.against(suite.Bench(tmp_path), suite.ROOT, 2)
    assert [(row["row"], row["failed"]) for row in document["tiny"]] == [
        (row.label, None) for row in (suite.OURS, suite.OURS, suite.OURS_Q8, suite.OURS_Q8)
    ]
    assert "here / there" in "\n".join(page)


@pytest.mark.slow
def test_large_shapes_run_in_a_tiny_form_on_the_cpu(tmp_path: Path) -> None:
    labels = ["eagle3-8b-2048", "dflash-8b-2048", "eagle3-70b-8192"]
    result = device.every_case(tmp_path, labels, SMALL, 1, device="cpu", checkpoint_activations=True)
    for label in labels:
        assert [answer.get("failed") for answer in result[label].values()] == [None, None]
        assert all(answer["tokens_per_s"] > 0 and answer["flop"] > 0 for answer in result[label].values())

"""The training benchmark runs in a tiny form: engines on one case, growth, its page, and the GPU script."""

import argparse
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train import gpu, growth, report, worker
from benchmarks.train.case import Case
from benchmarks.train.ours import Ours, OursHeld
from benchmarks.train.run import OURS, Found, Row

TINY = Case("eagle3", 24, vocab=96, draft=48, width=64, wider=96, heads=1, kv_heads=1, supervised=0.5, steps=2)
SMALL = {
    "width": 64, "wider": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512, "draft": 256, "tokens": 96,
    "steps": 3, "layers": 2, "block": 4, "anchors": 95,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    TINY.save(folder)
    Ours(*Case.load(folder), folder / "fresh").save_weights(folder)
    return folder


def test_reading_the_store_trains_the_same_steps_as_the_batch_in_memory(folder: Path, tmp_path: Path) -> None:
    loaded = Case.load(folder)
    reading, held = Ours(*loaded, tmp_path / "reading"), OursHeld(*loaded, tmp_path / "held")
    losses = [reading.step() for _ in range(3)]
    assert losses == [held.step() for _ in range(3)]
    assert losses[2] < losses[0]


def test_losses_are_those_of_the_weights_in_the_file(folder: Path, tmp_path: Path) -> None:
    case, tensors = Case.load(folder)
    engine = Ours(case, tensors, tmp_path / "first")
    settings = {"steps": 2, "mask_offset": 0}
    found = engine.losses(settings)
    tensors.weights["lm_head.weight"].mul_(2)
    assert Ours(case, tensors, tmp_path / "second").losses(settings) != pytest.approx(found, rel=1e-3)
    assert engine.losses(settings) == found


def test_a_worker_that_cannot_do_its_work_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = json.dumps({"op": "open", "folder": str(tmp_path / "nowhere")})
    answers = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["worker", "OursHeld"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(request + "\n"))
    monkeypatch.setattr(sys, "stdout", answers)
    worker.main()
    assert "FileNotFoundError" in json.loads(answers.getvalue())["failed"]


def test_the_page_names_every_row_and_says_whether_a_bar_is_met() -> None:
    best = Found(Row("SpecForge 0.2, sdpa", "SpecForge"), [3.0, 2.0, 2.4], [4.0, 4.0, 4.0], [1.0], [1.0 + 1e-6])
    slow = Found(Row("ModelOpt 0.47, sdpa", "ModelOpt"), failed="ModuleNotFoundError: modelopt")
    ours = Found(OURS, [1.9, 2.1, 2.0], [2.0, 2.0, 2.0])
    bars = report.bars({"full": [ours, best, slow], "half": [ours, best]}, {}, {})
    assert bars[0][1:] == ("1.20x", ">= 1.2x", "yes")
    assert bars[1][1:] == ("1.20x", ">= 1.5x", "no")
    page = report.speed_table([ours, best, slow])
    assert "ModuleNotFoundError" in page
    assert "1.20x" in page


def test_growth_tells_a_square_from_a_line(tmp_path: Path) -> None:
    points = [{"tokens": t, "steps": 7, "cpu": 1e-4 * t, "bytes": 1e5 * t} for t in growth.TOKENS]
    points += [{"tokens": 1024, "steps": k, "cpu": 0.1 * k, "bytes": 1e6 * k} for k in range(1, 7)]
    found = growth.fits(points)
    assert found["exponent_cpu"] == pytest.approx(1, abs=1e-6)
    assert abs(found["memory_square"]) < 1e-6
    squares = [point | {"bytes": 8.0 * point["tokens"] ** 2} for point in points]
    assert growth.fits(squares)["memory_square"] == pytest.approx(8, rel=1e-6)
    growth.plot(points, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_the_gpu_script_runs_in_a_tiny_form_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(
        only=["eagle3-8b-2048", "dflash-8b-2048", "eagle3-70b"], steps=1, recompute=True, peak_tflops=1.0,
        device="cpu", shrink={**SMALL, "anchors": 8},
    )  # fmt: skip
    found = gpu.every_row(arguments)
    rows = [found[label] for label in ("eagle3-8b-2048", "dflash-8b-2048", "eagle3-70b-8192")]
    assert all(row["tokens_per_s"] > 0 and 0 < row["mfu"] < 1 for row in rows)
    assert json.loads(capsys.readouterr().out.splitlines()[0].split(maxsplit=1)[1])["tokens"] == SMALL["tokens"]


@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
def test_counted_products_are_those_torch_counts(drafter: str) -> None:
    """But for attention, whose CPU kernel torch does not count."""
    shape = replace(gpu.Shape(drafter, 1), **SMALL)
    run = gpu.Run(shape, torch.device("cpu"))
    # torch counts its own products, not oneDNN's.
    onednn = {torch.ops.mkldnn._linear_pointwise: lambda x, weight, *_, **__: 2 * math.prod(x) * weight[0]}
    with FlopCounterMode(display=False, custom_mapping=onednn) as counter:
        run.update(0)
    assert counter.get_total_flops() == pytest.approx(shape.products, rel=0.1)

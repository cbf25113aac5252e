"""Recipes in pairs, as the benchmark measures them."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import paired
from hiddenstore.testing.builders import make_store
from tests.trainer.runs import WORDS
from trainer.train.paired import measure_paired

SHORT = [word for word in WORDS if not word.startswith(("train.", "drafter.vocab"))] + ["train.max_steps=2"]


def test_seeds_in_processes_of_their_own_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "raw", samples=20, layers=(1, 3, 4), codec="raw")
    words = ["paired", store.path, "--target", "t", "--recipes", "compact", "--results", str(tmp_path / "results")]
    words += ["--seeds", "2", "--first-seed", "4", "--processes", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--settings", *SHORT])
    paired.main()
    (found,) = json.loads(next((tmp_path / "results").glob("*.json")).read_text())["paired"]
    (row,) = measure_paired(store, ("compact",), (4, 5), SHORT, lambda *_, **__: None)
    assert (found["seeds"], found["steps"]) == ([4, 5], 2)
    for name in ("acceptance", "original_acceptance", "difference", "half_width"):
        # Other threads sum in another order.
        assert found[name] == pytest.approx(json.loads(row.model_dump_json())[name], rel=1e-3)


def test_one_pair_is_refused_since_it_tells_no_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paired", str(tmp_path), "--target", "t", "--seeds", "1"])
    with pytest.raises(SystemExit):
        paired.main()
    assert "--seeds 1: of fewer than 2 pairs" in capsys.readouterr().err

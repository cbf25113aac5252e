"""The table of drafters in engines: what a row says, and that a drafter an engine does not take keeps its reason."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.commands import Command, RefusedError
from benchmarks.engines import HEAD, cell, line
from hiddenstore.cli import main
from hiddenstore.testing.builders import make_store

MEASURED: dict[str, Any] = {
    "drafter": "eagle3", "engine": "vllm", "drafts_of": 3, "accepted_length": 1.5, "answers": 24, "rounds": 3,
    "ties": [{"rounds": 3}, {"rounds": 1}], "differences": [{"rounds": 2}],
    "tokens_per_s": 40.0, "baseline_tokens_per_s": 32.0, "speedup_rounds": [1.3, 1.2, 1.25],
}  # fmt: skip


def test_a_row_stands_beside_what_decode_and_eval_said_and_counts_the_answers_of_every_round() -> None:
    decoded = {"accepted_length": 1.48, "engine_accepted_length": 1.5, "simulated_accepted_length": 1.479}
    cells = line(MEASURED, decoded)
    assert cells[3:7] == ["1.500", "1.480", "1.500", "1.479"]
    assert cells[7:] == ["18 / 4 / 2", "40.0", "32.0", "1.250 (1.200–1.300)"]
    assert len(cells) == len(HEAD) == len(line({"drafter": "x", "engine": "vllm", "refused": "no"}, {}))


def test_a_method_without_a_run_has_nothing_of_decode() -> None:
    assert line(MEASURED | {"drafter": "ngram"}, {})[4:7] == ["–", "–", "–"]


def test_a_drafter_that_an_engine_does_not_take_is_a_row_with_the_reason_of_export(tmp_path: Path) -> None:
    make_store(tmp_path, samples=4, final="all")
    words = ["train", str(tmp_path / "store"), "-o", str(tmp_path / "run"), "--drafter", "eagle1"]
    small = ["drafter.first_norm=true", "train.max_steps=1", "train.validate_every=0"]
    assert CliRunner().invoke(main, [*words, *small], catch_exceptions=False).exit_code == 0
    options = Namespace(cells=tmp_path / "cells", max_new_tokens=8, runs=[tmp_path / "run"])
    row = cell(options, "vllm", tmp_path / "run", "target", {"dtype": "float32", "words": []})
    assert row["drafter"] == "run"
    assert "its layer 0 has no input_layernorm" in row["refused"]
    assert "no: vLLM cannot run this eagle1 drafter" in line(row, {})[3]


def test_a_command_says_why_it_could_not(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="nowhere"):
        Command().demand("info", str(tmp_path / "nowhere"))

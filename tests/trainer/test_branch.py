"""A run that goes on from an earlier checkpoint, and one that is served without an export of its own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hiddenstore.cli import main
from tests.tiny_world import tree
from tests.tmpfs import mounted
from tests.trainer.runs import WORDS, tiny_store
from trainer.train import checkpoint
from trainer.train.run_folder import branch


def command(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(main, list(words), prog_name="hiddenstore", catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with checkpoints at 4, 8 and 12, beside its store."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_store(folder)
    command("train", str(folder / "store"), "-o", str(folder / "run"), *WORDS, "train.keep=9", "-q")
    return folder


def test_a_new_run_goes_on_from_an_earlier_checkpoint_to_the_same_weights(trained: Path, tmp_path: Path) -> None:
    store, run, again = str(trained / "store"), trained / "run", tmp_path / "again"
    before = tree(run)
    command("train", store, "-o", str(again), "--resume-from", str(run / "checkpoints" / "step-4"), "-q")
    last = "checkpoints/step-12/drafter.safetensors"
    assert (again / last).read_bytes() == (run / last).read_bytes()
    steps = [json.loads(line)["step"] for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step not in (6, 12)] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert tree(run) == before
    refused = command(
        "train", store, "-o", str(again), "--resume-from", str(run / "checkpoints" / "LATEST"), "--json", code=6
    )
    assert json.loads(refused.stderr.strip().splitlines()[-1])["kind"] == "output-exists"
    command("train", store, "-o", str(again), "--resume", "--resume-from", str(run), code=2)


def test_a_run_that_goes_on_from_another_has_the_start_that_lies_in_it(trained: Path, tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    shutil.copytree(trained / "run", run)
    shutil.copytree(trained / "run", run / "start")
    branch(run / "checkpoints" / "step-4", again)
    assert tree(again / "start") == tree(run / "start")
    assert [path.name for path in checkpoint.checkpoints(again)] == ["step-4"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "size=128k")


def test_a_branch_on_a_full_disk_says_that_the_disk_is_full_and_leaves_nothing(trained: Path, disk: Path) -> None:
    words = ("train", str(trained / "store"), "-o", str(disk / "again"), "--resume-from", str(trained / "run"))
    refused = command(*words, "--json", code=5)
    assert json.loads(refused.stderr.strip().splitlines()[-1])["kind"] == "disk-full"
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("place", ["run", "run/checkpoints/step-8", "run/checkpoints/LATEST"])
def test_a_run_or_checkpoint_is_exported_once_and_served(trained: Path, place: str) -> None:
    words = ("serve", str(trained / place), "--target", "maker/target", "--engine", "sglang", "--print-only")
    step = 8 if place.endswith("8") else 12
    folder = trained / "run" / "exports" / f"sglang-0.5.23-step-{step}"
    served = json.loads(command(*words, "--json").stdout)
    assert served["drafter"] == str(folder)
    assert str(folder) in served["command"]
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert "hiddenstore export" not in command(*words).stderr
    assert (folder / "model.safetensors").stat().st_mtime_ns == made

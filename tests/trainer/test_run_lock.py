"""A run folder has one writer (finding A8): the second is told who it is, and a killed one leaves no lock behind."""

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hiddenstore.errors import ConfigError, ConflictError, StorageError
from hiddenstore.files.lock import WRITER, FolderLock
from tests.forked import Forked
from tests.trainer.runs import WORDS, tiny_store
from tests.trainer.test_resume import start
from trainer.train.loop import train
from trainer.train.run_folder import TrainOptions, create, open_new
from trainer.vocab import DraftVocab

LONG = [*WORDS, "train.max_steps=100000", "train.checkpoint_every=5", "train.validate_every=0"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Forked, str, Path]]:
    """A training in another process that has written a checkpoint and goes on."""
    store, run = tiny_store(tmp_path).path, tmp_path / "run"
    process = start(store, run, *LONG)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "LATEST").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield process, store, run
    process.kill()
    process.wait(60)


@pytest.mark.parametrize("resume", [False, True])
def test_a8_a_second_training_is_told_which_process_writes_the_folder(
    running: tuple[Forked, str, Path], resume: bool
) -> None:
    process, store, run = running
    with pytest.raises(ConflictError) as caught:
        train(store, run, words=[] if resume else WORDS, resume=resume)
    assert caught.value.kind == "run-in-use"
    assert f"process {process.pid} on {socket.gethostname()}" in caught.value.message
    assert process.poll() is None


def test_a8_a_killed_training_leaves_a_folder_that_resumes(
    running: tuple[Forked, str, Path],
) -> None:
    process, store, run = running
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert (run / WRITER).exists()
    steps = int((run / "checkpoints" / "LATEST").read_text().rpartition("-")[2]) + 2
    assert train(store, run, words=[f"train.max_steps={steps}"], resume=True).steps == steps
    assert not (run / WRITER).exists()
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == sorted(set(lines))


def test_a8_of_two_new_runs_in_one_folder_one_is_refused(tmp_path: Path) -> None:
    store, run = tiny_store(tmp_path).path, tmp_path / "run"
    processes = [start(store, run, *WORDS, f"train.seed={seed}") for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        codes = sorted(pool.map(lambda process: process.wait(240), processes))
    assert codes == [0, ConflictError.exit_code]
    seed = re.search(r"^  seed: (\d)$", (run / "config.yaml").read_text().partition("train:")[2], re.MULTILINE)
    assert seed is not None
    assert json.loads((run / "checkpoints/step-12/drafter.json").read_text())["seed"] == int(seed[1])


def test_a_refused_training_leaves_nothing_in_a_folder_that_was_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ConfigError):
        train(tiny_store(tmp_path).path, run, words=["loss.stepz=3"])
    assert os.listdir(run) == []


def test_a_file_of_somebody_else_is_not_written_over(tmp_path: Path) -> None:
    run, text = tmp_path / "run", "train: {seed: 3}  # mine\n"
    run.mkdir()
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConflictError, match=r"config\.yaml that no run wrote") as caught:
        train(tiny_store(tmp_path).path, run, file=run / "config.yaml", words=WORDS)
    assert caught.value.kind == "output-exists"
    assert (run / "config.yaml").read_text() == text
    assert os.listdir(run) == ["config.yaml"]


def test_a_lock_is_given_back_and_taken_again_by_the_same_process(tmp_path: Path) -> None:
    for _ in range(2):
        with FolderLock(tmp_path) as lock, FolderLock(tmp_path) as other:
            lock.take()
            lock.take()
            with pytest.raises(ConflictError, match=f"process {os.getpid()} on "):
                other.take()
        assert not (tmp_path / WRITER).exists()


def test_who_had_a_folder_that_was_removed_leaves_the_lock_of_the_one_made_in_its_place(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second, third = FolderLock(run), FolderLock(run), FolderLock(run)
    run.mkdir()
    first.take()
    shutil.rmtree(run)
    run.mkdir()
    second.take()
    first.release()
    with pytest.raises(ConflictError, match="is being written by process"):
        third.take()
    second.release()


def test_a_folder_that_cannot_be_locked_keeps_what_another_process_began_in_it(tmp_path: Path) -> None:
    store, run = tiny_store(tmp_path), tmp_path / "run"
    options = TrainOptions(store.path, tmp_path / "done", words=WORDS)
    _, config = open_new(options)
    (run / WRITER).mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        (run / name).write_text("another process has begun here")
    with pytest.raises(StorageError):
        create(run, store, config, DraftVocab.full(store.capture.target.vocab_size), 1.0, lock=FolderLock(run))
    assert sorted(path.name for path in run.iterdir()) == [WRITER, "config.yaml", "run.json"]

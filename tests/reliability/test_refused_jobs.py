"""Reads that fail for a moment under collect, copy, training and its resume: said as an error of the storage, and the
same command finishes the job as if nothing had been."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from collectors.capture.job import CollectOptions, collect
from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.data import TokenBatches
from hiddenstore.errors import StorageError
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.faults import ROOT, FaultFilesystem, ReadFault
from tests.reliability.figures import Figures
from tests.reliability.refused_reads import Reads, errors_at
from tests.tiny_world import run
from tests.trainer.runs import WORDS, tiny_store
from trainer.train.log import METRICS

SAMPLES = 4
POINTS = 2
TIMED = ("tokens_per_s", "data_wait_fraction")
ASIDE = f"{ROOT}-copy"


@dataclass(frozen=True)
class Made:
    """What the jobs read."""

    folder: Path

    def collect(self, out: FaultFilesystem) -> None:
        target, layers = str(self.folder / "target"), "0,1"
        collect(CollectOptions(self.folder / "data", out, target, layers=layers, check="none"), note=_quiet)  # type: ignore[arg-type]

    def copy_to(self, out: FaultFilesystem) -> None:
        run_copy(open_copy([Store.open(self.source())], out))

    def copy_from(self, source: FaultFilesystem) -> None:
        """Every read of the source; the copy is a new one each time."""
        out = FaultFilesystem(root=ASIDE)
        run_copy(open_copy([Store.open(source)], out))
        assert contents(Store.open(out)) == contents(Store.open(self.source()))

    def train(self, source: FaultFilesystem) -> None:
        """What a run reads of two epochs, whose batches must be those of a sound disk."""
        assert _batches(source) == _batches(self.source())

    def source(self) -> FaultFilesystem:
        store = make_store(FaultFilesystem(root=f"{ROOT}-source"), samples=6, layers=(1,), width=8, codec="q8")
        assert isinstance(store.fs, FaultFilesystem)
        return store.fs


def _quiet(_: str) -> None:
    return None


def _batches(fs: FaultFilesystem) -> str:
    """A digest of every batch of two epochs."""
    digest = hashlib.sha256()
    for batch in TokenBatches(Store.open(fs), batch_tokens=80, pack_tokens=40, epochs=2):
        for pack in batch.packs:
            digest.update(pack.input_ids.numpy().tobytes() + pack.aux.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("refused")
    data_for_tiny(folder / "data", samples=SAMPLES)
    save_target(folder / "target")
    return Made(folder)


WRITERS: dict[str, Callable[[Made, FaultFilesystem], None]] = {
    "collect": Made.collect,
    "copy to": Made.copy_to,
}
READERS: dict[str, Callable[[Made, FaultFilesystem], None]] = {"copy from": Made.copy_from, "train": Made.train}


def faults(total: int, points: int | None) -> list[ReadFault]:
    """Each of so many reads with each error number, or some reads with one each."""
    step = 1 if points is None else total // points
    return [ReadFault(at, error) for at in range(step // 2, total, step) for error in errors_at(at, points is not None)]


def refuse_writer(name: str, made: Made, points: int | None, figures: Figures) -> None:
    """A new store, each read of which fails once; what was committed stays, and the same call finishes the job."""
    straight = FaultFilesystem()
    WRITERS[name](made, straight)
    total, expected, tally = len(straight.disk.reads), contents(Store.open(straight)), Tally()
    assert total > 10
    for fault in faults(total, points):
        out = FaultFilesystem()
        out.disk.read_fault = fault
        tally.points += 1
        try:
            WRITERS[name](made, out)
        except StorageError:
            out.disk.read_fault = None
            WRITERS[name](made, out)
        out.disk.read_fault = None
        assert contents(Store.open(out)) == expected, f"{fault} of {name}"
        assert verify(out, "bytes").findings == [], f"{fault} of {name}"
    figures.add("refused reads", name, tally)


def refuse_reader(name: str, made: Made, points: int | None, figures: Figures) -> None:
    """A sound store, each read of which fails once."""
    source, tally = made.source(), Tally()
    source.disk.reads.clear()
    READERS[name](made, source)
    before, total = source.disk.files(), len(source.disk.reads)
    assert total > 10
    for fault in faults(total, points):
        source.disk.reads.clear()
        source.disk.read_fault = fault
        tally.points += 1
        with pytest.raises(StorageError):
            READERS[name](made, source)
        source.disk.read_fault = None
        assert source.disk.files() == before, f"{fault} of {name}"
        READERS[name](made, source)
    figures.add("refused reads", name, tally)


@pytest.mark.parametrize("name", WRITERS)
def test_a_read_that_fails_costs_a_writer_nothing(name: str, made: Made, figures: Figures) -> None:
    refuse_writer(name, made, POINTS, figures)


@pytest.mark.parametrize("name", READERS)
def test_a_read_that_fails_is_an_error_of_a_reader_and_nothing_else(name: str, made: Made, figures: Figures) -> None:
    refuse_reader(name, made, POINTS, figures)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_no_read_that_fails_costs_a_writer_anything(name: str, made: Made, figures: Figures) -> None:
    refuse_writer(name, made, None, figures)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_read_that_fails_is_an_error_of_a_reader_and_nothing_else(
    name: str, made: Made, figures: Figures
) -> None:
    refuse_reader(name, made, None, figures)


def metrics(run: Path) -> list[dict[str, object]]:
    """Everything a run logged but the times."""
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]


def refuse_resume(folder: Path, points: int | None, patch: pytest.MonkeyPatch, figures: Figures) -> None:
    """A finished run that is to go on, each read of whose folder fails once: exit code 5, nothing is trained anew, and
    the same command goes on as if nothing had been."""
    store, begun, path = tiny_store(folder, samples=8).path, folder / "begun", folder / "run"
    assert run("train", store, "-o", str(begun), "-q", *WORDS, "train.max_steps=2") == 0
    reads = Reads((path,), patch)

    def resume() -> int:
        return run("train", store, "-o", str(path), "-q", "--resume", "train.max_steps=3")

    def done() -> tuple[object, bytes]:
        return metrics(path), (path / "checkpoints" / "step-3" / "drafter.safetensors").read_bytes()

    shutil.copytree(begun, path)
    reads.begin()
    assert resume() == 0
    total, expected, before, tally = reads.count, done(), metrics(begun), Tally()
    assert total > 6
    for fault in faults(total, points):
        shutil.rmtree(path)
        shutil.copytree(begun, path)
        reads.begin(fault.at, fault.error)
        tally.points += 1
        assert resume() == 5, fault
        reads.begin()
        assert metrics(path)[: len(before)] == before, fault
        assert resume() == 0, fault
        assert done() == expected, fault
    figures.add("refused reads", "train --resume, of its run", tally)


def test_a_read_of_a_checkpoint_that_fails_stops_a_resume_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: Figures
) -> None:
    refuse_resume(tmp_path, 1, monkeypatch, figures)


@pytest.mark.slow
def test_every_read_of_a_run_that_fails_stops_a_resume_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: Figures
) -> None:
    refuse_resume(tmp_path, None, monkeypatch, figures)

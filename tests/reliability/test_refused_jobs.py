"""Reads that fail for a moment under collect, copy and training: said as an error of the storage, and the same command
finishes the job as if nothing had been."""

import errno
import hashlib
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
from hiddenstore.testing.invariants import contents
from hiddenstore.testing.suite import Tally
from hiddenstore.verify import verify
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.faults import ROOT, FaultFilesystem, ReadFault
from tests.reliability.figures import Figures

ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM)
SAMPLES = 4
POINTS = 2
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


def refuse_writer(name: str, made: Made, points: int | None, figures: Figures) -> None:
    """A new store, each read of which fails once; what was committed stays, and the same call finishes the job."""
    straight = FaultFilesystem()
    WRITERS[name](made, straight)
    total, expected, tally = len(straight.disk.reads), contents(Store.open(straight)), Tally()
    assert total > 10
    step = 1 if points is None else total // points
    for at in range(step // 2, total, step):
        out = FaultFilesystem()
        out.disk.read_fault = ReadFault(at, ERRORS[at % len(ERRORS)])
        tally.points += 1
        try:
            WRITERS[name](made, out)
        except StorageError:
            out.disk.read_fault = None
            WRITERS[name](made, out)
        out.disk.read_fault = None
        assert contents(Store.open(out)) == expected, f"read {at} of {name}"
        assert verify(out, "bytes").findings == [], f"read {at} of {name}"
    figures.add("refused reads", name, tally)


def refuse_reader(name: str, made: Made, points: int | None, figures: Figures) -> None:
    """A sound store, each read of which fails once."""
    source, tally = made.source(), Tally()
    source.disk.reads.clear()
    READERS[name](made, source)
    before, total = source.disk.files(), len(source.disk.reads)
    assert total > 10
    step = 1 if points is None else total // points
    for at in range(step // 2, total, step):
        source.disk.reads.clear()
        source.disk.read_fault = ReadFault(at, ERRORS[at % len(ERRORS)])
        tally.points += 1
        with pytest.raises(StorageError):
            READERS[name](made, source)
        source.disk.read_fault = None
        assert source.disk.files() == before, f"read {at} of {name}"
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

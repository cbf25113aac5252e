"""Reads that fail for a moment under verify, repair and gc: said, never taken for damage, and nothing is changed (A1).

One sound store; each read of each command fails once, with an error number, or answers that nothing is there.
"""

import errno
from collections.abc import Sequence
from contextlib import suppress

import pytest

from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.errors import HiddenstoreError, NotFoundError, StorageError
from hiddenstore.files import layout
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import contents, problems
from hiddenstore.verify import verify
from schemas.manifest import Container
from tests.faults import FaultFilesystem, ReadFault
from tests.reliability.figures import Figures
from tests.reliability.refused_reads import ERRORS, errors_at

COMMANDS = {
    "verify": lambda fs: verify(fs, "bytes"),
    "repair": lambda fs: repair(fs, dry_run=False, accept_loss=1000),
    "gc": lambda fs: gc(fs, dry_run=False, older_than_s=0, abandoned=True),
}


def sound_store(container: Container, codec: str) -> Store:
    store = make_store(FaultFilesystem(), samples=3, layers=(1,), width=8, codec=codec, container=container)
    store.save_snapshot("whole")
    return store


def sweep(store: Store, command: str, errors: Sequence[int], figures: Figures) -> None:
    """Every read fails by each of the error numbers, or, with none, by the next one; and answers that nothing is
    there."""
    fs = store.fs
    assert isinstance(fs, FaultFilesystem)
    before = fs.disk.files()
    fs.disk.reads.clear()
    COMMANDS[command](fs)
    assert fs.disk.files() == before
    total = len(fs.disk.reads)
    assert total > 10
    tally = Tally()
    for at in range(total):
        for error in (*(errors or (ERRORS[at % len(ERRORS)],)), errno.ENOENT):
            tally.points += 1
            check(fs, command, ReadFault(at, error))
            assert fs.disk.files() == before, f"read {at} of {command} failed and something changed"
    figures.add("refused reads", command, tally)


def check(fs: FaultFilesystem, command: str, fault: ReadFault) -> None:
    fs.disk.reads.clear()
    fs.disk.read_fault = fault
    try:
        if fault.error != errno.ENOENT:
            with pytest.raises(StorageError) as error:
                COMMANDS[command](fs)
            assert error.value.exit_code == 5
        else:
            # An answer that nothing is there may be seen through.
            with suppress(StorageError, NotFoundError):
                COMMANDS[command](fs)
    finally:
        fs.disk.read_fault = None


@pytest.mark.parametrize("command", COMMANDS)
def test_no_read_that_fails_once_is_damage_a1(command: str, figures: Figures) -> None:
    sweep(sound_store("webdataset", "bf16"), command, (), figures)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("container", "codec"), [("zarr", "q8"), ("zarr", "bf16"), ("webdataset", "q8")])
def test_no_read_that_fails_once_is_damage_whatever_the_store_a1(
    command: str, container: Container, codec: str, figures: Figures
) -> None:
    sweep(sound_store(container, codec), command, ERRORS, figures)


def test_bytes_that_are_right_past_the_page_cache_are_no_damage_a1() -> None:
    store = sound_store("zarr", "bf16")
    fs = store.fs
    assert isinstance(fs, FaultFilesystem)
    before = fs.disk.files()
    for path, data in before.items():
        flipped = bytearray(data)
        if flipped:
            flipped[len(flipped) // 2] ^= 1
        fs.disk.cached = {path: bytes(flipped)}
        if path.endswith(layout.STORE_JSON):
            continue
        report = verify(fs, "bytes")
        assert report.findings == [], path
        fs.disk.cached = {path: bytes(flipped)}
        result = repair(fs, dry_run=False)
        assert (result.units, result.aside) == ([], {}), path
        assert fs.disk.files() == before


def test_a_store_whose_disk_is_gone_is_not_repaired_a1() -> None:
    store = sound_store("zarr", "bf16")
    fs = store.fs
    assert isinstance(fs, FaultFilesystem)
    record = store.commits()[0]
    victim = f"{store.path}/{record.segment}/{record.files[-1].path}"
    kept = fs.disk.files()[f"{store.path}/{layout.STORE_JSON}"]
    fs.disk.overwrite(victim, None)
    fs.disk.overwrite(f"{store.path}/{layout.STORE_JSON}", None)
    with pytest.raises(HiddenstoreError):
        repair(fs)
    with pytest.raises(StorageError) as error:
        verify(fs)
    assert error.value.kind == "absence-unknown"
    fs.disk.overwrite(f"{store.path}/{layout.STORE_JSON}", kept)
    assert "file-missing" in verify(fs).kinds


def damaged_store() -> tuple[FaultFilesystem, dict[str, str]]:
    """A store that lost one sample, and what the others hold."""
    store = make_store(FaultFilesystem(), samples=6, layers=(1,), width=8, codec="bf16", container="webdataset")
    fs = store.fs
    assert isinstance(fs, FaultFilesystem)
    record = max(store.commits(), key=lambda r: len(r.samples))
    expected, victim = contents(store), record.samples[0].id
    path = f"{record.segment}/samples.tar"
    data = bytearray(fs.read(path))
    data[data.index(f"{victim}.layer_1".encode()) + 512 + 128] ^= 1
    fs.disk.overwrite(f"{fs.root}/{path}", bytes(data))
    return fs, {name: digest for name, digest in expected.items() if name != victim}


def check_damaged(step: int, figures: Figures) -> None:
    whole, expected = damaged_store()
    fs = whole.copy()
    fs.disk.reads.clear()
    repair(fs, dry_run=False, accept_loss=1)
    total = len(fs.disk.reads)
    assert contents(Store.open(fs)) == expected
    points = [(at, error) for at in range(0, total, step) for error in (*errors_at(at // step, step > 1), errno.ENOENT)]
    for at, error in points:
        fs = whole.copy()
        fs.disk.read_fault = ReadFault(at, error)
        with suppress(HiddenstoreError):
            repair(fs, dry_run=False, accept_loss=1)
        fs.disk.read_fault = None
        repair(fs, dry_run=False, accept_loss=1)
        assert contents(Store.open(fs)) == expected, f"read {at} failed with {errno.errorcode[error]}"
        assert problems(Store.open(fs)) == []
    figures.add("refused reads", "repair of a damaged store", Tally(points=len(points)))


def test_a_read_that_fails_while_a_damaged_store_is_repaired_costs_no_other_sample_a1(figures: Figures) -> None:
    check_damaged(4, figures)


@pytest.mark.slow
def test_no_read_that_fails_while_a_damaged_store_is_repaired_costs_another_sample_a1(figures: Figures) -> None:
    check_damaged(1, figures)

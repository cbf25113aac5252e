"""One process sleeps while others go on: for every operation of a command, reads too, others do whole work before it.

What read before, and what the others left, still reads afterwards, bit for bit, snapshots too; and the same commands
finish the job. The digits in names are counted, not drawn, so that equal disks are seen to be equal: each is looked at
once.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import count

import pytest

from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.errors import HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.publish import publish_index
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, HEAD, capture_spec, memory_input, random_records, target_files
from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import SAMPLES, WIDTH, contents, problems, sample_digest
from hiddenstore.verify import verify
from hiddenstore.writer import create_store, pending_units, register_input, write_unit
from tests.accepting import repair_all
from tests.faults import ROOT, FaultDisk, FaultFilesystem, SleepyDisk
from tests.reliability.figures import Figures

INPUT = memory_input(SAMPLES)
CAPTURE = capture_spec(layers=(1,), width=WIDTH, codec="q8")
Readable = dict[str, str]
Work = Callable[[Filesystem], object]


class Digits:
    """What ``secrets.token_hex`` would draw; ``start`` keeps those of the others apart."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, number: int) -> None:
        self._numbers = count(number)

    def __call__(self, size: int) -> str:
        return f"{next(self._numbers):0{2 * size}x}"


DIGITS = Digits()


@pytest.fixture(autouse=True)
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", DIGITS)


def collect(fs: Filesystem) -> None:
    store = create_store(fs, CAPTURE, HEAD, "safe", target_files(WIDTH), "webdataset")
    register_input(store, INPUT)
    members = {unit.name: unit.samples for unit in INPUT.units()}
    for pending in pending_units(store, INPUT.info.digest).values():
        records = random_records([sample for sample in members[pending.name] if pending.lacks(sample.id)], CAPTURE)
        if pending.replaces is None:
            write_unit(store, pending.name, INPUT.info.digest, records, (), ENGINE, pending.revision)
        else:
            recapture_unit(store, pending, records, (), ENGINE)


def mend(fs: Filesystem) -> None:
    repair(fs, dry_run=False, accept_loss=1)


def sweep(fs: Filesystem) -> None:
    gc(fs, dry_run=False, older_than_s=0)


def give_up(fs: Filesystem) -> None:
    gc(fs, dry_run=False, older_than_s=0, abandoned=True)


def care(fs: Filesystem) -> None:
    """What a person types, and a snapshot where there is none."""
    repair_all(fs)
    collect(fs)
    Store.open(fs).save_snapshot("s")
    sweep(fs)


def whole() -> FaultFilesystem:
    fs = FaultFilesystem()
    collect(fs)
    return fs


@cache
def reference() -> Readable:
    return contents(Store.open(whole()))


def flip(fs: FaultFilesystem, path: str, place: int) -> FaultFilesystem:
    data = bytearray(fs.read(path))
    data[place] ^= 1
    fs.disk.overwrite(f"{fs.root}/{path}", bytes(data))
    return fs


def damaged_sample() -> FaultFilesystem:
    fs = whole()
    record = max(Store.open(fs).commits(), key=lambda record: len(record.samples))
    path = f"{record.segment}/samples.tar"
    return flip(fs, path, fs.read(path).index(f"{record.samples[0].id}.layer_1".encode()) + 512 + 128)


def damaged_record() -> FaultFilesystem:
    fs = whole()
    return flip(fs, f"{layout.COMMITS_DIR}/{Store.open(fs).catalog.names[0]}", 700)


def unknown_record() -> FaultFilesystem:
    """Nothing says which samples its unit has."""
    fs = damaged_record()
    publish_index(fs, Store.open(fs, strict=False).catalog.names)
    fs.disk.overwrite(f"{fs.root}/{layout.input_path(INPUT.info.digest)}", None)
    return fs


def damaged_snapshot() -> FaultFilesystem:
    fs = whole()
    Store.open(fs).save_snapshot("s")
    return flip(fs, layout.snapshot_path("s"), 30)


def damaged_index() -> FaultFilesystem:
    fs = whole()
    publish_index(fs, fs.list(layout.COMMITS_DIR))
    return flip(fs, layout.index_path(1), 300)


def lossy() -> FaultFilesystem:
    fs = damaged_sample()
    repair_all(fs)
    return fs


def half() -> FaultFilesystem:
    fs = FaultFilesystem()
    store = create_store(fs, CAPTURE, HEAD, "safe", target_files(WIDTH), "webdataset")
    digest, unit = register_input(store, INPUT), next(iter(INPUT.units()))
    write_unit(store, unit.name, digest, random_records(unit.samples, CAPTURE), (), ENGINE)
    return fs


def readable(fs: Filesystem, snapshot: str | None = None) -> Readable:
    """What reads in spite of damage."""
    digests: Readable = {}
    with suppress(HiddenstoreError):
        store = Store.open(fs, snapshot, strict=False)
        for name in store.sample_ids:
            with suppress(HiddenstoreError):
                digests[name] = sample_digest(store, name)
    return digests


def views(fs: Filesystem) -> dict[str | None, Readable]:
    """What reads in the store, and in each of its snapshots."""
    names = (layout.parse_snapshot(name) for name in fs.list(layout.SNAPSHOTS_DIR))
    return {name: readable(fs, name) for name in (None, *(name for name in names if name))}


class Interleavings:
    """``work`` at a store that sleeps before each of its operations in turn, until ``others`` are done."""

    def __init__(self, store: FaultFilesystem, work: Work, others: Work) -> None:
        self.store, self.work, self.others = store, work, others
        self.tally = Tally()
        self.before = views(store)
        # Of what others make of a disk there is one outcome, as there is of what ends as the same disk.
        self._after: dict[bytes, tuple[FaultDisk, dict[str | None, Readable]]] = {}
        self._ends: dict[tuple[bytes, str], Tally] = {}

    def try_all(self, step: int = 1) -> Tally:
        at = 0
        while self._try(at):
            at += step
        return self.tally

    def _try(self, at: int) -> bool:
        """One of them; whether there is one."""
        disk, left = self.store.copy().disk, dict[str | None, Readable]()

        def meanwhile() -> None:
            left.update(self._let_others(disk))

        DIGITS.start(1 << 12)
        sleepy = SleepyDisk(disk, at, meanwhile)
        with suppress(HiddenstoreError):
            self.work(LocalFilesystem(ROOT, disk=sleepy))
        if sleepy.operation is None:
            return False
        key = (disk.state(), repr(left))
        if key not in self._ends:
            self._ends[key] = Tally()
            self._ends[key].check(f"before {sleepy.operation}", partial(self._require_whole, disk, left))
        self.tally.points += 1
        self.tally.failures += self._ends[key].failures
        return True

    def _let_others(self, disk: FaultDisk) -> dict[str | None, Readable]:
        key = disk.state()
        if disk.is_quiet and key in self._after:
            disk.become(self._after[key][0])
            return self._after[key][1]
        fs = FaultFilesystem(disk=disk)
        DIGITS.start(1 << 16)
        self.others(fs)
        left = views(fs)
        DIGITS.start(1 << 20)
        if disk.is_quiet:
            self._after[key] = disk.survivor("kept", "kept"), left
        return left

    def _require_whole(self, disk: FaultDisk, left: dict[str | None, Readable]) -> None:
        fs = FaultFilesystem(disk=disk)
        now = views(fs)
        assert now[None].items() <= reference().items(), "wrong: another value"
        for name, digests in (*self.before.items(), *left.items()):
            assert digests.items() <= now.get(name, {}).items(), f"lost: of {name or 'the store'}, what read before"
        repair_all(fs)
        assert now[None].items() <= readable(fs).items(), "lost: a repair drops what reads"
        collect(fs)
        sweep(fs)
        assert contents(Store.open(fs)) == reference(), "lost: the same commands do not finish"
        assert problems(Store.open(fs), finished=True) == []
        assert verify(fs, "bytes").findings == []


def check(
    make: Callable[[], FaultFilesystem], work: Work, figures: Figures, step: int = 1, others: Work = care
) -> None:
    tally = Interleavings(make(), work, others).try_all(step)
    assert tally.points > 5
    figures.add("operations before which a process sleeps", f"{make.__name__}: {work.__name__}", tally)
    assert tally.failures == []


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [damaged_sample, damaged_record, unknown_record, damaged_index])
def test_a_repair_that_sleeps_undoes_nothing_of_what_others_did(
    make: Callable[[], FaultFilesystem], step: int, figures: Figures
) -> None:
    check(make, mend, figures, step)


def test_a_repair_that_slept_takes_a_snapshot_that_was_saved_anew_only_where_it_slept_while_it_moved_it() -> None:
    tally = Interleavings(damaged_snapshot(), mend, care).try_all()
    # No storage removes a file only where it holds what was read: the moments between that look and the end are left.
    assert len(tally.failures) < 10 < 100 < tally.points


@pytest.mark.parametrize("make", [lossy, half])
@pytest.mark.parametrize("work", [collect, sweep, give_up])
def test_a_collect_or_gc_that_sleeps_undoes_nothing_of_what_others_did(
    make: Callable[[], FaultFilesystem], work: Work, figures: Figures
) -> None:
    check(make, work, figures)


def saved() -> FaultFilesystem:
    fs = lossy()
    Store.open(fs).save_snapshot("s")
    return fs


@pytest.mark.parametrize(("make", "others"), [(lossy, sweep), (saved, lambda fs: Store.open(fs).remove_snapshot("s"))])
def test_a_gc_comes_to_its_end_whatever_others_remove_meanwhile(
    make: Callable[[], FaultFilesystem], others: Work
) -> None:
    store = make()
    for at in count():
        fs = store.copy()
        sleepy = SleepyDisk(fs.disk, at, partial(others, fs))
        sweep(LocalFilesystem(ROOT, disk=sleepy))
        if sleepy.operation is None:
            break
    assert at > 10


def test_a_writer_that_slept_has_lost_where_a_repair_has_made_its_name_free_again() -> None:
    fs = whole()
    store, unit = Store.open(fs), next(iter(INPUT.units()))
    path = f"{layout.COMMITS_DIR}/{unit.name}.json"
    tar = f"{store.catalog[store.catalog.names.index(f'{unit.name}.json')].record.segment}/samples.tar"
    flip(fs, path, 700)
    fs.disk.overwrite(f"{fs.root}/{tar}", b"")
    repair_all(fs)
    assert fs.size(path) is None
    record = write_unit(store, unit.name, INPUT.info.digest, random_records(unit.samples, CAPTURE), (), ENGINE)
    # An import that was told of a commit would delete the only other copy.
    assert record is None
    assert not {sample.id for sample in unit.samples} & {*Store.open(fs).sample_ids}
    collect(fs)
    sweep(fs)
    assert contents(Store.open(fs)) == reference()
    assert verify(fs, "bytes").findings == []

"""Every byte of a small store flipped, every file truncated, deleted, emptied or swapped: exact data or an error.

A damaged store is opened and read whole through the reader. What the reader does not look at (the attributes of a
group, documentation for other readers) is the business of ``verify`` at depth bytes. Whatever is read must be exactly
what was written. An error of a unit names samples of that unit, an error of a document names the file.
"""

from collections.abc import Iterator
from itertools import combinations

import pytest

from hiddenstore import layout
from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError, NotFoundError
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.verify import verify
from schemas.manifest import Container
from tests.faults import FaultFilesystem
from tests.invariants import contents, sample_digest

STORE_BYTES = 64 << 10
# Tar headers are no business of the reader, so each of their bytes asks for a whole verify.
EXHAUSTIVE = [pytest.mark.slow, pytest.mark.timeout(1800)]
READ_ERRORS = (CorruptionError, FormatError)


class Sweep:
    """A small store in memory that is damaged, looked at and healed again and again."""

    def __init__(self, codec: str, step: int, container: Container = "zarr") -> None:
        self.step = step
        self.fs = FaultFilesystem()
        self.store = make_store(self.fs, samples=2, layers=(1, 3), width=32, codec=codec, container=container)
        self.store.save_snapshot("whole")
        self.expected = contents(self.store)
        self.inputs = {digest: registered.table for digest, registered in self.store.inputs().items()}
        self.files = self.fs.disk.files()
        self.units = {record.segment: [sample.id for sample in record.samples] for record in self.store.commits()}
        self.by_reader = self.by_verify = 0

    def check(self, path: str, data: bytes | None) -> None:
        """Damage one file, demand exact data or an error that names what is wrong, heal it."""
        self.fs.disk.overwrite(path, data)
        try:
            self.check_now(path)
        finally:
            self.fs.disk.overwrite(path, self.files[path])

    def check_now(self, *paths: str) -> None:
        found, errors = self.read(paths)
        wrong = [name for name, digest in found.items() if self.expected.get(name) != digest]
        assert not wrong, f"damage of {paths} reads as other data"
        for error in errors:
            self.check_names(error, paths)
        if errors:
            self.by_reader += 1
        else:
            report = verify(self.fs, depth="bytes")
            # A deleted input costs no sample: it is a note.
            gone = [note.path for note in report.notes if note.kind == "input-missing"]
            assert report.findings or any(path.endswith(tuple(gone)) for path in paths), f"damage of {paths} is silent"
            self.by_verify += 1

    def read(self, damaged: tuple[str, ...]) -> tuple[dict[str, str], list[HiddenstoreError]]:
        """Digests of the samples that can be read, and every error on the way."""
        try:
            store = Store.open(self.fs)
            if any(layout.SEGMENTS_DIR not in path for path in damaged):
                for file in store.manifest.target_files:
                    store.target_file(file.path)
                for digest, registered in store.inputs().items():
                    assert registered.table.equals(self.inputs[digest])
                Store.open(self.fs, snapshot="whole")
        except (*READ_ERRORS, NotFoundError) as error:
            return {}, [error]
        found: dict[str, str] = {}
        errors: list[HiddenstoreError] = []
        for name in store.sample_ids:
            try:
                found |= {name: sample_digest(store, name)}
            except READ_ERRORS as error:
                errors.append(error)
        return found, errors

    def check_names(self, error: HiddenstoreError, paths: tuple[str, ...]) -> None:
        segments = [path for path in paths if f"/{layout.SEGMENTS_DIR}/" in path]
        if isinstance(error, CorruptionError) and segments:
            allowed = {
                name for path in segments for unit, names in self.units.items() if unit in path for name in names
            }
            assert error.samples
            assert set(error.samples) <= allowed
            assert any(path.rpartition("/")[2] in error.message for path in segments)
        else:
            assert any(named(error, path) for path in paths), error.message


def named(error: HiddenstoreError, path: str) -> bool:
    """Whether a message names a document; a missing snapshot is named as the user names it."""
    name = path.rpartition("/")[2]
    return name in error.message or f"snapshot {name.removesuffix('.json')!r}" in error.message


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("bf16", 1), id="bf16"),
        pytest.param(("q8", 7), id="q8-every-7th"),
        pytest.param(("lossless", 7), id="lossless-every-7th"),
        pytest.param(("q8", 61, "webdataset"), id="q8-webdataset-every-61st"),
        pytest.param(("q8", 1, "webdataset"), id="q8-webdataset", marks=EXHAUSTIVE),
        pytest.param(("lossless", 1, "webdataset"), id="lossless-webdataset", marks=EXHAUSTIVE),
        pytest.param(("q8", 1), id="q8", marks=pytest.mark.slow),
        pytest.param(("lossless", 1), id="lossless", marks=pytest.mark.slow),
        pytest.param(("q4", 7), id="q4-every-7th", marks=pytest.mark.slow),
        pytest.param(("tiny", 7), id="tiny-every-7th", marks=pytest.mark.slow),
    ],
)
def sweep(request: pytest.FixtureRequest) -> Sweep:
    return Sweep(*request.param)


def test_the_store_of_the_sweep_is_small_and_whole(sweep: Sweep) -> None:
    assert sum(map(len, sweep.files.values())) <= STORE_BYTES
    assert len(sweep.units) >= 1
    assert verify(sweep.fs, depth="bytes").findings in ((), [])


def test_every_flipped_byte_is_exact_data_or_an_error(sweep: Sweep) -> None:
    for path, data in sweep.files.items():
        for place in range(0, len(data), sweep.step):
            damaged = bytearray(data)
            damaged[place] ^= 1 << (place % 8)
            sweep.check(path, bytes(damaged))
    print(f"reader {sweep.by_reader}, verify {sweep.by_verify}")  # noqa: T201


def lengths(size: int) -> Iterator[int]:
    return (length for length in sorted({0, 1, size // 3, size // 2, size - 4, size - 1}) if 0 <= length < size)


def test_every_truncated_lengthened_or_deleted_file_is_an_error(sweep: Sweep) -> None:
    for path, data in sweep.files.items():
        for length in lengths(len(data)):
            sweep.check(path, data[:length])
        sweep.check(path, data + b"\0")
        sweep.check(path, bytes(len(data)))
        sweep.check(path, None)


def test_every_pair_of_files_of_one_size_swapped_is_an_error(sweep: Sweep) -> None:
    pairs = [
        pair
        for pair in combinations(sweep.files, 2)
        if len(sweep.files[pair[0]]) == len(sweep.files[pair[1]]) and sweep.files[pair[0]] != sweep.files[pair[1]]
    ]
    for one, other in pairs:
        sweep.fs.disk.overwrite(one, sweep.files[other])
        sweep.fs.disk.overwrite(other, sweep.files[one])
        try:
            sweep.check_now(one, other)
        finally:
            for path in (one, other):
                sweep.fs.disk.overwrite(path, sweep.files[path])

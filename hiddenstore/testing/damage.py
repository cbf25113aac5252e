"""A small store that is damaged, looked at and healed again and again.

A damaged store is opened and read whole through the reader. What the reader does not look at (the attributes of a
group, documentation for other readers) is the business of ``verify`` at depth bytes. Whatever is read must be exactly
what was written. An error of a unit names samples of that unit, an error of a document names the file.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import combinations

from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError, NotFoundError
from hiddenstore.files import layout
from hiddenstore.fs.seam import Filesystem
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    make_store,
    memory_input,
    random_records,
    rebuilding_files,
    target_files,
)
from hiddenstore.testing.invariants import contents, record_digest, sample_digest
from hiddenstore.testing.workload import Backend
from hiddenstore.verify import verify
from hiddenstore.writer import create_store, register_input, write_unit

READ_ERRORS = (CorruptionError, FormatError)
SNAPSHOT = "whole"
TOGETHER_EVERY = 4

Changes = Mapping[str, bytes | None]
"""New bytes by path; None removes the file."""


class Sweep:
    """``files`` are the bytes of the whole store by path; ``by_reader`` and ``by_verify`` count who saw the damage."""

    def __init__(self, backend: Backend, codec: str = "q8", step: int = 1, container: str = "zarr") -> None:
        self.backend, self.step = backend, step
        self.fs = backend("damaged")
        self.store = make_store(self.fs, samples=2, layers=(1, 3), codec=codec, container=container)
        self.store.save_snapshot(SNAPSHOT)
        self.others = dict(_files(_with_other_states(backend("other"), self.store)))
        self.expected = contents(self.store)
        self.inputs = {digest: registered.table for digest, registered in self.store.inputs().items()}
        self.files = dict(_files(self.fs))
        self.units = {record.segment: [sample.id for sample in record.samples] for record in self.store.commits()}
        self.by_reader = self.by_verify = 0

    def flips(self) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """Every ``step``-th byte of every file with one bit flipped."""
        for path, data in self.files.items():
            for place in range(0, len(data), self.step):
                damaged = bytearray(data)
                damaged[place] ^= 1 << (place % 8)
                yield f"byte {place} of {path} flipped", {path: bytes(damaged)}

    def cuts(self) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """Every file cut, lengthened, zeroed and removed."""
        for path, data in self.files.items():
            size = len(data)
            for length in sorted({0, 1, size // 3, size // 2, size - 4, size - 1}):
                if 0 <= length < size:
                    yield f"{path} cut to {length} bytes", {path: data[:length]}
            yield f"{path} lengthened", {path: data + b"\0"}
            yield f"{path} zeroed", {path: bytes(size)}
            yield f"{path} removed", {path: None}

    def swaps(self) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """Every pair of files of one size in each other's place."""
        for one, other in combinations(self.files, 2):
            if len(self.files[one]) == len(self.files[other]) and self.files[one] != self.files[other]:
                yield f"{one} and {other} swapped", {one: self.files[other], other: self.files[one]}

    def replays(self) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """Every file of segments and target replaced by the one of that name, attempt digits aside, of another store
        of the same samples: whole, and of other states."""
        others = {_plain(path): data for path, data in self.others.items()}
        for path, data in self.files.items():
            replayed = others.get(_plain(path))
            is_own = path.startswith((layout.SEGMENTS_DIR, layout.TARGET_DIR))
            if is_own and replayed is not None and replayed != data:
                yield f"{path} of another store", {path: replayed}

    def check(self, changes: Changes) -> None:
        """Damage files, demand exact data or an error that names what is wrong, heal them. Raises AssertionError: other
        data was read, nothing noticed, or the error names something else."""
        try:
            for path, data in changes.items():
                _write(self.fs, path, data)
            self.check_now(tuple(changes))
        finally:
            for path in changes:
                _write(self.fs, path, self.files[path])

    def check_now(self, paths: tuple[str, ...]) -> None:
        """Demand exact data or an error, of files that are damaged now."""
        fs = self.backend("damaged")
        digests, errors = self._read(fs, paths)
        given = [*digests.items()]
        # Another way through the same bytes, at some points: it names no sample, and must not read them wrong.
        if (self.by_reader + self.by_verify) % TOGETHER_EVERY == 0:
            given += self._read_together(fs)
        wrong = [name for name, digest in given if self.expected.get(name) != digest]
        assert not wrong, f"wrong: damage of {paths} reads as other data"
        for error in errors:
            self._check_names(error, paths)
        if errors:
            self.by_reader += 1
            return
        report = verify(fs, depth="bytes")
        # A deleted input costs no sample: it is a note.
        gone = [note.path for note in report.notes if note.kind == "input-missing"]
        assert report.findings or set(paths) & set(gone), f"silent: damage of {paths}"
        self.by_verify += 1

    def _read(self, fs: Filesystem, damaged: tuple[str, ...]) -> tuple[dict[str, str], list[HiddenstoreError]]:
        """Digests of the samples that can be read, and every error on the way."""
        try:
            store = Store.open(fs)
            if any(layout.SEGMENTS_DIR not in path for path in damaged):
                for file in store.manifest.target_files:
                    store.target_file(file.path)
                for digest, registered in store.inputs().items():
                    assert registered.table.equals(self.inputs[digest])
                Store.open(fs, snapshot=SNAPSHOT)
        except (*READ_ERRORS, NotFoundError) as error:
            return {}, [error]
        digests: dict[str, str] = {}
        errors: list[HiddenstoreError] = []
        for name in store.sample_ids:
            try:
                digests |= {name: sample_digest(store, name)}
            except READ_ERRORS as error:
                errors.append(error)
        return digests, errors

    def _read_together(self, fs: Filesystem) -> Iterator[tuple[str, str]]:
        """Digests of the samples that reading those of a unit together gives before an error."""
        with suppress(*READ_ERRORS, NotFoundError):
            for record in Store.open(fs):
                yield record.sample.id, record_digest(record)

    def _check_names(self, error: HiddenstoreError, paths: tuple[str, ...]) -> None:
        segments = [path for path in paths if path.startswith(f"{layout.SEGMENTS_DIR}/")]
        if isinstance(error, CorruptionError) and segments:
            allowed = {
                name for path in segments for unit, names in self.units.items() if unit in path for name in names
            }
            assert error.samples, error.message
            assert set(error.samples) <= allowed, error.message
            assert any(path.rpartition("/")[2] in error.message for path in segments), error.message
        else:
            assert any(_is_named(error, path) for path in paths), error.message


def _with_other_states(fs: Filesystem, store: Store) -> Filesystem:
    """A whole store of the same samples and another target."""
    prepared, capture = memory_input(2), store.capture
    files = rebuilding_files(capture, 1) if capture.blocks else target_files(seed=1)
    other = create_store(fs, capture, HEAD, store.manifest.recipe, files, store.manifest.container)
    register_input(other, prepared)
    for unit in prepared.units():
        write_unit(other, unit.name, prepared.info.digest, random_records(unit.samples, capture, 1), (), ENGINE)
    return fs


def _is_named(error: HiddenstoreError, path: str) -> bool:
    """Whether a message names a document; a missing snapshot is named as the user names it."""
    name = path.rpartition("/")[2]
    return name in error.message or f"snapshot {name.removesuffix('.json')!r}" in error.message


def _files(fs: Filesystem, folder: str = "") -> Iterator[tuple[str, bytes]]:
    for name in fs.list(folder):
        path = f"{folder}/{name}".lstrip("/")
        if fs.size(path) is None:
            yield from _files(fs, path)
        else:
            yield path, fs.read(path)


def _write(fs: Filesystem, path: str, data: bytes | None) -> None:
    fs.remove_tree(path)
    if data is not None:
        file = fs.create(path)
        file.write(data)
        file.close()


def _plain(path: str) -> str:
    """A path without the random digits of an attempt."""
    folder, _, rest = path.partition("/")
    segment, _, inner = rest.partition("/")
    return f"{folder}/{segment[:-8]}/{inner}" if folder == layout.SEGMENTS_DIR else path

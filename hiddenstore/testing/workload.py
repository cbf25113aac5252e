"""What a collector does to a store, as work that can be stopped at any point and done again, what must be true of a
store after anything, and a small store that is damaged, looked at and healed again and again.

``problems`` lists what is not true in words; ``fingerprint`` is equal for two stores that hold the same, whatever the
random digits of their segments are.

A damaged store is opened and read whole through the reader. What the reader does not look at (the attributes of a
group, documentation for other readers) is the business of ``verify`` at depth bytes. Whatever is read must be exactly
what was written. An error of a unit names samples of that unit, an error of a document names the file. A document of
this very store that is older and no less true, a shorter list under a snapshot's name or a record under a later
revision, need not be noticed: what it leads to is still what was written.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any

from hiddenstore.codecs.recipes import recipe_name
from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError, NotFoundError
from hiddenstore.files import layout
from hiddenstore.files.digests import content_mismatch
from hiddenstore.files.documents import seal, sha256_hex
from hiddenstore.fs.seam import Filesystem, is_temporary
from hiddenstore.records import Record
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import encode_records
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    UNIT_TOKENS,
    capture_spec,
    make_store,
    memory_input,
    random_records,
    rebuilding_files,
    target_files,
)
from hiddenstore.verify import verify
from hiddenstore.writer import create_store, register_input, write_encoded_unit, write_unit
from schemas.capture import REBUILT, CaptureSpec
from schemas.manifest import CommitRecord, Container

Backend = Callable[[str], Filesystem]
"""A filesystem over the place of that name, empty when it was never used; called again, another process's view of it.
For kills it must pickle."""

SAMPLES = 3
WIDTH = 8
READ_ERRORS = (CorruptionError, FormatError)
SNAPSHOT = "whole"
TOGETHER_EVERY = 4
UNLIKE_EVERY = 7

Changes = Mapping[str, bytes | None]
"""New bytes by path; None removes the file."""
FOLDERS = layout.TOP_NAMES - {"lost+found"}


def problems(store: Store, *, finished: bool = False) -> list[str]:
    """Everything that is wrong; empty for a sound store. ``finished`` also demands every unit of every input."""
    return [
        *(problem for record in store.commits() for problem in _file_problems(store, record)),
        *_target_problems(store),
        *_sample_problems(store),
        *_input_problems(store, finished),
        *_snapshot_problems(store),
        *(f"{name} is no name of a store" for name in _strangers(store.fs)),
    ]


def fingerprint(fs: Filesystem) -> dict[str, Any]:
    """What a store holds: documents by digest, units by their record and file digests without the attempt's digits."""
    store = Store.open(fs)
    return {
        "manifest": sha256_hex(fs.read(layout.STORE_JSON)),
        "target": {file.path: sha256_hex(store.target_file(file.path)) for file in store.manifest.target_files},
        "inputs": {digest: sha256_hex(fs.read(layout.input_path(digest))) for digest in store.inputs()},
        "units": {
            record.unit: record.model_dump(mode="json", exclude={"segment"})
            | {"bytes": {file.path: sha256_hex(fs.read(f"{record.segment}/{file.path}")) for file in record.files}}
            for record in store.commits()
        },
    }


def contents(store: Store) -> dict[str, str]:
    """A digest of every sample as the reader gives it."""
    return {sample_id: sample_digest(store, sample_id) for sample_id in store.sample_ids}


def sample_digest(store: Store, sample_id: str) -> str:
    """Digest of one sample as it reads: tokens, mask, spans, split and states, bit for bit."""
    return record_digest(store.read(sample_id))


def record_digest(record: Record) -> str:
    """The same of a sample that was read."""
    import torch

    digest = hashlib.sha256(record.sample.split.encode())
    for array in (record.sample.input_ids, record.sample.loss_mask, record.sample.spans, record.final_rows):
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    for states in (record.aux, record.final):
        digest.update(f"{tuple(states.shape)}".encode() + states.view(torch.uint16).numpy().tobytes())
    if record.topk is not None:
        for tensor in (record.topk.ids, record.topk.log_probs, record.topk.lse):
            digest.update(f"{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def garbage(fs: Filesystem) -> list[str]:
    """Paths that no document names and a sweep may remove: segments without a record and interrupted puts."""
    named = {record.segment for record in Store.open(fs).commits()}
    segments = [f"{layout.SEGMENTS_DIR}/{name}" for name in fs.list(layout.SEGMENTS_DIR)]
    folders = ("", *sorted(FOLDERS - {layout.STORE_JSON, layout.SEGMENTS_DIR}))
    temps = [f"{folder}/{name}".strip("/") for folder in folders for name in fs.list(folder) if is_temporary(name)]
    return [path for path in segments if path not in named] + temps


def _file_problems(store: Store, record: CommitRecord) -> Iterator[str]:
    for file in record.files:
        path = f"{record.segment}/{file.path}"
        size = store.fs.size(path)
        if size != file.size:
            yield f"{path}: expected {file.size} bytes, found {size}"
        elif content_mismatch(file, store.fs.read(path)):
            yield f"{path}: its bytes are not the ones its record names"


def _target_problems(store: Store) -> Iterator[str]:
    for file in store.manifest.target_files:
        yield from _refusal(partial(store.target_file, file.path))


def _refusal(read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except HiddenstoreError as error:
        yield error.message


def _sample_problems(store: Store) -> Iterator[str]:
    counts = Counter(sample.id for record in store.commits() for sample in record.samples)
    rejected = {reject.id for record in store.commits() for reject in record.rejects}
    yield from (f"sample {name} is stored {count} times" for name, count in counts.items() if count > 1)
    yield from (f"sample {name} is both stored and rejected" for name in sorted(rejected & set(counts)))
    for name in store.sample_ids:
        try:
            if store.read(name).sample.id != name:
                yield f"sample {name} reads as another one"
        except HiddenstoreError as error:
            yield error.message


def _input_problems(store: Store, finished: bool) -> Iterator[str]:
    inputs = {}
    for digest, registered in store.inputs().items():
        try:
            inputs[digest] = registered.unit_samples()
        except HiddenstoreError as error:
            yield error.message
    committed = {record.unit: record for record in store.commits()}
    for record in committed.values():
        members = [sample.id for sample in record.samples] + [reject.id for reject in record.rejects]
        expected = inputs.get(record.input, {}).get(record.unit)
        if expected is not None and sorted(members) != sorted(expected):
            yield f"unit {record.unit} is not what its input says"
        if finished and expected is None:
            yield f"unit {record.unit} is of no registered input"
    if finished:
        units = [unit for members in inputs.values() for unit in members]
        yield from (f"unit {unit} is incomplete" for unit in units if unit not in committed)


def _snapshot_problems(store: Store) -> Iterator[str]:
    for name in store.fs.list(layout.SNAPSHOTS_DIR):
        if not is_temporary(name):
            yield from _refusal(partial(Store.open, store.fs, snapshot=name.removesuffix(".json")))


def _strangers(fs: Filesystem) -> list[str]:
    names = [name for name in fs.list("") if name not in FOLDERS and not name.startswith(".")]
    names += [name for name in fs.list(layout.COMMITS_DIR) if layout.parse_commit(name) is None]
    names += [name for name in fs.list(layout.SEGMENTS_DIR) if not layout.segment_claims(name)]
    names += [name for name in fs.list(layout.INPUTS_DIR) if layout.parse_input(name) is None]
    return [name for name in names if not is_temporary(name)]


@dataclass(frozen=True)
class Plan:
    """What to write: units encoded beforehand, and whether the input is registered before or after them."""

    codec: str = "bf16"
    register_first: bool = True
    container: Container = "zarr"

    @cached_property
    def capture(self) -> CaptureSpec:
        layers = (1, 3) if self.codec == REBUILT else (1,)
        return capture_spec(layers=layers, width=WIDTH, codec=self.codec)

    @cached_property
    def units(self) -> dict[str, EncodedUnit]:
        return {
            unit.name: encode_records(unit.name, random_records(unit.samples, self.capture), self.capture)
            for unit in memory_input(SAMPLES).units()
        }

    def expected(self, fs: Filesystem) -> tuple[dict[str, object], dict[str, str]]:
        """Fingerprint and contents of the run that was never stopped, in an empty place."""
        store = Workload(fs, self).run()
        assert problems(store, finished=True) == []
        assert len(self.units) >= 2
        assert len(store) == SAMPLES
        return fingerprint(store.fs), contents(store)


@dataclass
class Workload:
    """Create, register, write, commit, snapshot; ``done`` and ``registered``: what it was told had succeeded."""

    fs: Filesystem
    plan: Plan
    done: list[str] = field(default_factory=list)
    registered: bool = False

    def run(self) -> Store:
        plan = self.plan
        files = rebuilding_files(plan.capture) if plan.capture.blocks else target_files(WIDTH)
        store = create_store(self.fs, plan.capture, HEAD, recipe_name(plan.capture.codecs), files, plan.container)
        if plan.register_first:
            self.register(store)
        committed = {record.unit for record in store.commits()}
        for unit, encoded in plan.units.items():
            if unit not in committed:
                assert write_encoded_unit(store, unit, memory_input(SAMPLES).info.digest, encoded, (), ENGINE)
                self.done.append(unit)
        self.register(store)
        store = Store.open(self.fs)
        store.save_snapshot("end")
        return store

    def register(self, store: Store) -> None:
        register_input(store, memory_input(SAMPLES))
        self.registered = True

    def promised(self) -> "Workload":
        return replace(self, done=list(self.done))

    def check(self, fs: Filesystem, expected: tuple[dict[str, object], dict[str, str]]) -> None:
        """What a stop left in ``fs`` is sound, holds all that was promised, and the same work finishes the job. Raises
        AssertionError: it does not; HiddenstoreError: nor can it be read."""
        stored, read = expected
        if fs.size(layout.STORE_JSON) is not None:
            store = Store.open(fs)
            assert {record.unit for record in store.commits()} >= set(self.done), "lost: a unit that was committed"
            assert bool(store.inputs()) >= self.registered, "lost: an input that was registered"
            require_sound(store, read)
        else:
            assert self.done == [], "lost: the whole store"
        resumed = Workload(fs, self.plan)
        store = resumed.run()
        assert not set(resumed.done) & set(self.done), "doubled: a unit that was committed is done again"
        require_sound(store, read, finished=True)
        assert fingerprint(fs) == stored, "wrong: other documents or bytes than those of the run that was not stopped"


def require_sound(store: Store, expected: Mapping[str, str], *, finished: bool = False) -> None:
    """AssertionError unless a store holds nothing but ``expected`` (digests by sample id) and, ``finished``, all of it,
    and everything in it hangs together."""
    digests = contents(store)
    assert digests.items() <= expected.items(), "wrong: samples read as other data"
    assert not store.duplicates, "doubled: samples are in more than one unit"
    assert not finished or digests.keys() == expected.keys(), "lost: samples are missing"
    listed = problems(store, finished=finished)
    assert not listed, f"other: {listed[:3]}"


class Sweep:
    """``files`` are the bytes of the whole store by path; ``by_reader`` and ``by_verify`` count who saw the damage."""

    def __init__(self, backend: Backend, codec: str = "q8", step: int = 1, container: str = "zarr") -> None:
        self.backend, self.step = backend, step
        self.fs = backend("damaged")
        self.store = make_store(self.fs, samples=2, layers=(1, 3), codec=codec, container=container)
        self.store.save_snapshot(SNAPSHOT)
        self.others = {_plain(path): data for path, data in _files(_with_other_states(backend("other"), self.store))}
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
        """Every pair of files of one size in each other's place, and of unlike size too; every 7th where not every
        byte is flipped."""
        pairs = [pair for pair in combinations(self.files, 2) if self.files[pair[0]] != self.files[pair[1]]]
        unlike = [pair for pair in pairs if len(self.files[pair[0]]) != len(self.files[pair[1]])]
        for one, other in [*(pair for pair in pairs if pair not in unlike), *unlike[:: min(self.step, UNLIKE_EVERY)]]:
            yield f"{one} and {other} swapped", {one: self.files[other], other: self.files[one]}

    def replays(self) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """Every file replaced by the one of that name, attempt digits aside, of another store of the same samples:
        whole, and of other states; every input by another input; and what was true of this store before."""
        for path, data in self.files.items():
            replayed = self.others.get(_plain(path), data)
            if path.startswith(f"{layout.INPUTS_DIR}/"):
                replayed = memory_input(2, seed=1).registration(UNIT_TOKENS)
            if replayed != data:
                yield f"{path} of another store", {path: replayed}
        for path, data in self.once_true.items():
            yield f"{path} of this store, from before", {path: data}

    @cached_property
    def once_true(self) -> dict[str, bytes]:
        """Documents that are older and no less true: each record as a revision of its own, and the snapshot without
        the last unit."""
        records = {
            layout.commit_path(record.unit, 1): self.files[layout.commit_path(record.unit)]
            for record in self.store.commits()
        }
        whole, last = self.store.snapshot(SNAPSHOT), self.store.commits()[-1]
        less = {"samples": whole.samples - len(last.samples), "tokens": whole.tokens - last.tokens}
        shorter = whole.model_copy(update={"commits": whole.commits[:-1], **less})
        return {**records, layout.snapshot_path(SNAPSHOT): seal(shorter)}

    def check(self, changes: Changes) -> None:
        """Damage files, demand exact data or an error that names what is wrong, heal them. Raises AssertionError: other
        data was read, nothing noticed, or the error names something else."""
        try:
            for path, data in changes.items():
                _write(self.fs, path, data)
            self.check_now(changes)
        finally:
            for path in changes:
                _write(self.fs, path, self.files.get(path))

    def check_now(self, changes: Changes) -> None:
        """Demand exact data or an error, of files that are damaged now."""
        fs, paths = self.backend("damaged"), tuple(changes)
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
        is_true = changes.items() <= self.once_true.items()
        assert report.findings or is_true or set(paths) & set(gone), f"silent: damage of {paths}"
        self.by_verify += 1

    def _read(self, fs: Filesystem, damaged: tuple[str, ...]) -> tuple[dict[str, str], list[HiddenstoreError]]:
        """Digests of the samples that can be read, and every error on the way."""
        digests: dict[str, str] = {}
        errors: list[HiddenstoreError] = []
        stores: list[Store] = []
        looks: list[Callable[[], object]] = [lambda: stores.append(Store.open(fs))]
        if any(layout.SEGMENTS_DIR not in path for path in damaged):
            looks += [partial(self._look_beside, fs), lambda: stores.append(Store.open(fs, snapshot=SNAPSHOT))]
        for look in looks:
            try:
                look()
            except (*READ_ERRORS, NotFoundError) as error:
                errors.append(error)
        is_snapshot = any(path.startswith(f"{layout.SNAPSHOTS_DIR}/") for path in damaged)
        for store in stores if is_snapshot else stores[:1]:
            for name in store.sample_ids:
                try:
                    digests |= {name: sample_digest(store, name)}
                except READ_ERRORS as error:
                    errors.append(error)
        return digests, errors

    def _look_beside(self, fs: Filesystem) -> None:
        """Read the documents that no sample needs."""
        store = Store.open(fs)
        for file in store.manifest.target_files:
            store.target_file(file.path)
        for digest, registered in store.inputs().items():
            assert registered.table.equals(self.inputs[digest]), "wrong: another input"

    def _read_together(self, fs: Filesystem) -> Iterator[tuple[str, str]]:
        """Digests of the samples that reading those of a unit together gives before an error."""
        with suppress(*READ_ERRORS, NotFoundError):
            for record in Store.open(fs):
                yield record.sample.id, record_digest(record)

    def _check_names(self, error: HiddenstoreError, paths: tuple[str, ...]) -> None:
        segments = [path for path in paths if path.startswith(f"{layout.SEGMENTS_DIR}/")]
        if any(_is_named(error, path) for path in paths if path not in segments):
            return
        units = {unit for path in paths for unit in self.units if unit in path or f"/{_unit(path)}-" in unit}
        allowed = {name for unit in units for name in self.units[unit]}
        assert isinstance(error, CorruptionError), error.message
        assert error.samples, error.message
        assert set(error.samples) <= allowed, error.message
        named = [path.rpartition("/")[2] for path in segments] + [_unit(path) for path in paths if _unit(path)]
        assert any(name in error.message for name in named), error.message


def _with_other_states(fs: Filesystem, store: Store) -> Filesystem:
    """A whole store of the same samples and another target."""
    prepared, capture = memory_input(2), store.capture
    files = rebuilding_files(capture, 1) if capture.blocks else target_files(seed=1)
    other = create_store(fs, capture, HEAD, store.manifest.recipe, files, store.manifest.container)
    register_input(other, prepared)
    for unit in prepared.units():
        write_unit(other, unit.name, prepared.info.digest, random_records(unit.samples, capture, 1), (), ENGINE)
    Store.open(fs).save_snapshot(SNAPSHOT)
    return fs


def _unit(path: str) -> str:
    """The unit whose record a path is; empty for another file."""
    parsed = layout.parse_commit(path.rpartition("/")[2]) if path.startswith(f"{layout.COMMITS_DIR}/") else None
    return parsed.unit if parsed is not None else ""


def _is_named(error: HiddenstoreError, path: str) -> bool:
    """Whether a message names a document; a snapshot may be named as the user names it, and of store.json and a file
    of the target that do not fit, either one."""
    if path == layout.snapshot_path(SNAPSHOT) and re.search(rf"snapshot '?{SNAPSHOT}\b", error.message):
        return True
    names = (path.rpartition("/")[2], *([f"/{layout.TARGET_DIR}/"] if path == layout.STORE_JSON else []))
    return any(name in error.message for name in names)


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

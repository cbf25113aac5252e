"""Writing a store: create it, publish units, register inputs. Any number of writers, no lock.

The order is the promise: segment durable, then its record by put-if-absent. A crash at any point leaves either no
record (the segment is garbage) or a whole unit.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hiddenstore.codecs.fitted import require_fitted
from hiddenstore.commit import committed_units, latest_revisions, lost_samples, publish_commit, read_commit
from hiddenstore.errors import ConflictError, HiddenstoreError, Kind, StorageError
from hiddenstore.files import layout
from hiddenstore.files.documents import flat, seal, sha256_hex
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem, is_address
from hiddenstore.index.publish import indexed_revisions
from hiddenstore.segments import CONTAINERS, default_container
from hiddenstore.store import Store, tables_of
from hiddenstore.targets.identity import cast_hint
from schemas.base import FORMAT_VERSION, IMAGES_FORMAT
from schemas.capture import STATED, CaptureSpec, HeadSpec
from schemas.manifest import (
    CommitRecord,
    Container,
    Engine,
    FileEntry,
    Package,
    PackageRole,
    Recapture,
    Reject,
    StoreManifest,
)

if TYPE_CHECKING:
    from hiddenstore.inputs import PreparedInput
    from hiddenstore.records import Record
    from hiddenstore.segments.base import EncodedUnit

# A name, a branch and a loading dtype are for people; digests decide whether two targets are one.
_NOT_COMPARED = {"capture.target.name", "capture.target.revision", "capture.target.dtype"}
_COMPARED_WHERE_STATED = {f"capture.target.{field}" for field in STATED}


def create_store(
    location: "str | Path | Filesystem",
    capture: CaptureSpec,
    head: HeadSpec,
    recipe: str,
    target_files: Mapping[str, bytes],
    container: Container | None = None,
) -> Store:
    """Create a store, or open the one that is there when it holds the same capture.

    ``target_files`` are published under ``target/`` before ``store.json`` names them, and again where one is gone.
    ``container`` None is that of the store, of a new one ``default_container``. Raises ConflictError:
    ``store-mismatch`` listing every difference; ``target-files-differ`` when an unfinished creation left other files
    under ``target/``; ``output-exists``: it holds somebody's files; ConfigError ``usage``: a snapshot's name."""
    fs = open_filesystem(location)
    entries = tuple(
        FileEntry(path=name, size=len(data), sha256=sha256_hex(data)) for name, data in sorted(target_files.items())
    )
    manifest = StoreManifest(
        format=FORMAT_VERSION if capture.images is None else IMAGES_FORMAT,
        container=container or default_container(fs),
        recipe=recipe,
        capture=capture,
        head=head,
        target_files=entries,
        packages=_packages(capture, container or default_container(fs)),
    )
    fs.require_atomic_put()
    if fs.size(layout.STORE_JSON) is None:
        require_fitted(capture)
        require_place(fs)
        for entry in entries:
            _publish_target_file(fs, entry, target_files[entry.path])
        fs.put_if_absent(layout.STORE_JSON, seal(manifest))
    store = Store.open(fs)
    if container is None:
        manifest = manifest.model_copy(update={"container": store.manifest.container})
    differences = capture_differences(store.manifest, manifest)
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise ConflictError(
            f"{store.path} holds another capture:\n{lines}",
            kind=Kind.STORE_MISMATCH,
            hint=cast_hint(
                differences, f"another folder, or ask for what is stored: hiddenstore info {shlex.quote(store.path)}"
            ),
        )
    for entry in store.manifest.target_files:
        if entry in entries and fs.size(f"{layout.TARGET_DIR}/{entry.path}") is None:
            _publish_target_file(fs, entry, target_files[entry.path])
    return store


def _packages(capture: CaptureSpec, container: str) -> dict[PackageRole, Package]:
    """Which distributions bring codecs and container; all are loaded, and so checked, before anything is made."""
    packages: dict[PackageRole, Package] = {}
    for role, (table, name) in tables_of(capture, container).items():
        table[name]
        dist = table.packages[name][0].dist if name in table.packages else None
        if dist is not None:
            packages[role] = Package(name=dist.name, version=dist.version)
    return packages


def require_place(location: str | Path | Filesystem) -> None:
    """Refuse what a store can neither be nor become: ConflictError ``output-exists``; ConfigError ``usage``: the name
    of a snapshot. What a store is made of may be there, by another rank or a crash."""
    fs, hint = open_filesystem(location), "give a new folder: -o STORE"
    if not is_address(fs.root) and Path(fs.root).is_file():
        raise ConflictError(f"{fs.root} is a file, not a store", kind=Kind.OUTPUT_EXISTS, hint=hint)
    if fs.size(layout.STORE_JSON) is not None:
        return
    layout.refuse_snapshot(fs.root)
    foreign = [name for name in fs.list("") if name not in layout.TOP_NAMES and not name.startswith(".")]
    if foreign:
        problem = f"{fs.root} is no store and not empty: it holds {', '.join(foreign[:3])}{' …' if foreign[3:] else ''}"
        raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint=hint)


def capture_differences(stored: StoreManifest, requested: StoreManifest) -> list[str]:
    """Every field in which two stores differ, as ``capture.aux_layers: [1, 3] stored, [1, 4] asked``."""
    others = {"format", "recipe", "target_files", "packages"}
    one, other = (dict(flat(manifest.model_dump(mode="json", exclude=others))) for manifest in (stored, requested))
    return [
        f"{name}: {_short(one.get(name))} stored, {_short(other.get(name))} asked"
        for name in one | other
        if name not in _NOT_COMPARED and one.get(name) != other.get(name)
        if name not in _COMPARED_WHERE_STATED or None not in (one.get(name), other.get(name))
    ]


def write_unit(
    store: Store,
    unit: str,
    input_digest: str,
    records: Iterable["Record"],
    rejects: Sequence[Reject],
    engine: Engine,
    revision: int = 0,
    recaptured: Sequence[Recapture] = (),
) -> CommitRecord | None:
    """Encode, write and commit one unit; None when another attempt committed it first.

    A lost race sweeps this attempt's own segment and nothing else. A unit whose samples were all rejected has a record
    without files. ``recaptured`` names samples that another engine captured. Equal records give equal bytes, apart from
    the random digits of the segment's name. Raises ConfigError, before anything is written: as ``encode_records``;
    ``name-invalid``: the digest of the input is no 64 hex digits.
    """
    from hiddenstore.segments.encode import encode_records

    layout.input_path(input_digest)
    one_prefix, records = CONTAINERS[store.manifest.container].shares_rows, list(records)
    encoded = encode_records(unit, records, store.capture, one_prefix=one_prefix) if records else None
    return write_encoded_unit(store, unit, input_digest, encoded, rejects, engine, revision, recaptured)


def write_encoded_unit(
    store: Store,
    unit: str,
    input_digest: str,
    encoded: "EncodedUnit | None",
    rejects: Sequence[Reject],
    engine: Engine,
    revision: int = 0,
    recaptured: Sequence[Recapture] = (),
) -> CommitRecord | None:
    """``write_unit`` for a unit encoded elsewhere (``encode_records``); None holds no sample."""
    from hiddenstore.segments.segment import write_encoded

    fs, path = store.fs, layout.segment_path(unit, layout.new_attempt(), revision)
    commit = CommitRecord(
        unit=unit,
        input=input_digest,
        segment=path,
        engine=engine,
        files=(),
        samples=(),
        rejects=tuple(rejects),
        recaptured=tuple(recaptured),
    )
    if encoded is not None:
        try:
            files = write_encoded(fs, path, encoded, store.capture, store.manifest.container)
        except BaseException:
            sweep(fs, path)
            raise
        commit = CommitRecord(**{**dict(commit), "files": files, "samples": encoded.samples, "stats": encoded.stats})
    return commit if publish_segment(fs, commit, revision) else None


def publish_segment(fs: Filesystem, record: CommitRecord, revision: int = 0) -> bool:
    """Publish the record of a segment that is durable; False when another attempt was first, or a later one counts.

    A lost race and a full disk sweep the segment. Raises StorageError: ``segment-swept``: the segment is no longer
    there; nothing is published."""
    for file in record.files:
        if fs.size(f"{record.segment}/{file.path}") != file.size:
            problem = f"{fs.root}/{record.segment} is gone before its record was written: gc --abandoned gave it up"
            raise StorageError(problem, kind=Kind.SEGMENT_SWEPT, hint="run the same command again")
    try:
        if publish_commit(fs, record, revision):
            # A repair may have set a damaged record of this name aside; then its own counts.
            return fs.size(layout.commit_path(record.unit, revision + 1)) is None
    except StorageError as error:
        if error.kind == Kind.DISK_FULL and fs.size(layout.commit_path(record.unit, revision)) is None:
            sweep(fs, record.segment)
        raise
    sweep(fs, record.segment)
    return False


def sweep(fs: Filesystem, segment: str) -> None:
    """Remove a segment that no record names; what the disk refuses to remove stays for ``hiddenstore gc``."""
    with suppress(HiddenstoreError):
        fs.remove_tree(segment)


def register_input(store: Store, prepared: "PreparedInput") -> str:
    """Record which samples and units a prepared input consists of; returns its digest.

    Register before collecting, so that a unit still missing can be seen as missing. Raises ConflictError:
    ``input-units-differ`` when the same input is registered with other unit borders."""
    from hiddenstore.inputs import RegisteredInput, parse_registered
    from hiddenstore.segments.base import unit_tokens

    digest = prepared.info.digest
    path = layout.input_path(digest)
    data = prepared.registration(unit_tokens(store.capture))
    if store.fs.size(path) is None and store.fs.put_if_absent(path, data):
        return digest
    # Another version of Arrow may have written the same rows in other bytes.
    if store.fs.read(path) == data:
        return digest
    if not RegisteredInput(store.fs, digest).table.equals(parse_registered(data, digest, "this input")):
        raise ConflictError(
            f"{store.path}/{path} cuts this input into other units than this version would",
            kind=Kind.INPUT_UNITS_DIFFER,
            hint="collect into a new store and merge with: hiddenstore copy",
        )
    return digest


def restore_input(location: "str | Path | Filesystem", prepared: "PreparedInput") -> None:
    """Register an input again that is gone, though records of its units are there. Where some of them are damaged no
    writer opens the store before a repair, which needs the input to know what they held."""
    fs, digest = open_filesystem(location), prepared.info.digest
    is_gone, prefix = fs.size(layout.input_path(digest)) is None, layout.unit_prefix(digest)
    if is_gone and any(unit.startswith(prefix) for unit in committed_units(fs)):
        register_input(Store.open(fs, strict=False), prepared)


@dataclass(frozen=True)
class PendingUnit:
    """A unit that no record names, or of which a repair dropped samples.

    ``revision`` is that of the record to be written; ``replaces`` the record that counts until then, None without one;
    ``order`` all ids of the unit as the input has them, for a unit that has one.
    """

    name: str
    revision: int = 0
    replaces: CommitRecord | None = None
    order: tuple[str, ...] = ()

    def lacks(self, sample_id: str) -> bool:
        """Whether a sample of the unit is to be captured."""
        return self.replaces is None or sample_id in lost_samples(self.replaces)


def pending_units(store: Store, digest: str) -> dict[str, PendingUnit]:
    """What is left to do of a registered input, by unit in input order; reads the folder as it is now.

    Of records written since ``store`` was opened only repairs are read: captures leave nothing behind. A record that an
    index names and that vanished gets no successor of its name: the index would speak for it.
    """
    from hiddenstore.inputs import RegisteredInput

    numbers = {name: number for number, name in enumerate(store.catalog.names)}
    rejects = store.catalog.facts["rejects"]
    latest = latest_revisions(store.fs)
    registered, pending = RegisteredInput(store.fs, digest), {}
    named: dict[str, int] | None = None
    for unit in registered.units:
        if unit not in latest:
            named = indexed_revisions(store.fs, store.catalog.index_files) if named is None else named
            pending[unit] = PendingUnit(unit, named.get(unit, -1) + 1)
            continue
        revision, name = latest[unit]
        number, record = numbers.get(name), None
        if number is not None and rejects[number]:
            record = store.commits()[number]
        elif number is None and revision:
            record = read_commit(store.fs, name).record
        if record is not None and lost_samples(record):
            pending[unit] = PendingUnit(unit, revision + 1, record)
    lossy = [unit for unit, item in pending.items() if item.replaces is not None]
    return pending | {unit: replace(pending[unit], order=tuple(registered.members(unit))) for unit in lossy}


def _publish_target_file(fs: Filesystem, entry: FileEntry, data: bytes) -> None:
    path = f"{layout.TARGET_DIR}/{entry.path}"
    if fs.put_if_absent(path, data):
        return
    sha256 = sha256_hex(fs.read(path))
    if sha256 != entry.sha256:
        raise ConflictError(
            f"{fs.root}/{path} is left from a store that was never finished: expected sha256 {entry.sha256}, "
            f"found {sha256}",
            kind=Kind.TARGET_FILES_DIFFER,
            hint=shlex.join(["rm", "-r", f"{fs.root}/{layout.TARGET_DIR}"])
            + ", unless another job is creating this store now",
        )


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:8]}…" if len(text) == 64 else text

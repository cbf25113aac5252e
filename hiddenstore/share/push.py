"""A store or an exported drafter to a place where others pull it from.

What a store shares is what its records name, as WebDataset: a store in another container, or a part of one, is copied
into a staging folder first. Every byte is read and compared with its record before the first one is sent.
"""

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from hiddenstore.care.copy import Copy, open_copy
from hiddenstore.commit import lost_samples
from hiddenstore.console.text import plural
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, Kind, NotFoundError, StorageError
from hiddenstore.files import layout
from hiddenstore.files.digests import digest_for, mismatch
from hiddenstore.fs import is_address, open_filesystem
from hiddenstore.fs.seam import is_inside, storage_errors
from hiddenstore.index.file import live_indexes
from hiddenstore.inspect.samples import Test
from hiddenstore.share.hub import HubRemote, require_limits
from hiddenstore.share.remote import (
    CARD,
    PIECE_BYTES,
    SUMS,
    Advance,
    Begin,
    LocalFile,
    Remote,
    lossy_units,
    lost_units,
    read_sums,
    restore_hint,
    sums_text,
)
from hiddenstore.store import Store
from hiddenstore.targets.calibration import SLICE_PATH, slice_document
from hiddenstore.verify.profile import PROFILE_PATH, read_profile
from schemas.manifest import FileEntry

CONTAINER = "webdataset"
DRAFTER_FILES = (".json", ".safetensors", ".gguf")


@dataclass(frozen=True)
class PushReport:
    """What a push did; ``files_sent`` and ``bytes_sent`` leave out what was there already."""

    files: int
    bytes: int
    files_sent: int
    bytes_sent: int


def require_place(remote: Remote, source: str, is_store: bool) -> None:
    """Refuse a repository of the other kind, and one at a revision: ConfigError ``address-invalid``; the name of a
    snapshot: ``usage``; a place inside of what is pushed: ConflictError ``output-exists``."""
    if not isinstance(remote, HubRemote):
        place, whole = open_filesystem(remote.address).address, open_filesystem(source).address
        if f"{place}/".startswith(f"{whole}/"):
            problem, hint = f"{source} cannot be pushed into itself, {remote.address}", "name a place outside of it"
            raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint=hint)
        layout.refuse_snapshot(remote.address)
        return
    kind, plain = ("dataset", "hf://datasets/") if is_store else ("model", "hf://")
    if remote.kind != kind or remote.revision:
        what = "a store is pushed to a dataset" if is_store else "a drafter is pushed to a model"
        message = f"{remote.address}: {what} repository, to its main branch"
        raise ConfigError(message, kind=Kind.ADDRESS_INVALID, hint=f"{plain}{remote.repo}")


def staging_reason(store: Store, is_part: bool) -> str | None:
    """Why a store has to be copied before it can be pushed; None where it is pushed as it lies."""
    if is_part:
        return "only a part of it is pushed"
    if is_address(store.path):
        return "it does not lie on this machine"
    container = store.manifest.container
    return None if container == CONTAINER else f"its container is {container}, and what is shared is {CONTAINER}"


def open_staging(store: Store, staging: Path, keep: Test | None, layers: Sequence[int] | None, on_hub: bool) -> Copy:
    """The copy of a store, or of a part of it, that ``push_store`` can push; it resumes. Raises as ``open_copy``;
    ConflictError ``output-exists``: the folder holds samples that are not to be pushed; it stays as it is."""
    if on_hub and keep is None and len(store.catalog):
        require_limits([(f"{layout.SEGMENTS_DIR}/{number}", 0) for number in range(len(store.catalog))])
    _require_no_others(store, staging, keep)
    return open_copy([store], staging, None, keep, CONTAINER, layers=layers)


def _require_no_others(store: Store, staging: Path, keep: Test | None) -> None:
    """Refuse a folder with samples of another store or choice: those it holds, and those of its inputs, which the copy
    would fill. What a repair of the store dropped was its own, and the folder may have it still."""
    try:
        present = Store.open(staging, strict=False)
    except NotFoundError:
        return
    selection = {entry.id for unit, entry in store.entries if keep is None or keep(unit, entry)}
    pending = set[str]()
    if keep is None:
        selection.update(*(lost_samples(record) for record in store.commits()))
        pending.update(*_input_ids(store))
    others = {name for name in present.sample_ids if name not in selection}
    others.update(*(ids - selection - pending for ids in _input_ids(present)))
    if others:
        count, first = plural(len(others), "sample"), min(others)[:12]
        message = f"{staging} holds {count} not among those to push, such as {first}; nothing was copied"
        raise ConflictError(message, kind=Kind.OUTPUT_EXISTS, hint="--staging ANOTHER")


def _input_ids(store: Store) -> Iterator[set[str]]:
    return (set(registered.table["sample_id"].to_pylist()) for registered in store.inputs().values())


def push_store(store: Store, remote: Remote, card: str, public: bool, begin: Begin) -> PushReport:
    """Push a local WebDataset store. Raises ConfigError: ``hub-limit``, ``address-invalid``; CorruptionError
    ``file-corrupt``: a file is not what its record says; ConflictError ``output-exists``: the place holds something
    else; StorageError: disk or place refused."""
    entries = dict(_files_of_store(store))
    indexes = {path for path in entries if path.startswith(f"{layout.INDEX_DIR}/")}
    return _push(Path(store.path), entries, indexes, remote, card, public, begin)


def push_drafter(folder: Path, remote: Remote, card: str, public: bool, begin: Begin) -> PushReport:
    """Push an exported drafter. On the hub a newer one takes the older one's place. Raises as ``push_store``;
    ConfigError ``path-unsafe``: a name that no pull takes."""
    names = [file.name for file in drafter_files(folder)[0]]
    replaceable = {*names} if remote.keeps_history else set[str]()
    return _push(folder, dict.fromkeys(names), replaceable, remote, card, public, begin)


def drafter_files(folder: Path) -> tuple[list[Path], list[str]]:
    """What belongs to an exported drafter, and the names of what else lies in its folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in DRAFTER_FILES)
    others = {path.name for path in folder.iterdir()} - {path.name for path in files} - {CARD, SUMS}
    return files, sorted(others)


def _files_of_store(store: Store) -> Iterator[tuple[str, FileEntry | None]]:
    """Everything that counts by path, with what its record says of it, in the order in which a reader may meet it."""
    for record in store.commits():
        yield from ((f"{record.segment}/{file.path}", file) for file in record.files)
    yield from ((f"{layout.TARGET_DIR}/{file.path}", file) for file in store.manifest.target_files)
    for folder, parse in ((layout.INPUTS_DIR, layout.parse_input), (layout.ADVICE_DIR, layout.parse_advice)):
        yield from ((f"{folder}/{name}", None) for name in store.fs.list(folder) if parse(name) is not None)
    # Both hold tokens of samples, which may be of those that were left out.
    profile, states = read_profile(store.fs), slice_document(store.fs)
    if profile is not None and profile.sample_id in store:
        yield PROFILE_PATH, None
    if states is not None and all(sample.id in store for sample in states.samples):
        yield layout.slice_path(states.file_sha256), None
        yield SLICE_PATH, None
    names = {commit.name for commit in store.commit_files}
    yield from ((f"{layout.COMMITS_DIR}/{name}", None) for name in sorted(names))
    # A writer at work may have published one of records that this push does not know.
    indexes = (file for file in live_indexes(store.fs) if names.issuperset(file.header.records))
    yield from ((layout.index_path(file.number), None) for file in indexes)
    yield layout.STORE_JSON, None


def _size(root: Path, path: str) -> int:
    """Bytes of a file. Raises CorruptionError: ``file-missing``; StorageError: it cannot be looked at."""
    hint = shlex.join(["hiddenstore", "verify", str(root)])
    try:
        with storage_errors(root / path, hint):
            return (root / path).stat().st_size
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        problem = f"{root / path} is not there; nothing was pushed"
        raise CorruptionError(problem, kind=Kind.FILE_MISSING, path=path, hint=hint) from error


def _require_names(root: Path, paths: Iterable[str]) -> None:
    """Refuse a name that every pull would: ConfigError ``path-unsafe``."""
    for path in paths:
        if not is_inside(path):
            folder, _, name = path.rpartition("/")
            plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
            raise ConfigError(
                f"{str(root / path)!r} cannot be pushed: no pull takes a name with ':', a backslash or what is not "
                "printed; nothing was sent",
                kind=Kind.PATH_UNSAFE,
                hint=shlex.join(["mv", str(root / path), str(root / folder / plain)]),
            )


def _push(
    root: Path,
    entries: Mapping[str, FileEntry | None],
    replaceable: Set[str],
    remote: Remote,
    card: str,
    public: bool,
    begin: Begin,
) -> PushReport:
    _require_names(root, entries)
    sizes = {path: _size(root, path) for path in entries}
    if isinstance(remote, HubRemote):
        require_limits([*sizes.items(), (CARD, len(card)), (SUMS, 1)])
    advance = begin("read", sum(sizes.values()))
    files = [
        LocalFile(path, root / path, sizes[path], _sha256(root, path, entry, advance), path in replaceable)
        for path, entry in entries.items()
    ]
    files.append(_of_bytes(CARD, card.encode()))
    digests = {file.path: file.sha256 for file in files}
    files.append(_of_bytes(SUMS, sums_text(digests)))
    known = remote.digests(files)
    if changed := [f.path for f in files if not f.replaces and known.get(f.path) not in (None, "", f.sha256)]:
        more = f", and {len(changed) - 1:,} more files that differ" if len(changed) > 1 else ""
        pull = shlex.join(["hiddenstore", "pull", remote.address, "PUSHED"])
        raise ConflictError(
            f"{remote.address} holds another {changed[0]}{more}",
            kind=Kind.OUTPUT_EXISTS,
            hint=f"another name; or, where it holds what was pushed of this store before, {pull} and push again with "
            "--staging PUSHED",
        )
    before = _pushed_before(remote)
    if units := lost_units(before, digests):
        raise ConflictError(
            f"{remote.address} holds another store: {plural(len(units), 'unit')} of it, such as {units[0]}, are not in "
            f"{root}, and would be lost",
            kind=Kind.OUTPUT_EXISTS,
            hint="another name",
        )
    if units := lossy_units(root, remote, before)[0]:
        raise ConflictError(
            f"{remote.address} holds samples of {plural(len(units), 'unit')}, such as {units[0]}, that a repair of "
            f"{root} dropped and that would be lost; nothing was sent",
            kind=Kind.OUTPUT_EXISTS,
            hint=f"{restore_hint(remote, 'PUSHED', str(root))}; or the same collect",
        )
    remote.begin(digests, public)
    missing = [file for file in files if known.get(file.path) != file.sha256]
    sent = sum(file.size for file in missing)
    remote.put(missing, begin("push", sent))
    return PushReport(len(files), sum(file.size for file in files), len(missing), sent)


def _pushed_before(remote: Remote) -> dict[str, str]:
    try:
        return read_sums(remote)
    except NotFoundError:
        return {}  # there is no such repository yet


def _of_bytes(path: str, data: bytes) -> LocalFile:
    return LocalFile(path, data, len(data), hashlib.sha256(data).hexdigest(), True)


def _sha256(root: Path, path: str, entry: FileEntry | None, advance: Advance) -> str:
    """Of a file as it lies; CorruptionError ``file-corrupt`` where its record says otherwise."""
    digest, recorded = hashlib.sha256(), None if entry is None else digest_for(entry)
    with storage_errors(root / path), (root / path).open("rb") as file:
        while data := file.read(PIECE_BYTES):
            digest.update(data)
            if recorded is not None:
                recorded.update(data)
            advance(len(data))
    if entry is not None and recorded is not None and (fault := mismatch(entry, recorded)):
        problem = f"{root / path} is damaged: {fault}; nothing was pushed"
        hint = shlex.join(["hiddenstore", "verify", str(root), "--full"])
        raise CorruptionError(problem, kind=Kind.FILE_CORRUPT, path=path, hint=hint)
    return digest.hexdigest()

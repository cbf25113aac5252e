"""Damaged files beside the units: found, and moved to ``quarantine/``, so that who made them can write them again."""

from collections.abc import Callable, Iterator
from functools import partial

from hiddenstore import layout
from hiddenstore.advise.document import advice_numbers, read_advice
from hiddenstore.calibration import SLICE_PATH, slice_bytes, slice_document
from hiddenstore.commit import latest_names, read_commit
from hiddenstore.errors import CorruptionError
from hiddenstore.fs import Filesystem
from hiddenstore.store import Store, load_snapshot
from hiddenstore.verify.profile import PROFILE_PATH, read_profile


def damaged_documents(store: Store) -> dict[str, str]:
    """Files of the target, inputs, snapshots, replaced commit records, calibration and advice that cannot be read.

    Path and reason of each. The segments and the records that count are the business of ``repair``.
    """
    found: dict[str, str] = {}
    for path, read in _readers(store):
        try:
            if store.fs.size(path) is not None:
                read()
        except CorruptionError as error:
            found[path] = _why(error)
    return found | _damaged_slice(store.fs)


def set_aside(fs: Filesystem, path: str) -> None:
    """Move a file to ``quarantine/``, under its own path."""
    fs.put_if_absent(f"{layout.QUARANTINE_DIR}/{path}", fs.read(path))
    fs.remove_tree(path)


def _readers(store: Store) -> Iterator[tuple[str, Callable[[], object]]]:
    fs = store.fs
    for file in store.manifest.target_files:
        yield f"{layout.TARGET_DIR}/{file.path}", partial(store.target_file, file.path)
    for digest, registered in store.inputs().items():
        yield layout.input_path(digest), registered.unit_samples
    for name in fs.list(layout.SNAPSHOTS_DIR):
        if name.endswith(".json"):
            yield f"{layout.SNAPSHOTS_DIR}/{name}", partial(load_snapshot, fs, name.removesuffix(".json"))
    for name in sorted(set(fs.list(layout.COMMITS_DIR)) - set(latest_names(fs))):
        if layout.parse_commit(name) is not None:
            yield f"{layout.COMMITS_DIR}/{name}", partial(read_commit, fs, name)
    yield PROFILE_PATH, partial(read_profile, fs)
    for number in advice_numbers(fs):
        yield layout.advice_path(number), partial(read_advice, fs, number)


def _damaged_slice(fs: Filesystem) -> dict[str, str]:
    """The document of the slice, and its states where they are damaged: a new slice may need their name."""
    try:
        document = slice_document(fs)
    except CorruptionError as error:
        return {SLICE_PATH: _why(error)}
    if document is None:
        return {}
    try:
        slice_bytes(fs, document)
    except CorruptionError as error:
        states = layout.slice_path(document.file_sha256)
        return {path: _why(error) for path in (SLICE_PATH, states) if fs.size(path) is not None}
    return {}


def _why(error: CorruptionError) -> str:
    """What is wrong, without the name of the file."""
    return error.message.partition(" is damaged: ")[2] or error.message

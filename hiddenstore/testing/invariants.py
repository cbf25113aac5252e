"""What must be true of a store after anything: used by the crash, damage and kill tests, and by other backends.

``problems`` lists what is not true in words; ``fingerprint`` is equal for two stores that hold the same, whatever the
random digits of their segments are.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hiddenstore.errors import HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.digests import content_mismatch
from hiddenstore.files.documents import sha256_hex
from hiddenstore.fs.seam import Filesystem, is_temporary
from hiddenstore.records import Record
from hiddenstore.store import Store
from schemas.manifest import CommitRecord

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

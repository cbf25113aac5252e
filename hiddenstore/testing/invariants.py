"""What must be true of a store after anything: used by the crash, damage and kill tests, and by other backends.

``problems`` lists what is not true in words; ``fingerprint`` is equal for two stores that hold the same, whatever the
random digits of their segments are.
"""

import hashlib
from collections import Counter
from typing import Any

from hiddenstore import layout
from hiddenstore.documents import sha256_hex
from hiddenstore.errors import HiddenstoreError
from hiddenstore.fs import Filesystem, is_temporary
from hiddenstore.store import Store
from schemas.manifest import CommitRecord

FOLDERS = {
    layout.STORE_JSON,
    layout.TARGET_DIR,
    layout.INPUTS_DIR,
    layout.COMMITS_DIR,
    layout.SEGMENTS_DIR,
    layout.SNAPSHOTS_DIR,
}


def problems(store: Store, *, finished: bool = False) -> list[str]:
    """Everything that is wrong; empty for a sound store. ``finished`` also demands every unit of every input."""
    found = [problem for record in store.commits() for problem in _file_problems(store, record)]
    found += _target_problems(store)
    found += _sample_problems(store)
    found += _input_problems(store, finished)
    found += _snapshot_problems(store)
    found += [f"{name} is no name of a store" for name in _strangers(store.fs)]
    return found


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
    import torch

    record = store.read(sample_id)
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


def _file_problems(store: Store, record: CommitRecord) -> list[str]:
    found = []
    for file in record.files:
        path = f"{record.segment}/{file.path}"
        size = store.fs.size(path)
        if size != file.size:
            found.append(f"{path}: expected {file.size} bytes, found {size}")
        elif sha256_hex(store.fs.read(path)) != file.sha256:
            found.append(f"{path}: its bytes are not the ones its record names")
    return found


def _target_problems(store: Store) -> list[str]:
    found = []
    for file in store.manifest.target_files:
        try:
            store.target_file(file.path)
        except HiddenstoreError as error:
            found.append(error.message)
    return found


def _sample_problems(store: Store) -> list[str]:
    counted = Counter(sample.id for record in store.commits() for sample in record.samples)
    rejected = {reject.id for record in store.commits() for reject in record.rejects}
    found = [f"sample {name} is held {count} times" for name, count in counted.items() if count > 1]
    found += [f"sample {name} is both held and rejected" for name in sorted(rejected & set(counted))]
    for name in store.sample_ids:
        try:
            if store.read(name).sample.id != name:
                found.append(f"sample {name} reads as another one")
        except HiddenstoreError as error:
            found.append(error.message)
    return found


def _input_problems(store: Store, finished: bool) -> list[str]:
    found = []
    inputs = {}
    for digest, registered in store.inputs().items():
        try:
            inputs[digest] = registered.unit_samples()
        except HiddenstoreError as error:
            found.append(error.message)
    committed = {record.unit: record for record in store.commits()}
    for record in committed.values():
        held = [sample.id for sample in record.samples] + [reject.id for reject in record.rejects]
        expected = inputs.get(record.input, {}).get(record.unit)
        if expected is not None and sorted(held) != sorted(expected):
            found.append(f"unit {record.unit} is not what its input says")
        if finished and expected is None:
            found.append(f"unit {record.unit} is of no registered input")
    if finished:
        units = [unit for members in inputs.values() for unit in members]
        found += [f"unit {unit} is incomplete" for unit in units if unit not in committed]
    return found


def _snapshot_problems(store: Store) -> list[str]:
    found = []
    for name in store.fs.list(layout.SNAPSHOTS_DIR):
        if is_temporary(name):
            continue
        try:
            Store.open(store.fs, snapshot=name.removesuffix(".json"))
        except HiddenstoreError as error:
            found.append(error.message)
    return found


def _strangers(fs: Filesystem) -> list[str]:
    names = [name for name in fs.list("") if name not in FOLDERS]
    names += [name for name in fs.list(layout.COMMITS_DIR) if layout.parse_commit(name) is None]
    names += [name for name in fs.list(layout.SEGMENTS_DIR) if layout.parse_segment(name) is None]
    names += [name for name in fs.list(layout.INPUTS_DIR) if layout.parse_input(name) is None]
    return [name for name in names if not is_temporary(name)]

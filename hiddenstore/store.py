"""The store as a reader sees it: its manifest, the commits that count, and samples by id.

Shapes: T tokens of one sample, L layers read, D target width, R rows of the final hidden.
"""

import shlex
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hiddenstore import layout
from hiddenstore.commit import Commit, Scan, make_snapshot, read_snapshot, scan_commits
from hiddenstore.documents import load, seal, sha256_hex
from hiddenstore.errors import ConflictError, CorruptionError, NotFoundError
from hiddenstore.fs import Filesystem, is_inside, open_filesystem
from schemas.capture import CaptureSpec
from schemas.manifest import CommitRecord, SampleEntry, Snapshot, StoreManifest

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hiddenstore.codecs import Encoded
    from hiddenstore.records import Record, Sample
    from hiddenstore.registered import RegisteredInput
    from hiddenstore.segment import SegmentReader

OPEN_SEGMENTS = 64


def no_store(fs: Filesystem) -> NotFoundError:
    """``store-missing``: what to raise where there is no store.json."""
    place = shlex.quote(fs.root)
    if fs.size(layout.DATA_JSON) is not None:
        what, command = "it holds prepared data", f"hiddenstore collect {place} -o STORE --target TARGET"
    else:
        what, command = f"{layout.STORE_JSON} is missing", f"hiddenstore collect DATA -o {place} --target TARGET"
    return NotFoundError(f"{fs.root} is no store: {what}", kind="store-missing", hint=command)


class Store:
    """Captured samples by id. Opening reads metadata only; what is committed later is seen by opening again.

    Reading is safe from many threads. A sample id held by several units is read from the first unit by name;
    ``duplicates`` counts the others.
    """

    def __init__(self, fs: Filesystem, manifest: StoreManifest, scan: Scan) -> None:
        self.fs = fs
        self.path = fs.root
        self.manifest = manifest
        self.damaged = scan.damaged
        self._commits = scan.commits
        self._readers: OrderedDict[str, SegmentReader] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, location: "str | Path | Filesystem", snapshot: Snapshot | str | None = None, strict: bool = True
    ) -> "Store":
        """The store at a path, or only what a snapshot of it names.

        With ``strict`` off, commit records that cannot be read are listed in ``damaged`` instead of raised.

        Raises:
            NotFoundError: no store or no such snapshot.
            CorruptionError: a document is damaged; the message names the file.
            FormatError: ``format-future``.
            ConfigError: ``scheme-unsupported`` for a URL.
        """
        fs = open_filesystem(location)
        if fs.size(layout.STORE_JSON) is None:
            raise no_store(fs)
        manifest = load_manifest(fs)
        if snapshot is None:
            scan = scan_commits(fs)
        else:
            scan = read_snapshot(fs, load_snapshot(fs, snapshot) if isinstance(snapshot, str) else snapshot)
        if strict and scan.damaged:
            raise scan.damaged[0]
        return cls(fs, manifest, scan)

    def __repr__(self) -> str:
        capture, target = self.capture, self.capture.target
        tokens = sum(record.tokens for record in self.commits())
        supervised = sum(entry.supervised for record in self.commits() for entry in record.samples)
        size = sum(record.bytes_stored for record in self.commits())
        share = f"{supervised / tokens:.0%}" if tokens else "none"
        aux = ", ".join(capture.aux_fields) or "none"
        return (
            f"Store {self.path}\n"
            f"  {len(self):,} samples, {tokens:,} tokens ({share} supervised), {len(self._commits):,} units, "
            f"{size / 1e9:.2f} GB\n"
            f"  target {target.name}: {target.model_type}, {target.num_layers} layers, width {target.hidden_size}\n"
            f"  aux {aux} ({capture.codecs.aux}); final {capture.final}, {capture.final_norm} ({capture.codecs.final})"
        )

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._index

    def __getitem__(self, sample_id: str) -> "Record":
        return self.read(sample_id)

    @property
    def capture(self) -> CaptureSpec:
        """What every unit of this store holds."""
        return self.manifest.capture

    def commits(self) -> list[CommitRecord]:
        """The records that count, sorted by unit."""
        return [commit.record for commit in self._commits]

    @property
    def commit_files(self) -> tuple[Commit, ...]:
        """The same records with their file names and digests."""
        return self._commits

    @cached_property
    def sample_ids(self) -> list[str]:
        """Ids in commit order, each once."""
        return list(self._index)

    @property
    def duplicates(self) -> int:
        """Samples that are not read because an earlier unit holds the same id."""
        return sum(len(commit.record.samples) for commit in self._commits) - len(self._index)

    @property
    def entries(self) -> Iterator[tuple[CommitRecord, SampleEntry]]:
        """Every sample that is read, with the record that holds it, in commit order."""
        for record, index in self._index.values():
            yield record, record.samples[index]

    def locate(self, sample_id: str) -> tuple[CommitRecord, int]:
        """The record that holds a sample and the sample's index in it; NotFoundError ``sample-missing``."""
        try:
            return self._index[sample_id]
        except KeyError:
            raise NotFoundError(
                f"{self.path} holds no sample {sample_id}", kind="sample-missing", hint=f"hiddenstore ls {self.path}"
            ) from None

    def read(self, sample_id: str, layers: Sequence[int] | None = None, final: bool = True) -> "Record":
        """One record: aux bfloat16 [L, T, D] of the layers asked for (default all, ascending), final bfloat16 [R, D].

        Raises:
            NotFoundError: ``sample-missing``.
            CorruptionError: bytes disagree with their checksum; names file and samples.
        """
        record, index = self.locate(sample_id)
        return self._reader(record).read(index, layers, final)

    def read_into(
        self, sample_id: str, aux: "Tensor", final: "Tensor | None", layers: Sequence[int] | None = None
    ) -> "Record":
        """One record decoded into memory of the caller: see ``SegmentReader.read_into``; raises as ``read`` does."""
        record, index = self.locate(sample_id)
        return self._reader(record).read_into(index, aux, final, layers)

    def read_encoded(
        self,
        sample_id: str,
        layers: Sequence[int] | None = None,
        final: bool = True,
        out: "tuple[Sequence[Tensor], Sequence[Tensor]] | None" = None,
    ) -> "tuple[Encoded, Encoded, np.ndarray]":
        """One record's states as they are stored: see ``SegmentReader.read_encoded``; raises as ``read`` does."""
        record, index = self.locate(sample_id)
        return self._reader(record).read_encoded(index, layers, final, out)

    def reader_of(self, sample_id: str) -> "tuple[SegmentReader, int]":
        """The open unit that holds a sample and the sample's index in it; NotFoundError ``sample-missing``."""
        record, index = self.locate(sample_id)
        return self._reader(record), index

    def sample(self, sample_id: str) -> "Sample":
        """Tokens, mask and spans of one sample, without its states."""
        record, index = self.locate(sample_id)
        return self._reader(record).sample(index)

    def target_file(self, name: str) -> bytes:
        """One file of ``target/``, checked against ``store.json``.

        Raises:
            NotFoundError: ``target-file-missing``, the store names no such file.
            CorruptionError: ``target-file-corrupt``.
        """
        entry = next((file for file in self.manifest.target_files if file.path == name), None)
        path = f"{layout.TARGET_DIR}/{name}"
        if entry is None:
            raise NotFoundError(f"{self.path} holds no {path}", kind="target-file-missing")
        size = self.fs.size(path)
        data = self.fs.read(path) if size == entry.size else b""
        if size != entry.size or sha256_hex(data) != entry.sha256:
            found = "no file" if size is None else f"{size:,} bytes"
            if size == entry.size:
                found = f"sha256 {sha256_hex(data)}"
            raise CorruptionError(
                f"{self.path}/{path} is damaged: expected {entry.size:,} bytes with sha256 {entry.sha256}, "
                f"found {found}",
                kind="target-file-corrupt",
                hint=shlex.join(["hiddenstore", "verify", self.path, "--full"]),
                path=path,
            )
        return data

    def inputs(self) -> "dict[str, RegisteredInput]":
        """The inputs this store was asked to hold, by digest."""
        from hiddenstore.registered import registered_inputs

        return registered_inputs(self.fs)

    def snapshot(self, name: str = "now") -> Snapshot:
        """What this object sees, frozen; in memory only."""
        return make_snapshot(name, self._commits)

    def save_snapshot(self, name: str) -> Snapshot:
        """Write ``snapshots/<name>.json``; ConflictError ``snapshot-exists`` when the name holds another list."""
        snapshot = self.snapshot(name)
        if not self.fs.put_if_absent(layout.snapshot_path(name), seal(snapshot)):
            stored = load_snapshot(self.fs, name)
            if stored != snapshot:
                raise ConflictError(
                    f"{self.path} has another snapshot {name!r} already: {stored.samples:,} samples stored, "
                    f"{snapshot.samples:,} asked",
                    kind="snapshot-exists",
                    hint="choose another name; a snapshot never changes",
                )
        return snapshot

    @cached_property
    def _index(self) -> dict[str, tuple[CommitRecord, int]]:
        index: dict[str, tuple[CommitRecord, int]] = {}
        for commit in self._commits:
            for place, sample in enumerate(commit.record.samples):
                index.setdefault(sample.id, (commit.record, place))
        return index

    def _reader(self, record: CommitRecord) -> "SegmentReader":
        from hiddenstore.segment import open_segment

        with self._lock:
            reader = self._readers.get(record.segment)
            if reader is not None:
                self._readers.move_to_end(record.segment)
                return reader
        reader = open_segment(self, record)
        with self._lock:
            reader = self._readers.setdefault(record.segment, reader)
            while len(self._readers) > OPEN_SEGMENTS:
                self._readers.popitem(last=False)
        return reader


def load_manifest(fs: Filesystem) -> StoreManifest:
    """``store.json``, whose target files lie inside ``target/``."""
    manifest = load(fs, layout.STORE_JSON, StoreManifest)
    leaving = [file.path for file in manifest.target_files if not is_inside(file.path)]
    if leaving:
        raise CorruptionError(
            f"{fs.root}/{layout.STORE_JSON} is damaged: it names {leaving[0]!r}, which is not inside "
            f"{layout.TARGET_DIR}",
            kind="store-invalid",
            path=layout.STORE_JSON,
        )
    return manifest


def load_snapshot(fs: Filesystem, name: str) -> Snapshot:
    """A saved snapshot; NotFoundError ``snapshot-missing``."""
    path = layout.snapshot_path(name)
    if fs.size(path) is None:
        saved = [entry.removesuffix(".json") for entry in fs.list(layout.SNAPSHOTS_DIR)]
        raise NotFoundError(
            f"{fs.root} has no snapshot {name!r}; it has {', '.join(saved) or 'none'}", kind="snapshot-missing"
        )
    snapshot = load(fs, path, Snapshot)
    if snapshot.name != name:
        raise CorruptionError(
            f"{fs.root}/{path} is damaged: it holds snapshot {snapshot.name!r}", kind="snapshot-corrupt", path=path
        )
    return snapshot

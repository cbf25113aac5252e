"""The store as a reader sees it: its manifest, the commits that count, samples by id, and a sequence of records, as a
prompt or a notebook shows it too.

Shapes: T tokens of one sample, L layers read, D target width, R rows of the final hidden.
"""

import shlex
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from hiddenstore.codecs import CODECS, FITTED, LAYOUTS, fitted
from hiddenstore.commit import Commit
from hiddenstore.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    FormatError,
    Kind,
    NotFoundError,
    StorageError,
)
from hiddenstore.files import layout
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import load, seal, sha256_hex
from hiddenstore.files.layout import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem, is_inside
from hiddenstore.index.catalog import Catalog, Records, make_snapshot, read_catalog, read_frozen, saved_snapshots
from hiddenstore.records import Record, facts_table
from hiddenstore.registry import Registry
from hiddenstore.segments import CONTAINERS
from hiddenstore.threads import Lock
from schemas.capture import CaptureSpec
from schemas.manifest import CommitRecord, PackageRole, SampleEntry, Snapshot, StoreManifest

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    import webdataset
    import zarr
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hiddenstore.inputs import RegisteredInput
    from hiddenstore.records import Sample
    from hiddenstore.segments.segment import SegmentReader
    from hiddenstore.targets.head import HeadBundle
    from hiddenstore.targets.rebuild import Rebuilder

OPEN_SEGMENTS = 64
_PICKLED = ("fs", "path", "manifest", "damaged", "catalog")


class Store:
    """Captured samples by id. Opening reads metadata only; what is committed later is seen by opening again.

    A sequence of records: ``for record in store``; ``store[0]``, ``store[-1]``, ``store[2:5]``; ``store["4f2a"]`` by
    the start of an id. A slice reads its records into a list, an iteration one after the other.

    Reading is safe from many threads. A sample id held by several units is read from the first unit by name;
    ``duplicates`` counts the others.
    """

    def __init__(self, fs: Filesystem, manifest: StoreManifest, catalog: Catalog) -> None:
        self.fs = fs
        self.path = fs.root
        self.manifest = manifest
        self.damaged = catalog.damaged
        self.catalog = catalog
        self._readers: OrderedDict[str, SegmentReader] = OrderedDict()
        self._rebuilders: dict[str, Rebuilder] = {}
        self._lock = Lock()
        _bind_codec(fs, manifest)

    @classmethod
    def open(
        cls, location: "str | Path | Filesystem", snapshot: Snapshot | str | None = None, strict: bool = True
    ) -> "Store":
        """The store at a path, or only what a snapshot of it names.

        With ``strict`` off every commit record is read, whatever an index covers, and those that cannot be are listed
        in ``damaged`` instead of raised. Raises NotFoundError: no store or no such snapshot; CorruptionError: a
        document is damaged; the message names the file; FormatError: ``format-future``; ``plugin-missing``, a codec or
        the container is of a package that is not installed; ConfigError: ``scheme-unsupported``,
        ``address-invalid``."""
        fs = open_filesystem(location)
        manifest = load_manifest(fs)
        if snapshot is None:
            catalog = read_catalog(fs, use_index=strict)
        else:
            catalog = read_frozen(fs, load_snapshot(fs, snapshot) if isinstance(snapshot, str) else snapshot)
        if strict and catalog.damaged:
            raise catalog.damaged[0]
        return cls(fs, manifest, catalog)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the units, decoder blocks and files that were opened; what is read after that opens its own."""
        with self._lock:
            self._readers.clear()
            self._rebuilders.clear()
        self.fs.let_go()

    @property
    def is_frozen(self) -> bool:
        """Whether a snapshot was opened, which is read as it was."""
        return self.catalog.snapshot is not None

    def __getstate__(self) -> dict[str, object]:
        """What a process that gets it by pickle needs: its units are opened there anew."""
        return {name: value for name, value in vars(self).items() if name in _PICKLED}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _readers=OrderedDict(), _rebuilders={}, _lock=Lock())
        _bind_codec(self.fs, self.manifest)

    def __len__(self) -> int:
        return self.totals["samples"] - self.duplicates

    def __contains__(self, sample_id: object) -> bool:
        return isinstance(sample_id, str) and self.catalog.locate(sample_id) is not None

    @overload
    def __getitem__(self, key: int | str) -> Record: ...

    @overload
    def __getitem__(self, key: slice) -> list[Record]: ...

    def __getitem__(self, key: int | str | slice) -> Record | list[Record]:
        if isinstance(key, slice):
            return [self.read(sample_id) for sample_id in self.sample_ids[key]]
        return self.read(self.id_starting(key) if isinstance(key, str) else self.id_at(key))

    def id_at(self, index: int) -> str:
        """The id at an index, negative from the end; NotFoundError ``sample-missing``."""
        with suppress(IndexError):
            return self.sample_ids[index]
        places = f"0 to {len(self) - 1:,}: there is none at {index}" if len(self) else f"so none at {index}"
        raise self._missing(f"{self.path} holds {len(self):,} samples, {places}")

    def id_starting(self, text: str) -> str:
        """The id that is ``text``, or the only one that starts with it. Raises NotFoundError: ``sample-missing``;
        ConfigError: ``sample-ambiguous`` listing the candidates."""
        if text in self:
            return text
        matches = self.ids_starting(text.lower()) if text else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            shown = ", ".join(matches[:4]) + (", …" if len(matches) > 4 else "")
            raise ConfigError(f"{len(matches)} samples start with {text!r}: {shown}", kind=Kind.SAMPLE_AMBIGUOUS)
        raise self._missing(f"{self.path} holds {len(self):,} samples, and none is {text!r}")

    def __repr__(self) -> str:
        facts = self._facts()
        return (
            f"Store {self.path}\n"
            f"  {facts['samples']} samples, {facts['tokens']}, {facts['units']} units, {facts['size']}\n"
            f"  target {facts['target']}\n  aux {facts['aux']}; final {facts['final']}"
        )

    def _repr_html_(self) -> str:
        return facts_table(f"Store {self.path}", self._facts())

    def _facts(self) -> dict[str, str]:
        capture, target, totals = self.capture, self.capture.target, self.totals
        tokens = totals["tokens"]
        share = f"{totals['supervised'] / tokens:.0%}" if tokens else "none"
        return {
            "samples": f"{len(self):,}",
            "tokens": f"{tokens:,} tokens ({share} supervised)",
            "units": f"{totals['units']:,}",
            "size": f"{totals['bytes_stored'] / 1e9:.2f} GB",
            "target": f"{target.name}: {target.model_type}, {target.num_layers} layers, width {target.hidden_size}",
            "aux": f"{', '.join(capture.aux_fields) or 'none'} ({capture.codecs.aux})",
            "final": f"{capture.final}, {capture.final_norm} ({capture.codecs.final})",
        }

    def _missing(self, message: str) -> NotFoundError:
        return NotFoundError(message, kind=Kind.SAMPLE_MISSING, hint=shlex.join(["hiddenstore", "ls", self.path]))

    @property
    def capture(self) -> CaptureSpec:
        """What every unit of this store holds."""
        return self.manifest.capture

    def commits(self) -> Sequence[CommitRecord]:
        """The records that count, sorted by unit; those that an index covers are read when they are asked for."""
        return Records(self.catalog)

    @property
    def commit_files(self) -> Sequence[Commit]:
        """The same records with their file names and digests."""
        return self.catalog

    @cached_property
    def sample_ids(self) -> Sequence[str]:
        """Ids in commit order, each once."""
        return self.catalog.table.ids.take(self.catalog.commit_order())

    def ids_starting(self, text: str) -> Sequence[str]:
        """The ids that start with ``text``, sorted."""
        return self.catalog.starting(text).ids

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all units, samples stored twice counted twice: samples, tokens, supervised, bytes_stored, rejects,
        and ``units``."""
        return {"units": len(self.catalog)} | {name: int(facts.sum()) for name, facts in self.catalog.facts.items()}

    @property
    def duplicates(self) -> int:
        """Samples that are not read because an earlier unit holds the same id."""
        return self.catalog.repeats

    @property
    def entries(self) -> Iterator[tuple[CommitRecord, SampleEntry]]:
        """Every sample that is read, with the record that holds it, in commit order; reads the records."""
        dropped = self.catalog.dropped
        unread = set(zip(dropped.record.tolist(), dropped.position.tolist(), strict=True))
        for number, record in enumerate(self.commits()):
            for position, entry in enumerate(record.samples):
                if (number, position) not in unread:
                    yield record, entry

    def locate(self, sample_id: str) -> tuple[CommitRecord, int]:
        """The record that holds a sample and the sample's index in it; NotFoundError ``sample-missing``."""
        number, position = self._place(sample_id)
        return self.catalog.record_of(number, [position], [sample_id]), position

    def index_of(self, sample_id: str) -> int:
        """The place of a sample in ``sample_ids``; NotFoundError ``sample-missing``."""
        return self.catalog.place_of(*self._place(sample_id))

    def _place(self, sample_id: str) -> tuple[int, int]:
        place = self.catalog.locate(sample_id)
        if place is None:
            raise self._missing(f"{self.path} holds no sample {sample_id}")
        return place

    def read(self, sample_id: str, layers: Sequence[int] | None = None, final: bool = True) -> "Record":
        """One record: aux bfloat16 [L, T, D] of the layers asked for (default all, ascending), final bfloat16 [R, D].
        Raises NotFoundError: ``sample-missing``; CorruptionError: bytes disagree with their checksum; names file and
        samples."""
        reader, index = self.reader_of(sample_id)
        return self.read_unit(reader, index, layers, final)

    def read_unit(
        self, reader: "SegmentReader", index: int, layers: Sequence[int] | None = None, final: bool = True
    ) -> "Record":
        """The same of the ``index``-th sample of an open unit."""
        rebuilder = self.rebuilder()
        if rebuilder is None:
            return reader.read(index, layers, final)
        from hiddenstore.targets.rebuild import layers_to_read

        reader.require_layers(layers or ())
        record = reader.read(index, layers_to_read(self.capture, layers, final), final)
        return rebuilder.complete(record, layers, final)

    def read_into(
        self, sample_id: str, aux: "Tensor", final: "Tensor | None", layers: Sequence[int] | None = None
    ) -> "Record":
        """What is stored of one record decoded into memory of the caller: see ``SegmentReader.read_into``; raises as
        ``read`` does. Nothing is rebuilt."""
        reader, index = self.reader_of(sample_id)
        return reader.read_into(index, aux, final, layers)

    def rebuilder(self, device: "torch.device | str" = "cpu") -> "Rebuilder | None":
        """What brings back the states that are not stored, on ``device``; None where all are. Raises CorruptionError: a
        file of ``target/`` is damaged; ConfigError: ``blocks-unsupported``, this transformers lacks the target's
        blocks."""
        if not self.capture.states:
            return None
        from hiddenstore.targets.blocks import BLOCKS_FILE, TargetBlocks
        from hiddenstore.targets.folder import CONFIG_FILE
        from hiddenstore.targets.rebuild import Rebuilder

        with self._lock:
            if str(device) not in self._rebuilders:
                data = self.target_file(BLOCKS_FILE) if self.capture.blocks else None
                blocks = TargetBlocks.from_bytes(self.target_file(CONFIG_FILE), data, device)
                head = self.head()
                # Embeddings stay: rows of them are a pack's, the table is gigabytes.
                norm = {name: getattr(head, name) for name in ("norm_weight", "norm_bias")}
                moved = {name: tensor.to(device) for name, tensor in norm.items() if tensor is not None}
                self._rebuilders[str(device)] = Rebuilder(self.capture, replace(head, **moved), blocks)
            return self._rebuilders[str(device)]

    def sample(self, sample_id: str) -> "Sample":
        """Tokens, mask and spans of one sample, without its states."""
        reader, index = self.reader_of(sample_id)
        return reader.sample(index)

    def reader_of(self, sample_id: str) -> "tuple[SegmentReader, int]":
        """The open unit that holds a sample and the sample's index in it; NotFoundError ``sample-missing``."""
        record, index = self.locate(sample_id)
        return self._reader(record), index

    def readers_of(self, sample_ids: Sequence[str]) -> "Iterator[tuple[SegmentReader, np.ndarray, list[int]]]":
        """The open units that hold samples: for each, int64 [S] the samples' indices in it, ascending, and their
        places in ``sample_ids``; raises as ``reader_of``."""
        places = self.catalog.places_of(sample_ids)
        if places is None:
            places = np.array([self._place(sample_id) for sample_id in sample_ids], dtype=np.int64).reshape(-1, 2).T
        order = np.lexsort(places[::-1])
        for part in np.split(order, np.flatnonzero(np.diff(places[0, order])) + 1) if len(order) else ():
            indices, rows = places[1, part], part.tolist()
            ids = [sample_ids[row] for row in rows]
            record = self.catalog.record_of(int(places[0, part[0]]), indices.tolist(), ids)
            yield self._reader(record), indices, rows

    def _reader(self, record: CommitRecord) -> "SegmentReader":
        with self._lock:
            reader = self._readers.get(record.segment)
            if reader is None:
                reader = self._readers[record.segment] = self.open_unit(record)
                if len(self._readers) > OPEN_SEGMENTS:
                    self._readers.popitem(last=False)
            else:
                self._readers.move_to_end(record.segment)
        return reader

    def __iter__(self) -> Iterator["Record"]:
        from hiddenstore.segments.segment import read_records

        if self.capture.states:
            for reader, positions in self._stored():
                yield from (self.read_unit(reader, position) for position in positions.tolist())
        else:
            yield from read_records(self._stored())

    def _stored(self) -> "Iterator[tuple[SegmentReader, np.ndarray]]":
        """Every unit and where in it lie the samples that are read: int64 [S], ascending."""
        table, order = self.catalog.table, self.catalog.commit_order()
        numbers = table.record[order]
        for rows in np.split(order, np.flatnonzero(np.diff(numbers)) + 1) if len(order) else ():
            positions, number = table.position[rows], int(table.record[rows[0]])
            record = self.catalog.record_of(number, positions.tolist(), table.ids.take(rows)[:])
            yield self._reader(record), positions.astype(np.int64)

    def open_unit(self, record: CommitRecord) -> "SegmentReader":
        """A new reader of one unit, with nothing cached from before."""
        from hiddenstore.segments.segment import SegmentReader

        return SegmentReader(self.fs, record.segment, record, self.capture, self.manifest.container)

    def target_file(self, name: str) -> bytes:
        """One file of ``target/``, checked against ``store.json``. Raises NotFoundError: ``target-file-missing``, the
        store names no such file; CorruptionError: ``target-file-corrupt``."""
        return target_file(self.fs, self.manifest, name)

    def head(self, device: "torch.device | str | None" = None) -> "HeadBundle":
        """What turns final hiddens into logits: ``target/head.safetensors``, on ``device`` (default: CPU). Raises
        CorruptionError: the bytes disagree with store.json, or a tensor is missing."""
        from hiddenstore.targets.head import HEAD_FILE, HeadBundle

        head = HeadBundle.from_bytes(self.target_file(HEAD_FILE), self.manifest.head, where=f"target/{HEAD_FILE}")
        return head if device is None else head.to(device)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the target, as transformers loads it from ``target/``; no code of the target runs. Raises
        NotFoundError: ``target-file-missing``, the target came without one; ConfigError: ``target-unreadable``."""
        names = [file.path for file in self.manifest.target_files]
        if not any(name.startswith("tokenizer") or name == "vocab.json" for name in names):
            message = f"{self.path}/{layout.TARGET_DIR} holds no tokenizer"
            raise NotFoundError(message, kind=Kind.TARGET_FILE_MISSING)
        from transformers import AutoTokenizer

        try:
            with self.fs.local_copy(layout.TARGET_DIR, without=".safetensors") as folder:
                return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # its files may hold anything
            raise_refusal(error, f"{self.path}/{layout.TARGET_DIR}")
            raise ConfigError(
                f"the tokenizer in {self.path}/{layout.TARGET_DIR} cannot be loaded: {error}",
                kind=Kind.TARGET_UNREADABLE,
                hint=shlex.join(["hiddenstore", "verify", self.path, "--full"]),
            ) from error

    def to_arrow(self) -> "pa.Table":
        """The table of samples: id, split, tokens, supervised, final_rows, unit; in commit order."""
        from hiddenstore.index.catalog import sample_table

        return sample_table(self.catalog)

    def to_pandas(self) -> "pd.DataFrame":
        """The same as a data frame; ImportError where pandas is not installed."""
        return self.to_arrow().to_pandas()

    def inputs(self) -> "dict[str, RegisteredInput]":
        """The inputs this store was asked to hold, by digest; of a snapshot, those that its records name."""
        from hiddenstore.inputs import registered_inputs

        inputs = registered_inputs(self.fs)
        if not self.is_frozen:
            return inputs
        digests = {record.input for record in self.commits()}
        return {digest: item for digest, item in inputs.items() if digest in digests}

    def snapshot(self, name: str = "now") -> Snapshot:
        """What this object sees, frozen; in memory only."""
        return make_snapshot(name, self.catalog)

    def save_snapshot(self, name: str) -> Snapshot:
        """Write ``snapshots/<name>.json``; ConflictError ``output-exists`` when the name holds another list."""
        snapshot = self.snapshot(name)
        try:
            is_new = self.fs.put_if_absent(layout.snapshot_path(name), seal(snapshot))
        except StorageError as error:
            # It may lie there although the answer was lost, and somebody may read it.
            with suppress(StorageError, NotFoundError):
                if error.kind == Kind.REPLY_LOST and load_snapshot(self.fs, name).commits == snapshot.commits:
                    return snapshot
            raise
        if not is_new:
            stored = load_snapshot(self.fs, name)
            if stored.commits != snapshot.commits:
                raise ConflictError(
                    f"{self.path} has another snapshot {name!r} already: {stored.samples:,} samples stored, "
                    f"{snapshot.samples:,} asked",
                    kind=Kind.OUTPUT_EXISTS,
                    hint="choose another name; a snapshot never changes",
                )
        return snapshot

    def remove_snapshot(self, name: str) -> None:
        """Forget a saved snapshot, also one that cannot be read; NotFoundError ``snapshot-missing``."""
        path = layout.snapshot_path(name)
        if self.fs.size(path) is None:
            load_snapshot(self.fs, name)
        self.fs.remove_tree(path)

    def zarr(self, unit: str) -> "zarr.Group":
        """The arrays of a committed unit as a stock ``zarr.Group``, read-only; docs/format.md says what they hold.
        Raises NotFoundError: ``unit-missing``, no such unit, or one that holds no sample; ConfigError:
        ``container-mismatch``, the store holds tars; ``store-remote``, it is not on a local disk."""
        self._require_container("zarr", "zarr-shared")
        import zarr

        return zarr.open_group(self.fs.local_path(self._unit_record(unit).segment), mode="r")

    def webdataset(self, unit: str | None = None) -> "webdataset.WebDataset":
        """The samples as a stock ``webdataset.WebDataset`` over the tars of one unit or, in order, of all.

        Nothing is shuffled, and of all units a sample that two of them hold comes once; docs/webdataset.md says what a
        sample holds. Raises NotFoundError: ``unit-missing``, no
        such unit, or one that holds no sample; ConfigError: ``container-mismatch``, the store holds Zarr groups;
        ``store-empty``; ``store-remote``."""
        self._require_container("webdataset")
        import webdataset

        from hiddenstore.segments.tar_members import TAR

        records = self.commits() if unit is None else [self._unit_record(unit)]
        tars = [str(self.fs.local_path(f"{record.segment}/{TAR}")) for record in records if record.files]
        if not tars:
            raise ConfigError(f"{self.path} holds no sample yet", kind=Kind.STORE_EMPTY)
        samples = webdataset.WebDataset(tars, shardshuffle=False)
        return samples.select(self._is_read) if unit is None and self.duplicates else samples

    def _is_read(self, member: Mapping[str, Any]) -> bool:
        """Whether a sample of a tar is the one that is read under its id."""
        record, _ = self.locate(member["__key__"])
        return f"/{record.segment}/" in member["__url__"]

    def _require_container(self, container: str, *others: str) -> None:
        if self.manifest.container not in (container, *others):
            raise ConfigError(
                f"{self.path} is a {self.manifest.container} store, not a {container} one",
                kind=Kind.CONTAINER_MISMATCH,
                hint=shlex.join(
                    ["hiddenstore", "copy", self.path, f"{self.path}-{container}", "--container", container]
                ),
            )

    def _unit_record(self, unit: str) -> CommitRecord:
        for number, name in enumerate(self.catalog.names):
            if (parsed := layout.parse_commit(name)) and parsed.unit == unit and self.commits()[number].files:
                return self.commits()[number]
        problem = f"{self.path} holds no samples of a unit {unit!r}"
        raise NotFoundError(problem, kind=Kind.UNIT_MISSING, hint=shlex.join(["hiddenstore", "ls", self.path]))


def tables_of(capture: CaptureSpec, container: str) -> dict[PackageRole, tuple[Registry[Any], str]]:
    """The table and the name that reading needs, by ``aux``, ``final`` and ``container``."""
    codecs = capture.codecs
    return {
        "aux": (FITTED if codecs.aux in FITTED else CODECS, codecs.aux),
        "final": (CODECS if codecs.final in CODECS else LAYOUTS, codecs.final),
        "container": (CONTAINERS, container),
    }


def _require_tables(fs: Filesystem, manifest: StoreManifest) -> None:
    for role, (table, name) in tables_of(manifest.capture, manifest.container).items():
        if name in table:
            continue
        package = manifest.packages.get(role)
        source = f"{package.name} {package.version} brings it" if package else "store.json names no package for it"
        wanted = f"{package.name}=={package.version}" if package else "--upgrade hiddenstore"
        problem = f"{fs.root} is stored with the {table.thing} {name!r}, which is not installed: {source}"
        raise FormatError(problem, kind=Kind.PLUGIN_MISSING, hint=f"pip install {wanted}")


def target_file(fs: Filesystem, manifest: StoreManifest, name: str) -> bytes:
    """See ``Store.target_file``."""
    entry = next((file for file in manifest.target_files if file.path == name), None)
    path = f"{layout.TARGET_DIR}/{name}"
    if entry is None:
        raise NotFoundError(f"{fs.root} holds no {path}", kind=Kind.TARGET_FILE_MISSING)
    size = fs.size(path)
    if size == entry.size:
        data = fs.read(path)
        if sha256_hex(data) == entry.sha256:
            return data
        stored = f"sha256 {sha256_hex(data)}"
    else:
        stored = "no file" if size is None else f"{size:,} bytes"
    raise CorruptionError(
        f"{fs.root}/{path} is damaged: expected {entry.size:,} bytes with sha256 {entry.sha256}, found {stored}",
        kind=Kind.TARGET_FILE_CORRUPT,
        hint=shlex.join(["hiddenstore", "verify", fs.root, "--full"]),
        path=path,
    )


def load_manifest(fs: Filesystem) -> StoreManifest:
    """What a store holds, without a look at its records; raises as ``Store.open``."""
    if fs.size(layout.STORE_JSON) is None:
        raise missing("store", fs.root)
    manifest = load(fs, layout.STORE_JSON, StoreManifest)
    outside = [file.path for file in manifest.target_files if not is_inside(file.path)]
    if outside:
        reason = f"it names {outside[0]!r}, which is not inside {layout.TARGET_DIR}"
        message = f"{fs.root}/{layout.STORE_JSON} is damaged: {reason}"
        raise CorruptionError(message, kind=Kind.STORE_INVALID, path=layout.STORE_JSON)
    _bind_codec(fs, manifest)
    _require_tables(fs, manifest)
    return manifest


def _bind_codec(fs: Filesystem, manifest: StoreManifest) -> None:
    """Make what was fitted to the states of a store known by its name."""
    fitted.bind(manifest.capture.codecs.aux, fs.address, partial(target_file, fs, manifest))


def load_snapshot(fs: Filesystem, name: str) -> Snapshot:
    """A saved snapshot; NotFoundError ``snapshot-missing``."""
    path = layout.snapshot_path(name)
    if fs.size(path) is None:
        saved = ", ".join(saved_snapshots(fs)) or "none"
        raise NotFoundError(f"{fs.root} has no snapshot {name!r}; it has {saved}", kind=Kind.SNAPSHOT_MISSING)
    snapshot = load(fs, path, Snapshot)
    if snapshot.name != name:
        raise CorruptionError(
            f"{fs.root}/{path} is damaged: it holds snapshot {snapshot.name!r}", kind=Kind.SNAPSHOT_CORRUPT, path=path
        )
    return snapshot

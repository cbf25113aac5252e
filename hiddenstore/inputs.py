"""Inputs: DATA folders that stream in units, and what a store registers of them.

A unit is a run of consecutive samples; its borders follow from the lengths and a token budget alone, so every worker
and every restart cuts the same units. A registered input is a parquet file of the samples and the unit of each. Page
checksums guard its values; statistics and the rest of the footer decide no row, so only the digest of the whole file
sees damage there.
"""

import hashlib
import io
import shlex
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from hiddenstore.errors import ConfigError, CorruptionError, FormatError, HiddenstoreError, Kind, NotFoundError
from hiddenstore.files import layout
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import load
from hiddenstore.files.layout import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem, is_inside
from hiddenstore.records import Sample, images_fault, mask_fault, spans_fault, tokens_fault
from hiddenstore.records import sample_id as id_of
from schemas.manifest import FileEntry, ImageEntry, Split
from schemas.prepared import PreparedData

UNIT_TOKENS = 32_768
UNIT_BYTES = 512_000_000
ROWS_PER_BATCH = 256
TURNS = pa.list_(pa.struct([("role", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]))
PREPARED = pa.schema(
    [
        ("sample_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("spans", TURNS),
        ("split", pa.string()),
        ("source", pa.string()),
    ]
)
"""Columns of the parts of DATA."""
IMAGES = pa.schema(
    [
        *((name, pa.string()) for name in ("sample_id", "sha256")),
        *((name, pa.int32()) for name in ("start", "height", "width")),
        ("data", pa.binary()),
    ]
)
"""Columns of the files of its images, which lie in the order of the samples."""
IMAGES_PER_BATCH = 16
REGISTERED = pa.schema(
    [("sample_id", pa.string()), ("unit", pa.string()), ("tokens", pa.int32()), ("split", pa.string())]
)
# Rows of real ids take five times the bytes of their file.
_MOST_UNPACKED, _SMALL_BYTES = 32, 1 << 20
_READ_ROWS = 65_536
_SHA256_KEY = b"hiddenstore.sha256"
_NO_SHA256 = b"0" * 64
_NO_IMAGES: tuple[str | None, Iterable[dict[str, Any]]] = (None, ())


def input_digest(rows: Iterable[tuple[str, str]]) -> str:
    """sha256 over ``<sample id>\\t<split>\\n`` of every row in file order: the name of an input in a store."""
    digest = hashlib.sha256()
    for sample_id, split in rows:
        digest.update(f"{sample_id}\t{split}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class RegisteredInput:
    """``inputs/<digest>.parquet``: which samples a store was asked to hold, and in which unit each of them is."""

    fs: Filesystem = field(repr=False)
    digest: str

    @cached_property
    def table(self) -> pa.Table:
        """Columns sample_id, unit, tokens, split in input order. Raises NotFoundError: ``path-missing``;
        CorruptionError: ``file-corrupt``."""
        return parse_registered(self._bytes(), self.digest, f"{self.fs.root}/{layout.input_path(self.digest)}")

    def _bytes(self) -> bytes:
        path = layout.input_path(self.digest)
        if self.fs.size(path) is None:
            raise NotFoundError(f"{self.fs.root} has no input {self.digest}", kind=Kind.PATH_MISSING)
        return self.fs.read(path)

    @cached_property
    def units(self) -> list[str]:
        """Unit names in input order; raises as ``table``."""
        # Ids are nine tenths of the file and of the time to read it.
        names = _unit_names(self._bytes(), self.digest) if "table" not in vars(self) else None
        return self._coded[0] if names is None else names

    @property
    def samples(self) -> int:
        return self.table.num_rows

    @property
    def tokens(self) -> int:
        return int(pc.sum(self.table["tokens"]).as_py() or 0)

    def members(self, unit: str) -> list[str]:
        """Sample ids of one unit, in order; none of a unit that the input does not have."""
        start, stop = self.places.get(unit, (0, 0))
        ids = self.table["sample_id"]
        return (ids.slice(start, stop - start) if self.rows is None else ids.take(self.rows[start:stop])).to_pylist()

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where the samples of each unit lie in the rows sorted by unit; units are in input order."""
        names, codes = self._coded
        stops = [0, *np.cumsum(np.bincount(codes, minlength=len(names))).tolist()]
        return dict(zip(names, pairwise(stops), strict=True))

    @cached_property
    def rows(self) -> np.ndarray | None:
        """The rows sorted by unit; None where they are."""
        _, codes = self._coded
        return None if bool((codes[1:] >= codes[:-1]).all()) else np.argsort(codes, kind="stable")

    @cached_property
    def _coded(self) -> tuple[list[str], np.ndarray]:
        """The units in input order, and int32 [N] which of them each row is of."""
        chunks = self.table["unit"].dictionary_encode().unify_dictionaries().chunks
        codes = [np.zeros(0, np.int32), *(chunk.indices.to_numpy() for chunk in chunks)]
        return chunks[0].dictionary.to_pylist() if chunks else [], np.concatenate(codes)

    def unit_samples(self) -> dict[str, list[str]]:
        """Sample ids of every unit, in order."""
        members: dict[str, list[str]] = {}
        for sample_id, unit in zip(self.table["sample_id"].to_pylist(), self.table["unit"].to_pylist(), strict=True):
            members.setdefault(unit, []).append(sample_id)
        return members


def registered_inputs(fs: Filesystem) -> dict[str, RegisteredInput]:
    """The inputs of a store by digest; nothing is read before it is asked for."""
    digests = (layout.parse_input(name) for name in fs.list(layout.INPUTS_DIR))
    return {digest: RegisteredInput(fs, digest) for digest in digests if digest is not None}


def encode_registered(table: pa.Table) -> bytes:
    """The file of rows with columns ``REGISTERED``; equal rows give equal bytes."""
    named = _content_sha256(table) + b" " + _NO_SHA256
    sink = io.BytesIO()
    naming = table.replace_schema_metadata({_SHA256_KEY: named})
    pq.write_table(naming, sink, compression="zstd", write_page_checksum=True)
    data = sink.getvalue()
    return data.replace(named, named[: -len(_NO_SHA256)] + _file_sha256(data, named))


def parse_registered(data: bytes, digest: str, where: str) -> pa.Table:
    """The rows of a registered input, checked; ``where`` names the file in errors."""
    try:
        with _parquet_of(data) as parquet:
            table = _rows_of(parquet, len(data))
            named = _named(parquet)
        rows, _, file = named.partition(b" ")
        # The digest of the file speaks for its rows too, which take far longer to digest.
        is_whole = bool(file) and file == _file_sha256(data, named)
        is_intact = table.schema.names == REGISTERED.names and (is_whole or rows == _content_sha256(table))
        actual = table_digest(table) if is_intact else ""
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _input_damage(where, str(error)) from error
    reason = None
    if not is_intact:
        reason = "its rows do not have the sha256 it names"
    elif actual != digest:
        reason = f"it holds input {actual}"
    elif file and not is_whole:
        reason = "the file does not have the sha256 it names"
    if reason is not None:
        raise _input_damage(where, reason)
    return table


def _input_damage(where: str, reason: str) -> CorruptionError:
    hint = shlex.join(["hiddenstore", "repair", where.rpartition(f"/{layout.INPUTS_DIR}/")[0]])
    return CorruptionError(f"{where} is damaged: {reason}", kind=Kind.FILE_CORRUPT, path=where, hint=hint)


def _unit_names(data: bytes, digest: str) -> list[str] | None:
    """Unit names in input order, no other column read; None where the file's own digest does not vouch for them or they
    do not say that they are of this input: ``parse_registered`` tells why."""
    faults = (pa.ArrowException, OSError, ValueError, KeyError)
    with suppress(*faults), _parquet_of(data, read_dictionary=["unit"]) as parquet:
        named = _named(parquet)
        _, _, file = named.partition(b" ")
        if not file or file != _file_sha256(data, named):
            return None
        column = _rows_of(parquet, len(data), ["unit"])["unit"]
        names = pc.unique(column).cast(pa.string()).to_pylist()
        prefix = layout.unit_prefix(digest)
        return names if all(name is not None and name.startswith(prefix) for name in names) else None
    return None


def _parquet_of(data: bytes, **options: Any) -> pq.ParquetFile:
    # Read here and now: a background thread of Arrow that still held a Python buffer at interpreter exit would
    # abort the process (seen with read_table, about once in 40 runs on a busy machine).
    return pq.ParquetFile(pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True, **options)


def _rows_of(parquet: pq.ParquetFile, size: int, columns: list[str] | None = None) -> pa.Table:
    """The rows of a file of ``size`` bytes. No two ids are alike, so that they take some bytes of it each; ValueError
    for rows that share theirs."""
    batches, most = [], _MOST_UNPACKED * size + _SMALL_BYTES
    for batch in parquet.iter_batches(_READ_ROWS, columns=columns, use_threads=False):
        most -= batch.nbytes
        if most < 0:
            raise ValueError(f"its rows take more than {_MOST_UNPACKED} times its size")
        batches.append(batch)
    # In one piece: rows are taken from it unit by unit, which joins the pieces each time.
    return pa.Table.from_batches(batches, batches[0].schema if batches else parquet.schema_arrow).combine_chunks()


def _named(parquet: pq.ParquetFile) -> bytes:
    """The digests that a registered input names itself by: of its rows, and behind a space of its file."""
    return (parquet.metadata.metadata or {}).get(_SHA256_KEY, b"")


def table_digest(table: pa.Table) -> str:
    """``input_digest`` of rows with sample_id and split."""
    return _rows_sha256(table, ["sample_id", "split"])


def _content_sha256(table: pa.Table) -> bytes:
    return _rows_sha256(table, REGISTERED.names).encode()


def _rows_sha256(table: pa.Table, names: list[str]) -> str:
    """sha256 over some columns of every row joined by tabs, each row ended by a newline."""
    digest = hashlib.sha256()
    for batch in table.to_batches(65_536):
        columns = [batch[name].cast(pa.string()) for name in names]
        *first, last = columns
        lines = pc.binary_join_element_wise(*first, pc.binary_join_element_wise(last, "", "\n"), "\t")
        if lines.null_count:
            raise ValueError("a value is missing")
        digest.update(text_of(lines))
    return digest.hexdigest()


def text_of(lines: pa.StringArray) -> memoryview:
    """The text of an array end to end."""
    offsets, text = lines.buffers()[1:]
    borders = np.frombuffer(offsets, dtype=np.int32)[lines.offset : lines.offset + len(lines) + 1]
    return memoryview(text)[borders[0] : borders[-1]] if len(lines) else memoryview(b"")


def _file_sha256(data: bytes, named: bytes) -> bytes:
    """The sha256 of a file with zeros in place of the digits that ``named``, what it says of itself, ends with."""
    unsaid = named[: -len(_NO_SHA256)] + _NO_SHA256
    return hashlib.sha256(data.replace(named, unsaid)).hexdigest().encode()


@dataclass
class Unit:
    """Consecutive samples of one prepared input: the atom of work, retry and commit."""

    name: str
    index: int
    samples: list[Sample]

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


class PreparedInput:
    """A DATA folder written by ``hiddenstore prepare``; rows stream in bounded memory. ``starts``: numbers of samples
    that begin a unit, whatever room the one before has."""

    starts: Collection[int] = ()

    def __init__(self, fs: Filesystem, info: PreparedData) -> None:
        self.fs = fs
        self.folder = fs.root
        self.info = info
        self._verified: dict[str, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"PreparedInput({self.folder!r}, samples={self.info.samples:,}, tokens={self.info.tokens:,})"

    @classmethod
    def open(cls, data_dir: str | Path | Filesystem) -> "PreparedInput":
        """Read ``data.json`` and check that every part is there with its size. Raises NotFoundError: no folder or no
        ``data.json``; CorruptionError: ``file-corrupt``, naming the part."""
        fs = open_filesystem(data_dir)
        if fs.size(layout.DATA_JSON) is None:
            raise missing("data", fs.root)
        info = load(fs, layout.DATA_JSON, PreparedData)
        for file in (*info.files, *(info.images.files if info.images else ())):
            if not is_inside(file.path):
                raise _corrupt(f"{fs.root}/{layout.DATA_JSON}", f"it names {file.path!r}, not inside the folder")
            size = fs.size(file.path)
            if size != file.size:
                stored = "no file" if size is None else f"{size:,}"
                raise _corrupt(f"{fs.root}/{file.path}", f"expected {file.size:,} bytes, found {stored}")
        return cls(fs, info)

    def samples(self) -> Iterator[Sample]:
        """Every sample in file order; the sha256 of a part is checked before its first row is given out. Raises
        FormatError: ``array-invalid``, a part is whole and a row of it none that ``prepare`` writes."""
        images = groupby(self._image_rows(), key=itemgetter("sample_id"))
        name, rows = next(images, _NO_IMAGES)
        for batch in self._batches(PREPARED.names):
            for sample in _samples(batch):
                if sample.id == name:
                    sample = self._with_images(sample, rows)
                    name, rows = next(images, _NO_IMAGES)
                fault = self._fault(sample)
                if fault is not None:
                    raise self._misfit(f"sample {sample.id[:32]!r}: {fault}")
                yield sample
        if name is not None:
            raise self._misfit(f"images of {name[:32]!r}, which is no sample after the one with images before it")

    def _image_rows(self) -> Iterator[dict[str, Any]]:
        for file in self.info.images.files if self.info.images else ():
            for batch in self._part(file, IMAGES.names, IMAGES, IMAGES_PER_BATCH):
                yield from batch.to_pylist()

    def _with_images(self, sample: Sample, rows: Iterable[dict[str, Any]]) -> Sample:
        listed = list(rows)
        try:
            entries = tuple(ImageEntry(**{name: row[name] for name in ImageEntry.model_fields}) for row in listed)
        except ValidationError as error:
            raise self._misfit(f"an image of sample {sample.id}: {error.errors()[0]['msg']}") from error
        return replace(sample, images=entries, image_files=tuple(row["data"] for row in listed))

    def _fault(self, sample: Sample) -> str | None:
        """A digest proves who wrote a row, not that it makes sense."""
        if sample.split not in get_args(Split):
            return f"its split is {sample.split!r}"
        if not sample.tokens or len(sample.loss_mask) != sample.tokens:
            return f"it has {sample.tokens:,} tokens and a mask of {len(sample.loss_mask):,}"
        if id_of(sample.input_ids, sample.loss_mask, sample.images) != sample.id:
            return "its id is not the digest of its tokens, mask and images"
        digests = [hashlib.sha256(data).hexdigest() for data in sample.image_files]
        if digests != [image.sha256 for image in sample.images]:
            return "an image does not have the sha256 that it is listed with"
        images = self.info.images
        return (
            tokens_fault(sample.input_ids, self.info.vocab_size)
            or mask_fault(sample.loss_mask, sample.supervised)
            or spans_fault(sample.spans, sample.tokens)
            or images_fault(sample.input_ids, sample.images, None if images is None else images.spec.token_id)
        )

    def _misfit(self, reason: str) -> FormatError:
        message = f"{self.folder} holds what prepare does not write: {reason}"
        hint = "hiddenstore prepare INPUT -o DATA --target T"
        return FormatError(message, kind=Kind.ARRAY_INVALID, hint=hint)

    def units(self, max_tokens: int = UNIT_TOKENS) -> Iterator[Unit]:
        """The units in order. ``max_tokens`` is ``unit_tokens(capture)`` of the store; a longer sample is alone."""
        cutter = _Cutter(max_tokens, self.starts)
        for index, samples in groupby(self.samples(), key=lambda sample: cutter.index_of(sample.tokens)):
            yield Unit(layout.unit_name(self.info.digest, index), index, list(samples))

    def registration(self, max_tokens: int) -> bytes:
        """The parquet that a store keeps of this input: sample_id, unit, tokens, split. Equal inputs, equal bytes."""
        cutter = _Cutter(max_tokens, self.starts)
        batches = []
        for batch in self._batches(["sample_id", "input_ids", "split"]):
            lengths = pc.list_value_length(batch["input_ids"]).to_pylist()
            units = [layout.unit_name(self.info.digest, cutter.index_of(length)) for length in lengths]
            columns = [batch["sample_id"], pa.array(units), pa.array(lengths, pa.int32()), batch["split"]]
            batches.append(pa.record_batch(columns, schema=REGISTERED))
        table = pa.Table.from_batches(batches, schema=REGISTERED)
        named = table_digest(table)
        if pc.count_distinct(table["sample_id"]).as_py() != table.num_rows:
            raise self._misfit("a sample is there twice")
        if named != self.info.digest:
            raise _corrupt(f"{self.folder}/{layout.DATA_JSON}", f"it names the input {self.info.digest}, found {named}")
        return encode_registered(table)

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        rows = 0
        for file in self.info.files:
            for batch in self._part(file, columns, PREPARED, ROWS_PER_BATCH):
                rows += batch.num_rows
                yield batch
        if rows != self.info.samples:
            raise _corrupt(self.folder, f"expected {self.info.samples:,} samples, found {rows:,}")

    def _part(self, file: FileEntry, columns: list[str], schema: pa.Schema, at_once: int) -> Iterator[pa.RecordBatch]:
        with self.fs.local_copy(file.path) as path:
            try:
                with self._verified_part(path, file) as parquet:
                    for batch in parquet.iter_batches(at_once, columns=columns):
                        yield self._typed(batch, columns, schema)
            except HiddenstoreError:
                raise
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                raise_refusal(error, f"{self.folder}/{file.path}")
                raise self._misfit(f"{file.path} is no parquet file that can be read: {error}") from error

    def _typed(self, batch: pa.RecordBatch, columns: list[str], schema: pa.Schema) -> pa.RecordBatch:
        try:
            typed = batch.select(columns).cast(pa.schema([schema.field(name) for name in columns]))
            # Places and text as a file gives them are believed by everything below.
            typed.validate(full=True)
        except (pa.ArrowException, KeyError) as error:
            raise self._misfit(f"{error}") from error
        for name in columns:
            if name != "source" and (typed[name].null_count or _values(typed[name]).null_count):
                raise self._misfit(f"a value of {name} is missing")
        return typed

    def _verified_part(self, path: Path, entry: FileEntry) -> pq.ParquetFile:
        status = path.stat()
        # A job goes back to a part after hours, and another may lie there by then.
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if self._verified.get(entry.path) != version:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != entry.sha256:
                raise _corrupt(f"{self.folder}/{entry.path}", f"expected sha256 {entry.sha256}, found {sha256}")
            self._verified[entry.path] = version
        return pq.ParquetFile(path)


def count_units(lengths: Iterable[int], max_tokens: int) -> int:
    """How many units samples of so many tokens make, see ``PreparedInput.units``."""
    cutter = _Cutter(max_tokens, ())
    return 1 + max(map(cutter.index_of, lengths), default=-1)


class _Cutter:
    """Gives each following sample the index of its unit; those numbered in ``starts`` begin one."""

    def __init__(self, max_tokens: int, starts: Collection[int]) -> None:
        if max_tokens < 1:
            raise ConfigError(f"a unit needs room for at least one token, not {max_tokens}", kind=Kind.OPTION_INVALID)
        self._limit, self._starts = max_tokens, starts
        self._sample = self._index = self._tokens = 0

    def index_of(self, tokens: int) -> int:
        if self._tokens and (self._tokens + tokens > self._limit or self._sample in self._starts):
            self._index += 1
            self._tokens = 0
        self._sample += 1
        self._tokens += tokens
        return self._index


def _samples(batch: pa.RecordBatch) -> Iterator[Sample]:
    ids, splits, sources = (batch[name].to_pylist() for name in ("sample_id", "split", "source"))
    tokens = _rows(batch["input_ids"], np.int32)
    masks = _rows(batch["loss_mask"], np.uint8)
    spans = batch["spans"].flatten()
    turns = np.stack([_numpy(spans.field(name), np.int32) for name in ("role", "start", "end")], axis=1)
    borders = _borders(batch["spans"])
    for row, sample_id in enumerate(ids):
        yield Sample(
            id=sample_id,
            input_ids=tokens[row],
            loss_mask=masks[row],
            spans=turns[borders[row] : borders[row + 1]],
            split=splits[row],
            source=sources[row] or "",
        )


def _rows(column: Any, dtype: type) -> list[np.ndarray]:
    values, borders = _numpy(column.flatten(), dtype), _borders(column)
    return [values[start:end] for start, end in pairwise(borders)]


def _values(column: pa.Array) -> pa.Array:
    return column.flatten() if pa.types.is_list(column.type) else column


def _borders(column: Any) -> np.ndarray:
    offsets = column.offsets.to_numpy()
    return offsets - offsets[0]


def _numpy(values: Any, dtype: type) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False).astype(dtype)


def _corrupt(path: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{path} is damaged: {reason}",
        kind=Kind.FILE_CORRUPT,
        path=path,
        hint="hiddenstore prepare INPUT -o DATA --target T",
    )

"""Prepared inputs: streaming DATA in units.

A unit is a run of consecutive samples; its borders follow from the lengths and a token budget alone, so every worker
and every restart cuts the same units.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hiddenstore import layout
from hiddenstore.documents import load
from hiddenstore.errors import ConfigError, CorruptionError, Kind, NotFoundError
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import is_inside
from hiddenstore.inputs.registered import REGISTERED, encode_registered, table_digest
from hiddenstore.records import Sample
from schemas.prepared import PreparedData

UNIT_TOKENS = 32_768
UNIT_BYTES = 512_000_000
ROWS_PER_BATCH = 256


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
    """A DATA folder written by ``hiddenstore prepare``; rows stream in bounded memory."""

    def __init__(self, folder: Path, info: PreparedData) -> None:
        self.folder = folder
        self.info = info
        self._verified: set[str] = set()

    def __repr__(self) -> str:
        return f"PreparedInput({str(self.folder)!r}, samples={self.info.samples:,}, tokens={self.info.tokens:,})"

    @classmethod
    def open(cls, data_dir: str | Path) -> "PreparedInput":
        """Read ``data.json`` and check that every part is there with its size.

        Raises:
            NotFoundError: no folder or no ``data.json``.
            CorruptionError: ``file-corrupt``, naming the part.
        """
        folder = Path(data_dir)
        fs = LocalFilesystem(folder)
        if fs.size(layout.DATA_JSON) is None:
            raise NotFoundError(
                f"{folder} holds no prepared data: {layout.DATA_JSON} is missing",
                kind=Kind.PATH_MISSING,
                hint=f"hiddenstore prepare INPUT -o {folder} --target T",
            )
        info = load(fs, layout.DATA_JSON, PreparedData)
        for file in info.files:
            if not is_inside(file.path):
                raise _corrupt(folder / layout.DATA_JSON, f"it names {file.path!r}, which is not inside the folder")
            size = fs.size(file.path)
            if size != file.size:
                raise _corrupt(folder / file.path, f"expected {file.size:,} bytes, found {size or 0:,}")
        return cls(folder, info)

    def samples(self) -> Iterator[Sample]:
        """Every sample in file order; the sha256 of a part is checked before its first row is given out."""
        for batch in self._batches(["sample_id", "input_ids", "loss_mask", "spans", "split", "source"]):
            yield from _samples(batch)

    def units(self, max_tokens: int = UNIT_TOKENS) -> Iterator[Unit]:
        """The units in order. ``max_tokens`` is ``unit_tokens(capture)`` of the store; a longer sample is alone."""
        cutter = _Cutter(max_tokens)
        for index, samples in groupby(self.samples(), key=lambda sample: cutter.index_of(sample.tokens)):
            yield Unit(layout.unit_name(self.info.digest, index), index, list(samples))

    def registration(self, max_tokens: int) -> bytes:
        """The parquet that a store keeps of this input: sample_id, unit, tokens, split. Equal inputs, equal bytes."""
        cutter = _Cutter(max_tokens)
        batches = []
        for batch in self._batches(["sample_id", "input_ids", "split"]):
            lengths = pc.list_value_length(batch["input_ids"]).to_pylist()
            units = [layout.unit_name(self.info.digest, cutter.index_of(length)) for length in lengths]
            columns = [batch["sample_id"], pa.array(units), pa.array(lengths, pa.int32()), batch["split"]]
            batches.append(pa.record_batch(columns, schema=REGISTERED))
        table = pa.Table.from_batches(batches, schema=REGISTERED)
        named = table_digest(table)
        if named != self.info.digest:
            raise _corrupt(self.folder / layout.DATA_JSON, f"it names the input {self.info.digest}, found {named}")
        return encode_registered(table)

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        rows = 0
        for file in self.info.files:
            self._verify(file.path, file.sha256)
            with pq.ParquetFile(self.folder / file.path) as parquet:
                for batch in parquet.iter_batches(ROWS_PER_BATCH, columns=columns):
                    rows += batch.num_rows
                    yield batch
        if rows != self.info.samples:
            raise _corrupt(self.folder, f"expected {self.info.samples:,} samples, found {rows:,}")

    def _verify(self, name: str, expected: str) -> None:
        if name in self._verified:
            return
        with (self.folder / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != expected:
            raise _corrupt(self.folder / name, f"expected sha256 {expected}, found {sha256}")
        self._verified.add(name)


class _Cutter:
    """Gives each following sample the index of its unit."""

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ConfigError(f"a unit needs room for at least one token, not {max_tokens}", kind=Kind.OPTION_INVALID)
        self._limit = max_tokens
        self._index, self._tokens = 0, 0

    def index_of(self, tokens: int) -> int:
        if self._tokens and self._tokens + tokens > self._limit:
            self._index += 1
            self._tokens = 0
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


def _borders(column: Any) -> np.ndarray:
    offsets = column.offsets.to_numpy()
    return offsets - offsets[0]


def _numpy(values: Any, dtype: type) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False).astype(dtype)


def _corrupt(path: Path, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{path} is damaged: {reason}",
        kind=Kind.FILE_CORRUPT,
        path=str(path),
        hint="hiddenstore prepare INPUT -o DATA --target T",
    )

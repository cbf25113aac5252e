"""What a store remembers of an input: its samples and the unit of each, in a parquet file that guards all its bytes.

Page checksums guard the values; statistics and the rest of the footer decide no row, so only the digest of the whole
file sees damage there.
"""

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hiddenstore import layout
from hiddenstore.errors import CorruptionError, Kind, NotFoundError
from hiddenstore.fs.seam import Filesystem

REGISTERED = pa.schema(
    [("sample_id", pa.string()), ("unit", pa.string()), ("tokens", pa.int32()), ("split", pa.string())]
)
_SHA256_KEY = b"hiddenstore.sha256"
_NO_SHA256 = b"0" * 64


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
        """Columns sample_id, unit, tokens, split in input order.

        Raises:
            NotFoundError: ``path-missing``.
            CorruptionError: ``file-corrupt``.
        """
        path = layout.input_path(self.digest)
        if self.fs.size(path) is None:
            raise NotFoundError(f"{self.fs.root} has no input {self.digest}", kind=Kind.PATH_MISSING)
        return parse_registered(self.fs.read(path), self.digest, f"{self.fs.root}/{path}")

    @property
    def units(self) -> list[str]:
        """Unit names in input order."""
        return pc.unique(self.table["unit"]).to_pylist()

    @property
    def samples(self) -> int:
        return self.table.num_rows

    @property
    def tokens(self) -> int:
        return int(pc.sum(self.table["tokens"]).as_py() or 0)

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
        # Read here and now: a background thread of Arrow that still held a Python buffer at interpreter exit would
        # abort the process (seen with read_table, about once in 40 runs on a busy machine).
        with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True) as parquet:
            table = parquet.read(use_threads=False)
            named = (parquet.metadata.metadata or {}).get(_SHA256_KEY, b"")
        rows, _, file = named.partition(b" ")
        is_intact = table.schema.names == REGISTERED.names and rows == _content_sha256(table)
        actual = table_digest(table) if is_intact else ""
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptionError(f"{where} is damaged: {error}", kind=Kind.FILE_CORRUPT, path=where) from error
    reason = None
    if not is_intact:
        reason = "its rows do not have the sha256 it names"
    elif actual != digest:
        reason = f"it holds input {actual}"
    elif file and file != _file_sha256(data, named):
        reason = "the file does not have the sha256 it names"
    if reason is not None:
        raise CorruptionError(f"{where} is damaged: {reason}", kind=Kind.FILE_CORRUPT, path=where)
    return table


def table_digest(table: pa.Table) -> str:
    """``input_digest`` of rows with sample_id and split."""
    return input_digest(zip(table["sample_id"].to_pylist(), table["split"].to_pylist(), strict=True))


def _content_sha256(table: pa.Table) -> bytes:
    digest = hashlib.sha256()
    for batch in table.to_batches(65_536):
        rows = zip(*(batch[name].to_pylist() for name in REGISTERED.names), strict=True)
        for row in rows:
            digest.update("\t".join(map(str, row)).encode() + b"\n")
    return digest.hexdigest().encode()


def _file_sha256(data: bytes, named: bytes) -> bytes:
    """The sha256 of a file with zeros in place of the digits that ``named``, what it says of itself, ends with."""
    unsaid = named[: -len(_NO_SHA256)] + _NO_SHA256
    return hashlib.sha256(data.replace(named, unsaid)).hexdigest().encode()

"""Commit records whose samples are columns from the start, no Python object each: for what reads every record.

A record is mostly its samples, which are regular text as this package writes them; one scan takes that apart, and
checks it as the schema does. Any other record is read as every document is, which says what is wrong with it.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hiddenstore.commit import Commit, commit_of, head_fault, read_many
from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.documents import checked_body, parsed, read_bounded, sha256_hex
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.table import Ids, SampleTable, table_of
from schemas.manifest import MAX_TOKENS, CommitHead

_OPENING, _CLOSING = b'"samples":[', b'],"segment":'
_ENTRY = re.compile(
    rb'\{"final_rows":N,"final_start":N,"id":"([0-9a-f]{32})","split":"(train|validation)","start":N,'
    rb'"supervised":N,"tokens":N\}'.replace(b"N", rb"(0|[1-9][0-9]{0,14})")
)
_NUMBERS = (0, 1, 4, 5, 6)
_BETWEEN = b"},{"
_FIXED_BYTES = len(b'{"final_rows":,"final_start":,"id":"","split":"","start":,"supervised":,"tokens":}')


@dataclass(frozen=True)
class Listed:
    """A record as it lies on disk: file name under ``commits/``, sha256 of its bytes, what it says beside its samples,
    and the samples in its order; their ``record`` is 0."""

    name: str
    sha256: str
    head: CommitHead
    samples: SampleTable

    @classmethod
    def of(cls, commit: Commit) -> "Listed":
        """The same of a record that was read."""
        return cls(commit.name, commit.sha256, commit.record, table_of([(0, commit.record)]))

    @property
    def facts(self) -> dict[str, int]:
        """The numbers of a record that a catalog and an index keep, by name."""
        return {
            "samples": len(self.samples),
            "tokens": int(self.samples.tokens.sum(dtype=np.int64)),
            "supervised": int(self.samples.supervised.sum(dtype=np.int64)),
            "bytes_stored": self.head.bytes_stored,
            "rejects": len(self.head.rejects),
        }

    def numbered(self, number: int) -> SampleTable:
        """The samples with ``record`` a number."""
        record = np.full(len(self.samples), number, dtype=np.int32)
        return SampleTable(self.samples.ids, {**self.samples.columns, "record": record})


def list_records(fs: Filesystem, names: Sequence[str]) -> list[Listed | HiddenstoreError]:
    """``read_many`` of records as ``Listed``."""
    return read_many(fs, names, _listed)


def _listed(fs: Filesystem, name: str) -> Listed:
    path = f"{layout.COMMITS_DIR}/{name}"
    data, where = read_bounded(fs, path), f"{fs.root}/{path}"
    body = checked_body(data, where)
    before, _, rest = body.partition(_OPENING)
    entries, closing, after = rest.partition(_CLOSING)
    samples = _columns(entries) if closing else None
    if samples is not None:
        with suppress(CorruptionError, FormatError):
            head = parsed(b'%s"segment":%s' % (before, after), CommitHead, where)
            rows = max(int(column.sum(dtype=np.int64)) for column in (samples.tokens, samples.final_rows))
            # Ids of rejects may be anything: the other reader looks at them.
            if not head.rejects and head_fault(head, name, len(samples), rows) is None:
                return Listed(name, sha256_hex(data), head, samples)
    return Listed.of(commit_of(data, name, where))


def _columns(entries: bytes) -> SampleTable | None:
    """The samples in the text between the brackets; None for all that a writer of this package does not write."""
    groups = list(zip(*_ENTRY.findall(entries), strict=True)) or [()] * 7
    count, texts = len(groups[0]), [b",".join(group) for group in groups]
    # Nothing but one comma lies between the matches.
    size = sum(map(len, texts)) - 7 * max(0, count - 1) + count * _FIXED_BYTES + max(0, count - 1)
    if size != len(entries) or entries.count(_BETWEEN) != max(0, count - 1):
        return None
    if not count:
        return table_of(())
    numbers = np.fromstring(b",".join([texts[place] for place in _NUMBERS]), dtype=np.int64, sep=",")
    final_rows, final_start, start, supervised, tokens = numbers.reshape(len(_NUMBERS), count)
    if max(final_rows.max(), supervised.max(), tokens.max()) >= MAX_TOKENS or not tokens.all():
        return None
    for lengths, starts in ((tokens, start), (final_rows, final_start)):
        if not np.array_equal(np.cumsum(lengths) - lengths, starts):
            return None
    columns: dict[str, np.ndarray] = {
        "record": np.zeros(count, dtype=np.int32),
        "position": np.arange(count, dtype=np.int32),
        "tokens": tokens.astype(np.int32),
        "supervised": supervised.astype(np.int32),
        "final_rows": final_rows.astype(np.int32),
        "split": np.array([split != b"train" for split in groups[3]], dtype=np.uint8),
    }
    return SampleTable(Ids.of_digits(b"".join(groups[2]).decode()), columns)

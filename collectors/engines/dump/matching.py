"""What a dump does not say of its samples, from prepared DATA or from an export's own list: ends, masks, turns, splits.

Shapes: T tokens of a sample.
"""

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from collectors.engines.dump.peer import PeerSample, Unusable, require_read, unreadable
from collectors.tokenize.batches import is_validation
from hiddenstore.dumps.common import SAMPLES_FILE
from hiddenstore.inputs import PreparedInput
from hiddenstore.records import Sample, sample_id
from hiddenstore.targets.folder import first_line
from schemas.manifest import ROLES

_KEY_TOKENS = 16
_ASSISTANT = ROLES.index("assistant")


@dataclass(frozen=True)
class _PreparedSample:
    """One prepared sample, small enough to keep every one of them; ``digest`` of the ids a dump names."""

    tokens: int
    digest: bytes
    mask: bytes
    first: int
    spans: np.ndarray
    split: str


class PreparedTokens:
    """Finds the prepared sample whose tokens a dump's row begins with; keeps masks and digests, no tokens."""

    def __init__(self, data: PreparedInput) -> None:
        self.digest = data.info.digest
        self._samples: dict[tuple[bytes, int], list[_PreparedSample]] = {}
        for sample in data.samples():
            mask, first = np.packbits(sample.loss_mask).tobytes(), int(sample.input_ids[0])
            for lost in (0, 1):
                ids = sample.input_ids[lost:]
                entry = _PreparedSample(sample.tokens, _digest(ids), mask, first, sample.spans, sample.split)
                self._samples.setdefault((_digest(ids[:_KEY_TOKENS]), lost), []).append(entry)
        for entries in self._samples.values():
            entries.sort(key=lambda entry: -entry.tokens)

    def match(self, peer: PeerSample) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        """Tokens, mask, spans and split of the longest prepared sample that the row is, padding aside. Raises Unusable:
        ``not-in-data``; ``mask-mismatch``: the dump's own mask is another one."""
        refusal = Unusable("not-in-data", "no sample of the prepared data has these tokens")
        for entry in self._entries(peer):
            try:
                return _restore(peer, entry)
            except Unusable as mismatch:
                refusal = mismatch  # Of conversations with the same tokens each may be learned in another way.
        raise refusal

    def _entries(self, peer: PeerSample) -> Iterator[_PreparedSample]:
        """Those whose tokens the row begins with, the longest first."""
        lost = peer.first_row
        for length in range(min(_KEY_TOKENS, len(peer.input_ids)), 0, -1):
            for entry in self._samples.get((_digest(peer.input_ids[:length]), lost), ()):
                named = entry.tokens - lost
                if length < min(_KEY_TOKENS, named) or not _fits(peer, named):
                    continue
                if _digest(peer.input_ids[:named]) == entry.digest:
                    yield entry
            if not peer.padded:
                return


def _restore(peer: PeerSample, entry: _PreparedSample) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    lost, named = peer.first_row, entry.tokens - peer.first_row
    ids = np.concatenate([np.full(lost, entry.first, np.int32), peer.input_ids[:named]])
    mask = np.unpackbits(np.frombuffer(entry.mask, np.uint8), count=entry.tokens)
    if peer.loss_mask is not None and not np.array_equal(peer.loss_mask[:named], mask[lost:]):
        different = int((peer.loss_mask[:named] != mask[lost:]).sum())
        raise Unusable("mask-mismatch", f"its loss mask differs from the prepared one at {different} tokens")
    return ids, mask, entry.spans, entry.split


def exported_turns(folder: Path) -> dict[str, tuple[np.ndarray, str]]:
    """Turn spans and split by sample id, as our own export wrote them beside a peer's files; else empty. Raises
    ConfigError: ``input-unreadable``."""
    path = folder / SAMPLES_FILE
    turns: dict[str, tuple[np.ndarray, str]] = {}
    if not path.is_file():
        return turns
    try:
        for batch in pq.ParquetFile(path).iter_batches(columns=["sample_id", "spans", "split"]):
            for row in batch.to_pylist():
                spans = [[turn["role"], turn["start"], turn["end"]] for turn in row["spans"]]
                turns[row["sample_id"]] = np.array(spans, np.int32).reshape(-1, 3), row["split"]
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        require_read(error, path)
        hint = (
            f"export the store again; without that file ({shlex.join(['rm', str(path)])}) turns and split are guessed"
        )
        raise unreadable(f"{path} cannot be read: {first_line(error)}", hint) from error
    return turns


@dataclass(frozen=True)
class Matcher:
    """Turns what a dump holds into samples; ``exported`` as ``exported_turns``, ``validation``: share held out."""

    prepared: PreparedTokens | None
    exported: Mapping[str, tuple[np.ndarray, str]]
    all_supervised: bool
    validation: float

    @property
    def settings(self) -> tuple[str, ...]:
        """All of it that decides what the samples of a dump are."""
        digest = "" if self.prepared is None else self.prepared.digest
        return digest, str(self.all_supervised), f"{self.validation:g}"

    def sample(self, peer: PeerSample, location: str) -> Sample:
        """The sample at a location. Raises Unusable: no mask (``mask-missing``), or as ``PreparedTokens.match``."""
        if self.prepared is not None:
            prepared = self.prepared.match(peer)
            return Sample(sample_id(*prepared[:2]), *prepared, location)
        ids, mask = peer.input_ids, peer.loss_mask
        if mask is None:
            if not self.all_supervised:
                raise Unusable("mask-missing", "it holds no loss mask")
            mask = np.ones(len(ids), np.uint8)
        if peer.padded:
            end = text_end(ids, mask)
            ids, mask = ids[:end], mask[:end]
        exported_id = sample_id(ids, mask)
        if self.all_supervised:
            mask = np.ones_like(mask)
        name = sample_id(ids, mask)
        if exported_id in self.exported:
            return Sample(name, ids, mask, *self.exported[exported_id], location)
        split = "validation" if is_validation(name, self.validation) else "train"
        return Sample(name, ids, mask, supervised_spans(mask), split, location)


def text_end(input_ids: np.ndarray, loss_mask: np.ndarray) -> int:
    """Where text ends in a row padded with id 0; at worst it cuts unsupervised zeros off, which nothing learns from."""
    text = np.flatnonzero((input_ids != 0) | (loss_mask != 0))
    return int(text[-1]) + 1 if len(text) else 0


def supervised_spans(loss_mask: np.ndarray) -> np.ndarray:
    """Runs of supervised tokens as assistant turns, int32 [n, 3]: all that a mask says of turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask, [0]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    return np.stack([np.full(len(starts), _ASSISTANT), starts, ends], axis=1).astype(np.int32)


def rows_of(peer: PeerSample, input_ids: np.ndarray) -> slice:
    """Which rows of the dump are these tokens, int32 [T]; Unusable ``changed`` where it holds others."""
    named, lost, tokens = peer.input_ids, peer.first_row, len(input_ids)
    if np.array_equal(named[:tokens], input_ids):
        return slice(lost, lost + tokens)
    if lost and np.array_equal(named[: tokens - lost], input_ids[lost:]):
        return slice(0, tokens)
    raise Unusable("changed", "the file holds other tokens than when the import began")


def _fits(peer: PeerSample, named: int) -> bool:
    """Whether a text of ``named`` ids can be this row: all of it, or followed by padding only."""
    if not peer.padded or named > len(peer.input_ids):
        return named == len(peer.input_ids)
    return not peer.input_ids[named:].any() and (peer.loss_mask is None or not peer.loss_mask[named:].any())


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=16).digest()

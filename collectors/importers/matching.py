"""What a dump does not say of its samples, from prepared DATA or from an export's own list: ends, masks, turns, splits.

Shapes: T tokens of a sample.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from collectors.importers.peer import PeerSample, Unusable
from collectors.prepare_batches import is_validation
from hiddenstore.inputs import PreparedInput
from hiddenstore.interop.common import SAMPLES_FILE
from hiddenstore.records import Sample, sample_id
from schemas.prepared import ROLES

_KEY_TOKENS = 16
_ASSISTANT = ROLES.index("assistant")


@dataclass(frozen=True)
class _Known:
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
        self._known: dict[tuple[bytes, bool], list[_Known]] = {}
        for sample in data.samples():
            mask = np.packbits(sample.loss_mask).tobytes()
            for lost in (0, 1):
                ids = sample.input_ids[lost:]
                known = _Known(sample.tokens, _digest(ids), mask, int(sample.input_ids[0]), sample.spans, sample.split)
                self._known.setdefault((_digest(ids[:_KEY_TOKENS]), bool(lost)), []).append(known)
        for found in self._known.values():
            found.sort(key=lambda known: -known.tokens)

    def match(self, peer: PeerSample) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        """Tokens, mask, spans and split of the longest prepared sample that the row is, padding aside.

        Raises:
            Unusable: ``not-in-data``; ``mask-mismatch``: the dump's own mask is another one.
        """
        lost = peer.first_row
        for length in range(min(_KEY_TOKENS, len(peer.input_ids)), 0, -1):
            for known in self._known.get((_digest(peer.input_ids[:length]), bool(lost)), ()):
                named = known.tokens - lost
                if length < min(_KEY_TOKENS, named) or not _fits(peer, named):
                    continue
                if _digest(peer.input_ids[:named]) == known.digest:
                    return self._as_prepared(peer, known)
            if not peer.padded:
                break
        raise Unusable("not-in-data", "no sample of the prepared data has these tokens")

    def _as_prepared(self, peer: PeerSample, known: _Known) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        lost, named = peer.first_row, known.tokens - peer.first_row
        ids = np.concatenate([np.full(lost, known.first, np.int32), peer.input_ids[:named]])
        mask = np.unpackbits(np.frombuffer(known.mask, np.uint8), count=known.tokens)
        if peer.loss_mask is not None and not np.array_equal(peer.loss_mask[:named], mask[lost:]):
            different = int((peer.loss_mask[:named] != mask[lost:]).sum())
            raise Unusable("mask-mismatch", f"its loss mask differs from the prepared one at {different} tokens")
        return ids, mask, known.spans, known.split


class ExportedSamples:
    """Turn spans and splits that our own export wrote beside a peer's files, by sample id."""

    def __init__(self, folder: Path) -> None:
        self._known: dict[str, tuple[np.ndarray, str]] = {}
        path = folder / SAMPLES_FILE
        if not path.is_file():
            return
        for batch in pq.ParquetFile(path).iter_batches(columns=["sample_id", "spans", "split"]):
            for row in batch.to_pylist():
                spans = [[turn["role"], turn["start"], turn["end"]] for turn in row["spans"]]
                turns = np.array(spans, np.int32).reshape(-1, 3)
                self._known[row["sample_id"]] = (turns, row["split"])

    def find(self, name: str) -> tuple[np.ndarray, str] | None:
        """Spans and split of a sample id."""
        return self._known.get(name)


@dataclass(frozen=True)
class Matcher:
    """Turns what a dump holds into samples.

    ``all_supervised``: every token of a dump without masks counts. ``validation``: share held out, by sample id.
    """

    prepared: PreparedTokens | None
    exported: ExportedSamples
    all_supervised: bool
    validation: float

    def sample(self, peer: PeerSample, place: str) -> Sample:
        """The sample at a place.

        Raises:
            Unusable: no mask (``mask-missing``), or as ``PreparedTokens.match``.
        """
        if self.prepared is not None:
            ids, mask, spans, split = self.prepared.match(peer)
            return Sample(sample_id(ids, mask), ids, mask, spans, split, place)
        peer_mask = peer.loss_mask
        if peer_mask is None:
            if not self.all_supervised:
                raise Unusable("mask-missing", "it holds no loss mask")
            peer_mask = np.ones(len(peer.input_ids), np.uint8)
        end = text_end(peer.input_ids, peer_mask) if peer.padded else len(peer.input_ids)
        ids, mask = peer.input_ids[:end], peer_mask[:end]
        name = sample_id(ids, mask)
        known = self.exported.find(name)
        if known is not None:
            return Sample(name, ids, mask, *known, place)
        split = "validation" if is_validation(name, self.validation) else "train"
        return Sample(name, ids, mask, supervised_spans(mask), split, place)


def text_end(input_ids: np.ndarray, loss_mask: np.ndarray) -> int:
    """Where text ends in a row that may be padded with id 0: behind the last other id, or the last supervised token.

    At worst it cuts unsupervised zeros off the end of a text, which nothing learns from.
    """
    kept = np.flatnonzero((input_ids != 0) | (loss_mask != 0))
    return int(kept[-1]) + 1 if len(kept) else 0


def supervised_spans(loss_mask: np.ndarray) -> np.ndarray:
    """Runs of supervised tokens as assistant turns, int32 [n, 3]: all that a mask says of turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask, [0]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    return np.stack([np.full(len(starts), _ASSISTANT), starts, ends], axis=1).astype(np.int32)


def rows_of(peer: PeerSample, sample: Sample) -> slice:
    """Which rows of the dump are a sample's tokens.

    Raises:
        Unusable: ``changed``: the file no longer holds the tokens that were registered.
    """
    named = peer.input_ids
    lost = peer.first_row
    if np.array_equal(named[: sample.tokens], sample.input_ids):
        return slice(lost, lost + sample.tokens)
    if lost and np.array_equal(named[: sample.tokens - lost], sample.input_ids[lost:]):
        return slice(0, sample.tokens)
    raise Unusable("changed", "the file holds other tokens than when the import began")


def _fits(peer: PeerSample, named: int) -> bool:
    """Whether a text of ``named`` ids can be this row: all of it, or followed by padding only."""
    if named > len(peer.input_ids):
        return False
    if not peer.padded:
        return named == len(peer.input_ids)
    rest_mask = None if peer.loss_mask is None else peer.loss_mask[named:]
    rest = peer.input_ids[named:]
    return not rest.any() and (rest_mask is None or not rest_mask.any())


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=16).digest()

"""Filling packs from a store: how much memory a pack needs, and one sample into its place in it.

Shapes: T tokens of a pack, L layers read, D target width, R final rows of a pack, k top tokens, C columns of a code
array.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_layout
from hiddenstore.data.buffers import Buffers, Members, carve, room_bytes
from hiddenstore.data.packed import EncodedPack, PackedBatch
from hiddenstore.errors import CorruptionError
from hiddenstore.records import TopK

if TYPE_CHECKING:
    from hiddenstore.store import Store


@dataclass(frozen=True)
class SampleSlot:
    """A sample to read and how much of a pack it takes: aux rows and final rows."""

    id: str
    tokens: int
    final_rows: int


@dataclass(frozen=True)
class Place:
    """Where a sample goes in its pack."""

    slot: SampleSlot
    document: int
    start: int
    final_start: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.slot.tokens)

    @property
    def final_rows(self) -> slice:
        return slice(self.final_start, self.final_start + self.slot.final_rows)


def places_of(slots: Sequence[SampleSlot]) -> list[Place]:
    """Samples end to end."""
    places, start, final_start = [], 0, 0
    for document, slot in enumerate(slots):
        places.append(Place(slot, document, start, final_start))
        start += slot.tokens
        final_start += slot.final_rows
    return places


class Pack(Protocol):
    """What a filler makes."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The decoded pack on a device."""


class Filler(Protocol):
    """One way to make packs. ``fill`` is called from many threads, once per place."""

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        """Shapes and types of the tensors of a pack of ``slots``."""

    def empty(self, slots: Sequence[SampleSlot], buffers: Buffers) -> Pack:
        """A pack with room for ``slots``."""

    def fill(self, pack: Pack, place: Place) -> None:
        """Read a sample into its place; CorruptionError ``sample-shape`` when it is not as long as its slot."""


class Decoded:
    """Packs decoded on the CPU, straight into their place. ``final`` says whether final rows are read."""

    def __init__(self, store: "Store", layers: Sequence[int], final: bool) -> None:
        capture = store.capture
        self._store, self._layers, self._final = store, tuple(layers), final
        self._width = capture.target.hidden_size
        self._topk = capture.topk if final and capture.holds_topk else 0

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        T, R = _lengths(slots)
        members = {
            **_places(T, R),
            "aux": ((len(self._layers), T, self._width), torch.bfloat16),
            "final": ((0 if self._topk else R, self._width), torch.bfloat16),
        }
        if self._topk:
            members["ids"] = ((R, self._topk), torch.int64)
            members["log_probs"] = ((R, self._topk), torch.float32)
            members["lse"] = ((R,), torch.float32)
        return members

    def empty(self, slots: Sequence[SampleSlot], buffers: Buffers) -> PackedBatch:
        members = self.members(slots)
        tensors = carve(buffers.take(room_bytes(members)), members)
        topk = TopK(*(tensors.pop(name) for name in ("ids", "log_probs", "lse"))) if self._topk else None
        return PackedBatch(**tensors, sample_ids=[slot.id for slot in slots], topk=topk)

    def fill(self, pack: Pack, place: Place) -> None:
        assert isinstance(pack, PackedBatch)
        slot = place.slot
        aux = pack.aux[:, place.rows]
        final = pack.final[place.final_rows] if not self._topk else pack.final
        record = self._store.read_into(slot.id, aux, final if self._final else None, self._layers)
        rows = len(record.final_rows) if record.topk is None else record.topk.rows
        sample = record.sample
        _require(slot, (sample.tokens, record.aux.shape[1], rows, len(record.final_rows)))
        if pack.topk is not None:
            assert record.topk is not None
            pack.topk.ids[place.final_rows] = record.topk.ids
            pack.topk.log_probs[place.final_rows] = record.topk.log_probs
            pack.topk.lse[place.final_rows] = record.topk.lse
        _put(vars(pack), place, sample.input_ids, sample.loss_mask, record.final_rows)


class StillEncoded:
    """Packs of stored bytes, decoded where ``EncodedPack.to`` moves them."""

    def __init__(self, store: "Store", layers: Sequence[int], final: bool) -> None:
        capture = store.capture
        self._store, self._layers, self._final = store, tuple(layers), final
        self._width, self._codecs = capture.target.hidden_size, capture.codecs

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        T, R = _lengths(slots)
        aux, final = get_layout(self._codecs.aux), get_layout(self._codecs.final)
        aux_shape = (len(self._layers), T, aux.code_columns(self._width))
        final_shape = (int(self._final), R, final.code_columns(self._width))
        return {
            **_places(T, R),
            "aux_codes": (aux_shape, getattr(torch, aux.code_dtype)),
            "final_codes": (final_shape, getattr(torch, final.code_dtype)),
        }

    def empty(self, slots: Sequence[SampleSlot], buffers: Buffers) -> EncodedPack:
        members, places = self.members(slots), places_of(slots)
        tensors = carve(buffers.take(room_bytes(members)), members)
        return EncodedPack(
            aux_codes=tensors.pop("aux_codes"),
            final_codes=tensors.pop("final_codes"),
            places=tensors,
            rows=[place.rows for place in places],
            final_rows=[place.final_rows for place in places],
            sample_ids=[slot.id for slot in slots],
            codecs=self._codecs,
            width=self._width,
            aux_small=[{} for _ in slots],
            final_small=[{} for _ in slots],
        )

    def fill(self, pack: Pack, place: Place) -> None:
        assert isinstance(pack, EncodedPack)
        slot = place.slot
        reader, index = self._store.reader_of(slot.id)
        input_ids, loss_mask = reader.tokens(index)
        out = (list(pack.aux_codes[:, place.rows]), list(pack.final_codes[:, place.final_rows]))
        aux, final, final_rows = reader.read_encoded(index, self._layers, self._final, out)
        _require(slot, (len(input_ids), slot.tokens, len(final_rows), len(final_rows)))
        pack.aux_small[place.document] = aux.small
        pack.final_small[place.document] = final.small
        _put(pack.places, place, input_ids, loss_mask, final_rows)


def _lengths(slots: Sequence[SampleSlot]) -> tuple[int, int]:
    return sum(slot.tokens for slot in slots), sum(slot.final_rows for slot in slots)


def _places(T: int, R: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "input_ids": ((T,), torch.int64),
        "loss_mask": ((T,), torch.bool),
        "positions": ((T,), torch.int64),
        "document": ((T,), torch.int64),
        "final_rows": ((R,), torch.int64),
    }


def _put(
    tensors: dict[str, Tensor], place: Place, input_ids: np.ndarray, loss_mask: np.ndarray, final_rows: np.ndarray
) -> None:
    # numpy starts a short copy in a tenth of the time torch takes.
    rows = place.rows
    tensors["input_ids"].numpy()[rows] = input_ids
    np.not_equal(loss_mask, 0, out=tensors["loss_mask"].numpy()[rows])
    tensors["positions"].numpy()[rows] = np.arange(len(input_ids))
    tensors["document"].numpy()[rows] = place.document
    tensors["final_rows"].numpy()[place.final_rows] = final_rows + np.int64(place.start)


def _require(slot: SampleSlot, found: tuple[int, int, int, int]) -> None:
    """``found``: tokens, aux rows, final rows and final positions that a sample turned out to have."""
    if found != (slot.tokens, slot.tokens, slot.final_rows, slot.final_rows):
        raise CorruptionError(
            f"sample {slot.id}: expected {slot.tokens} tokens and {slot.final_rows} final rows, "
            f"found tokens, aux rows, final rows, final positions = {found}",
            kind="sample-shape",
            samples=(slot.id,),
        )

"""Packs as a consumer sees them: samples end to end, decoded, or still encoded until they are on the device.

Shapes: T tokens of a pack, L layers read, D target width, R final rows of a pack, k top tokens, C columns of a code
array, t and r tokens and final rows of one sample.
"""

import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.affine import AffineCodec
from hiddenstore.codecs.base import Encoded
from hiddenstore.codecs.topk import unpack_rows
from hiddenstore.records import TopK
from hiddenstore.targets.rebuild import Rebuilder, layers_to_read
from schemas.capture import TOPK, Codecs

PAGE_BYTES = 4096

_LINE_BYTES = 64

Members = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Buffers:
    """Lends flat uint8 tensors and takes their memory back once no tensor over it is left.

    What is lent and what lies free is at most ``limit_bytes`` together, unless more is lent. Pinned memory comes from
    torch's allocator instead, which reuses it too and knows which copies to the device are still under way.
    """

    def __init__(self, limit_bytes: int, pinned: bool = False) -> None:
        self.pinned = pinned
        self.taken = 0
        """Bytes lent so far, those that came back too: memory that is larger than what was asked for counts whole."""
        self._limit = limit_bytes
        # Given back from whatever thread drops the last tensor; appending to a deque needs no lock.
        self._returned: deque[np.ndarray] = deque()
        self._free: list[np.ndarray] = []
        self._total = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size] that starts on a page; one thread at a time may ask."""
        if self.pinned:
            self.taken += size
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        memory = self._reused(size)
        if memory is None:
            memory = _pages(size)
            self._total += memory.size
        self.taken += memory.size
        lent = memory[:size]
        # ``from_numpy`` holds this very array for as long as the storage lives.
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return torch.from_numpy(lent)

    def _reused(self, size: int) -> np.ndarray | None:
        """The smallest free memory that fits. Where none does the largest goes, as does more while the limit asks for
        it: every pack is to find room in what those before it had, whatever their lengths."""
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=lambda memory: memory.size)
        fitting = next((index for index, memory in enumerate(self._free) if memory.size >= size), None)
        reused = None if fitting is None else self._free.pop(fitting)
        if reused is None and self._free:
            self._total -= self._free.pop().size
        needed = 0 if reused is not None else size
        while self._free and self._total + needed > self._limit:
            self._total -= self._free.pop().size
        return reused


def room_bytes(members: Members) -> int:
    """Bytes that ``carve`` needs."""
    return sum(_lines(_size(shape, dtype)) for shape, dtype in members.values())


def carve(flat: Tensor, members: Members) -> dict[str, Tensor]:
    """Tensors of the given shapes over one flat uint8 tensor, each at a multiple of 64 bytes: views of one storage."""
    tensors, start = {}, 0
    for name, (shape, dtype) in members.items():
        values = flat[start : start + _size(shape, dtype)].view(dtype)
        tensors[name] = values if len(shape) == 1 else values.view(shape)
        start += _lines(_size(shape, dtype))
    return tensors


def apart(flat: Tensor, members: Members) -> dict[str, Tensor]:
    """The same with a storage of its own for each, or ``torch.save`` would refuse them, and write all of ``flat`` with
    any one; not on pinned memory, of which torch's allocator has to recognise what is copied to the device."""
    if flat.is_pinned():
        return carve(flat, members)
    memory = flat.numpy()
    tensors, start = {}, 0
    for name, (shape, dtype) in members.items():
        size = _size(shape, dtype)
        values = torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=start) if size else None
        tensors[name] = torch.empty(shape, dtype=dtype, device="cpu") if values is None else values.view(shape)
        start += _lines(size)
    return tensors


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _lines(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def _pages(size: int) -> np.ndarray:
    """uint8 of at least ``size``, a little more so that the next pack fits too, from the start of a page on."""
    room = -(-(size + size // 16) // PAGE_BYTES) * PAGE_BYTES
    memory = np.empty(room + PAGE_BYTES, dtype=np.uint8)
    first = -memory.ctypes.data % PAGE_BYTES
    return memory[first : first + room]


@dataclass(eq=False)
class PackedBatch:
    """Samples end to end; attention stays inside one ``document``.

    input_ids int64 [T]; loss_mask bool [T], unshifted; positions int64 [T], restarting at every sample, those
    of an image's tokens alike; document
    int64 [T], index of the sample in the pack; aux bfloat16 [L, T, D]; final bfloat16 [R, D]; final_rows int64 [R],
    the row of the pack each final hidden belongs to, ascending. With ``topk`` [R, k] the target's top tokens stand at
    those rows in place of the hidden, and final is [0, D].
    """

    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    document: Tensor
    aux: Tensor
    final: Tensor
    final_rows: Tensor
    sample_ids: list[str]
    topk: TopK | None = None

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same pack on ``device``; copies from pinned memory overlap with computation."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: t.to(device, non_blocking=True) for name, t in tensors.items() if isinstance(t, Tensor)
        }
        topk = None if self.topk is None else self.topk.to(device)
        return replace(self, **moved, topk=topk)


@dataclass(eq=False)
class EncodedPack:
    """A pack as it is stored: what crosses to the device is a half or a quarter of the decoded bytes.

    tensors: ``input_ids`` … ``final_rows`` as in ``PackedBatch``; aux_codes [L, T, C] and final_codes [1, R, C] of
    their codecs' types (no first axis where the final is not read, or not stored); small: per sample the small arrays
    of its aux and of its final; rows and final_rows: where each sample lies.
    """

    tensors: dict[str, Tensor]
    aux_codes: Tensor
    final_codes: Tensor
    rows: list[slice]
    final_rows: list[slice]
    sample_ids: list[str]
    codecs: Codecs
    width: int
    aux_small: list[dict[str, np.ndarray]]
    final_small: list[dict[str, np.ndarray]]

    @property
    def tokens(self) -> int:
        return int(self.aux_codes.shape[1])

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move the codes and the small arrays in one copy each, and decode there: the bits a decoded pack has."""
        device = torch.device(device)
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        aux = self._decoded(self.codecs.aux, self.aux_codes, self.rows, self.aux_small, device)
        final = torch.empty((0, self.width), dtype=torch.bfloat16, device=device)
        topk = None
        if len(self.final_codes) and self.codecs.final == TOPK:
            topk = unpack_rows(Encoded(list(self.final_codes))).to(device)
        elif len(self.final_codes):
            final = self._decoded(self.codecs.final, self.final_codes, self.final_rows, self.final_small, device)[0]
        return PackedBatch(**tensors, aux=aux, final=final, sample_ids=self.sample_ids, topk=topk)

    def _decoded(
        self,
        name: str,
        codes: Tensor,
        rows: Sequence[slice],
        small: Sequence[Mapping[str, np.ndarray]],
        device: torch.device,
    ) -> Tensor:
        codec, moved = get_codec(name), codes.to(device, non_blocking=True)
        if not codec.small:
            return moved.view(torch.bfloat16)
        out = torch.empty((*codes.shape[:2], self.width), dtype=torch.bfloat16, device=device)
        if isinstance(codec, AffineCodec):
            codec.decode_pack(moved, rows, small_on(small, device), out)
            return out
        for span, arrays in zip(rows, small_on(small, device), strict=True):
            if len(codes) and span.stop > span.start:
                codec.decode(Encoded([layer[span] for layer in moved], arrays), out[:, span])
        return out


def small_on(samples: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> list[dict[str, Any]]:
    """The small arrays of every sample, ready to be decoded with on ``device``."""
    return [dict(arrays) for arrays in samples] if device.type == "cpu" else moved_at_once(samples, device)


def moved_at_once(samples: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> list[dict[str, Any]]:
    """The arrays of bf16 bits on ``device`` after one copy from pinned memory; the others as they are."""
    moving = {
        f"{number} {name}": array
        for number, arrays in enumerate(samples)
        for name, array in arrays.items()
        if array.dtype == np.uint16
    }
    members: Members = {name: (array.shape, torch.uint16) for name, array in moving.items()}
    flat = torch.empty(room_bytes(members), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for name, tensor in carve(flat, members).items():
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(moving[name])))
    moved = carve(flat.to(device, non_blocking=True), members)
    return [
        {name: moved.get(f"{number} {name}", array) for name, array in arrays.items()}
        for number, arrays in enumerate(samples)
    ]


def complete(pack: PackedBatch, rebuilder: Rebuilder, layers: Sequence[int], final: bool) -> PackedBatch:
    """The pack with what is rebuilt of ``layers`` and, where ``final`` says so, of the final rows.

    The pack holds ``layers_to_read`` and no final hidden where that is rebuilt. A sample comes back as it does from
    ``store[id]`` on the same device, whatever pack it lies in.
    """
    lengths = torch.bincount(pack.document, minlength=len(pack.sample_ids)).tolist()
    read = layers_to_read(rebuilder.capture, layers, final)
    aux = rebuilder.aux(pack.input_ids.cpu(), pack.aux, lengths, read, layers)
    if not final or not rebuilder.capture.rebuilds_final:
        return replace(pack, aux=aux)
    return replace(pack, aux=aux, final=rebuilder.final(pack.aux[-1], lengths)[pack.final_rows])

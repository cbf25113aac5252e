"""Packs as a consumer sees them: samples end to end, decoded, or still encoded until they are on the device.

Shapes: T tokens of a pack, L layers read, D target width, R final rows of a pack, k top tokens, C columns of a code
array, t and r tokens and final rows of one sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import Encoded, get_codec
from hiddenstore.codecs.topk import unpack_rows
from hiddenstore.data.buffers import Members, carve, room_bytes
from hiddenstore.records import TopK
from schemas.capture import TOPK, Codecs


@dataclass(eq=False)
class PackedBatch:
    """Samples end to end; attention stays inside one ``document``.

    input_ids int64 [T]; loss_mask bool [T], unshifted; positions int64 [T], restarting at every sample; document
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

    places: ``input_ids`` … ``final_rows`` as in ``PackedBatch``; aux_codes [L, T, C] and final_codes [1, R, C] of their
    codecs' types (no first axis where the final is not read); small: per sample the small arrays of its aux and of its
    final; rows and final_rows: where each sample lies.
    """

    places: dict[str, Tensor]
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
        places = {name: tensor.to(device, non_blocking=True) for name, tensor in self.places.items()}
        aux = self._decoded(self.codecs.aux, self.aux_codes, self.rows, self.aux_small, device)
        final = torch.empty((0, self.width), dtype=torch.bfloat16, device=device)
        topk = None
        if len(self.final_codes) and self.codecs.final == TOPK:
            topk = unpack_rows(Encoded(list(self.final_codes))).to(device)
        elif len(self.final_codes):
            final = self._decoded(self.codecs.final, self.final_codes, self.final_rows, self.final_small, device)[0]
        return PackedBatch(**places, aux=aux, final=final, sample_ids=self.sample_ids, topk=topk)

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
        for here, part in zip(rows, small_on(small, device), strict=True):
            if len(codes) and here.stop > here.start:
                codec.decode(Encoded([layer[here] for layer in moved], part), out[:, here])
        return out


def small_on(parts: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> list[dict[str, Any]]:
    """The small arrays of every sample, ready to be decoded with on ``device``."""
    return [dict(part) for part in parts] if device.type == "cpu" else moved_together(parts, device)


def moved_together(parts: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> list[dict[str, Any]]:
    """The arrays of bf16 bits on ``device`` after one copy from pinned memory; the others as they are."""
    moving = {
        f"{number} {name}": array
        for number, part in enumerate(parts)
        for name, array in part.items()
        if array.dtype == np.uint16
    }
    members: Members = {name: (array.shape, torch.uint16) for name, array in moving.items()}
    flat = torch.empty(room_bytes(members), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, tensor in carve(flat, members).items():
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(moving[name])))
    there = carve(flat.to(device, non_blocking=True), members)
    return [
        {name: there.get(f"{number} {name}", array) for name, array in part.items()}
        for number, part in enumerate(parts)
    ]

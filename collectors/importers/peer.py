"""What an importer gets from a peer's dump: places, and the tokens and states that lie at each of them.

Shapes: T rows of one sample as the peer stored it, C layer columns, D target width.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hiddenstore.errors import HiddenstoreError
from schemas.capture import NormState

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Unusable(Exception):  # noqa: N818 - a verdict on one sample, counted; not an error of the program
    """One sample that cannot be imported. ``reason`` is a stable kebab-case kind, ``detail`` a sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, eq=False)
class PeerSample:
    """One sample as a peer's files hold it, unshifted.

    input_ids int32 [n]; loss_mask uint8 [n], None where the format keeps none. The ids name the rows from ``first_row``
    on; a format that shifts before it writes has lost the ids before. ``padded``: the rows may end in padding that
    nothing in the file tells from text. columns [T, C, D] and final [T, D] are there when states were asked for, in the
    file's own dtype; ``rows`` and ``column_width`` (C·D) are known either way. ``final_norm`` is what the file itself
    says, None where it says nothing.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray | None
    rows: int
    column_width: int
    first_row: int = 0
    padded: bool = False
    columns: Tensor | None = None
    final: Tensor | None = None
    final_norm: NormState | None = None
    split: str | None = None


@dataclass(frozen=True)
class Stated:
    """What a dump says of itself, in its own words; None and empty where it says nothing.

    ``layers`` in the peer's numbering and order; ``version`` of its format; ``facts`` for the engine record.
    """

    layers: tuple[int, ...] | None = None
    width: int | None = None
    vocab_size: int | None = None
    version: str = "unknown"
    facts: tuple[tuple[str, str], ...] = ()


class PeerSource(Protocol):
    """A dump that was found and opened."""

    @property
    def stated(self) -> Stated: ...

    def places(self) -> Sequence[str]:
        """Every sample, always in the same order: ``file``, or ``file#index`` where a file holds several."""
        ...

    def file_of(self, place: str) -> Path:
        """The file that holds the states of a place; it goes when all of its samples are in the store."""
        ...

    def read(self, place: str, states: bool) -> PeerSample:
        """Tokens and mask of one sample, with ``states`` its layers and final hidden too.

        Raises:
            Unusable: this sample cannot be imported.
        """
        ...

    def close(self) -> None: ...


def in_order(names: Sequence[str]) -> list[str]:
    """Names sorted with their numbers as numbers: ``data_2`` before ``data_10``."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def files_below(folder: Path, *suffixes: str) -> list[str]:
    """Paths below a folder that end in one of ``suffixes``, posix and relative, in order; hidden ones are left out."""
    found = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name.endswith(suffixes) and not any(part.startswith(".") for part in name.split("/")) and path.is_file():
            found.append(name)
    return in_order(found)


def token_ids(value: Any, key: str) -> np.ndarray:
    """A tensor of ids [T] or [1, T] as int32 [T]."""
    ids = _flat(value, key)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise Unusable("wrong-dtype", f"{key} is {_name(ids)}, expected whole numbers")
    if not len(ids):
        raise Unusable("empty", f"{key} is empty")
    if int(ids.min()) < 0 or int(ids.max()) >= 2**31:
        raise Unusable("token-out-of-range", f"{key} holds {int(ids.min())} … {int(ids.max())}, which are no token ids")
    return ids.to(torch.int32).numpy()


def mask_of(value: Any, key: str, tokens: int) -> np.ndarray:
    """A tensor of zeros and ones [T] or [1, T] as uint8 [T]."""
    mask = _flat(value, key)
    if len(mask) != tokens:
        raise Unusable("mask-length", f"{key} has {len(mask)} entries for {tokens} tokens")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise Unusable("mask-values", f"{key} holds other values than 0 and 1")
    return mask.to(torch.uint8).numpy()


def state_shape(shape: Sequence[int], key: str) -> tuple[int, int]:
    """Rows and width of states [T, W] or [1, T, W]."""
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2:
        raise Unusable("wrong-shape", f"{key} has shape {list(shape)}, expected [T, width] or [1, T, width]")
    return int(shape[0]), int(shape[1])


def states_of(value: Tensor, key: str) -> Tensor:
    """States [T, W] or [1, T, W] as [T, W]."""
    if value.dtype not in STATE_DTYPES:
        raise Unusable("wrong-dtype", f"{key} is {_name(value)}, expected bf16, fp16 or fp32")
    return value.reshape(state_shape(value.shape, key))


def columns_of(states: Tensor, width: int, key: str) -> Tensor:
    """Layers side by side [T, C·D] as [T, C, D]."""
    if states.shape[1] % width:
        raise Unusable("wrong-width", f"{key} is {states.shape[1]} wide, no multiple of the target's width {width}")
    return states.reshape(states.shape[0], -1, width)


def require_rows(found: int, tokens: int, key: str) -> None:
    """States must have a row for every token."""
    if found != tokens:
        raise Unusable("length-mismatch", f"{key} has {found} rows for {tokens} tokens")


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    if isinstance(error, HiddenstoreError):
        return error.message
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _flat(value: Any, key: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise Unusable("missing-key", f"there is no tensor {key}")
    if value.dim() == 2 and value.shape[0] == 1:
        value = value[0]
    if value.dim() != 1:
        raise Unusable("wrong-shape", f"{key} has shape {list(value.shape)}, expected [T] or [1, T]")
    return value


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

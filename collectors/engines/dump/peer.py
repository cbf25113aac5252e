"""A peer's format, and a dump of it: locations, and the tokens and states that lie at each of them.

Shapes: T rows of one sample as the peer stored it, C layer columns, D target width.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiddenstore.errors import ConfigError, FormatError, Kind, NotFoundError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import foreign_json
from hiddenstore.fs.publish import tree_files
from hiddenstore.targets import LAYER_RULES
from hiddenstore.targets.folder import first_line
from schemas.capture import NormState
from schemas.layers import LayerConvention, from_convention

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


@dataclass(frozen=True)
class Stated:
    """What a dump says of itself: ``layers`` in the peer's numbering, ``version`` of its format, further ``facts``."""

    layers: tuple[int, ...] | None = None
    width: int | None = None
    vocab_size: int | None = None
    version: str = "unknown"
    facts: tuple[tuple[str, str], ...] = ()


class PeerSource(ABC):
    """A format, and as an object the dump in ``folder`` of a target of ``width``; ``name`` as in ``FORMATS``.

    ``numbering``: how the peer counts layers. ``moves_layers``: it takes a drafter's published layers for ids of that
    numbering. ``default_layers``: whose default its columns are when nobody names them,
    None where nothing may be assumed. ``final``: norm state of its final hidden, None where it has none.
    ``last_is_final``: the column of the last layer is the final hidden once more, after its norm. ``layers_note`` and
    ``pre_norm_hint``: what errors add where layers must be named, and where the final hidden is before its norm.
    """

    numbering: LayerConvention = "output"
    moves_layers = False
    default_layers: str | None = None
    final: NormState | None = None
    last_is_final = False
    has_many_per_file = False
    layers_note = ""
    pre_norm_hint = ""
    stated = Stated()

    def __init__(self, name: str, folder: Path, width: int) -> None:
        """Raises NotFoundError ``path-missing``; a subclass ``input-unreadable`` and ``dump-version`` too."""
        if not folder.is_dir():
            raise NotFoundError(f"{folder} is no folder", kind=Kind.PATH_MISSING)
        self.name = name
        self.folder, self._width = folder, width

    def usual_layers(self, drafter: str, num_layers: int, count: int | None = None) -> list[int]:
        """Our numbers of what the peer's own tool captures for a drafter of ``LAYER_RULES``, ``count`` layers or as
        many as is usual, in the order of its columns."""
        published = LAYER_RULES[drafter].published(num_layers, count)
        return from_convention(sorted(set(published)), self.numbering) if self.moves_layers else list(published)

    @abstractmethod
    def locations(self) -> Sequence[str]:
        """Every sample, always in the same order: ``file``, or ``file#index`` where a file holds several."""

    def file_of(self, location: str) -> Path:
        """The file that holds the states of a sample; it goes when all of its samples are in the store."""
        return self.folder / (location.rpartition("#")[0] if self.has_many_per_file else location)

    @abstractmethod
    def read(self, location: str, states: bool) -> PeerSample:
        """Tokens and mask of one sample, with ``states`` its layers and final hidden too; raises Unusable."""


def index_of(location: str) -> int:
    """The index in ``file#index``."""
    return int(location.rpartition("#")[2])


def files_below(folder: Path, *suffixes: str) -> list[str]:
    """Visible files below a folder ending in ``suffixes``, posix and relative, ``data_2`` before ``data_10``."""
    names = []
    for path in tree_files(folder):
        name = path.relative_to(folder).as_posix()
        if name.endswith(suffixes) and not any(word.startswith(".") for word in name.split("/")):
            names.append(name)
    return sorted(names, key=lambda name: [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)])


def read_manifest(path: Path) -> dict[str, Any]:
    """A JSON object; ConfigError ``input-unreadable``."""
    try:
        document = foreign_json(path.read_bytes())
    except (OSError, ValueError) as error:
        require_read(error, path)
        raise unreadable(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise unreadable(f"{path} holds no object")
    return document


def require_version(path: Path, manifest: dict[str, Any], key: str, expected: int) -> None:
    """Raises FormatError ``dump-version``."""
    if manifest.get(key) != expected:
        raise FormatError(f"{path} is of {key} {manifest.get(key)}, expected {expected}", kind=Kind.DUMP_VERSION)


def facts_of(manifest: dict[str, Any], *names: str) -> tuple[tuple[str, str], ...]:
    """What a manifest says of its origin; a path of somebody's machine is cut to its name."""
    texts = [(name, str(manifest[name])) for name in names if isinstance(manifest.get(name), str | int)]
    return tuple((name, Path(text).name if text.startswith("/") else text) for name, text in texts)


def unreadable(message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(message, kind=Kind.INPUT_UNREADABLE, hint=hint)


def token_ids(value: Any, key: str) -> np.ndarray:
    """A tensor of ids [T] or [1, T] as int32 [T]."""
    ids = _flat(value, key)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise Unusable("wrong-dtype", f"{key} is {_dtype(ids)}, expected whole numbers")
    if not len(ids):
        raise Unusable("empty", f"{key} is empty")
    # torch knows no least and no largest of unsigned numbers.
    numbers = ids.numpy()
    least, largest = int(numbers.min()), int(numbers.max())
    if least < 0 or largest >= 2**31:
        raise Unusable("token-out-of-range", f"{key} holds {least} … {largest}, which are no token ids")
    return numbers.astype(np.int32)


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
        raise Unusable("wrong-dtype", f"{key} is {_dtype(value)}, expected bf16, fp16 or fp32")
    return value.reshape(state_shape(value.shape, key))


def columns_of(states: Tensor, width: int, key: str) -> Tensor:
    """Layers side by side [T, C·D] as [T, C, D]."""
    if states.shape[1] % width:
        raise Unusable("wrong-width", f"{key} is {states.shape[1]} wide, no multiple of the target's width {width}")
    return states.reshape(len(states), states.shape[1] // width, width)


def require_rows(rows: int, tokens: int, key: str) -> None:
    """States must have a row for every token."""
    if rows != tokens:
        raise Unusable("length-mismatch", f"{key} has {rows} rows for {tokens} tokens")


def missing_key(key: str, names: Iterable[str]) -> Unusable:
    """A file without a tensor that its format has, and the tensors it has."""
    return Unusable("missing-key", f"there is no tensor {key}; the file holds {', '.join(sorted(names)) or 'nothing'}")


def _flat(value: Any, key: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise Unusable("missing-key", f"there is no tensor {key}")
    if value.dim() == 2 and value.shape[0] == 1:
        value = value[0]
    if value.dim() != 1:
        raise Unusable("wrong-shape", f"{key} has shape {list(value.shape)}, expected [T] or [1, T]")
    return value


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class OpenFile:
    """An open safetensors file; every read says Unusable in place of raising."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.keys = frozenset(handle.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header."""
        self._require(key)
        return tuple(self._handle.get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        """A whole tensor."""
        self._require(key)
        tensor: Tensor = self._handle.get_tensor(key)
        return tensor

    def row(self, key: str, index: int) -> Tensor:
        """One entry along the first axis."""
        self._require(key)
        row: Tensor = self._handle.get_slice(key)[index]
        return row

    def _require(self, key: str) -> None:
        if key not in self.keys:
            raise missing_key(key, self.keys)


def require_read(error: Exception, path: Path) -> None:
    """Raise StorageError where the disk refused: what it did not read is no fault of a file's content."""
    raise_refusal(error, path, "nothing was counted as rejected; run the same command again once the disk answers")


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """A safetensors file; Unusable ``not-captured`` when it is absent, ``truncated`` when it is not whole,
    ``wrong-shape`` where the block asks for an axis that a tensor has not."""
    if not path.is_file():
        raise Unusable("not-captured", f"{path.name} is not there")
    try:
        with safe_open(path, framework="pt") as handle:
            yield OpenFile(handle)
    except (SafetensorError, OSError) as error:
        require_read(error, path)
        raise Unusable("truncated", f"{path.name} is no whole safetensors file: {first_line(error)}") from error
    except IndexError as error:
        raise Unusable("wrong-shape", f"a tensor of {path.name} has fewer axes than its format says") from error

"""Files that TensorRT-LLM saves hidden states to: read once they are whole, checked, and removed as soon as taken.

Facts of the format (TensorRT-LLM 1.2 documentation of ``SaveHiddenStatesDecodingConfig``): ``<prefix>_<counter>.pt`` is
``torch.save`` of a list with a dict per request: ``input_ids`` int64 [T], ``hidden_state`` [T, D] after the final norm,
``aux_hidden_states`` [T, L·D], layers ascending side by side and, when -1 was asked for, the final one among them. An
older version calls the last ``hidden_state_features``. The counter says nothing about which request a file belongs to.

Shapes: T tokens of a request, L captured layers, D width.
"""

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenstore.errors import CaptureError, Kind
from hiddenstore.targets.folder import first_line

SUFFIX = ".pt"
AUX_KEYS = ("aux_hidden_states", "hidden_state_features")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class SavedStates:
    """token_ids int32 [T]; aux [L, T, D], layers ascending; final [T, D] post-norm; views of ``path``."""

    path: Path
    token_ids: np.ndarray
    aux: Tensor
    final: Tensor


class SavedFolder:
    """The folder an engine writes into."""

    def __init__(self, folder: Path, layers: int, width: int) -> None:
        self.folder = folder
        self._layers, self._width = layers, width
        self._in_use: dict[Path, int] = {}

    def clear(self) -> None:
        """Remove what lies there already: an engine that warms up may save its own requests."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def take(self) -> Iterator[SavedStates]:
        """The requests of every file that has become whole since the last call. Raises CaptureError: ``engine-file``,
        ``engine-layers``."""
        for path in self._files():
            if path in self._in_use or not _is_complete(path):
                continue
            saved = _load(path)
            self._in_use[path] = len(saved)
            for position, entry in enumerate(saved):
                yield read_entry(entry, self._layers, self._width, path, position)

    def done(self, saved: SavedStates) -> None:
        """Remove the file of these states once all its requests are done."""
        self._in_use[saved.path] -= 1
        if not self._in_use[saved.path]:
            saved.path.unlink()
            del self._in_use[saved.path]

    def unfinished(self) -> list[str]:
        """``name (bytes)`` of every file that is not whole."""
        return [f"{path.name} ({path.stat().st_size} bytes)" for path in self._files() if not _is_complete(path)]

    def _files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.suffix == SUFFIX]


def _is_complete(path: Path) -> bool:
    """A torch file ends with the directory of its zip, which is written last."""
    return zipfile.is_zipfile(path)


def _load(path: Path) -> list[Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        message = f"cannot read TensorRT-LLM's file {path.name}: {first_line(error)}"
        raise CaptureError(message, kind=Kind.ENGINE_FILE) from error
    return saved if isinstance(saved, list) else [saved]


def read_entry(entry: object, layers: int, width: int, path: Path, position: int = 0) -> SavedStates:
    """One saved request, checked against ``layers`` layers of ``width``; raises as ``SavedFolder.take``."""
    where = f"request {position + 1} of {path.name}"
    if not isinstance(entry, Mapping):
        raise _no_entry(where, f"it is a {type(entry).__name__}")
    token_ids = _tensor(entry, "input_ids", where)
    final = _tensor(entry, "hidden_state", where)
    tokens = int(token_ids.numel())
    _require_states(final, tokens, "hidden_state", where)
    if final.shape[1] != width:
        raise CaptureError(
            f"hidden_state of {where} is {final.shape[1]} wide, but the target is {width} wide", kind=Kind.ENGINE_LAYERS
        )
    key = next((name for name in AUX_KEYS if name in entry), None)
    if key is not None:
        aux = _tensor(entry, key, where)
        _require_states(aux, tokens, key, where)
        aux = _without_final(aux, final, layers, key, where)
    elif layers == 0:
        aux = final[:, :0]
    else:
        raise CaptureError(
            f"{where} holds no {' nor '.join(AUX_KEYS)}, but {layers} layers were asked for", kind=Kind.ENGINE_LAYERS
        )
    layered = aux.reshape(tokens, layers, width).transpose(0, 1)
    return SavedStates(path, token_ids.to(torch.int32).numpy(), layered, final)


def _without_final(aux: Tensor, final: Tensor, layers: int, key: str, where: str) -> Tensor:
    """aux [T, (L or L+1)·D] without the columns of the final hidden, which some versions repeat there: [T, L·D]."""
    width, columns = final.shape[1], aux
    if aux.shape[1] and _same_bits(aux[:, -width:], final):
        columns = aux[:, :-width]
    elif aux.shape[1] and _same_bits(aux[:, :width], final):
        columns = aux[:, width:]
    if columns.shape[1] == layers * width:
        return columns
    repeats = f", {width} of it hidden_state once more" if columns is not aux else ""
    raise CaptureError(
        f"{key} of {where} is {aux.shape[1]} wide{repeats}, but {layers} layers of {width} make {layers * width}: "
        f"TensorRT-LLM's code of this model does not hand out every layer that was asked for",
        kind=Kind.ENGINE_LAYERS,
        hint="other --layers, or --engine hf or vllm",
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def _tensor(entry: Mapping[Any, Any], key: str, where: str) -> Tensor:
    value = entry.get(key)
    if not isinstance(value, Tensor):
        raise _no_entry(where, f"it has no tensor {key}, only {', '.join(sorted(map(str, entry))) or 'nothing'}")
    return value


def _require_states(states: Tensor, tokens: int, key: str, where: str) -> None:
    if states.dtype not in DTYPES:
        raise CaptureError(f"{key} of {where} is {states.dtype}, which is no state", kind=Kind.ENGINE_FILE)
    if states.dim() != 2 or states.shape[0] != tokens:
        raise CaptureError(
            f"{key} of {where} has shape {list(states.shape)}, but the request has {tokens} tokens: a reused prefix or "
            f"a chunked prefill saves the last rows only",
            kind=Kind.ENGINE_FILE,
        )


def _no_entry(where: str, reason: str) -> CaptureError:
    return CaptureError(f"{where} is no request saved by TensorRT-LLM: {reason}", kind=Kind.ENGINE_FILE)

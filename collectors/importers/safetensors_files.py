"""Safetensors files of strangers: what is wrong with one becomes a verdict on its samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from collectors.importers.peer import Unusable, first_line


class OpenFile:
    """An open safetensors file; every read says Unusable in place of raising."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name
        self.keys = frozenset(handle.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header."""
        self._require(key)
        return tuple(self._handle.get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        """A whole tensor."""
        self._require(key)
        found: Tensor = self._handle.get_tensor(key)
        return found

    def row(self, key: str, index: int) -> Tensor:
        """One entry along the first axis."""
        self._require(key)
        found: Tensor = self._handle.get_slice(key)[index]
        return found

    def _require(self, key: str) -> None:
        if key not in self.keys:
            held = ", ".join(sorted(self.keys)) or "nothing"
            raise Unusable("missing-key", f"there is no tensor {key}; the file holds {held}")


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """A safetensors file; Unusable ``not-captured`` when it is absent, ``truncated`` when it is not whole."""
    if not path.is_file():
        raise Unusable("not-captured", f"{path.name} is not there")
    try:
        with safe_open(path, framework="pt") as handle:
            yield OpenFile(handle, path.name)
    except (SafetensorError, OSError) as error:
        raise Unusable("truncated", f"{path.name} is no whole safetensors file: {first_line(error)}") from error

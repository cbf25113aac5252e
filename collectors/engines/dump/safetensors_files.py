"""Safetensors files of strangers: what is wrong with one becomes a verdict on its samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from collectors.engines.dump.peer import Unusable, missing_key
from collectors.targets.folder import first_line


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


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """A safetensors file; Unusable ``not-captured`` when it is absent, ``truncated`` when it is not whole."""
    if not path.is_file():
        raise Unusable("not-captured", f"{path.name} is not there")
    try:
        with safe_open(path, framework="pt") as handle:
            yield OpenFile(handle)
    except (SafetensorError, OSError) as error:
        raise Unusable("truncated", f"{path.name} is no whole safetensors file: {first_line(error)}") from error

"""Keys and values of a growing sequence, and attention over them, for decoding.

Shapes: n new rows, N query heads, G key-value heads, E head width.
"""

import torch
from torch import Tensor

from trainer.attention.grouped import attend


class KVCache:
    """Keys and values of one growing sequence, for decoding: [1, G, length, E] a layer, storage grown by doubling.
    ``visible`` bool [n, length + n]: what the next n rows may read, themselves included; None where they are a
    chain."""

    def __init__(self) -> None:
        self.visible: Tensor | None = None
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Positions in layer 0, which a forward appends to first."""
        return self._lengths.get(0, 0)

    def append(self, k: Tensor, v: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Add k, v [n, G, E]; returns everything so far as views [1, G, length, E]."""
        begin = self._lengths.get(layer, 0)
        end = begin + k.shape[0]
        if layer not in self._k or end > self._k[layer].shape[2]:
            self._k[layer] = _grown(self._k.get(layer), k, begin, end)
            self._v[layer] = _grown(self._v.get(layer), v, begin, end)
        self._k[layer][0, :, begin:end] = k.transpose(0, 1)
        self._v[layer][0, :, begin:end] = v.transpose(0, 1)
        self._lengths[layer] = end
        return self._k[layer][:, :, :end], self._v[layer][:, :, :end]

    def crop(self, length: int) -> None:
        """Forget everything from position ``length`` on, in every layer."""
        self._lengths = {layer: min(old, length) for layer, old in self._lengths.items()}


def attend_cached(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int = 0) -> Tensor:
    """Add k, v [n, G, E] to the cache and attend to what its rows may read with q [n, N, E]: [n, N, E]."""
    keys, values = cache.append(k, v, layer)
    n, length = q.shape[0], keys.shape[2]
    mask = cache.visible
    if mask is None and n > 1:
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    return attend(q.transpose(0, 1)[None], keys, values, mask)[0].transpose(0, 1)


def _grown(old: Tensor | None, like: Tensor, length: int, end: int) -> Tensor:
    new = like.new_empty(1, like.shape[1], max(64, 2 * end), like.shape[2])
    if old is not None:
        new[:, :, :length] = old[:, :, :length]
    return new

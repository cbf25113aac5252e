"""The newest token of each row attends over its own columns, on a CPU in bf16: torch's fused kernel is slow for a
single query, and reads the padding too. All that is not understood here goes to transformers' own function.

Shapes: B rows, H query heads, G heads of keys and values, T columns written, C columns of a room, E width of a head.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from hiddenstore.console import output as console
from hiddenstore.threads import Lock, Threads

NAME = "hiddenstore_newest"
"""Of this attention, among those of transformers."""

WORTH_COMPILING = 2 << 30
"""Bytes of keys and values that a batch reads. The kernel saves 0.2 s a GB or more and compiles in two, which a few
such batches pay for. The batch alone decides: a run that goes on gives the same answers so, though last bits differ."""

_LANES = 16
"""Numbers of a vector of the kernel, and columns that it scores at once; fewer are torch's."""

# What blocks pass to any attention, and sdpa computes without.
_PASSED_BY = frozenset({"position_ids", "use_cache", "cache_position", "sliding_window", "is_causal"})

_LEAST_BYTES = 1 << 21
"""Keys and values that another thread is woken for: a fifth of a millisecond's, and waking takes a tenth of that."""

_newest: "ContextVar[_NewestToken | None]" = ContextVar("_newest", default=None)

_lock = Lock()
# Steps of each model that are under way: batches of several threads may share one.
_steps: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()

Step = Callable[[], AbstractContextManager[None]]
"""Around a forward of one new token a row."""


@contextmanager
def newest_token(backbone: Any, read: int) -> Iterator[Step]:
    """What the steps of a batch run in that reads ``read`` bytes of keys and values; each gives ``backbone`` its own
    attention back. Where this one is not for it nothing changes."""
    if read < WORTH_COMPILING or not _can_replace(backbone) or find_spec("numba") is None:
        yield nullcontext
        return
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    threads = torch.get_num_threads()
    with Threads(threads - 1) if threads > 1 else nullcontext() as pool:
        yield partial(_in_place_of_sdpa, backbone, _NewestToken(threads, pool))


def _can_replace(backbone: Any) -> bool:
    # A model that writes its attention out would say at each step that it cannot.
    can_set = getattr(backbone, "_can_set_attn_implementation", lambda: False)
    config = getattr(backbone, "config", None)
    # Which tokens an indexer lets through is told to attentions that transformers knows by name.
    if getattr(config, "_attn_implementation", None) not in ("sdpa", NAME) or getattr(config, "index_topk", None):
        return False
    return bool(can_set())


@contextmanager
def _in_place_of_sdpa(backbone: Any, newest: "_NewestToken") -> Iterator[None]:
    before = _newest.set(newest)
    with _lock:
        _steps[backbone] = _steps.get(backbone, 0) + 1
        if _steps[backbone] == 1:
            backbone.set_attn_implementation(NAME)
    try:
        yield
    finally:
        with _lock:
            _steps[backbone] -= 1
            if not _steps[backbone]:
                backbone.set_attn_implementation("sdpa")
        _newest.reset(before)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    newest = _newest.get()
    out = None if newest is None else newest.attend(module, query, key, value, attention_mask, **options)
    if out is not None:
        return out, None
    result: tuple[Tensor, Any] = AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
    return result


class _NewestToken:
    """The attention of one batch: its threads, and what its layers share at a step."""

    def __init__(self, threads: int, pool: Threads | None) -> None:
        self._threads, self._pool = threads, pool
        self._mask: Tensor | None = None
        self._columns: tuple[np.ndarray, np.ndarray] | None = None

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> Tensor | None:
        """bf16 [B, 1, H, E] of query [B, H, 1, E] over key and value [B, G, T, E]; None where it is not understood."""
        if query.device.type != "cpu" or query.dtype != torch.bfloat16 or query.dim() != 4:
            return None
        if query.shape[2] != 1 or dropout:
            return None
        if any(name not in _PASSED_BY and given is not None and given is not False for name, given in more.items()):
            return None
        rows, heads, _, width = query.shape
        keys, values = _room(key, query), _room(value, query)
        if keys is None or values is None or keys.shape != values.shape or key.shape != value.shape:
            return None
        groups, last = key.shape[1:3]
        shared = getattr(module, "num_key_value_groups", 1)
        columns = self._own_columns(mask, rows, last)
        if groups * shared != heads or width % _LANES or last < _LANES or columns is None:
            return None
        attend = _kernel(width, shared)
        if attend is None:
            return None
        first, ends = columns
        out = torch.empty(rows, 1, heads, width, dtype=query.dtype)
        factor = np.float32((width**-0.5 if scaling is None else scaling) * math.log2(math.e))
        arrays = (_bits(query[:, :, 0].contiguous()), keys, values, first, last, factor)

        def work(start: int, stop: int) -> None:
            attend(*arrays, start, stop, _bits(out[:, 0]))

        parts = self._parts(ends, 2 * groups * width * query.itemsize)
        others = [self._pool.submit(work, *part) for part in parts[1:]] if self._pool else []
        work(*parts[0])
        for other in others:
            other.result()
        return out

    def _own_columns(self, mask: Tensor | None, rows: int, last: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The first column int64 [B] of each row, where each sees all from there on, and how many columns the rows up
        to each have; the same for all layers that share a mask."""
        if mask is None:
            return np.zeros(rows, np.int64), last * np.arange(1, rows + 1)
        if mask is not self._mask:
            self._mask, self._columns = mask, None
            if mask.dtype == torch.bool and mask.shape == (rows, 1, 1, last):
                own = mask[:, 0, 0]
                counts = own.sum(-1)
                is_end = torch.equal(own, torch.arange(last) >= last - counts[:, None])
                if is_end and bool(counts.all()):
                    self._columns = (last - counts).numpy(), counts.cumsum(0).numpy()
        return self._columns

    def _parts(self, ends: np.ndarray, column_bytes: int) -> list[tuple[int, int]]:
        """Rows that read about as much, from one on to before another, for as many threads as are worth waking."""
        count = min(self._threads, max(1, int(ends[-1]) * column_bytes // _LEAST_BYTES))
        cuts = [int(np.searchsorted(ends, ends[-1] * n / count)) + 1 for n in range(1, count)]
        return [(start, stop) for start, stop in pairwise([0, *cuts, len(ends)]) if start < stop]


def _room(states: Tensor, query: Tensor) -> np.ndarray | None:
    """The bits [B, G, C, E] of the room of which bf16 states [B, G, T, E] are the first columns; None of others."""
    rows, _, _, width = query.shape
    if states.dtype != torch.bfloat16 or states.dim() != 4 or (states.shape[0], states.shape[3]) != (rows, width):
        return None
    groups, last = states.shape[1:3]
    by_row, by_head, *inner = states.stride()
    capacity = by_head // width
    is_room = inner == [width, 1] and by_head == capacity * width and by_row == groups * by_head and capacity >= last
    numbers = states.storage_offset() + rows * groups * capacity * width
    if not is_room or states.untyped_storage().nbytes() < numbers * states.itemsize:
        return None
    return _bits(states.as_strided((rows, groups, capacity, width), states.stride()))


def _bits(states: Tensor) -> np.ndarray:
    """bf16 as uint16."""
    return states.view(torch.int16).numpy().view(np.uint16)


@cache
def _kernel(width: int, shared: int) -> Any:
    """The kernel for ``shared`` query heads of E numbers to each head of keys and values; None where there is none."""
    try:
        from collectors.regenerate.attention_kernel import attend_of

        attend, one = attend_of(width, shared), np.zeros((1, 1, _LANES, width), np.uint16)
        query = np.zeros((1, shared, width), np.uint16)
        attend(query, one, one, np.zeros(1, np.int64), _LANES, np.float32(1.0), 0, 1, query.copy())
    except Exception as error:  # noqa: BLE001 - a compiler of another numpy, or for another machine, says so its own way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        console.output().warn(f"numba compiles nothing here, so that answers take a third longer: {reason}")
        return None
    return attend

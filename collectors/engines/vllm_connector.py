"""Hidden-states connectors that vLLM loads: states go from its cache into the memory of their unit; or, on a CPU, into
files, where the stock one copies on CUDA streams.

Which rows are a request's, when its blocks may be used again, and files with their locks stay vLLM's.
"""

import fcntl
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

from collectors.engines.unit_memory import PLACE, Place, UnitMemory


class _Copied:
    """Stands where a CUDA event stands: a copy on a CPU is done when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes the states of one finished request, taken from the cache before its blocks are used again."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        tokens = pending.token_ids.shape[0]
        first_slots = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
        slots = (first_slots + torch.arange(self._block_size)[None, :]).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, tokens).contiguous()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        copied = _Copied()
        self._req_copy_events[pending.req_id] = copied
        written = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_futures[pending.req_id] = written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))


class HiddenStoreConnector(CpuHiddenStatesConnector):
    """The scheduler's side tells the worker's where the states of a finished request go; the worker puts them there."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self._collector = f"/proc/{int(self._kv_transfer_config.get_from_extra_config('collector', 0))}/fd/"
        self._guard = threading.Lock()
        self._unit: UnitMemory | None = None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Scheduler: a request without a place, a warm-up or an aborted one, is not saved."""
        is_saved, _path = super().request_finished(request, block_ids)
        place = str((request.kv_transfer_params or {}).get(PLACE, ""))
        # A server's clients could name any process.
        if not is_saved or not place.startswith(self._collector):
            self._pending_saves.pop(request.request_id, None)
            return False, None
        self._pending_saves[request.request_id].filename = place
        return True, {PLACE: place}

    def _submit_async_write(self, pending: Any) -> None:
        copies = CpuHiddenStatesConnector if self._kv_cache.device.type == "cpu" else ExampleHiddenStatesConnector
        copies._submit_async_write(self, pending)

    def _write_tensors(self, tensors: dict[str, Tensor], copied: Any, filename: str, lock: int | None) -> None:
        """Worker, in a thread of its own: takes the place of writing a file."""
        copied.synchronize()
        place = Place.parse(filename)
        self._memory(place).put(place.index, tensors["token_ids"].numpy(), tensors["hidden_states"])

    def _memory(self, place: Place) -> UnitMemory:
        """The unit's memory, mapped once: an engine captures one unit at a time."""
        with self._guard:
            if self._unit is None or self._unit.number != place.number:
                self._unit = UnitMemory.open(place)
            return self._unit

"""A hidden-states connector for vLLM on a CPU, loaded by vLLM itself: the stock one copies on CUDA streams.

Only the copy differs; which rows belong to a request, the files and their locks stay vLLM's.
"""

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


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

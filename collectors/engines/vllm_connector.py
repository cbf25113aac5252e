"""A hidden-states connector that vLLM loads: states go from its cache into the memory of the unit they belong to.

Which rows are a request's, and when its blocks may be used again, stays vLLM's; no file is written and none is read.
"""

import threading
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector

from collectors.engines.unit_memory import PLACE, Place, UnitMemory
from collectors.engines.vllm_cpu_connector import CpuHiddenStatesConnector


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

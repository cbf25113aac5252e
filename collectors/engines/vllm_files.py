"""How vLLM is asked for hidden states, and the files it answers with.

Facts measured on vLLM 0.32: a file holds ``hidden_states`` [T, n, D] in the model's dtype and ``token_ids`` int64 [T];
columns are the asked ids ascending and without repeats, whatever order they were asked in; id k is the residual stream
after k layers, so id N is the final hidden before its norm; a writer holds an exclusive ``flock`` on ``<file>.lock``
until the file is whole.

Shapes: T tokens, n asked ids, L aux layers, N decoder layers, D target width.
"""

import fcntl
import json
import os
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from collectors.targets.load import EngineTarget
from hiddenstore.errors import CaptureError, Kind
from schemas.layers import to_convention

CONNECTOR = "ExampleHiddenStatesConnector"
CPU_CONNECTOR = "CpuHiddenStatesConnector"
CPU_CONNECTOR_MODULE = "collectors.engines.vllm_cpu_connector"
# A file that is not whole so long after its request was answered will never be.
LATE_S = 120.0
_STATES, _TOKENS = "hidden_states", "token_ids"


@dataclass(frozen=True)
class LayerIds:
    """The ids vLLM is asked for, ascending: ``aux`` of them the aux layers', the last one N, the final hidden."""

    ids: tuple[int, ...]
    aux: int

    @classmethod
    def of(cls, aux_layers: tuple[int, ...], num_layers: int) -> "LayerIds":
        """
        >>> LayerIds.of((-1, 1, 3), 4)
        LayerIds(ids=(0, 2, 4), aux=3)
        """
        ids = {*to_convention(aux_layers, "vllm"), num_layers}
        return cls(tuple(sorted(ids)), len(aux_layers))

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """aux [L, T, D] and final [T, D], views of the states [T, n, D] of one request.

        Raises:
            CaptureError: ``engine-shape``.
        """
        if states.ndim != 3 or states.shape[1] != len(self.ids):
            raise CaptureError(
                f"vLLM gave states {list(states.shape)}, expected [tokens, {len(self.ids)}, width] for its layer ids "
                f"{list(self.ids)}",
                kind=Kind.ENGINE_SHAPE,
            )
        return states[:, : self.aux].transpose(0, 1), states[:, -1]


def speculative_config(layer_ids: LayerIds) -> dict[str, Any]:
    """What vLLM's ``speculative_config`` says to hand out hidden states."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids.ids)}},
    }


def kv_transfer_config(folder: str, on_cpu: bool = False) -> dict[str, Any]:
    """What vLLM's ``kv_transfer_config`` says to write them below ``folder``."""
    config: dict[str, Any] = {
        "kv_connector": CPU_CONNECTOR if on_cpu else CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return config | ({"kv_connector_module_path": CPU_CONNECTOR_MODULE} if on_cpu else {})


def server_command(target: EngineTarget, layer_ids: LayerIds) -> str:
    """The command that starts a server which hands out these layers."""
    words = ["vllm", "serve", target.folder.name, "--dtype", target.identity.dtype]
    words += ["--speculative-config", json.dumps(speculative_config(layer_ids))]
    words += ["--kv-transfer-config", json.dumps(kv_transfer_config("/dev/shm/states"))]
    return shlex.join(words)


class StateFile:
    """The answer to one request on disk; ``read`` it, then ``remove`` it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = self.path.with_name(f"{self.path.name}.lock")
        self._answered_s = time.monotonic()

    def read(self) -> tuple[np.ndarray, Tensor] | None:
        """token_ids int32 [T] and states [T, n, D] in the model's dtype; None while it is being written.

        Raises:
            CaptureError: ``states-late``, ``engine-file``.
        """
        if not self._is_complete():
            if time.monotonic() - self._answered_s > LATE_S:
                raise CaptureError(
                    f"vLLM answered a request, but {self.path} is not there after {LATE_S:.0f} s",
                    kind=Kind.STATES_LATE,
                    hint="vLLM's log says why it could not be written: a full folder is the usual reason",
                )
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                tokens, states = file.get_tensor(_TOKENS), file.get_tensor(_STATES)
        except (SafetensorError, OSError) as error:
            raise CaptureError(f"cannot read {self.path}: {error}", kind=Kind.ENGINE_FILE) from error
        return tokens.numpy().astype(np.int32), states

    def wait(self) -> tuple[np.ndarray, Tensor]:
        """As ``read``, but waits until the file is whole."""
        while (states := self.read()) is None:
            time.sleep(0.002)
        return states

    def remove(self) -> None:
        """Remove the file and its lock.

        Raises:
            CaptureError: ``engine-file``: this user may not, and the folder would fill.
        """
        for path in (self.path, self._lock):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CaptureError(
                    f"cannot remove {path}, so the folder would fill up: {error.strerror}",
                    kind=Kind.ENGINE_FILE,
                    hint="run collect as the user of the server, or give both the same group and a writable folder",
                ) from error

    def _is_complete(self) -> bool:
        """True once nobody writes: the writer lets go of its lock when the file is closed."""
        try:
            descriptor = os.open(self._lock, os.O_RDONLY)
        except FileNotFoundError:
            # A server without locks writes a file before it answers.
            return self.path.exists()
        try:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return self.path.exists()
            return False
        finally:
            os.close(descriptor)

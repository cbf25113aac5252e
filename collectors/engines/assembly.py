"""The states of one unit, put together in request order whatever order an engine hands them over in.

Shapes: N tokens of the unit, R final rows of the unit, L aux layers, T tokens of one request, D target width.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured, CaptureRequest, Done, nobody
from hiddenstore.codecs.base import fresh
from hiddenstore.errors import CaptureError, Kind

UnitTensors = tuple[np.ndarray, Tensor, Tensor]
"""Where the states of a unit are put: token_ids int32 [N], aux bfloat16 [L, N, D], final bfloat16 [R, D]."""


class Assembly:
    """The states of one unit while its requests come in."""

    def __init__(
        self,
        requests: Sequence[CaptureRequest],
        layers: int,
        width: int,
        tensors: UnitTensors | None = None,
        done: Done = nobody,
    ) -> None:
        """``tensors`` None: new memory of this process. ``done`` as ``CaptureEngine.capture`` has it."""
        self._done = done
        self._requests = requests
        self._starts = list(accumulate((len(request.input_ids) for request in requests), initial=0))
        self._final_starts = list(accumulate((len(request.final_rows) for request in requests), initial=0))
        self._missing = set(range(len(requests)))
        self._next: dict[int, int] = {}
        tokens, rows = self._starts[-1], self._final_starts[-1]
        self._token_ids, self._aux, self._final = tensors or (
            np.empty(tokens, dtype=np.int32),
            fresh((layers, tokens, width), torch.bfloat16),
            fresh((rows, width), torch.bfloat16),
        )

    def put(self, index: int, token_ids: np.ndarray, aux: Tensor, final: Tensor, next_token: int | None = None) -> None:
        """Take the states of request ``index``: token_ids int [T] as run; aux [L, T, D]; final [T, D], any dtype.
        Raises CaptureError: ``engine-tokens``, ``engine-shape``, ``engine-request`` (answered twice)."""
        request, where = self._requests[index], f"request {index} of {len(self._requests)}"
        tokens = len(request.input_ids)
        self._require_missing(index)
        if not np.array_equal(token_ids, request.input_ids):
            raise CaptureError(
                f"the engine ran {len(token_ids)} tokens for {where} that are not the {tokens} it was given",
                kind=Kind.ENGINE_TOKENS,
            )
        layers, _, width = self._aux.shape
        for name, states, expected in (("aux", aux, (layers, tokens, width)), ("final", final, (tokens, width))):
            if tuple(states.shape) != expected:
                raise CaptureError(
                    f"the engine gave {name} states {list(states.shape)} for {where}, expected {list(expected)}; fewer "
                    f"positions than tokens are what a prefix cache or a chunked prefill leaves behind",
                    kind=Kind.ENGINE_SHAPE,
                )
        start, final_start = self._starts[index], self._final_starts[index]
        self._token_ids[start : start + tokens] = token_ids
        self._aux[:, start : start + tokens].copy_(aux)
        rows = torch.from_numpy(request.final_rows.astype(np.int64)).to(final.device)
        self._final[final_start : final_start + len(rows)].copy_(final[rows])
        self.note(index, next_token)

    def note(self, index: int, next_token: int | None) -> None:
        """Count request ``index``, whose states are in place; CaptureError ``engine-request`` if they were before."""
        self._require_missing(index)
        self._missing.remove(index)
        self._done(len(self._requests[index].input_ids))
        rows = self._requests[index].final_rows
        if next_token is not None and len(rows) and int(rows[-1]) == len(self._requests[index].input_ids) - 1:
            self._next[self._final_starts[index] + len(rows) - 1] = next_token

    def _require_missing(self, index: int) -> None:
        if index not in self._missing:
            where = f"request {index} of {len(self._requests)}"
            raise CaptureError(f"the engine answered {where} twice", kind=Kind.ENGINE_REQUEST)

    def captured(self) -> Captured:
        """The whole unit. Raises CaptureError ``engine-request``: requests that the engine never answered."""
        if self._missing:
            first = min(self._missing)
            raise CaptureError(
                f"the engine never answered {len(self._missing)} of {len(self._requests)} requests, first {first}",
                kind=Kind.ENGINE_REQUEST,
            )
        rows = sorted(self._next)
        tokens = torch.tensor([self._next[row] for row in rows], dtype=torch.long)
        return Captured(self._token_ids, self._aux, self._final, torch.tensor(rows, dtype=torch.long), tokens)

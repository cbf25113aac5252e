"""A dump as an engine: the states of a request are looked up where its sample was read, in place of being computed.

Shapes: N tokens of the unit, R final rows, L aux layers, D target width, T tokens of one sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured, CaptureRequest, Refusal, raise_if_stopped
from collectors.engines.dump.columns import Columns
from collectors.engines.dump.matching import rows_of
from collectors.engines.dump.peer import PeerSample, PeerSource, Unusable
from collectors.targets.load import EngineTarget
from schemas.capture import NormState
from schemas.manifest import Engine


@dataclass
class DumpEngine:
    """Hands out states of ``source``; the ``source`` of a request is a location in it.

    ``rounded`` counts samples whose states were wider than bf16.
    """

    target: EngineTarget
    source: PeerSource
    columns: Columns
    final_norm: NormState | None
    rounded: int = field(default=0, init=False)

    def describe(self) -> Engine:
        stated = self.source.stated
        return Engine(name=f"import:{self.source.name}", version=stated.version, settings=dict(stated.facts))

    def close(self) -> None:
        """Nothing outlives the process."""

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False) -> Captured:
        """States of one unit; a sample that cannot be read, or whose tokens have changed, is refused."""
        width = self.target.head.hidden_size
        tokens = sum(len(request.input_ids) for request in requests)
        aux = torch.empty((len(self.columns.aux_layers), tokens, width), dtype=torch.bfloat16)
        final = torch.empty((sum(len(request.final_rows) for request in requests), width), dtype=torch.bfloat16)
        token_ids, refusals = [np.zeros(0, np.int32)], []
        end = final_end = 0
        for index, request in enumerate(requests):
            raise_if_stopped(stop)
            rows = slice(end, end + len(request.input_ids))
            try:
                sample = self.source.read(request.source, states=True)
                states = states_of_tokens(request.input_ids, sample, self.columns, aux[:, rows])
            except Unusable as unusable:
                refusals.append(Refusal(index, unusable.reason, f"{request.source}: {unusable.detail}"))
                continue
            if states is not None:
                final_rows = slice(final_end, final_end + len(request.final_rows))
                final[final_rows] = states[torch.from_numpy(request.final_rows)]
                final_end = final_rows.stop
            token_ids.append(request.input_ids)
            end = rows.stop
            tensors = [tensor for tensor in (sample.columns, sample.final) if tensor is not None]
            self.rounded += any(tensor.dtype != torch.bfloat16 for tensor in tensors)
        nothing = torch.zeros(0, dtype=torch.long)
        return Captured(np.concatenate(token_ids), aux[:, :end], final[:final_end], nothing, nothing, tuple(refusals))


def states_of_tokens(input_ids: np.ndarray, sample: PeerSample, columns: Columns, aux: Tensor) -> Tensor | None:
    """The rows of some tokens: layers into ``aux`` bf16 [L, T, D]; the final hidden [T, D] comes back in bf16.

    Raises:
        Unusable: ``changed``, ``layers-differ``, ``wrong-width``.
    """
    rows = rows_of(sample, input_ids)
    final = None if sample.final is None else sample.final[rows]
    columns.copy(None if sample.columns is None else sample.columns[rows], final, aux)
    return None if final is None else final.to(torch.bfloat16)

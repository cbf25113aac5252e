"""The transformers engine: the target in this process, states taken by forward hooks.

Shapes: B batch, T tokens of the padded batch, N tokens of the unit, R final rows, L aux layers, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from collectors.batching import plan_batches, rope_boundary, rope_kind
from collectors.engines import Captured, CaptureRequest, EngineOptions, no_server, take_settings
from collectors.hooks import Placement, StateTap
from collectors.target import EngineTarget, LoadedTarget, LoadOptions, load_weights
from hiddenstore.errors import ConfigError, InterruptError
from schemas.capture import NormState
from schemas.manifest import Engine

CHECKED_ROWS = 2
SETTINGS = {"device_map": None, "attention": None}


class HfEngine:
    """Runs ``target.parts.backbone`` over length-bucketed batches; the LM head runs on a few checked rows only.

    Settings: ``device_map`` and ``attention``, as ``LoadOptions`` has them. A LoadedTarget is used as it is.
    """

    final_norm: NormState = "pre_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        no_server("hf", options)
        settings = take_settings("hf", options.extra, SETTINGS)
        if options.tensor_parallel != 1:
            raise ConfigError(
                "engine hf has no tensor parallelism", kind="engine-arg", hint="--device-map auto spreads the layers"
            )
        if not isinstance(target, LoadedTarget):
            target = load_weights(target.folder, LoadOptions(options.dtype, options.device, **settings))
        self.target: LoadedTarget = target
        self._options = options
        self._boundary = rope_boundary(target.config)

    def describe(self) -> Engine:
        import transformers

        attention = getattr(self.target.model.config, "_attn_implementation", None) or "unknown"
        return Engine(
            name="hf",
            version=transformers.__version__,
            versions={"torch": torch.__version__},
            settings={"attention": attention, "dtype": self.target.identity.dtype},
        )

    def close(self) -> None:
        """Nothing outlives the process."""

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False) -> Captured:
        """States of one unit; its bytes depend on the unit, the options and the machine only."""
        lengths = [len(request.input_ids) for request in requests]
        self._require_stateless_positions(max(lengths, default=0))
        places = _placements(requests, self.target.device)
        token_ids = np.empty(sum(lengths), dtype=np.int32)
        next_rows: list[Tensor] = []
        next_tokens: list[Tensor] = []
        tap = StateTap(self.target.parts, self._options.aux_layers, sum(lengths), _total_rows(places))
        with tap, torch.inference_mode():
            for batch in plan_batches(lengths, self._options.batch_tokens, self._boundary):
                if stop():
                    raise InterruptError("stopped by a signal; the open unit was dropped", kind="interrupted")
                ids = _pad([requests[i].input_ids for i in batch])
                tap.batch = [places[i] for i in batch]
                last = self._forward(torch.from_numpy(ids).to(self.target.device))
                for row, i in enumerate(batch):
                    token_ids[places[i].start : places[i].start + lengths[i]] = ids[row, : lengths[i]]
                rows, tokens = self._own_next(last, [requests[i] for i in batch], tap.batch)
                next_rows.append(rows)
                next_tokens.append(tokens)
        return Captured(token_ids, tap.aux, tap.final, torch.cat(next_rows), torch.cat(next_tokens))

    def _require_stateless_positions(self, longest: int) -> None:
        """Refuse what cannot be exact: ``dynamic`` rotary embeddings remember the longest sequence run before."""
        if self._boundary is not None and longest > self._boundary and rope_kind(self.target.config) == "dynamic":
            raise ConfigError(
                f"a sample has {longest} tokens, and beyond {self._boundary} this target's dynamic rotary embedding "
                f"depends on what was run before",
                kind="rope-dynamic",
                hint=f"hiddenstore prepare INPUT -o DATA --target T --max-tokens {self._boundary}",
            )

    def _forward(self, ids: Tensor) -> Tensor:
        """Post-norm last hidden [B, T, D] of padded ids int64 [B, T]; the hooks fire inside."""
        states: Tensor = self.target.parts.backbone(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def _own_next(
        self, last: Tensor, requests: Sequence[CaptureRequest], places: Sequence[Placement]
    ) -> tuple[Tensor, Tensor]:
        """The model's own top-1 at a few captured rows: its own norm, its own LM head. Returns int64 [C], [C].

        Scale and softcap of the logits are monotone, so the LM head alone decides the top-1.
        """
        batch_rows, positions, final_rows = [], [], []
        for row, (request, place) in enumerate(zip(requests, places, strict=True)):
            for k in _spread(len(request.final_rows)):
                batch_rows.append(row)
                positions.append(int(request.final_rows[k]))
                final_rows.append(place.final_start + k)
        picked = last[torch.tensor(batch_rows, dtype=torch.long), torch.tensor(positions, dtype=torch.long)]
        tokens = self.target.lm_head(picked).argmax(dim=-1)
        return torch.tensor(final_rows, dtype=torch.long), tokens.cpu()


def _spread(rows: int) -> list[int]:
    """Up to ``CHECKED_ROWS`` indices below ``rows``, the last one among them."""
    count = min(CHECKED_ROWS, rows)
    return sorted({rows - 1 - (k * rows) // count for k in range(count)})


def _placements(requests: Sequence[CaptureRequest], device: torch.device) -> list[Placement]:
    starts = accumulate((len(request.input_ids) for request in requests), initial=0)
    final_starts = accumulate((len(request.final_rows) for request in requests), initial=0)
    return [
        Placement(start, len(request.input_ids), final_start, len(request.final_rows), _rows(request, device))
        for request, start, final_start in zip(requests, starts, final_starts, strict=False)
    ]


def _rows(request: CaptureRequest, device: torch.device) -> Tensor | slice:
    rows = request.final_rows
    if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows.astype(np.int64)).to(device)


def _total_rows(places: Sequence[Placement]) -> int:
    return places[-1].final_start + places[-1].final_rows if places else 0


def _pad(ids: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [B, T], right-padded with the row's first token, which every vocabulary has."""
    padded = np.empty((len(ids), max(len(row) for row in ids)), dtype=np.int64)
    for out, row in zip(padded, ids, strict=True):
        out[: len(row)] = row
        out[len(row) :] = row[0]
    return padded

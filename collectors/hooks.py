"""Forward hooks that copy exactly the asked states of a unit out of the target, as bf16, while it runs.

Padding never leaves the hook, nothing is kept in the model's own dtype, and ``output_hidden_states`` (which would keep
every layer) is not used.

Shapes: B batch, T tokens of the padded batch, N tokens of the unit, R final rows of the unit, L aux layers, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collectors.families import Parts, first_tensor
from hiddenstore.codecs.base import fresh


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one row of a batch goes: aux rows ``start … start + tokens``, final rows ``final_start … + len(rows)``.

    ``rows`` int64 [r] are ascending token positions, or a slice when they are consecutive.
    """

    start: int
    tokens: int
    final_start: int
    final_rows: int
    rows: Tensor | slice


class StateTap:
    """Context manager that installs the hooks for one unit and owns its buffers.

    aux bf16 [L, N, D] and final bf16 [R, D], on the target's device. Set ``batch`` before each forward.
    """

    def __init__(self, parts: Parts, aux_layers: Sequence[int], tokens: int, final_rows: int) -> None:
        self._parts = parts
        self._layers = tuple(aux_layers)
        self._handles: list[RemovableHandle] = []
        width, device = parts.head.hidden_size, parts.head.norm_weight.device
        self.aux = fresh((len(self._layers), tokens, width), torch.bfloat16, device)
        self.final = fresh((final_rows, width), torch.bfloat16, device)
        self.batch: Sequence[Placement] = ()

    def __enter__(self) -> "StateTap":
        for slot, layer in enumerate(self._layers):
            if layer == -1:
                # The input of block 0, not the output of the embedding module: Granite scales in between.
                hook = self._parts.blocks[0].register_forward_pre_hook(self._embeddings_hook(slot), with_kwargs=True)
            else:
                hook = self._parts.blocks[layer].register_forward_hook(self._block_hook(slot))
            self._handles.append(hook)
        self._handles.append(self._parts.final_norm.register_forward_pre_hook(self._take_final))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _block_hook(self, slot: int) -> Any:
        def take(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._take(slot, first_tensor(output))

        return take

    def _embeddings_hook(self, slot: int) -> Any:
        def take(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._take(slot, first_tensor(args if args else kwargs["hidden_states"]))

        return take

    def _take(self, slot: int, states: Tensor) -> None:
        target = self.aux[slot]
        for row, place in enumerate(self.batch):
            target[place.start : place.start + place.tokens].copy_(states[row, : place.tokens])

    def _take_final(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        states = first_tensor(args)
        for row, place in enumerate(self.batch):
            if place.final_rows:
                out = self.final[place.final_start : place.final_start + place.final_rows]
                out.copy_(states[row, place.rows])

"""States that a store does not hold, brought back from those that it does: one function for every reader.

The lowest aux layer comes from the tokens through the embedding and the target's first blocks, the final hidden from
the decoded top aux layer through the last blocks. Blocks run over whole samples; the final rows are cut out after it.
What comes back is the target's to a tolerance, not to the bit: kernels of engines differ (docs/design/015).

Shapes: T tokens of a sample or pack, S stored layers that were read, L layers wanted, R final rows, D target width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from hiddenstore.errors import CaptureError, Kind
from hiddenstore.records import Record, Sample, final_row_positions
from hiddenstore.targets.blocks import TargetBlocks
from hiddenstore.targets.calibration import Slice
from hiddenstore.targets.head import HeadBundle
from schemas.capture import FINAL, CaptureSpec
from schemas.layers import field_name

TOLERANCE = 0.02
"""Of the median over rows of |h' - h| / |h|, captured states in: engines' kernels differ by half a percent."""


def layers_to_read(capture: CaptureSpec, layers: Sequence[int] | None, final: bool) -> tuple[int, ...]:
    """The stored layers, ascending, that ``layers`` (None: all) and, with ``final``, the final hidden come from."""
    wanted = {*(capture.aux_layers if layers is None else layers)}
    if final and capture.rebuilds_final:
        wanted.add(capture.aux_layers[-1])
    return tuple(layer for layer in capture.aux_layers if layer in wanted and layer in capture.stored_layers)


@dataclass(frozen=True, eq=False)
class Rebuilder:
    """What a store's readers rebuild with: embeddings on the CPU; final norm and blocks on the device of the states."""

    capture: CaptureSpec
    head: HeadBundle
    blocks: TargetBlocks

    def complete(self, record: Record, layers: Sequence[int] | None = None, final: bool = True) -> Record:
        """A record of stored states, ``layers_to_read`` of it, with all that was wanted.

        aux is bf16 [L, T, D] in the order of ``layers`` (None: all, ascending), final bf16 [R, D].
        """
        read = layers_to_read(self.capture, layers, final)
        ids, rows = torch.from_numpy(record.sample.input_ids).long(), torch.from_numpy(record.final_rows).long()
        wanted = self.capture.aux_layers if layers is None else layers
        aux = self.aux(ids, record.aux, [len(ids)], read, wanted)
        if not final or not self.capture.rebuilds_final:
            return replace(record, aux=aux)
        return replace(record, aux=aux, final=self.final(record.aux[-1], [len(ids)])[rows])

    def aux(
        self, input_ids: Tensor, stored: Tensor, lengths: Sequence[int], read: Sequence[int], layers: Sequence[int]
    ) -> Tensor:
        """bf16 [L, T, D] of ``layers``, from ``stored`` bf16 [S, T, D] of the layers ``read``.

        ``input_ids`` int64 [T] on the CPU; ``lengths`` of the samples that lie end to end.
        """
        if tuple(layers) == tuple(read):
            return stored
        places = {layer: place for place, layer in enumerate(read)}
        out = stored.new_empty((len(layers), *stored.shape[1:]))
        for slot, layer in enumerate(layers):
            if layer in places:
                out[slot] = stored[places[layer]]
                continue
            embedded = self.head.embed(input_ids).to(stored.device)
            for start, stop in pairwise(accumulate(lengths, initial=0)):
                out[slot, start:stop] = self.blocks.run(embedded[start:stop], 0, layer + 1)
        return out

    def final(self, top: Tensor, lengths: Sequence[int]) -> Tensor:
        """The final hidden bf16 [T, D] at every token, as the capture has it before or after the norm, from the top aux
        layer bf16 [T, D] of samples that lie end to end."""
        first, stop = self.capture.aux_layers[-1] + 1, self.capture.target.num_layers
        states = torch.cat([self.blocks.run(sample, first, stop) for sample in top.split(list(lengths))])
        if self.capture.final_norm == "pre_norm":
            return states
        return self.head.norm(states).to(torch.bfloat16)

    def errors(self, states: Slice, samples: Sequence[Sample]) -> tuple[dict[str, float], int]:
        """Per rebuilt field the median over rows of |h' - h| / |h|, with the captured top layer in.

        And how many samples that is of: one whose beginning the slice lacks tells nothing, nor does one without a final
        row in it where the final hidden is rebuilt.

        ``samples`` begin with those of the slice, in its order.
        """
        capture, parts, count = self.capture, dict[str, list[Tensor]](), 0
        lowest = capture.aux_layers[0]
        for rows, finals, sample in whole_samples(states, samples):
            count += not capture.rebuilds_final or finals.stop > finals.start
            if lowest not in capture.stored_layers:
                ids = torch.from_numpy(sample.input_ids[: rows.stop - rows.start]).long()
                (again,) = self.aux(ids, states.aux[:0, rows], [len(ids)], (), [lowest])
                parts.setdefault(field_name(lowest), []).append(_row_errors(again, states.aux[0, rows]))
            if capture.rebuilds_final:
                again = self.final_of(sample, states.aux[-1, rows])
                parts.setdefault(FINAL, []).append(_row_errors(again, states.final[finals]))
        errors = {name: torch.cat(rows) for name, rows in parts.items()}
        return {name: float(rows.median()) for name, rows in errors.items() if len(rows)}, count

    def final_of(self, sample: Sample, top: Tensor) -> Tensor:
        """The final rows bf16 [R, D] of the first T tokens of a sample, from its top aux layer bf16 [T, D]."""
        positions = final_row_positions(sample.loss_mask, self.capture.final)
        positions = positions[positions < len(top)].astype(np.int64)
        return self.final(top, [len(top)])[torch.from_numpy(positions).to(top.device)]

    def require_close(self, states: Slice, samples: Sequence[Sample]) -> int:
        """Refuse captured states that the blocks do not bring back: CaptureError ``cross-check``; how many samples were
        compared, as in ``errors``."""
        errors, count = self.errors(states, samples)
        for name, error in errors.items():
            if not error <= TOLERANCE:
                raise CaptureError(
                    f"{name} as the target's blocks rebuild it is {error:.1%} off what the engine computed, at most "
                    f"{TOLERANCE:.0%} is allowed: a store of rebuilt states would hold others than were captured",
                    kind=Kind.CROSS_CHECK,
                    hint="--recipe compact, which stores every layer",
                )
        return count


def whole_samples(states: Slice, samples: Sequence[Sample]) -> Iterator[tuple[slice, slice, Sample]]:
    """Aux rows, final rows and sample of those parts of a slice that begin where their sample does."""
    start = final_start = 0
    for entry, sample in zip(states.samples, samples[: len(states.samples)], strict=True):
        rows = slice(start, start + entry.tokens)
        finals = slice(final_start, final_start + entry.final_rows)
        start, final_start = rows.stop, finals.stop
        if not entry.start:
            yield rows, finals, sample


def _row_errors(again: Tensor, captured: Tensor) -> Tensor:
    norms = captured.float().norm(dim=1)
    return (again.float() - captured.float()).norm(dim=1) / norms.clamp_min(torch.finfo(torch.float32).tiny)

"""One optimizer step over a global batch, and the sums it reports.

Shapes: K depths (TTT steps, block slots or heads).
"""

import json
import math
import shlex
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hiddenstore.data import Cursor, GlobalBatch, PackedBatch
from hiddenstore.errors import CaptureError, Kind
from hiddenstore.files.documents import sha256_hex
from hiddenstore.index.table import SPLITS
from trainer.drafters.base import LossInputs
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.simulate import evaluate_packs
from trainer.losses.fused_head import StepLosses
from trainer.parallel.data_parallel import unsharded
from trainer.train.guard import MOST_IN_A_ROW
from trainer.train.log import StepMetrics
from trainer.train.state import TrainState, inputs_of, multiplies_bf16, token_batches, told_what_helps

VALIDATION_DRAFT_LEN = 3
"""The default of `hiddenstore eval`, so that the two numbers can be compared."""
VALIDATION_KEY = (0, -1)
"""What every validation of every run draws its slots by: drawn anew, the loss of the same weights changes by 1 to 2 %
on a dozen samples, and with it which checkpoint is the best."""


def steps(state: TrainState) -> Generator[tuple[GlobalBatch, StepMetrics], None, None]:
    """Train batch after batch, from where the state stands to its last step; ``state.step`` counts along. Raises
    CaptureError: the loss or the gradient is not finite, or the loss stays a spike; names the samples. The weights stay
    those of the step before; HiddenstoreError: ``another-rank``, where it was another rank that failed."""
    batches = iter(state.batches)
    while state.step < state.total_steps:
        began = time.perf_counter()
        state.begin_step()
        helps = told_what_helps(f"the packs of step {state.step + 1}", state.device)
        with helps, state.group.all_or_none():
            batch = next(batches, None)
            inputs = [] if batch is None else inputs_of(state, batch.packs)
        if batch is None and state.config.train.follow:
            state.go_to(Cursor.from_json(state.batches.state_dict()))
            batches = iter(state.batches)
            continue
        if batch is None:
            return
        with told_what_helps(f"the forward and backward of step {state.step + 1}", state.device):
            metrics = train_step(state, batch, inputs, began)
        state.step += 1
        yield batch, metrics
        # The next batch comes to a GPU while this one is still named.
        del batch, inputs


def train_step(state: TrainState, batch: GlobalBatch, inputs: Sequence[LossInputs], began: float) -> StepMetrics:
    """One update; gradients are divided by the taught slots of the global batch, over all ranks."""
    group = state.group
    denominators = state.objective.denominators(*inputs)
    totals = Totals(state.objective.depths, state.device)
    totals.count(inputs)
    group.all_reduce([denominators, totals.counts, totals.open, totals.tokens])
    state.parallel.unshard()
    with group.all_or_none():
        for pack in inputs:
            with autocast(state):
                losses = state.objective.losses(pack, denominators)
            if losses.total.requires_grad:
                losses.total.backward()
            totals.add(losses)
    group.all_reduce([totals.value, totals.sums, totals.hits])
    state.parallel.reduce_gradients()
    value = float(totals.value)
    if not math.isfinite(value):
        raise _not_finite(state, batch, f"loss {value}")
    taught = int(totals.counts.sum())
    # Where nothing is taught, the loss of zero is no measure of others, and moments alone would move the weights.
    is_accepted = not taught or state.spikes.accepts(value)
    lr, norm = state.optimizer.step(state.step, update=is_accepted and taught > 0)
    if not math.isfinite(norm):
        raise _not_finite(state, batch, f"gradient norm {norm}")
    if state.spikes.is_persistent:
        raise _stays_high(state, batch, value)
    seconds = time.perf_counter() - began
    return StepMetrics(
        step=state.step + 1,
        loss=value,
        losses=totals.mean_losses(),
        acc=totals.accuracy(),
        taught=taught,
        lr=lr,
        grad_norm=norm,
        tokens=int(totals.tokens),
        tokens_per_s=int(totals.tokens) / seconds,
        data_wait_fraction=min(1.0, batch.wait_s / seconds),
        skipped=not is_accepted,
    )


class Totals:
    """Sums over packs and ranks, per depth: int64 [K], ``sums`` fp64 [K]; ``value`` fp64 and ``tokens`` int64."""

    def __init__(self, depths: int, device: torch.device) -> None:
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(depths, dtype=torch.float64, device=device)
        self.hits, self.counts, self.open = (torch.zeros(depths, dtype=torch.int64, device=device) for _ in range(3))
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, inputs: Sequence[LossInputs]) -> None:
        for pack in inputs:
            self.counts += pack.counts
            self.open += pack.open
            self.tokens += pack.batch.tokens

    def add(self, losses: StepLosses) -> None:
        self.value += losses.value
        self.sums += losses.sums
        self.hits += losses.hits

    def mean_losses(self) -> list[float]:
        mean: list[float] = (self.sums / self.counts.clamp(min=1)).tolist()
        return mean

    def accuracy(self) -> list[float]:
        share: list[float] = (self.hits.double() / self.open.clamp(min=1)).tolist()
        return share


@torch.no_grad()
def validate(state: TrainState) -> None:
    """Walk ``validation_tokens`` of the validation split and put the result in ``state.validation``. losses, acc: per
    depth, 0 where nothing is taught; loss: mean of the others; accepted_length, per_position: of greedy chains of
    ``VALIDATION_DRAFT_LEN`` over the same text, as `evaluate` counts them, None where nothing could be drafted; text:
    digest of the samples walked, how far each is read and what teaches. Unchanged when the store has no such split, or
    nothing of it teaches."""
    most, table = state.config.data.max_tokens, state.store.catalog.table
    table = table.take(table.split == SPLITS.index("validation"))
    if not len(table):
        return
    lengths = {
        sample: min(tokens, most or tokens) for sample, tokens in zip(table.ids, table.tokens.tolist(), strict=True)
    }
    totals = Totals(state.objective.depths, state.device)
    text: list[tuple[str, int]] = []

    def validation_packs() -> Iterator[PackedBatch]:
        tokens = 0
        for batch in token_batches(state.store, state.config, state.group, state.device, validation=True):
            inputs = inputs_of(state, batch.packs)
            totals.count(inputs)
            denominators = state.objective.denominators(*inputs)
            for pack in inputs:
                with autocast(state):
                    totals.add(state.objective.losses(pack, denominators))
            if state.context is None or state.context.index == 0:
                yield from batch.packs
            text.extend((sample, lengths[sample]) for sample in batch.all_sample_ids)
            tokens += sum(lengths[sample] for sample in batch.all_sample_ids)
            if tokens >= state.config.train.validation_tokens:
                break

    use = state.in_use
    shape = DraftShape(use.within(VALIDATION_DRAFT_LEN))
    state.model.eval()
    state.model.rng_key, state.model.progress = VALIDATION_KEY, 1.0
    with unsharded(state.parallel), state.group.all_or_none():
        tally = evaluate_packs([use], validation_packs(), [shape], device=str(state.device))[0].tally
    state.model.train()
    walked = torch.tensor([tally.drafts, tally.tokens, *tally.accepted_at], device=state.device)
    state.group.all_reduce([totals.sums, totals.hits, totals.counts, totals.open, walked])
    drafts, tokens, *accepted_at = walked.tolist()
    losses = totals.mean_losses()
    taught = [loss for loss, count in zip(losses, totals.counts.tolist(), strict=True) if count]
    if not taught:
        return
    state.validation = {
        "losses": losses,
        "acc": totals.accuracy(),
        "loss": sum(taught) / len(taught),
        "accepted_length": tokens / drafts if drafts else None,
        "per_position": [count / drafts for count in accepted_at] if drafts else None,
        "text": sha256_hex(json.dumps([sorted(text), state.config.data.loss_on]).encode())[:12],
    }


def autocast(state: TrainState) -> AbstractContextManager[Any]:
    """The matrix products in bf16 where the settings ask for it; master weights stay fp32."""
    if multiplies_bf16(state.config, state.device):
        return torch.autocast(state.device.type, dtype=torch.bfloat16)
    return nullcontext()


def _verify(state: TrainState) -> str:
    return shlex.join(["hiddenstore", "verify", str(state.store.path), "--meaning"])


def _not_finite(state: TrainState, batch: GlobalBatch, what: str) -> CaptureError:
    return CaptureError(
        f"step {state.step + 1}: {what} over samples {some_of(batch.all_sample_ids)}; the weights are those of step "
        f"{state.step}",
        kind=Kind.LOSS_NOT_FINITE,
        hint=_verify(state),
    )


def _stays_high(state: TrainState, batch: GlobalBatch, value: float) -> CaptureError:
    factor, median = state.config.train.spike_factor, state.spikes.median
    return CaptureError(
        f"step {state.step + 1}: loss {value:.3f} is the last of {MOST_IN_A_ROW + 1} in a row above {factor:g} times "
        f"the median of {median:.3f}; samples {some_of(batch.all_sample_ids)}; none of them changed the weights",
        kind=Kind.LOSS_STAYS_HIGH,
        hint=f"{_verify(state)}, or {state.options.resume_command} train.spike_factor=none",
    )


def some_of(ids: Sequence[str], most: int = 8) -> str:
    """The first of a list of sample ids, and how many more there are."""
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")

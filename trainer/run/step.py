"""One optimizer step over a global batch, and the sums it reports.

Shapes: K depths (TTT steps, block slots or heads).
"""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hiddenstore.data import GlobalBatch, PackedBatch
from hiddenstore.errors import CaptureError
from trainer.drafters.base import Work
from trainer.drafting.acceptance import DraftShape
from trainer.drafting.evaluate import evaluate_packs
from trainer.objectives.losses import StepLosses
from trainer.run.run_log import StepMetrics
from trainer.run.session import Session, token_batches
from trainer.run.spikes import MOST_IN_A_ROW
from trainer.scale.context import share_of
from trainer.scale.parallel import gathered

VALIDATION_DRAFT_LEN = 3
"""As `hiddenstore eval` drafts unless told, so that the two numbers can be compared."""


def steps(session: Session) -> Generator[tuple[GlobalBatch, StepMetrics], None, None]:
    """Train batch after batch, from where the session stands to its last step; ``session.step`` counts along.

    Raises:
        CaptureError: the loss or the gradient is not finite, or the loss stays a spike; names the samples. The weights
            stay those of the step before.
        HiddenstoreError: ``another-rank``, where it was another rank that failed.
    """
    batches = iter(session.batches)
    while session.step < session.total_steps:
        began = time.perf_counter()
        session.model.moment = (session.config.train.seed, session.step)
        with session.group.together():
            batch = next(batches, None)
            works = [] if batch is None else _works(session, _here(session, batch))
        if batch is None:
            return
        metrics = train_step(session, batch, works, began)
        session.step += 1
        yield batch, metrics


def train_step(session: Session, batch: GlobalBatch, works: Sequence[Work], began: float) -> StepMetrics:
    """One update; gradients are divided by the taught slots of the global batch, whoever holds its packs."""
    group = session.group
    divisors = session.objective.divisors(*works)
    totals = Totals(session.objective.depths, session.device)
    totals.count(works)
    group.sum([divisors, totals.counts, totals.open, totals.tokens])
    session.parallel.gather()
    with group.together():
        for work in works:
            with autocast(session):
                losses = session.objective.losses(work, divisors)
            if losses.total.requires_grad:
                losses.total.backward()
            totals.add(losses)
    group.sum([totals.value, totals.sums, totals.hits])
    session.parallel.sum_gradients()
    value = float(totals.value)
    if not math.isfinite(value):
        raise _not_finite(session, batch, f"loss {value}")
    taken = session.spikes.takes(value)
    lr, norm = session.optimizer.step(session.step, update=taken)
    if not math.isfinite(norm):
        raise _not_finite(session, batch, f"gradient norm {norm}")
    if session.spikes.goes_on:
        raise _stays_high(session, batch, value)
    seconds = time.perf_counter() - began
    return StepMetrics(
        step=session.step + 1,
        loss=value,
        losses=totals.mean_losses(),
        acc=totals.accuracy(),
        taught=int(totals.counts.sum()),
        lr=lr,
        grad_norm=norm,
        tokens=int(totals.tokens),
        tokens_per_s=int(totals.tokens) / seconds,
        data_wait_fraction=min(1.0, batch.wait_s / seconds),
        skipped=not taken,
    )


class Totals:
    """Sums over packs and ranks, per depth: int64 [K], ``sums`` fp64 [K]; ``value`` fp64 and ``tokens`` int64."""

    def __init__(self, depths: int, device: torch.device) -> None:
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(depths, dtype=torch.float64, device=device)
        self.hits, self.counts, self.open = (torch.zeros(depths, dtype=torch.int64, device=device) for _ in range(3))
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, works: Sequence[Work]) -> None:
        for work in works:
            self.counts += work.counts
            self.open += work.open
            self.tokens += work.batch.tokens

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
def validate(session: Session) -> None:
    """Walk ``validation_tokens`` of the validation split and keep in ``session.validation`` what was found.

    losses, acc: per depth; loss: mean of the losses; accepted_length, per_position: of greedy chains of
    ``VALIDATION_DRAFT_LEN`` over the same text, as `evaluate` counts them, None where nothing could be drafted.
    Left as it is when the store has no such split.
    """
    lengths = {entry.id: entry.tokens for _, entry in session.store.entries if entry.split == "validation"}
    if not lengths:
        return
    totals = Totals(session.objective.depths, session.device)

    def packs() -> Iterator[PackedBatch]:
        seen = 0
        for batch in token_batches(session.store, session.config, session.group, validation=True):
            whole = _here(session, batch)
            works = _works(session, whole)
            totals.count(works)
            divisors = session.objective.divisors(*works)
            for work in works:
                with autocast(session):
                    totals.add(session.objective.losses(work, divisors))
            if session.context is None or session.context.index == 0:
                yield from whole
            seen += sum(lengths[sample] for sample in batch.all_sample_ids)
            if seen >= session.config.train.validation_tokens:
                break

    use = session.in_use
    draft_len = min(VALIDATION_DRAFT_LEN, use.kind.longest_draft(use.config) or VALIDATION_DRAFT_LEN)
    session.model.eval()
    with gathered(session.parallel), session.group.together():
        tally = evaluate_packs([use], packs(), [DraftShape(draft_len)], device=str(session.device))[0].tally
    session.model.train()
    walked = torch.tensor([tally.drafts, tally.tokens, *tally.accepted_at], device=session.device)
    session.group.sum([totals.sums, totals.hits, totals.counts, totals.open, walked])
    drafts, tokens, *accepted_at = walked.tolist()
    losses = totals.mean_losses()
    session.validation = {
        "losses": losses,
        "acc": totals.accuracy(),
        "loss": sum(losses) / len(losses),
        "accepted_length": tokens / drafts if drafts else None,
        "per_position": [count / drafts for count in accepted_at] if drafts else None,
    }


def autocast(session: Session) -> AbstractContextManager[Any]:
    """The matrix products in bf16 where the settings ask for it; master weights stay fp32."""
    precision = session.config.train.precision
    if precision == "bf16" or (precision == "auto" and session.device.type == "cuda"):
        return torch.autocast(session.device.type, dtype=torch.bfloat16)
    return nullcontext()


def _here(session: Session, batch: GlobalBatch) -> list[PackedBatch]:
    return [pack.to(session.device) for pack in batch.packs]


def _works(session: Session, packs: Sequence[PackedBatch]) -> list[Work]:
    if session.context is not None:
        # The deepest slot is taught `depths` rows on, by a row whose mask may lie one further.
        packs = [share_of(pack, session.context, session.objective.depths + 2) for pack in packs]
    return [session.objective.plan(pack) for pack in packs]


def _not_finite(session: Session, batch: GlobalBatch, what: str) -> CaptureError:
    return CaptureError(
        f"step {session.step + 1}: {what} over samples {some_of(batch.all_sample_ids)}; the weights are those of step "
        f"{session.step}",
        kind="loss-not-finite",
        hint=f"hiddenstore verify {session.store.path} --meaning",
    )


def _stays_high(session: Session, batch: GlobalBatch, value: float) -> CaptureError:
    factor, median = session.config.train.spike_factor, session.spikes.median
    return CaptureError(
        f"step {session.step + 1}: loss {value:.3f} is the last of {MOST_IN_A_ROW + 1} in a row above {factor:g} times "
        f"the median of {median:.3f}; samples {some_of(batch.all_sample_ids)}; none of them changed the weights",
        kind="loss-stays-high",
        hint=f"hiddenstore verify {session.store.path} --meaning, or {session.asked.to_resume} train.spike_factor=none",
    )


def some_of(ids: Sequence[str], most: int = 8) -> str:
    """The first of a list of sample ids, and how many more there are."""
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")

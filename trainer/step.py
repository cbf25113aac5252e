"""One optimizer step over a global batch, and the sums it reports.

Shapes: K depths (TTT steps, block slots or heads).
"""

import math
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hiddenstore.data import GlobalBatch
from hiddenstore.errors import CaptureError
from trainer.drafters.base import Work
from trainer.losses import StepLosses
from trainer.run_log import StepMetrics
from trainer.session import Session, token_batches


def steps(session: Session) -> Generator[tuple[GlobalBatch, StepMetrics], None, None]:
    """Train batch after batch, from where the session stands to its last step; ``session.step`` counts along.

    Raises:
        CaptureError: the loss or the gradient is not finite; names the samples. The weights stay those of the step
            before.
        HiddenstoreError: ``another-rank``, where it was another rank that failed.
    """
    batches = iter(session.batches)
    while session.step < session.total_steps:
        began = time.perf_counter()
        with session.group.together():
            batch = next(batches, None)
            works = [] if batch is None else _works(session, batch)
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
    with group.together():
        for work in works:
            with autocast(session):
                losses = session.objective.losses(work, divisors)
            if losses.total.requires_grad:
                losses.total.backward()
            totals.add(losses)
    group.sum([totals.value, totals.sums, totals.hits])
    group.sum_gradients(session.optimizer.named.values())
    value = float(totals.value)
    if not math.isfinite(value):
        raise _not_finite(session, batch, f"loss {value}")
    lr, norm = session.optimizer.step(session.step)
    if not math.isfinite(norm):
        raise _not_finite(session, batch, f"gradient norm {norm}")
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
    """Losses and accuracy per depth over ``validation_tokens`` of the validation split, into ``session.validation``.

    Left as it is when the store has no such split.
    """
    lengths = {entry.id: entry.tokens for _, entry in session.store.entries if entry.split == "validation"}
    if not lengths:
        return
    totals = Totals(session.objective.depths, session.device)
    seen = 0
    with session.group.together():
        for batch in token_batches(session.store, session.config, session.group, validation=True):
            works = _works(session, batch)
            totals.count(works)
            divisors = session.objective.divisors(*works)
            for work in works:
                with autocast(session):
                    totals.add(session.objective.losses(work, divisors))
            seen += sum(lengths[sample] for sample in batch.all_sample_ids)
            if seen >= session.config.train.validation_tokens:
                break
    session.group.sum([totals.sums, totals.hits, totals.counts, totals.open])
    session.validation = {"losses": totals.mean_losses(), "acc": totals.accuracy()}


def autocast(session: Session) -> AbstractContextManager[Any]:
    """The matrix products in bf16 where the settings ask for it; master weights stay fp32."""
    precision = session.config.train.precision
    if precision == "bf16" or (precision == "auto" and session.device.type == "cuda"):
        return torch.autocast(session.device.type, dtype=torch.bfloat16)
    return nullcontext()


def _works(session: Session, batch: GlobalBatch) -> list[Work]:
    return [session.objective.plan(pack.to(session.device)) for pack in batch.packs]


def _not_finite(session: Session, batch: GlobalBatch, what: str) -> CaptureError:
    named = ", ".join(batch.all_sample_ids[:8])
    more = f" and {len(batch.all_sample_ids) - 8} more" if len(batch.all_sample_ids) > 8 else ""
    return CaptureError(
        f"step {session.step + 1}: {what} over samples {named}{more}; the weights are those of step {session.step}",
        kind="loss-not-finite",
        hint=f"hiddenstore verify {session.store.path} --meaning",
    )

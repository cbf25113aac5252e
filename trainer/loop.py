"""The training loop: batches of a store in, a drafter out.

States come through TokenBatches, logits and embeddings from the head bundle; nothing else of the target is opened.
"""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenstore.errors import InterruptError
from hiddenstore.rank import Drain, drain_on_signal, from_environment
from trainer import checkpoint
from trainer.announce import announce
from trainer.group import joined
from trainer.run_folder import Asked
from trainer.run_log import METRICS, RunLog
from trainer.session import Session, save, start
from trainer.step import steps, validate


@dataclass(frozen=True)
class TrainReport:
    """How a run ended. loss, acc: of the last step; validation: last losses and acc per TTT step, empty without a
    validation split. ``was_finished``: there was nothing left to do."""

    run: Path
    checkpoint: Path
    steps: int
    loss: float
    acc: list[float]
    seconds: float
    trainable: int
    vocab_coverage: float
    validation: dict[str, list[float]] = field(default_factory=dict)
    was_finished: bool = False


def train(
    store_location: str | Path,
    run: str | Path,
    *,
    drafter: str = "eagle3",
    file: str | Path | None = None,
    words: Sequence[str] = (),
    resume: bool = False,
) -> TrainReport:
    """Train a drafter on a store into a new folder ``run``, or continue one exactly.

    Under torchrun, or srun with MASTER_ADDR and MASTER_PORT, every process calls this; the batches are those of a
    single process. Rank 0 alone writes; a resume reads ``run`` on every rank.

    Raises:
        ConfigError: a wrong setting, or a store that lacks what the drafter reads.
        ConflictError: ``run`` exists and ``resume`` is not set, or it was trained on another store.
        NotFoundError: no store, or nothing to resume.
        CaptureError: the loss or the gradient is not finite; names the samples.
        InterruptError: a signal asked any rank to stop; a checkpoint was saved.
        HiddenstoreError: ``another-rank``, another rank failed and said why.
    """
    asked = Asked(store_location, Path(run), drafter, file, tuple(words), resume)
    with joined(from_environment()) as group, drain_on_signal() as drain:
        session = start(asked, group)
        began = time.monotonic()
        if session.step >= session.total_steps:
            return _report(session, _last_metrics(session.path), began, was_finished=True)
        if group.is_first:
            announce(session)
        return _train(session, drain, began)


def _train(session: Session, drain: Drain, began: float) -> TrainReport:
    config, total = session.config.train, session.total_steps
    last: dict[str, Any] = {}
    writes = session.group.is_first
    log = RunLog(session.path, total, start=session.step, tensorboard=config.tensorboard, writes=writes)
    with log, closing(steps(session)) as each:
        for batch, metrics in each:
            last = metrics.__dict__
            log.step(metrics)
            stop = session.group.any(drain.requested)
            at_end = session.step == total
            if config.validate_every and (at_end or (session.step % config.validate_every == 0 and not stop)):
                validate(session)
                log.validation(session.step, session.validation)
            if stop or at_end or (config.checkpoint_every and session.step % config.checkpoint_every == 0):
                log.sync()
                save(session, batch.cursor)
            if stop and not at_end:
                raise InterruptError(
                    f"stopped by {drain.signal_name or 'another rank'} after step {session.step} of {total}; "
                    "a checkpoint is saved",
                    kind="interrupted",
                    hint=session.asked.to_resume,
                )
    return _report(session, last, began)


def _report(session: Session, last: dict[str, Any], began: float, was_finished: bool = False) -> TrainReport:
    return TrainReport(
        run=session.path,
        checkpoint=session.path / checkpoint.FOLDER / f"step-{session.step}",
        steps=session.step,
        loss=float(last.get("loss", "nan")),
        acc=list(last.get("acc", [])),
        seconds=time.monotonic() - began,
        trainable=sum(parameter.numel() for parameter in session.optimizer.named.values()),
        vocab_coverage=session.vocab_coverage,
        validation=session.validation,
        was_finished=was_finished,
    )


def _last_metrics(run: Path) -> dict[str, Any]:
    path = run / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return next((line for line in reversed(found) if "loss" in line), {})

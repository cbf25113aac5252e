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

from hiddenstore.data import GlobalBatch
from hiddenstore.errors import ConfigError, InterruptError
from hiddenstore.rank import Drain, drain_on_signal, from_environment
from trainer.run import checkpoint
from trainer.run.announce import announce
from trainer.run.run_folder import Asked
from trainer.run.run_log import METRICS, RunLog
from trainer.run.session import Session, save, start
from trainer.run.step import some_of, steps, validate
from trainer.scale.group import joined


@dataclass(frozen=True)
class TrainReport:
    """How a run ended. loss, acc: of the last step; validation: the last one (`step.validate`), empty without a
    validation split; best: the checkpoint that validated best, if it was kept; skipped_steps: loss spikes.
    ``was_finished``: there was nothing left to do."""

    run: Path
    checkpoint: Path
    steps: int
    loss: float
    acc: list[float]
    seconds: float
    trainable: int
    vocab_coverage: float
    validation: dict[str, Any] = field(default_factory=dict)
    best: Path | None = None
    skipped_steps: int = 0
    stopped_early: bool = False
    was_finished: bool = False


def train(
    store_location: str | Path,
    run: str | Path,
    *,
    drafter: str | None = None,
    file: str | Path | None = None,
    words: Sequence[str] = (),
    resume: bool = False,
) -> TrainReport:
    """Train a drafter on a store into a new folder ``run``, or continue one exactly.

    ``file`` is YAML settings or the name of a recipe; ``drafter`` is eagle3 when neither it nor the words say.

    Under torchrun, or srun with MASTER_ADDR and MASTER_PORT, every process calls this; the batches are those of a
    single process. Rank 0 alone writes; a resume reads ``run`` on every rank.

    Raises:
        ConfigError: a wrong setting, or a store that lacks what the drafter reads.
        ConflictError: ``run`` exists and ``resume`` is not set, or it was trained on another store.
        NotFoundError: no store, or nothing to resume.
        CaptureError: the loss or the gradient is not finite, or the loss stays a spike; names the samples.
        InterruptError: a signal asked any rank to stop; a checkpoint was saved.
        HiddenstoreError: ``another-rank``, another rank failed and said why.
    """
    asked = Asked(store_location, Path(run), drafter, file, tuple(words), resume)
    with joined(from_environment()) as group, drain_on_signal() as drain:
        session = start(asked, group)
        began = time.monotonic()
        _check_validation(session)
        if session.step >= session.total_steps or session.standing.is_out_of_patience:
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
            if metrics.skipped:
                log.skip(session.step, _skip_text(session, metrics.loss, batch), batch.all_sample_ids)
            stop = session.group.any(drain.requested)
            at_end = session.step == total
            is_best = False
            if config.validate_every and (at_end or session.step % config.validate_every == 0):
                validate(session)
                is_best = session.standing.add(session.step, session.validation)
                log.validation(session.step, session.validation, _validation_text(session, is_best))
            at_end = at_end or session.standing.is_out_of_patience
            is_due = config.checkpoint_every and session.step % config.checkpoint_every == 0
            if stop or at_end or is_best or is_due:
                log.sync()
                save(session, batch.cursor)
            if stop and not at_end:
                raise InterruptError(
                    f"stopped by {drain.signal_name or 'another rank'} after step {session.step} of {total}; "
                    "a checkpoint is saved",
                    kind="interrupted",
                    hint=session.asked.to_resume,
                )
            if at_end:
                break
    return _report(session, last, began)


def _skip_text(session: Session, loss: float, batch: GlobalBatch) -> str:
    median = session.spikes.median
    assert median is not None
    return (
        f"step {session.step:,} skipped: its loss of {loss:.3f} is {loss / median:.1f} times the median of the last "
        f"ones; samples {some_of(batch.all_sample_ids, most=3)} ({METRICS} has all)"
    )


def _validation_text(session: Session, is_best: bool) -> str:
    found = session.validation
    if not found:
        return ""
    accepted = "" if found["accepted_length"] is None else f", accepted length {found['accepted_length']:.3f}"
    mark = " (kept as best)" if is_best else ""
    return f"step {session.step:,}: validation loss {found['loss']:.4f} (mean over depths){accepted}{mark}"


def _check_validation(session: Session) -> None:
    """Refuse to wait for validations that never come."""
    if session.config.train.patience is None:
        return
    if not any(entry.split == "validation" for _, entry in session.store.entries):
        raise ConfigError(
            f"train.patience waits for validations, but {session.store.path} holds no validation samples",
            kind="validation-missing",
            hint="hiddenstore prepare INPUT -o DATA --target T --val 1%",
        )


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
        best=_best(session),
        skipped_steps=session.spikes.skipped,
        stopped_early=session.step < session.total_steps and session.standing.is_out_of_patience,
        was_finished=was_finished,
    )


def _best(session: Session) -> Path | None:
    folders = [session.path / checkpoint.FOLDER / name for name in session.standing.kept]
    return next((folder for folder in folders if folder.is_dir()), None)


def _last_metrics(run: Path) -> dict[str, Any]:
    path = run / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return next((line for line in reversed(found) if "loss" in line), {})

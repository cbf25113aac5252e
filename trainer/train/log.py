"""The log of a run: ``metrics.jsonl``, a live line, the trackers that ``train.tracker`` names; and its curves, read."""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from hiddenstore.console.progress import Progress
from hiddenstore.errors import ConflictError, CorruptionError, Kind
from hiddenstore.files.documents import foreign_json
from trainer.train.track import Tracked

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. loss: weighted total; losses, acc: per depth, acc over every slot the mask admits (a token
    off the draft vocabulary is a miss); taught: slots in the loss, without which the weights stayed; grad_norm: before
    it is clipped; skipped: a spike, so the weights stayed."""

    step: int
    loss: float
    losses: list[float]
    acc: list[float]
    taught: int
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    data_wait_fraction: float
    skipped: bool = False


class RunLog:
    """Appends to the run's metrics; on resume, lines after the step resumed from are dropped first. Only rank 0
    ``writes``; the log of another rank is silent."""

    def __init__(
        self, run: Path, total_steps: int, *, start: int, clip: float, tracked: Tracked | None, writes: bool
    ) -> None:
        self.path, self._clip, self._tracked = run / METRICS, clip, tracked
        self._file: TextIO | None = None
        if not writes:
            return
        self._truncate(start)
        self._file = self.path.open("a", encoding="utf-8")
        self._progress = Progress("train", total=total_steps, unit="steps", start=start)

    def __enter__(self) -> Self:
        if self._file is not None:
            self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        self._progress.__exit__(kind, error, trace)
        self._file.close()
        if self._tracked is not None:
            self._tracked.close()

    def step(self, metrics: StepMetrics) -> None:
        """Record one optimizer step."""
        if self._file is None:
            return
        self._line(metrics.__dict__)
        shown = {
            "loss": f"{metrics.loss:.3f}",
            "acc": "/".join(f"{a:.2f}" for a in metrics.acc),
            "tok/s": f"{metrics.tokens_per_s:,.0f}",
            "wait": f"{metrics.data_wait_fraction:.0%}",
            "lr": f"{metrics.lr:.1e}",
            "gradient norm": _norm_text(metrics.grad_norm, self._clip),
        }
        self._progress.advance(1, **shown)
        if self._tracked is not None and metrics.taught:
            names = ("loss", "lr", "grad_norm", "tokens_per_s", "data_wait_fraction")
            values = {f"train/{name}": getattr(metrics, name) for name in names}
            values |= {f"train/acc@{depth}": acc for depth, acc in enumerate(metrics.acc, 1)}
            self._tracked.log(values, metrics.step)

    def epoch(self, step: int, epoch: int, samples: int) -> None:
        """Record that ``step`` is the first of an epoch, counted from 0, over what the store holds now."""
        if self._file is None:
            return
        self._line({"step": step, "epoch": epoch, "samples": samples})
        self._progress.log(f"epoch {epoch + 1:,} begins: the store holds {samples:,} samples now")

    def skip(self, step: int, text: str, samples: Sequence[str]) -> None:
        """Record that ``step`` changed nothing, and the samples of its batch."""
        if self._file is None:
            return
        self._line({"step": step, "skipped_samples": list(samples)})
        self._progress.log(text)

    def validation(self, step: int, values: Mapping[str, Any], text: str) -> None:
        """Record a validation pass after ``step`` steps (`trainer.train.step.validate`); nothing when empty."""
        if self._file is None or not values:
            return
        self._line({"step": step, "validation": dict(values)})
        self._progress.log(text)
        if self._tracked is not None:
            length = values["accepted_length"]
            shown = {} if length is None else {"validation/accepted_length": length}
            for depth, (loss, hit) in enumerate(zip(values["losses"], values["acc"], strict=True), 1):
                shown |= {f"validation/loss@{depth}": loss, f"validation/acc@{depth}": hit}
            self._tracked.log(shown, step)

    def sync(self) -> None:
        """Make what was written durable; called before a checkpoint is published."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _line(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _truncate(self, start: int) -> None:
        if not self.path.exists():
            return
        if not self.path.is_file():
            problem = f"{self.path} is no file, and a run writes its metrics there"
            raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint=shlex.join(["rm", "-r", str(self.path)]))
        size = 0
        with self.path.open("rb") as file:
            for line in file:
                # A kill may leave half a line; it belongs to a step that is redone.
                if not line.endswith(b"\n") or self._step_of(line) > start:
                    break
                size += len(line)
        os.truncate(self.path, size)

    def _step_of(self, line: bytes) -> int:
        try:
            return int(foreign_json(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CorruptionError(
                f"{self.path} holds a line that is no step: {line[:80]!r}", kind=Kind.RUN_CORRUPT, path=str(self.path)
            ) from error


def _norm_text(norm: float, clip: float) -> str:
    """``4,236 (clip 1)``: large norms of raw gradients are usual, as aux states have channels of great size."""
    shown = f"{norm:,.2f}" if norm < 100 else f"{norm:,.0f}"
    return shown if norm <= clip else f"{shown} (clip {clip:g})"


OVERFIT = 1.02
"""So many times its least is the validation loss of a run that overfits; less is noise."""


@dataclass
class Curves:
    """Lines of the log by what they tell: ``steps`` as `StepMetrics`; ``validations`` with their step; skips."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0

    @property
    def taught(self) -> list[dict[str, Any]]:
        """The steps that taught something: the loss of another is zero, and no measure."""
        return [step for step in self.steps if step.get("taught") != 0]

    @property
    def seconds(self) -> float:
        """What its steps took."""
        return sum(step_seconds(step) for step in self.steps)

    @property
    def wait_share(self) -> float:
        """Share of that time in which a step waited for data."""
        waited = sum(step_seconds(step) * step["data_wait_fraction"] for step in self.steps)
        return waited / self.seconds if self.seconds else 0.0

    def overfit(self, step: int) -> str | None:
        """What to say of the weights after ``step`` steps where an earlier validation of the same text was better; else
        None."""
        until = [one for one in self.validations if one["step"] <= step]
        # Validations of a program that named no text are of the first one named, as `BestCheckpoints` takes them.
        first = next((text for one in until if (text := one.get("text"))), None)
        until = [one for one in until if one.get("text", first) == until[-1].get("text", first)]
        best = min(until, key=_loss, default=None)
        if best is None or _loss(until[-1]) <= OVERFIT * _loss(best):
            return None
        return (
            f"validation loss was {best['loss']:.3f} at step {best['step']:,} and is {until[-1]['loss']:.3f} at step "
            f"{until[-1]['step']:,}: it overfits; more data helps, and eval --best judges the earlier weights"
        )


def _loss(validation: dict[str, Any]) -> float:
    loss = float(validation["loss"])
    return loss if math.isfinite(loss) else math.inf


def step_seconds(step: dict[str, Any]) -> float:
    """What a step took."""
    return float(step["tokens"] / step["tokens_per_s"]) if step["tokens_per_s"] else 0.0


def read_curves(run: Path) -> Curves:
    """The log of a run; empty where it has none. A last line that is not complete yet is left out. Raises
    CorruptionError: ``run-corrupt``, a line is no step."""
    curves, path = Curves(), run / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            row = foreign_json(line)
            if "validation" in row:
                _require(row["validation"], ("loss",), ("losses", "acc"))
                curves.validations.append({"step": row["step"], "accepted_length": None, **row["validation"]})
            elif "skipped_samples" in row:
                curves.skipped += 1
            elif "loss" in row:
                _require(row, _NUMBERS, ("losses", "acc"))
                curves.steps.append(row)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(
                f"{path}:{number} is no step: {line[:80]!r}", kind=Kind.RUN_CORRUPT, path=str(path)
            ) from error
    return curves


_NUMBERS = ("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait_fraction")


def _require(row: Mapping[str, Any], numbers: Sequence[str], lists: Sequence[str]) -> None:
    """KeyError or TypeError for a row that lacks a number or a list."""
    kinds = [(row[name], int | float) for name in numbers] + [(row[name], list) for name in lists]
    if not all(isinstance(value, kind) for value, kind in kinds):
        raise TypeError("a member is of another kind")

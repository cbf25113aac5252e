"""What a run has recorded in ``metrics.jsonl``, read back, and what it says about the run. No torch."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenstore.errors import CorruptionError, Kind
from trainer.train.log import METRICS

OVERFIT = 1.02
"""So many times its least is the validation loss of a run that overfits; less is noise."""


@dataclass
class Curves:
    """Lines of the log by what they tell: ``steps`` as `StepMetrics`; ``validations`` with their step; skips."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0

    @property
    def seconds(self) -> float:
        """What its steps took."""
        return sum(step_seconds(step) for step in self.steps)

    @property
    def wait_share(self) -> float:
        """Share of that time in which a step waited for data."""
        waited = sum(step_seconds(step) * step["data_wait_fraction"] for step in self.steps)
        return waited / self.seconds if self.seconds else 0.0

    def best(self) -> dict[str, Any] | None:
        """The validation with the least loss."""
        return min(self.validations, key=_loss, default=None)

    def overfit(self, step: int) -> str | None:
        """What to say of the weights after ``step`` steps where an earlier validation was better; else None."""
        until = [one for one in self.validations if one["step"] <= step]
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
            row = json.loads(line)
            if "validation" in row:
                curves.validations.append({"step": row["step"], **row["validation"]})
            elif "skipped_samples" in row:
                curves.skipped += 1
            elif "loss" in row:
                step_seconds(row)
                curves.steps.append(row)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(
                f"{path}:{number} is no step: {line[:80]!r}", kind=Kind.RUN_CORRUPT, path=str(path)
            ) from error
    return curves

"""What guards a run: which checkpoints validated best, and which steps are loss spikes.

A step whose loss is far above the recent ones changes nothing and names its samples. Both states lie in every
checkpoint, so a resume judges as the run would have.
"""

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any

from pydantic import Field

from schemas.base import Document
from trainer.config import LoopConfig


class BestState(Document):
    """What a checkpoint keeps of the best ones. best: validated value by checkpoint name; since: validations since the
    best one; by: the measure they are judged by; text: digest of what was validated."""

    by: str = "loss"
    text: str | None = None
    best: dict[str, float] = Field(default_factory=dict)
    since: int = 0

    def ranked(self) -> list[str]:
        """Names, the best first; of equals the older."""
        sign = -1 if self.by == "accepted_length" else 1
        return sorted(self.best, key=lambda name: (sign * self.best[name], int(name.rpartition("-")[2])))


class BestCheckpoints:
    """Ranks every validation once. Values of another measure than the settings name are forgotten, and those of another
    part of the split than the last one's: a resume may have changed ``train.validation_tokens``. A state that names no
    text, as of a program that named none, is one of the text validated next."""

    def __init__(self, settings: LoopConfig, state: BestState | None = None) -> None:
        self._settings = settings
        is_comparable = state is not None and state.by == settings.best_by
        self.state = state if state is not None and is_comparable else BestState(by=settings.best_by)

    def add(self, step: int, validation: Mapping[str, Any]) -> bool:
        """Whether the checkpoint of ``step`` stays as one of the best; no value, no judgement. A value that is not
        finite is no better one."""
        value = validation.get(self._settings.best_by)
        if value is None:
            return False
        text = validation.get("text")
        if self.state.text not in (None, text):
            self.state = BestState(by=self._settings.best_by)
        self.state = self.state.model_copy(update={"text": text})
        if not isfinite(value):
            self.state = self.state.model_copy(update={"since": self.state.since + 1})
            return False
        name = f"step-{step}"
        candidates = self.state.model_copy(update={"best": {**self.state.best, name: float(value)}})
        top = candidates.ranked()[: max(1, self._settings.keep_best)]
        since = 0 if top[0] == name or not self.state.best else self.state.since + 1
        best = {other: candidates.best[other] for other in top}
        self.state = candidates.model_copy(update={"best": best, "since": since})
        return name in top and self._settings.keep_best > 0

    @property
    def is_out_of_patience(self) -> bool:
        patience = self._settings.patience
        return patience is not None and self.state.since >= patience

    @property
    def names(self) -> list[str]:
        """Checkpoints that stay beside the newest, the best first."""
        return self.state.ranked() if self._settings.keep_best else []


WINDOW = 100
"""Accepted losses in the running median."""
ENOUGH = 20
"""Losses before anything is judged: the first ones of a run fall too fast."""
MOST_IN_A_ROW = 5
"""A loss that stays high is no spike, and skipping would go on for ever."""


class SpikeState(Document):
    """What a checkpoint keeps of the guard. losses: the last accepted, oldest first; skipped: spikes in all; in_a_row:
    spikes up to now."""

    losses: tuple[float, ...] = ()
    skipped: int = 0
    in_a_row: int = 0


class SpikeGuard:
    """Judges every loss once, in the order of the steps. ``factor`` None accepts them all."""

    def __init__(self, factor: float | None, state: SpikeState | None = None) -> None:
        state = state or SpikeState()
        self.factor, self.skipped, self.in_a_row = factor, state.skipped, state.in_a_row
        self._losses = deque(state.losses, WINDOW)

    @property
    def state(self) -> SpikeState:
        return SpikeState(losses=tuple(self._losses), skipped=self.skipped, in_a_row=self.in_a_row)

    @property
    def median(self) -> float | None:
        """Of the losses accepted lately; None while they are too few to judge by."""
        return median(self._losses) if len(self._losses) >= ENOUGH else None

    @property
    def is_persistent(self) -> bool:
        """Whether the loss has stayed high for longer than a spike does."""
        return self.in_a_row > MOST_IN_A_ROW

    def accepts(self, loss: float) -> bool:
        """Whether the step of this loss may change the weights."""
        middle = self.median
        if self.factor is not None and middle is not None and loss > self.factor * middle:
            self.skipped += 1
            self.in_a_row += 1
            return False
        self._losses.append(loss)
        self.in_a_row = 0
        return True

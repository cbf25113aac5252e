"""The loss-spike guard: a step whose loss stands far above the recent ones changes nothing and names its samples.

Its memory is a function of the losses alone and lies in every checkpoint, so a resume judges as the run would have.
"""

from collections import deque
from statistics import median

from schemas.base import Document

WINDOW = 100
"""Losses the running median is taken over; skipped ones are not among them."""
ENOUGH = 20
"""Losses before anything is judged: the first ones of a run fall too fast."""
MOST_IN_A_ROW = 5
"""A loss that stays high is no spike, and skipping would go on for ever."""


class SpikeState(Document):
    """What a checkpoint keeps. losses: the last taken, oldest first; skipped: steps in all; in_a_row: up to now."""

    losses: tuple[float, ...] = ()
    skipped: int = 0
    in_a_row: int = 0


class SpikeGuard:
    """Judges every loss once, in the order of the steps. ``factor`` None takes them all."""

    def __init__(self, factor: float | None, state: SpikeState | None = None) -> None:
        state = state or SpikeState()
        self.factor, self.skipped, self.in_a_row = factor, state.skipped, state.in_a_row
        self._losses = deque(state.losses, WINDOW)

    @property
    def state(self) -> SpikeState:
        return SpikeState(losses=tuple(self._losses), skipped=self.skipped, in_a_row=self.in_a_row)

    @property
    def median(self) -> float | None:
        """Of the losses taken lately; None while they are too few to judge by."""
        return median(self._losses) if len(self._losses) >= ENOUGH else None

    @property
    def goes_on(self) -> bool:
        """Whether the loss has stayed high for longer than a spike does."""
        return self.in_a_row > MOST_IN_A_ROW

    def takes(self, loss: float) -> bool:
        """Whether the step of this loss may change the weights."""
        middle = self.median
        if self.factor is not None and middle is not None and loss > self.factor * middle:
            self.skipped += 1
            self.in_a_row += 1
            return False
        self._losses.append(loss)
        self.in_a_row = 0
        return True

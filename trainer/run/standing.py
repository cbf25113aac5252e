"""Which validated steps are the best so far, and whether the run has waited long enough for a better one."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from schemas.base import Document
from trainer.config import LoopConfig


class StandingState(Document):
    """What a checkpoint keeps. best: validated value of the best steps by checkpoint name; since: validations since the
    best one; by: what they are judged by."""

    by: str = "loss"
    best: dict[str, float] = Field(default_factory=dict)
    since: int = 0

    def ranked(self) -> list[str]:
        """Names, the best first; of equals the older."""
        sign = -1 if self.by == "accepted_length" else 1
        return sorted(self.best, key=lambda name: (sign * self.best[name], int(name.rpartition("-")[2])))


class Standing:
    """Judges every validation once. Values judged by another measure than the settings name are forgotten."""

    def __init__(self, settings: LoopConfig, state: StandingState | None = None) -> None:
        self._settings = settings
        known = state is not None and state.by == settings.best_by
        self.state = state if state is not None and known else StandingState(by=settings.best_by)

    def add(self, step: int, validation: Mapping[str, Any]) -> bool:
        """Whether the checkpoint of ``step`` is to be kept as one of the best; no value, no judgement."""
        value = validation.get(self._settings.best_by)
        if value is None:
            return False
        name = f"step-{step}"
        before = self.state.ranked()
        seen = self.state.model_copy(update={"best": {**self.state.best, name: float(value)}})
        kept = seen.ranked()[: max(1, self._settings.keep_best)]
        since = 0 if kept[0] == name or not before else self.state.since + 1
        best = {known: seen.best[known] for known in kept}
        self.state = StandingState(by=self._settings.best_by, best=best, since=since)
        return name in kept and self._settings.keep_best > 0

    @property
    def is_out_of_patience(self) -> bool:
        patience = self._settings.patience
        return patience is not None and self.state.since >= patience

    @property
    def kept(self) -> list[str]:
        """Checkpoints that stay beside the newest, the best first."""
        return self.state.ranked() if self._settings.keep_best else []

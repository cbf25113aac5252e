"""Repairs whose loss is accepted whatever it is: first the plan, then the number that it gives."""

from pathlib import Path

from hiddenstore.care.repair import Repair, repair
from hiddenstore.fs.seam import Filesystem


def repair_all(place: str | Path | Filesystem) -> Repair:
    """What a repair did."""
    return repair(place, dry_run=False, accept_loss=repair(place).dropped)


def repair_words(place: str | Path) -> list[str]:
    """The command that a plan ends with."""
    return ["repair", str(place), "-y", "--accept-loss", str(repair(place).dropped)]

"""What each worker of a launched job did, for people and for scripts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

# More workers than this are told by their least, middle and most busy one.
LISTED = 8


@dataclass
class WorkerReport:
    """One worker, all its processes together when some were lost.

    ``seconds`` of wall time since it was first ready, of which ``forward_s`` ran the target and ``wait_s`` waited for
    the unit before to be written; the rest is reading, round trips, and starting again after a loss.
    """

    index: int
    hosts: list[str] = field(default_factory=list)
    units: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0
    wait_s: float = 0.0
    losses: int = 0

    @property
    def forward_share(self) -> float:
        return self.forward_s / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.seconds if self.seconds else 0.0


def documents(workers: Sequence[WorkerReport]) -> list[dict[str, object]]:
    """The workers as ``collect --json`` has them."""
    return [
        {
            "worker": worker.index,
            "hosts": worker.hosts,
            "units": worker.units,
            "tokens": worker.tokens,
            "seconds": round(worker.seconds, 3),
            "forward_s": round(worker.forward_s, 3),
            "wait_s": round(worker.wait_s, 3),
            "forward_share": round(worker.forward_share, 4),
            "wait_share": round(worker.wait_share, 4),
            "losses": worker.losses,
        }
        for worker in workers
    ]


def lines(workers: Sequence[WorkerReport]) -> list[tuple[str, str]]:
    """The workers as ``collect`` prints them."""
    lost = sum(worker.losses for worker in workers)
    return [
        ("workers", f"{len(workers)}, {lost} lost and replaced" if lost else str(len(workers))),
        ("units each", shares([worker.units for worker in workers])),
        ("target", f"{shares([100 * worker.forward_share for worker in workers])} % of each worker's time"),
        ("waiting", f"{shares([100 * worker.wait_share for worker in workers])} % of each worker's time, for writes"),
    ]


def shares(values: Sequence[float]) -> str:
    """``91/88/90``; of many only the least, the middle and the most: ``61…90…93``.

    >>> shares([91.2, 88.0]), shares(range(20))
    ('91/88', '0…10…19')
    """
    if len(values) <= LISTED:
        return "/".join(f"{value:.0f}" for value in values)
    ordered = sorted(values)
    return "…".join(f"{ordered[at]:.0f}" for at in (0, len(ordered) // 2, -1))

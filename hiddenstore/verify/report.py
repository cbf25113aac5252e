"""What a verification says."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hiddenstore.errors import HiddenstoreError

Depth = Literal["structure", "bytes", "meaning"]
DEPTHS: tuple[Depth, ...] = ("structure", "bytes", "meaning")

Advance = Callable[[int], None]
Begin = Callable[[str, int, str], Advance]
"""Told of every part that begins: its name, how much there is to do, and of what; gives what is told the progress."""


def unseen(label: str, total: int, unit: str) -> Advance:
    """The ``Begin`` of who does not look."""
    return lambda _done: None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: a stable kebab-case kind, the file or folder, the samples it affects, and why."""

    kind: str
    path: str
    samples: tuple[str, ...]
    detail: str

    @classmethod
    def of(cls, error: HiddenstoreError, path: str = "", samples: tuple[str, ...] = ()) -> "Finding":
        """An error met while looking, as a finding."""
        affected = tuple(getattr(error, "samples", ()) or samples)
        return cls(error.kind, getattr(error, "path", "") or path, affected, error.message)


@dataclass
class Report:
    """``findings`` make a store bad; ``notes`` are worth knowing (orphans, duplicates, what could not be decided).

    ``stock_samples``: how many were compared with what stock software reads. ``sample_share``: which share of the
    samples ``meaning`` looked at.
    """

    depth: Depth
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    units: int = 0
    samples: int = 0
    files: int = 0
    bytes_checked: int = 0
    samples_checked: int = 0
    sample_share: float = 0.0
    stock_samples: int = 0
    measures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def affected(self) -> list[str]:
        """Ids of every sample named by a finding, each once."""
        return list(dict.fromkeys(name for finding in self.findings for name in finding.samples))

    @property
    def kinds(self) -> dict[str, int]:
        """How often each kind was found."""
        return dict(Counter(finding.kind for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """The members of ``hiddenstore.verify/1`` without its schema name."""
        return {"ok": self.ok, **asdict(self)}

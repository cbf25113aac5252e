"""What an import did, counted as it goes."""

from collections import Counter
from dataclasses import dataclass, field

from collectors.importers.probe import Evidence
from schemas.capture import NormState


@dataclass
class ImportReport:
    """What this run did. ``rounded`` samples were wider than bf16; ``padding`` rows were left behind."""

    store: str
    peer: str
    explained: str = ""
    inputs: list[str] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)
    final_norm: NormState | None = None
    units: int = 0
    samples: int = 0
    tokens: int = 0
    bytes_stored: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    resumed_units: int = 0
    pending_units: int = 0
    padding: int = 0
    rounded: int = 0
    deleted_files: int = 0
    kept_files: int = 0
    seconds: float = 0.0

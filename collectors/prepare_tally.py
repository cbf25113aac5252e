"""What prepare counts while batches pass: samples, tokens, duplicates, rejects, and each source's part of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collectors.mix import MixedSource
from collectors.prepare_batches import SampleBatch
from collectors.rows import Problem
from schemas.prepared import RejectCount, SourceCount

EXAMPLES_PER_REASON = 3


@dataclass
class Tally:
    """Counts of one ``prepare``; ``seen`` holds the 16 bytes of every sample id."""

    rows: int = 0
    samples: int = 0
    validation: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    cut: int = 0
    duplicates: int = 0
    reasoning_lost: int = 0
    read: Counter[str] = field(default_factory=Counter)
    by_source: dict[str, list[int]] = field(default_factory=dict)
    rejects: dict[str, list[int]] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)

    def reject(self, problem: Problem) -> None:
        """Count one unusable row and keep it as an example while there are few."""
        self.rejects.setdefault(problem.reason, [0])[0] += 1
        examples = self.examples.setdefault(problem.reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(f"{problem.place}: {problem.detail}")

    def new_ones(self, batch: SampleBatch) -> np.ndarray:
        """bool [n]: the samples of a batch not seen before; they are counted, the others are duplicates."""
        fresh = np.zeros(batch.samples.num_rows, dtype=bool)
        for row, name in enumerate(batch.samples.column("sample_id").to_pylist()):
            key = bytes.fromhex(name)
            fresh[row] = key not in self.seen
            self.seen.add(key)
        self.samples += int(fresh.sum())
        self.duplicates += int((~fresh).sum())
        self.validation += int(batch.validation[fresh].sum())
        self.tokens += int(batch.tokens[fresh].sum())
        self.supervised += int(batch.supervised[fresh].sum())
        self.longest = max(self.longest, int(batch.tokens[fresh].max(initial=0)))
        self.cut += int(batch.cut[fresh].sum())
        self.reasoning_lost += int(batch.reasoning_lost[fresh].sum())
        places = batch.samples.column("source").to_pylist()
        for place, tokens, is_new in zip(places, batch.tokens.tolist(), fresh.tolist(), strict=True):
            if is_new:
                found = self.by_source.setdefault(place.rpartition(":")[0], [0, 0])
                found[0] += 1
                found[1] += tokens
        return fresh

    def counts(self) -> tuple[RejectCount, ...]:
        """Rows refused by reason, most first."""
        ordered = sorted(self.rejects, key=lambda reason: (-self.rejects[reason][0], reason))
        return tuple(
            RejectCount(reason=reason, rows=self.rejects[reason][0], examples=tuple(self.examples[reason]))
            for reason in ordered
        )

    def sources(self, sources: Sequence[MixedSource]) -> tuple[SourceCount, ...]:
        """What every source gave, in order."""
        found = []
        for mixed in sources:
            samples, tokens = self.by_source.get(mixed.source.label, (0, 0))
            found.append(
                SourceCount(
                    source=mixed.source.label,
                    rows=self.read[mixed.source.label],
                    samples=samples,
                    tokens=tokens,
                    available=mixed.available,
                    cap=mixed.entry.cap,
                    weight=mixed.entry.weight,
                )
            )
        return tuple(found)

"""What a comparison of two stores found, and whether it is equality: to the bit, or within a tolerance.

Shapes: D target width, n rows compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hiddenstore.records import TopK

# What must be the same in two captures of the same thing; engine, recipe, container and norm state may differ.
SAME_THING = (
    "capture.target.config_sha256",
    "capture.target.weights_sha256",
    "capture.target.tokenizer_sha256",
    "capture.aux_layers",
)


@dataclass
class FieldError:
    """Differences B - A of one field over all rows compared.

    ``relative`` = mean over rows of |b - a| / |a| (euclidean), ``worst`` the largest of them; ``cosine`` = mean over
    rows. Rows that are non-finite on
    one side only are counted in ``nonfinite_rows`` and left out of the means; bit-identical rows count as equal
    whatever they hold. Top tokens have no vectors to measure: of them rows are counted, and the means are None.
    """

    field: str
    rows: int = 0
    different_rows: int = 0
    nonfinite_rows: int = 0
    max_abs: float = 0.0
    worst: float = 0.0
    _measured: int = 0
    _relative: float = 0.0
    _cosine: float = 0.0

    def add_top_tokens(self, a: "TopK", b: "TopK") -> None:
        """Take in rows of top tokens of both sides, which agree when every id, log-prob and logsumexp does."""
        pairs = ((a.ids, b.ids), (a.log_probs, b.log_probs), (a.lse[:, None], b.lse[:, None]))
        same = torch.stack([(x == y).all(dim=-1) for x, y in pairs]).all(dim=0)
        self.rows += a.rows
        self.different_rows += a.rows - int(same.sum())

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take in rows bfloat16 [n, D] of both sides."""
        same = (a.view(torch.int16) == b.view(torch.int16)).all(dim=-1)
        x, y = a.double(), b.double()
        finite = x.isfinite().all(dim=-1) & y.isfinite().all(dim=-1)
        counted = finite & ~same
        equal = int(same.sum())
        self.rows += a.shape[0]
        self.different_rows += a.shape[0] - equal
        self.nonfinite_rows += int((~finite & ~same).sum())
        self._measured += int((finite | same).sum())
        self._cosine += equal
        if counted.any():
            x, y = x[counted], y[counted]
            difference = y - x
            self.max_abs = max(self.max_abs, float(difference.abs().max()))
            relative = difference.norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)
            self.worst = max(self.worst, float(relative.max()))
            self._relative += float(relative.sum())
            self._cosine += float(torch.cosine_similarity(x, y, dim=-1, eps=1e-30).sum())

    def beyond(self, tolerance: float) -> Iterator[str]:
        """Why this field is not the same within ``tolerance``."""
        if self.nonfinite_rows:
            yield f"{self.field}: {self.nonfinite_rows:,} rows are not finite on one side"
        if self.worst > tolerance:
            yield f"{self.field}: a row differs by {self.worst:.2g} of its length, more than {tolerance:g}"
        if self.different_rows and not self._measured:
            yield f"{self.field}: {self.different_rows:,} of {self.rows:,} rows of top tokens differ"

    def document(self) -> dict[str, Any]:
        """The members of one entry of ``fields``."""
        rows = self._measured
        return {
            "field": self.field,
            "rows": self.rows,
            "different_rows": self.different_rows,
            "nonfinite_rows": self.nonfinite_rows,
            "max_abs": self.max_abs,
            "relative": self._relative / rows if rows else None,
            "worst_relative": self.worst if rows else None,
            "cosine": self._cosine / rows if rows else None,
        }


@dataclass
class Agreement:
    """Rows on which ``argmax lm_head(norm(final))``, or the first top token held, is the same on both sides."""

    rows: int = 0
    agreeing: int = 0

    @property
    def share(self) -> float | None:
        return self.agreeing / self.rows if self.rows else None


@dataclass
class Comparison:
    """What ``diff`` found. ``final_normed``: one side's final hidden was normed, as the other side holds it."""

    schema: list[dict[str, Any]]
    only_a: list[str]
    both: list[str]
    only_b: list[str]
    other_split: int = 0
    other_spans: int = 0
    compared: int = 0
    fields: list[FieldError] = field(default_factory=list)
    top1: Agreement = field(default_factory=Agreement)
    final_normed: bool = False
    not_compared: str | None = None

    @property
    def different(self) -> bool:
        """Whether anything differs: schema, samples held, or a single bit of a state that was compared."""
        changed_rows = any(error.different_rows for error in self.fields)
        return bool(self.schema or self.only_a or self.only_b or self.other_split or self.other_spans or changed_rows)

    def beyond(self, tolerance: float) -> list[str]:
        """Why these are not two captures of the same thing; none when they are.

        They are when target, layers, samples, splits and spans are the same and no row differs by more than
        ``tolerance`` of its length. Engine, recipe, container and norm state may differ.
        """
        found = [f"{item['field']} differs" for item in self.schema if item["field"].startswith(SAME_THING)]
        for samples, where in ((self.only_a, "A"), (self.only_b, "B")):
            if samples:
                found.append(f"{len(samples):,} samples are only in {where}")
        if self.other_split or self.other_spans:
            found.append(f"{self.other_split + self.other_spans:,} samples have another split or other turn spans")
        if self.not_compared:
            found.append(f"no states were compared: {self.not_compared}")
        return found + [reason for error in self.fields for reason in error.beyond(tolerance)]

    def document(self) -> dict[str, Any]:
        """The members of ``hiddenstore.diff/1``."""
        return {
            "different": self.different,
            "schema_differences": self.schema,
            "coverage": {"only_a": len(self.only_a), "both": len(self.both), "only_b": len(self.only_b)},
            "only_a": self.only_a,
            "only_b": self.only_b,
            "other_split": self.other_split,
            "other_spans": self.other_spans,
            "compared_samples": self.compared,
            "not_compared": self.not_compared,
            "fields": [error.document() for error in self.fields],
            "final_normed": self.final_normed,
            "top1_rows": self.top1.rows,
            "top1_agreement": self.top1.share,
        }

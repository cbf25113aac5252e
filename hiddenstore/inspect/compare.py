"""How two stores differ: what they are, which samples they hold, and the numbers on the samples both hold.

Shapes: L aux layers, T tokens, D target width, R rows of the final hidden, n rows compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hiddenstore.files.documents import flat
from schemas.capture import FINAL, NormState
from schemas.layers import field_name

if TYPE_CHECKING:
    from hiddenstore.records import Record, TopK
    from hiddenstore.store import Store
    from hiddenstore.targets.head import HeadBundle


# What must be the same in two captures of the same thing; engine, recipe, container and norm state may differ.
SAME_THING = (
    "capture.target.config_sha256",
    "capture.target.weights_sha256",
    "capture.target.checkpoint_sha256",
    "capture.target.tokenizer_sha256",
    "capture.target.tokenizer_rules_sha256",
    "capture.aux_layers",
)


@dataclass
class FieldError:
    """Differences B - A of one field over all rows compared.

    ``relative`` = mean over rows of |b - a| / |a| (euclidean), ``worst`` the largest of them; ``cosine`` = mean over
    rows. Rows that are non-finite on one side only are counted in ``nonfinite_rows`` and left out of the means;
    bit-identical rows count as equal whatever they hold. Top tokens have no vectors to measure: of them rows are
    counted, and the means are None.
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
class Comparison:
    """How two stores differ. ``final_normed``: one side's final hidden was normed, as the other side holds it.

    ``top1_agreeing`` of ``top1_rows`` rows have the same ``argmax lm_head(norm(final))``, or first top token.
    """

    schema: list[dict[str, Any]]
    only_a: list[str]
    both: list[str]
    only_b: list[str]
    other_split: int = 0
    other_spans: int = 0
    compared: int = 0
    fields: list[FieldError] = field(default_factory=list)
    top1_rows: int = 0
    top1_agreeing: int = 0
    final_normed: bool = False
    not_compared: str | None = None

    @property
    def different(self) -> bool:
        """Whether anything differs: schema, samples held, or a single bit of a state that was compared."""
        changed_rows = any(error.different_rows for error in self.fields)
        return bool(self.schema or self.only_a or self.only_b or self.other_split or self.other_spans or changed_rows)

    @property
    def top1_share(self) -> float | None:
        return self.top1_agreeing / self.top1_rows if self.top1_rows else None

    def beyond(self, tolerance: float) -> list[str]:
        """Why these are not two captures of the same thing; none when they are.

        They are when target, layers, samples, splits and spans are the same and no row differs by more than
        ``tolerance`` of its length. Engine, recipe, container and norm state may differ.
        """
        # A digest that one side does not state is no difference of the target.
        stated = [item for item in self.schema if None not in (item["a"], item["b"])]
        reasons = [f"{item['field']} differs" for item in stated if item["field"].startswith(SAME_THING)]
        for samples, store in ((self.only_a, "A"), (self.only_b, "B")):
            if samples:
                reasons.append(f"{len(samples):,} samples are only in {store}")
        if self.other_split or self.other_spans:
            reasons.append(f"{self.other_split + self.other_spans:,} samples have another split or other turn spans")
        if self.not_compared and (self.only_a or self.both or self.only_b):
            reasons.append(f"no states were compared: {self.not_compared}")
        return reasons + [reason for error in self.fields for reason in error.beyond(tolerance)]

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
            "top1_rows": self.top1_rows,
            "top1_agreement": self.top1_share,
        }


DEFAULT_SAMPLES = 200


def compare(
    a: "Store", b: "Store", max_samples: int | None = DEFAULT_SAMPLES, advance: Callable[[int], None] | None = None
) -> Comparison:
    """Compare two stores; numbers on at most ``max_samples`` common samples (None: all), spread evenly. Raises
    CorruptionError: a sample of one of them cannot be read."""
    splits_a, splits_b = _splits(a), _splits(b)
    result = Comparison(
        schema=schema_differences(a, b),
        only_a=[sample for sample in a.sample_ids if sample not in splits_b],
        both=[sample for sample in a.sample_ids if sample in splits_b],
        only_b=[sample for sample in b.sample_ids if sample not in splits_a],
    )
    result.other_split = sum(splits_a[sample] != splits_b[sample] for sample in result.both)
    layers = sorted(set(a.capture.aux_layers) & set(b.capture.aux_layers))
    with_final = "none" not in (a.capture.final, b.capture.final)
    if a.capture.target.hidden_size != b.capture.target.hidden_size:
        result.not_compared = "the targets have different widths"
    elif not layers and not with_final:
        result.not_compared = "no layer is held by both"
    elif not result.both:
        result.not_compared = "no sample is held by both"
    else:
        numbers = _Numbers(a, b, result, layers, with_final)
        for sample_id in spread(result.both, max_samples):
            numbers.add(sample_id)
            if advance is not None:
                advance(1)
    return result


def schema_differences(a: "Store", b: "Store") -> list[dict[str, Any]]:
    """Every field of store.json in which two stores differ, as ``{"field", "a", "b"}``; target files by digest."""
    one, other = _settings(a), _settings(b)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return [{"field": name, "a": one.get(name), "b": other.get(name)} for name in names]


def _settings(store: "Store") -> dict[str, Any]:
    settings = dict(flat(store.manifest.model_dump(mode="json", exclude={"target_files", "packages"})))
    return settings | {f"target/{file.path}": file.digest for file in store.manifest.target_files}


def _splits(store: "Store") -> dict[str, int]:
    """The split of every sample, as the catalog numbers them."""
    table = store.catalog.table
    return dict(zip(table.ids, table.split.tolist(), strict=True))


def spread(items: Sequence[str], most: int | None) -> list[str]:
    """At most ``most`` of the items, evenly spaced, always the same ones."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


@dataclass(frozen=True, eq=False)
class _Finals:
    """What one side holds at n final rows: bfloat16 [n, D], or top tokens [n, k]."""

    final: torch.Tensor
    topk: "TopK | None"

    @classmethod
    def of(cls, record: "Record", rows: np.ndarray) -> "_Finals":
        picked = torch.from_numpy(rows)
        if record.topk is None:
            return cls(record.final[picked], None)
        return cls(record.final, record.topk.at(picked))

    def first_tokens(self, head: "HeadBundle", norm_state: NormState, rows: torch.Tensor) -> torch.Tensor:
        """The most probable token int64 of some rows (bool [n])."""
        if self.topk is not None:
            return self.topk.ids[rows, 0]
        return head.logits(self.final[rows], norm_state=norm_state).argmax(dim=-1)


class _Numbers:
    """The states of two stores, sample by sample, into ``result``."""

    def __init__(self, a: "Store", b: "Store", result: Comparison, layers: list[int], with_final: bool) -> None:
        self.stores, self.result, self.layers, self.with_final = (a, b), result, layers, with_final
        self.norms = (a.capture.final_norm, b.capture.final_norm)
        self.final = FieldError(FINAL)
        result.fields = [FieldError(field_name(layer)) for layer in layers]
        self.aux = list(result.fields)
        if with_final:
            result.final_normed = self.norms[0] != self.norms[1]
            same = a.capture.target.weights_sha256 == b.capture.target.weights_sha256
            head = a.head()
            self.heads = (head, head if same and a.manifest.head == b.manifest.head else b.head())
            # A hidden on one side and top tokens on the other share their first token only, which ``top1`` compares.
            if a.capture.holds_topk == b.capture.holds_topk:
                result.fields.append(self.final)

    def add(self, sample_id: str) -> None:
        """One sample that both stores hold."""
        one, other = (store.read(sample_id, layers=self.layers, final=self.with_final) for store in self.stores)
        self.result.other_spans += not np.array_equal(one.sample.spans, other.sample.spans)
        self.result.compared += 1
        for error, x, y in zip(self.aux, one.aux, other.aux, strict=True):
            error.add(x, y)
        if self.with_final:
            self._add_final(one, other)

    def _add_final(self, one: "Record", other: "Record") -> None:
        positions, in_one, in_other = np.intersect1d(one.final_rows, other.final_rows, return_indices=True)
        x, y = _Finals.of(one, in_one), _Finals.of(other, in_other)
        if x.topk is not None and y.topk is not None:
            self.final.add_top_tokens(x.topk, y.topk)
        elif x.topk is None and y.topk is None:
            self.final.add(*self._in_one_norm_state(x.final, y.final))
        rows = torch.from_numpy(one.sample.loss_mask[positions].astype(bool))
        if rows.any():
            picks = [
                side.first_tokens(head, norm, rows)
                for head, side, norm in zip(self.heads, (x, y), self.norms, strict=True)
            ]
            self.result.top1_rows += int(rows.sum())
            self.result.top1_agreeing += int((picks[0] == picks[1]).sum())

    def _in_one_norm_state(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hiddens bfloat16 [n, D]: as held, or both after the norm where only one side holds it so."""
        if self.norms[0] == self.norms[1]:
            return x, y
        if self.norms[0] == "pre_norm":
            return self.heads[0].norm(x).bfloat16(), y
        return x, self.heads[1].norm(y).bfloat16()

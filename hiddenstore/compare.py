"""How two stores differ: what they are, which samples they hold, and the numbers on the samples both hold.

Shapes: L aux layers, T tokens, D target width, R rows of the final hidden, n rows compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from schemas.capture import FINAL
from schemas.layers import field_name

if TYPE_CHECKING:
    from hiddenstore.head import HeadBundle
    from hiddenstore.records import Record
    from hiddenstore.store import Store

DEFAULT_SAMPLES = 200


@dataclass
class FieldError:
    """Differences B - A of one field over all rows compared.

    ``relative`` = mean over rows of |b - a| / |a| (euclidean); ``cosine`` = mean over rows. Rows that are non-finite on
    one side only are counted in ``nonfinite_rows`` and left out of the means; bit-identical rows count as equal
    whatever they hold.
    """

    field: str
    rows: int = 0
    different_rows: int = 0
    nonfinite_rows: int = 0
    max_abs: float = 0.0
    _relative: float = 0.0
    _cosine: float = 0.0

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
        self._cosine += equal
        if counted.any():
            x, y = x[counted], y[counted]
            difference = y - x
            self.max_abs = max(self.max_abs, float(difference.abs().max()))
            self._relative += float((difference.norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)).sum())
            self._cosine += float(torch.cosine_similarity(x, y, dim=-1, eps=1e-30).sum())

    def document(self) -> dict[str, Any]:
        """The members of one entry of ``fields``."""
        rows = self.rows - self.nonfinite_rows
        return {
            "field": self.field,
            "rows": self.rows,
            "different_rows": self.different_rows,
            "nonfinite_rows": self.nonfinite_rows,
            "max_abs": self.max_abs,
            "relative": self._relative / rows if rows else None,
            "cosine": self._cosine / rows if rows else None,
        }


@dataclass
class Agreement:
    """Rows on which ``argmax lm_head(norm(final))`` names the same token on both sides."""

    rows: int = 0
    agreeing: int = 0

    @property
    def share(self) -> float | None:
        return self.agreeing / self.rows if self.rows else None


@dataclass
class Comparison:
    """What ``diff`` found."""

    schema: list[dict[str, Any]]
    only_a: list[str]
    both: list[str]
    only_b: list[str]
    other_split: int = 0
    other_spans: int = 0
    compared: int = 0
    fields: list[FieldError] = field(default_factory=list)
    top1: Agreement = field(default_factory=Agreement)
    not_compared: str | None = None

    @property
    def different(self) -> bool:
        """Whether anything differs: schema, samples held, or a single bit of a state that was compared."""
        changed_rows = any(error.different_rows for error in self.fields)
        return bool(self.schema or self.only_a or self.only_b or self.other_split or self.other_spans or changed_rows)

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
            "top1_rows": self.top1.rows,
            "top1_agreement": self.top1.share,
        }


def compare(
    a: "Store", b: "Store", max_samples: int | None = DEFAULT_SAMPLES, advance: Callable[[int], None] | None = None
) -> Comparison:
    """Compare two stores; numbers on at most ``max_samples`` common samples (None: all), spread evenly.

    Raises:
        CorruptionError: a sample of one of them cannot be read.
    """
    ids_a, ids_b = a.sample_ids, b.sample_ids
    set_a, set_b = set(ids_a), set(ids_b)
    result = Comparison(
        schema=schema_differences(a, b),
        only_a=[sample for sample in ids_a if sample not in set_b],
        both=[sample for sample in ids_a if sample in set_b],
        only_b=[sample for sample in ids_b if sample not in set_a],
    )
    result.other_split = sum(_split(a, sample) != _split(b, sample) for sample in result.both)
    layers = sorted(set(a.capture.aux_layers) & set(b.capture.aux_layers))
    with_final = "none" not in (a.capture.final, b.capture.final)
    if a.capture.target.hidden_size != b.capture.target.hidden_size:
        result.not_compared = "the targets have different widths"
    elif not layers and not with_final:
        result.not_compared = "no layer is held by both"
    elif not result.both:
        result.not_compared = "no sample is held by both"
    else:
        _compare_numbers(a, b, result, layers, with_final, max_samples, advance)
    return result


def schema_differences(a: "Store", b: "Store") -> list[dict[str, Any]]:
    """Every field of store.json in which two stores differ, as ``{"field", "a", "b"}``; target files by digest."""
    keep = {"format", "container", "recipe", "capture", "head"}
    one = dict(_flat(a.manifest.model_dump(mode="json", include=keep)))
    other = dict(_flat(b.manifest.model_dump(mode="json", include=keep)))
    one |= {f"target/{file.path}": file.sha256 for file in a.manifest.target_files}
    other |= {f"target/{file.path}": file.sha256 for file in b.manifest.target_files}
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return [{"field": name, "a": one.get(name), "b": other.get(name)} for name in names]


def spread(items: Sequence[str], most: int | None) -> list[str]:
    """At most ``most`` of the items, evenly spaced, always the same ones."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


def _compare_numbers(
    a: "Store",
    b: "Store",
    result: Comparison,
    layers: list[int],
    with_final: bool,
    max_samples: int | None,
    advance: Callable[[int], None] | None,
) -> None:
    errors = [FieldError(field_name(layer)) for layer in layers]
    final_error = FieldError(FINAL)
    heads = _heads(a, b) if with_final else None
    for sample_id in spread(result.both, max_samples):
        one = a.read(sample_id, layers=layers, final=with_final)
        other = b.read(sample_id, layers=layers, final=with_final)
        result.other_spans += not np.array_equal(one.sample.spans, other.sample.spans)
        result.compared += 1
        for error, x, y in zip(errors, one.aux, other.aux, strict=True):
            error.add(x, y)
        if with_final:
            x, y, positions = _common_final(one, other)
            final_error.add(x, y)
            if heads is not None:
                _add_agreement(result.top1, heads, (x, y), one.sample.loss_mask[positions].astype(bool), (a, b))
        if advance is not None:
            advance(1)
    result.fields = [*errors, final_error] if with_final else errors


def _common_final(one: "Record", other: "Record") -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Final rows both records hold, bfloat16 [n, D] each, and their token positions int [n]."""
    positions, in_one, in_other = np.intersect1d(one.final_rows, other.final_rows, return_indices=True)
    return one.final[torch.from_numpy(in_one)], other.final[torch.from_numpy(in_other)], positions


def _heads(a: "Store", b: "Store") -> "tuple[HeadBundle, HeadBundle] | None":
    from hiddenstore.head import HeadBundle

    head_a = HeadBundle.load(a)
    same = a.capture.target.weights_sha256 == b.capture.target.weights_sha256 and a.manifest.head == b.manifest.head
    return head_a, head_a if same else HeadBundle.load(b)


def _add_agreement(
    agreement: Agreement,
    heads: "tuple[HeadBundle, HeadBundle]",
    finals: tuple[torch.Tensor, torch.Tensor],
    supervised: np.ndarray,
    stores: "tuple[Store, Store]",
) -> None:
    rows = torch.from_numpy(supervised)
    if not supervised.any():
        return
    picks = [
        head.logits(final[rows], norm_state=store.capture.final_norm).argmax(dim=-1)
        for head, final, store in zip(heads, finals, stores, strict=True)
    ]
    agreement.rows += int(rows.sum())
    agreement.agreeing += int((picks[0] == picks[1]).sum())


def _split(store: "Store", sample_id: str) -> str:
    record, index = store.locate(sample_id)
    return record.samples[index].split


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value

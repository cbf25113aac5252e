"""How two stores differ: what they are, which samples they hold, and the numbers on the samples both hold.

Shapes: L aux layers, T tokens, D target width, R rows of the final hidden, n rows compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hiddenstore.look.differences import Agreement, Comparison, FieldError
from schemas.capture import FINAL, NormState
from schemas.layers import field_name

if TYPE_CHECKING:
    from hiddenstore.head import HeadBundle
    from hiddenstore.records import Record, TopK
    from hiddenstore.store import Store

DEFAULT_SAMPLES = 200


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
    result.final_normed = with_final and a.capture.final_norm != b.capture.final_norm
    for sample_id in spread(result.both, max_samples):
        one = a.read(sample_id, layers=layers, final=with_final)
        other = b.read(sample_id, layers=layers, final=with_final)
        result.other_spans += not np.array_equal(one.sample.spans, other.sample.spans)
        result.compared += 1
        for error, x, y in zip(errors, one.aux, other.aux, strict=True):
            error.add(x, y)
        if heads is not None:
            x, y, supervised = _common_final(one, other)
            if x.topk is not None and y.topk is not None:
                final_error.add_top_tokens(x.topk, y.topk)
            elif x.topk is None and y.topk is None:
                final_error.add(*_same_norm_state(heads, (x, y), (a, b)))
            _add_agreement(result.top1, heads, (x, y), supervised, (a, b))
        if advance is not None:
            advance(1)
    # A hidden on one side and top tokens on the other share their first token only, which ``top1`` compares.
    alike = a.capture.holds_topk == b.capture.holds_topk
    result.fields = [*errors, final_error] if with_final and alike else errors


@dataclass(frozen=True, eq=False)
class _Finals:
    """What one side holds at n final rows: bfloat16 [n, D], or top tokens [n, k]."""

    final: torch.Tensor
    topk: "TopK | None"

    @classmethod
    def of(cls, record: "Record", rows: np.ndarray) -> "_Finals":
        chosen = torch.from_numpy(rows)
        if record.topk is None:
            return cls(record.final[chosen], None)
        return cls(record.final, record.topk.at(chosen))

    def first_tokens(self, head: "HeadBundle", norm_state: NormState, rows: torch.Tensor) -> torch.Tensor:
        """The most probable token int64 of some rows (bool [n])."""
        if self.topk is not None:
            return self.topk.ids[rows, 0]
        return head.logits(self.final[rows], norm_state=norm_state).argmax(dim=-1)


def _common_final(one: "Record", other: "Record") -> tuple[_Finals, _Finals, np.ndarray]:
    """What both records hold at the n final rows they share, and which of those are supervised, bool [n]."""
    positions, in_one, in_other = np.intersect1d(one.final_rows, other.final_rows, return_indices=True)
    return _Finals.of(one, in_one), _Finals.of(other, in_other), one.sample.loss_mask[positions].astype(bool)


def _same_norm_state(
    heads: "tuple[HeadBundle, HeadBundle]", finals: tuple[_Finals, _Finals], stores: "tuple[Store, Store]"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final hiddens bfloat16 [n, D] of both sides: as held, or both after the norm where only one side holds it so."""
    x, y = finals[0].final, finals[1].final
    norms = [store.capture.final_norm for store in stores]
    if norms[0] == norms[1]:
        return x, y
    return (heads[0].norm(x).bfloat16(), y) if norms[0] == "pre_norm" else (x, heads[1].norm(y).bfloat16())


def _heads(a: "Store", b: "Store") -> "tuple[HeadBundle, HeadBundle]":
    from hiddenstore.head import HeadBundle

    head_a = HeadBundle.load(a)
    same = a.capture.target.weights_sha256 == b.capture.target.weights_sha256 and a.manifest.head == b.manifest.head
    return head_a, head_a if same else HeadBundle.load(b)


def _add_agreement(
    agreement: Agreement,
    heads: "tuple[HeadBundle, HeadBundle]",
    finals: tuple[_Finals, _Finals],
    supervised: np.ndarray,
    stores: "tuple[Store, Store]",
) -> None:
    rows = torch.from_numpy(supervised)
    if not supervised.any():
        return
    picks = [
        held.first_tokens(head, store.capture.final_norm, rows)
        for head, held, store in zip(heads, finals, stores, strict=True)
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

"""Checks at capture: is what came out of the target a sample's hidden states at all?

One pass over the row norms answers for NaN, infinity, zeros and repeats; the top-1 check proves that the stored final
rows are the rows the model's own LM head read.

Shapes: N tokens of the unit, R final rows, L aux layers, D target width, C checked rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured
from hiddenstore.errors import CaptureError, Kind
from hiddenstore.records import Sample, is_text
from hiddenstore.targets.head import HeadBundle
from schemas.capture import FINAL, NormState
from schemas.layers import field_name
from schemas.manifest import Reject

REJECT_SHARE = 0.001
MIN_REJECTS = 1
# The first token of a sample is often a sink with a norm of its own; a few more make a median.
MIN_PROFILED_TOKENS = 8
# A layer's typical row norm moves by a small factor between texts; a wrong layer or a lost scale moves it by more.
NORM_FACTOR = 30.0
# bf16 rounding of the final hidden moves a logit by far less than this share of the logits' spread.
TIE_SHARE = 0.05


@dataclass(frozen=True)
class CheckSpec:
    """What to expect; ``reference``: typical row norm per aux layer, if known. ``names_source``: rejects name it."""

    aux_layers: tuple[int, ...]
    final_norm: NormState
    reference: tuple[float, ...] = ()
    names_source: bool = False


def check_unit(
    samples: Sequence[Sample], captured: Captured, final_rows: Sequence[np.ndarray], head: HeadBundle, spec: CheckSpec
) -> list[Reject]:
    """The samples of a unit that must not be stored, in order, each with its first reason. Raises CaptureError: as
    ``require_matching``."""
    require_matching(samples, captured, final_rows, (len(spec.aux_layers), head.hidden_size))
    aux_norms, final_norms = _row_norms(captured.aux), _row_norms(captured.final)
    disagreeing = _disagreeing_rows(captured, head, spec.final_norm)
    rejects = []
    start = final_start = 0
    for sample, rows in zip(samples, final_rows, strict=True):
        span = slice(start, start + sample.tokens)
        final_span = slice(final_start, final_start + len(rows))
        named = [(field_name(k), aux_norms[slot, span], sample.input_ids) for slot, k in enumerate(spec.aux_layers)]
        named.append((FINAL, final_norms[final_span], sample.input_ids[rows]))
        fault = _norm_fault(named, is_text(sample.tokens, sample.images), head, spec)
        fault = fault or _repeated(sample, captured, aux_norms, span, spec)
        fault = fault or _wrong_next(captured, disagreeing, final_span)
        if fault is not None:
            reason, detail = fault
            detail = f"{sample.source}: {detail}" if spec.names_source else detail
            rejects.append(Reject(id=sample.id, tokens=sample.tokens, reason=reason, detail=detail))
        start, final_start = span.stop, final_span.stop
    return rejects


class RejectBudget:
    """Counts rejects against the whole input: over ``allowed``, else over 0.1 % and over 1 sample, the run stops."""

    def __init__(self, samples: int, already: Sequence[Reject] = (), allowed: int | None = None) -> None:
        self.allowed = max(MIN_REJECTS, int(samples * REJECT_SHARE)) if allowed is None else allowed
        self.samples = samples
        self.reasons: Counter[str] = Counter(reject.reason for reject in already)
        self._last = list(already)[-3:]

    @property
    def total(self) -> int:
        return sum(self.reasons.values())

    def spend(self, rejects: Sequence[Reject]) -> None:
        """Raises CaptureError ``too-many-rejects`` naming the counts and the latest samples."""
        self.reasons.update(reject.reason for reject in rejects)
        self._last = (self._last + list(rejects))[-3:]
        if self.total <= self.allowed:
            return
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items()))
        latest = "; ".join(f"{reject.id[:12]}: {reject.detail}" for reject in self._last)
        raise CaptureError(
            f"{self.total} samples rejected ({counts}), more than the {self.allowed} allowed of {self.samples}; "
            f"latest {latest}",
            kind=Kind.TOO_MANY_REJECTS,
            hint="what is committed stays; check the target, its dtype and the data, then run the same command again",
        )


def _row_norms(states: Tensor) -> np.ndarray:
    """L2 norms of rows [..., D] in float64 on the CPU, to the precision of fp32: 0 of zeros alone, and finite of every
    finite row."""
    norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32).cpu().double()
    # The squares of fp32 vanish below 1e-23 and overflow above 1.8e19.
    suspects = (norms == 0) | ~norms.isfinite()
    if suspects.any():
        norms[suspects] = torch.linalg.vector_norm(states[suspects.to(states.device)].double(), dim=-1).cpu()
    return norms.numpy()


def require_matching(
    samples: Sequence[Sample], captured: Captured, final_rows: Sequence[np.ndarray], shape: tuple[int, int]
) -> None:
    """CaptureError ``engine-tokens``, ``engine-shape`` where the states cannot be those of the samples; ``shape``: L
    and D."""
    sent = np.concatenate([sample.input_ids for sample in samples]) if samples else np.zeros(0, dtype=np.int32)
    if not np.array_equal(sent, captured.token_ids):
        raise CaptureError(
            f"the engine ran {len(captured.token_ids)} tokens that are not the {len(sent)} it was given",
            kind=Kind.ENGINE_TOKENS,
        )
    layers, width = shape
    rows = sum(len(row) for row in final_rows)
    for name, states, expected in (
        ("aux", captured.aux, [layers, len(sent), width]),
        ("final", captured.final, [rows, width]),
    ):
        if list(states.shape) != expected or states.dtype != torch.bfloat16:
            raise CaptureError(
                f"the engine returned {name} states {list(states.shape)} of {states.dtype}, expected {expected} of "
                "torch.bfloat16",
                kind=Kind.ENGINE_SHAPE,
            )


def _norm_fault(
    named: Sequence[tuple[str, np.ndarray, np.ndarray]], text: np.ndarray, head: HeadBundle, spec: CheckSpec
) -> tuple[str, str] | None:
    """``named``: field name, row norms and token ids of one sample, aux fields first; ``text``: as ``is_text``."""
    for name, norms, tokens in named:
        if not np.isfinite(norms).all():
            return "non-finite", f"{name} holds NaN or infinity at {_where(~np.isfinite(norms))}"
        zero = norms == 0
        if zero.any():
            # A padding token's embedding may be zero, and with nothing before it every layer keeps it so.
            zero[zero] = head.embed_tokens[torch.from_numpy(tokens[zero].astype(np.int64))].any(dim=-1).cpu().numpy()
        if zero.any():
            return "zero-rows", f"{name} is all zero at {_where(zero)}"
    for (name, norms, _), expected in zip(named, spec.reference, strict=False):
        if text.sum() < MIN_PROFILED_TOKENS:
            break
        typical = float(np.median(norms[text]))
        if not expected / NORM_FACTOR <= typical <= expected * NORM_FACTOR:
            return "norm-profile", f"{name} has a median row norm of {typical:.3g}, expected {expected:.3g}"
    return None


def _repeated(
    sample: Sample, captured: Captured, aux_norms: np.ndarray, span: slice, spec: CheckSpec
) -> tuple[str, str] | None:
    """Neighbouring rows that are equal bit for bit although their tokens differ."""
    other_token = np.diff(sample.input_ids) != 0
    for slot, layer in enumerate(spec.aux_layers):
        if layer == -1:
            continue
        rows = aux_norms[slot, span]
        for t in np.flatnonzero((rows[1:] == rows[:-1]) & (rows[1:] > 0) & other_token).tolist():
            if torch.equal(captured.aux[slot, span.start + t], captured.aux[slot, span.start + t + 1]):
                return "repeated-rows", f"{field_name(layer)} repeats position {t} at {t + 1}"
    return None


def _disagreeing_rows(captured: Captured, head: HeadBundle, final_norm: NormState) -> np.ndarray:
    """bool [C]: the head bundle on the stored final row does not rank the engine's own next token first."""
    if captured.next_rows.numel() == 0:
        return np.zeros(0, dtype=bool)
    logits = head.logits(captured.final[captured.next_rows.to(captured.final.device)], norm_state=final_norm).cpu()
    best, scale = logits.max(dim=-1).values, logits.std(dim=-1)
    next_logits = logits.gather(-1, captured.next_tokens[:, None]).squeeze(-1)
    # A NaN compares false, so it counts as disagreement.
    disagrees: np.ndarray = (~(best - next_logits <= TIE_SHARE * scale + best.abs() * 2**-7)).numpy()
    return disagrees


def _wrong_next(captured: Captured, disagreeing: np.ndarray, final_span: slice) -> tuple[str, str] | None:
    rows = captured.next_rows.numpy()
    disagrees = disagreeing[(rows >= final_span.start) & (rows < final_span.stop)]
    if disagrees.size and disagrees.all():
        return "wrong-next-token", f"{disagrees.size} checked final rows do not predict the target's own next token"
    return None


def _where(bad: np.ndarray) -> str:
    return f"{int(bad.sum())} of {bad.size} rows, first {int(np.flatnonzero(bad)[0])}"

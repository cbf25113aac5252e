"""What a change of the states does: to the target's distribution, and to the layers a drafter reads.

Shapes: T tokens, R final rows, D target width, V target vocabulary, k top tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenstore.codecs.affine import channel_statistics
from hiddenstore.head import HeadBundle
from hiddenstore.records import TopK
from schemas.capture import NormState

_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Change:
    """Means over final rows: KL in nats, overlap sum min(p, p'), share of rows whose most probable token differs."""

    kl: float
    overlap: float
    top1_flips: float


def distribution_change(head: HeadBundle, original: Tensor, decoded: Tensor, state: NormState) -> Change:
    """KL(p || p') and the rest, p from final hiddens bfloat16 [R, D] as captured and p' from them decoded."""
    kl = overlap = flips = 0.0
    for rows in _blocks(head, original):
        before = head.logits(original[rows], state).double().log_softmax(-1)
        after = head.logits(decoded[rows], state).double().log_softmax(-1)
        kl += float((before.exp() * (before - after)).sum())
        overlap += float(torch.minimum(before, after).exp().sum())
        flips += float((before.argmax(-1) != after.argmax(-1)).sum())
    return _mean(kl, overlap, flips, len(original))


def truncation_change(head: HeadBundle, original: Tensor, top: TopK, state: NormState) -> Change:
    """The same where p' is what top tokens say, scaled to one and else zero; KL(p' || p), as the other is infinite."""
    kl = overlap = flips = 0.0
    for rows in _blocks(head, original):
        before = head.logits(original[rows], state).double().log_softmax(-1).gather(1, top.ids[rows])
        after = top.log_probs[rows].double().log_softmax(-1)
        kl += float((after.exp() * (after - before)).sum())
        overlap += float(torch.minimum(before, after).exp().sum())
        flips += float((before.argmax(-1) != after.argmax(-1)).sum())
    return _mean(kl, overlap, flips, len(original))


def channel_error(original: Tensor, decoded: Tensor) -> float:
    """Root mean square over tokens of |(h' - h) / c| / |(h - mu) / c|, norms over channels; bfloat16 [T, D] each.

    mu and c are the robust centre and size of each channel: dividing by c lets every channel count alike, where a
    plain relative error sees the few massive ones only; the quotient per token keeps attention sinks from being all
    that counts. Tokens that hold a NaN or an infinity are left out. Source: the codec study, section 7.
    """
    scale, offset = channel_statistics(original)
    before = original.float()
    size = ((before - offset) / scale).double().square().sum(1)
    error = ((decoded.float() - before) / scale).double().square().sum(1)
    held = torch.isfinite(size) & (size > 0)
    return float((error[held] / size[held]).mean().sqrt()) if bool(held.any()) else 0.0


def _mean(kl: float, overlap: float, flips: float, rows: int) -> Change:
    return Change(max(0.0, kl / rows), min(1.0, overlap / rows), flips / rows)


def _blocks(head: HeadBundle, original: Tensor) -> Iterator[slice]:
    step = max(1, _LOGITS_AT_ONCE // head.vocab_size)
    for start in range(0, len(original), step):
        yield slice(start, start + step)

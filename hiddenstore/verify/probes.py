"""Statistics that tell whether stored states belong to their tokens. Pure functions on arrays.

Shapes: T tokens of a sample, R rows of states, n rows tested, D target width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore.head import HeadBundle
from hiddenstore.records import TopK
from schemas.capture import NormState
from schemas.prepared import ROLES

ASSISTANT = ROLES.index("assistant")
OFFSETS = (0, 1, 2)
LOGIT_ROWS = 256
ZERO_SHARE = 0.02

# Log-probs are rounded to float16, so what they leave of 1 is known to about this much.
_LEAST_REST = 1e-4


@dataclass(frozen=True)
class Matching:
    """How much better rows fit their own tokens than the same tokens in any order.

    ``effect`` is the mean advantage of the true pairing over all permutations, ``spread`` the standard deviation of
    that mean under a random permutation (Hoeffding 1951), ``rows`` how many rows were paired.
    """

    effect: float
    spread: float
    rows: int

    @property
    def sigmas(self) -> float:
        return self.effect / self.spread if self.spread > 0 else 0.0


def matching(scores: np.ndarray) -> Matching:
    """Test a square matrix [n, n] of row-against-token scores whose diagonal is the true pairing."""
    n = len(scores)
    if n < 2:
        return Matching(0.0, 0.0, n)
    scores = scores.astype(np.float64)
    grand = scores.mean()
    centred = scores - scores.mean(axis=0, keepdims=True) - scores.mean(axis=1, keepdims=True) + grand
    spread = float(np.sqrt(np.square(centred).sum() / (n - 1)) / n)
    return Matching(float(np.trace(scores) / n - grand), spread, n)


def combined(parts: Sequence[Matching]) -> Matching:
    """Several samples as one test, weighted by rows."""
    rows = sum(part.rows for part in parts)
    if not rows:
        return Matching(0.0, 0.0, 0)
    weights = np.array([part.rows / rows for part in parts])
    effect = float(weights @ np.array([part.effect for part in parts]))
    spread = float(np.sqrt(np.square(weights * np.array([part.spread for part in parts])).sum()))
    return Matching(effect, spread, rows)


@dataclass(frozen=True)
class Prediction:
    """What the final hidden of one sample says of its tokens.

    nll: mean negative log-likelihood in nats of the token 0, 1 and 2 places on; hits: share of rows whose top token is
    the next one; matching: of rows and next tokens; next_tokens int64 [n].
    """

    nll: tuple[float, float, float]
    hits: float
    matching: Matching
    next_tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Held:
    """States bf16 [R, D] at the token positions ``places`` [R] of a sample with ``input_ids`` [T]."""

    states: Tensor
    places: np.ndarray
    input_ids: np.ndarray


def predict(head: HeadBundle, held: Held, norm_state: NormState) -> Prediction | None:
    """Run the head over up to ``LOGIT_ROWS`` final hiddens of one sample; None if there are too few."""
    final, rows, input_ids = held.states, held.places, held.input_ids
    usable = _followed(rows, input_ids, head.vocab_size)
    usable = usable[np.isfinite(final[torch.from_numpy(usable)].float().sum(-1).numpy())]
    if len(usable) < 2:
        return None
    usable = thinned(usable, LOGIT_ROWS)
    places = rows[usable]
    logp = torch.log_softmax(head.logits(final[torch.from_numpy(usable)], norm_state), dim=-1)
    tokens = [torch.from_numpy(input_ids[places + offset].astype(np.int64)) for offset in OFFSETS]
    nll = tuple(float(-logp.gather(1, ids[:, None]).mean()) for ids in tokens)
    following = tokens[1]
    hits = float((logp.argmax(-1) == following).float().mean())
    return Prediction((nll[0], nll[1], nll[2]), hits, matching(logp[:, following].numpy()), following.numpy())


def predict_from_top_tokens(topk: TopK, rows: np.ndarray, input_ids: np.ndarray, vocab: int) -> Prediction | None:
    """The same from top tokens [R, k] at token positions ``rows`` [R]; None if there are too few.

    The probability that the top tokens leave over counts as spread evenly over the rest of the vocabulary.
    """
    usable = thinned(_followed(rows, input_ids, vocab), LOGIT_ROWS)
    if len(usable) < 2:
        return None
    kept = topk.at(torch.from_numpy(usable))
    rest = (1 - kept.log_probs.exp().sum(-1)).clamp(min=_LEAST_REST).div(max(1, vocab - kept.k)).log()

    def logp(tokens: Tensor) -> Tensor:
        """[n, m] of m tokens after each of n rows."""
        is_kept = kept.ids[:, :, None] == tokens
        return torch.where(is_kept.any(1), (is_kept * kept.log_probs[:, :, None]).sum(1), rest[:, None])

    tokens = [torch.from_numpy(input_ids[rows[usable] + offset].astype(np.int64)) for offset in OFFSETS]
    pairs = [logp(ids) for ids in tokens]
    nll = tuple(float(-scores.diagonal().mean()) for scores in pairs)
    hits = float((kept.ids[:, 0] == tokens[1]).float().mean())
    return Prediction((nll[0], nll[1], nll[2]), hits, matching(pairs[1].numpy()), tokens[1].numpy())


def _followed(rows: np.ndarray, input_ids: np.ndarray, vocab: int) -> np.ndarray:
    """Indices of the rows whose own and next two tokens exist and are known."""
    usable = np.flatnonzero(rows + OFFSETS[-1] < len(input_ids))
    known = (input_ids >= 0) & (input_ids < vocab)
    followed: np.ndarray = usable[np.all([known[rows[usable] + offset] for offset in OFFSETS], axis=0)]
    return followed


def unigram_nats(tokens: np.ndarray) -> float:
    """Entropy of the tokens' own frequencies, with the Miller–Madow correction for a small sample, in nats."""
    if not len(tokens):
        return 0.0
    _, counts = np.unique(tokens, return_counts=True)
    share = counts / len(tokens)
    return float(-(share * np.log(share)).sum() + (len(counts) - 1) / (2 * len(tokens)))


def unit_scale_error(head: HeadBundle, final: Tensor) -> np.ndarray:
    """|x - 1| per row [R], x the scale of the row once the final norm's weight is divided out.

    A row that passed the final norm has unit scale there, exactly, whatever the target; one that did not has none.
    """
    weight = head.norm_weight.float()
    if head.spec.norm_flavour == "rms_plus_one":
        weight = weight + 1.0
    used = weight.abs() > 1e-3 * weight.abs().median()
    h = final.float()
    if head.norm_bias is not None:
        h = h - head.norm_bias.float()
    unit = h[:, used] / weight[used]
    deviation: np.ndarray = (unit.square().mean(-1).sqrt() - 1.0).abs().numpy()
    return deviation


def mask_fault(mask: np.ndarray, spans: np.ndarray) -> tuple[str, str] | None:
    """Whether a loss mask [T] follows the assistant turns ``spans`` [n, 3]: a kind and what is wrong, or None.

    Right are whole assistant turns, any part of them (a mask may be narrowed), and everything (``--loss-on all``).
    """
    held = mask != 0
    turns = [(int(a), int(b)) for role, a, b in spans if role == ASSISTANT and b > a]
    if held.all() or not held.any() or not len(spans):
        return None
    if np.array_equal(held, _turns_under(held, turns)):
        return None
    for shift, kept in ((1, slice(1, None)), (-1, slice(None, -1))):
        back = _shifted(held, -shift)
        if np.array_equal(held[kept], _shifted(_turns_under(back, turns), shift)[kept]):
            return "mask-shift", f"the loss mask lies {abs(shift)} token {'after' if shift > 0 else 'before'} its turns"
    outside = held & ~_union(turns, len(held))
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        return "mask-outside", f"{int(outside.sum())} supervised tokens lie in no assistant turn, the first at {first}"
    return None


def zero_rows(states: Tensor, typical_rms: float) -> np.ndarray:
    """Indices of rows of [R, D] that are zero up to what a codec makes of zero: ``ZERO_SHARE`` of a typical row."""
    rms = states.float().square().mean(-1).sqrt()
    found: np.ndarray = torch.nonzero(rms <= ZERO_SHARE * typical_rms).flatten().numpy()
    return found


def non_finite_rows(states: Tensor) -> np.ndarray:
    """Indices of rows of [R, D] with a NaN or an infinity."""
    found: np.ndarray = torch.nonzero(~torch.isfinite(states).all(-1)).flatten().numpy()
    return found


def repeated_rows(states: Tensor, tokens: np.ndarray) -> np.ndarray:
    """Indices of rows of bf16 [R, D] that equal, bit for bit, an earlier row at another token [R].

    Equal rows at equal tokens are left out: a run of one token can honestly produce them.
    """
    bits = np.ascontiguousarray(states.contiguous().view(torch.uint16).numpy())
    if not bits.size:
        return np.zeros(0, dtype=np.int64)
    keys = bits.view(np.dtype((np.void, bits.shape[1] * 2))).ravel()
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    original = first[group.ravel()]
    return np.flatnonzero((original != np.arange(len(bits))) & (tokens[original] != tokens))


def thinned(places: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of ``places``, evenly spread."""
    if len(places) <= most:
        return places
    return places[np.linspace(0, len(places) - 1, most).astype(np.int64)]


def _turns_under(held: np.ndarray, turns: list[tuple[int, int]]) -> np.ndarray:
    """The union of the turns that ``held`` touches."""
    return _union([(a, b) for a, b in turns if held[a:b].any()], len(held))


def _union(turns: list[tuple[int, int]], tokens: int) -> np.ndarray:
    union = np.zeros(tokens, dtype=bool)
    for a, b in turns:
        union[a:b] = True
    return union


def _shifted(held: np.ndarray, by: int) -> np.ndarray:
    """``held`` moved ``by`` places, what leaves is lost."""
    moved = np.zeros_like(held)
    if by > 0:
        moved[by:] = held[:-by]
    else:
        moved[:by] = held[-by:]
    return moved

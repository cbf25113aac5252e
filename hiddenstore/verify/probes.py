"""Statistics that tell whether stored states belong to their tokens. Pure functions on arrays.

Shapes: T tokens of a sample, R rows of states, n rows tested, D target width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore.records import TopK
from hiddenstore.targets.head import HeadBundle
from hiddenstore.verify.profile import signs
from schemas.capture import NormState
from schemas.manifest import ROLES

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


def combined(tests: Sequence[Matching]) -> Matching:
    """Several samples as one test, weighted by rows."""
    rows = sum(test.rows for test in tests)
    if not rows:
        return Matching(0.0, 0.0, 0)
    weights = np.array([test.rows / rows for test in tests])
    effect = float(weights @ np.array([test.effect for test in tests]))
    spread = float(np.sqrt(np.square(weights * np.array([test.spread for test in tests])).sum()))
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
class Rows:
    """States bf16 [R, D] at the token positions [R] of a sample with ``input_ids`` [T]."""

    states: Tensor
    positions: np.ndarray
    input_ids: np.ndarray


def predict(head: HeadBundle, rows: Rows, norm_state: NormState) -> Prediction | None:
    """Run the head over up to ``LOGIT_ROWS`` final hiddens of one sample; None if there are too few."""
    usable = _followed(rows.positions, rows.input_ids, head.vocab_size)
    usable = usable[np.isfinite(rows.states[torch.from_numpy(usable)].float().sum(-1).numpy())]
    usable = thinned(usable, LOGIT_ROWS)
    if len(usable) < 2:
        return None
    logp = torch.log_softmax(head.logits(rows.states[torch.from_numpy(usable)], norm_state), dim=-1)
    return _prediction(lambda tokens: logp[:, tokens], logp.argmax(-1), rows.positions[usable], rows.input_ids)


def predict_from_top_tokens(topk: TopK, positions: np.ndarray, input_ids: np.ndarray, vocab: int) -> Prediction | None:
    """The same from top tokens [R, k] at token positions [R]; None if there are too few.

    The probability that the top tokens leave over counts as spread evenly over the rest of the vocabulary.
    """
    usable = thinned(_followed(positions, input_ids, vocab), LOGIT_ROWS)
    if len(usable) < 2:
        return None
    top = topk.at(torch.from_numpy(usable))
    rest = (1 - top.log_probs.exp().sum(-1)).clamp(min=_LEAST_REST).div(max(1, vocab - top.k)).log()

    def logp(tokens: Tensor) -> Tensor:
        listed = top.ids[:, :, None] == tokens
        return torch.where(listed.any(1), (listed * top.log_probs[:, :, None]).sum(1), rest[:, None])

    return _prediction(logp, top.ids[:, 0], positions[usable], input_ids)


def _prediction(
    logp: Callable[[Tensor], Tensor], first: Tensor, positions: np.ndarray, input_ids: np.ndarray
) -> Prediction:
    """``logp`` gives [n, m] of m tokens after each of n rows; ``first`` [n] is the most probable token of each."""
    tokens = [torch.from_numpy(input_ids[positions + offset].astype(np.int64)) for offset in OFFSETS]
    scores = [logp(ids) for ids in tokens]
    nll = [float(-score.diagonal().mean()) for score in scores]
    hits = float((first == tokens[1]).float().mean())
    return Prediction((nll[0], nll[1], nll[2]), hits, matching(scores[1].numpy()), tokens[1].numpy())


def _followed(positions: np.ndarray, input_ids: np.ndarray, vocab: int) -> np.ndarray:
    """Indices of the rows whose own and next two tokens exist and are in the vocabulary."""
    usable = np.flatnonzero(positions + OFFSETS[-1] < len(input_ids))
    valid = (input_ids >= 0) & (input_ids < vocab)
    followed: np.ndarray = usable[np.all([valid[positions[usable] + offset] for offset in OFFSETS], axis=0)]
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


def mask_of_turns_fault(mask: np.ndarray, spans: np.ndarray) -> tuple[str, str] | None:
    """Whether a loss mask [T] follows the assistant turns ``spans`` [n, 3]: a kind and what is wrong, or None.

    Right are complete assistant turns, a subset of their tokens (a mask may be narrowed), and everything
    (``--loss-on all``).
    """
    supervised = mask != 0
    turns = [(int(a), int(b)) for role, a, b in spans if role == ASSISTANT and b > a]
    if supervised.all() or not supervised.any() or not len(spans):
        return None
    if np.array_equal(supervised, _turns_under(supervised, turns)):
        return None
    for shift, compared in ((1, slice(1, None)), (-1, slice(None, -1))):
        turns_shifted = _shifted(_turns_under(_shifted(supervised, -shift), turns), shift)
        if np.array_equal(supervised[compared], turns_shifted[compared]):
            return "mask-shift", f"the loss mask lies {abs(shift)} token {'after' if shift > 0 else 'before'} its turns"
    outside = supervised & ~_union(turns, len(supervised))
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        return "mask-outside", f"{int(outside.sum())} supervised tokens lie in no assistant turn, the first at {first}"
    return None


def _turns_under(mask: np.ndarray, turns: list[tuple[int, int]]) -> np.ndarray:
    """The union of the turns in which a token of ``mask`` lies."""
    return _union([(a, b) for a, b in turns if mask[a:b].any()], len(mask))


def _union(turns: list[tuple[int, int]], tokens: int) -> np.ndarray:
    union = np.zeros(tokens, dtype=bool)
    for a, b in turns:
        union[a:b] = True
    return union


def _shifted(mask: np.ndarray, by: int) -> np.ndarray:
    """``mask`` moved ``by`` tokens; what leaves is lost."""
    moved = np.roll(mask, by)
    moved[slice(0, by) if by > 0 else slice(by, None)] = False
    return moved


def zero_rows(states: Tensor, typical_rms: float) -> np.ndarray:
    """Indices of rows of [R, D] that are zero up to what a codec makes of zero: ``ZERO_SHARE`` of a typical row."""
    return np.flatnonzero((states.float().square().mean(-1).sqrt() <= ZERO_SHARE * typical_rms).numpy())


def non_finite_rows(states: Tensor) -> np.ndarray:
    """Indices of rows of [R, D] with a NaN or an infinity."""
    return np.flatnonzero((~torch.isfinite(states).all(-1)).numpy())


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


def thinned(indices: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of them, evenly spread."""
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, most).astype(np.int64)]


PROJECTIONS = 64
MOST_TOKENS = 200_000
MOST_ROWS = 256
CLIP = 10.0


class TokenPairing:
    """Gathers projected rows of one field, then tests every sample against the others.

    Rows are centred and divided by each channel's spread first: a few outlier channels would drown the rest.
    """

    def __init__(self, width: int) -> None:
        self._signs = torch.from_numpy(signs(width, PROJECTIONS)).float()
        self._centre: Tensor | None = None
        self._scale: Tensor | None = None
        self._rows: dict[str, np.ndarray] = {}
        self._tokens: dict[str, np.ndarray] = {}
        self._row_count = 0

    def calibrate(self, states: Sequence[Tensor]) -> None:
        """Channel centres and spreads [D] from a few samples' rows [R, D]."""
        rows = torch.cat(list(states)).float().nan_to_num(0.0, 0.0, 0.0) if states else torch.empty(0)
        if len(rows):
            self._centre = rows.median(dim=0).values
            spread = (rows - self._centre).abs().median(dim=0).values
            self._scale = spread.clamp(min=1e-6 * float(spread.max()) + 1e-30)

    def add(self, sample: str, rows: Rows) -> None:
        """The rows of one sample; beyond ``MOST_TOKENS`` in all nothing more is tested."""
        if self._centre is None or self._scale is None or self._row_count >= MOST_TOKENS:
            return
        scaled = (rows.states.float().nan_to_num(0.0, 0.0, 0.0) - self._centre) / self._scale
        projected = scaled.clamp(-CLIP, CLIP) @ self._signs
        self._rows[sample] = (projected / projected.norm(dim=-1, keepdim=True).clamp(min=1e-12)).numpy()
        self._tokens[sample] = rows.input_ids[rows.positions]
        self._row_count += len(rows.positions)

    def test(self) -> dict[str, Matching]:
        """The matching of every sample that has at least two rows whose tokens other samples have too."""
        if not self._tokens:
            return {}
        vocabulary, codes = np.unique(np.concatenate(list(self._tokens.values())), return_inverse=True)
        borders = np.cumsum([len(tokens) for tokens in self._tokens.values()])[:-1]
        coded = dict(zip(self._tokens, np.split(codes, borders), strict=True))
        size = np.bincount(codes, minlength=len(vocabulary))
        total = np.zeros((len(vocabulary), PROJECTIONS))
        for name, code in coded.items():
            np.add.at(total, code, self._rows[name])
        tested = {}
        for name, code in coded.items():
            present, slot, count = np.unique(code, return_inverse=True, return_counts=True)
            usable = thinned(np.flatnonzero(size[code] > count[slot]), MOST_ROWS)
            if len(usable) < 2:
                continue
            rows = self._rows[name]
            others = total[present]
            np.subtract.at(others, slot, rows)
            centroid = others[slot[usable]]
            centroid /= np.maximum(np.linalg.norm(centroid, axis=1, keepdims=True), 1e-12)
            tested[name] = matching(rows[usable] @ centroid.T)
        return tested

"""Do the rows of a field belong to the tokens beside them?

A layer keeps, among much else, which token it stands at: rows of one token resemble each other more than rows of
different tokens. Each row is compared with the mean row of every token of its sample, made from the other samples;
states of another sample lose exactly this resemblance.

Shapes: R rows of a sample, D target width, P projections, n rows tested, U distinct tokens.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hiddenstore.verify.probes import Held, Matching, matching, thinned
from hiddenstore.verify.profile import signs

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
        self._held = 0

    def calibrate(self, states: Sequence[Tensor]) -> None:
        """Channel centres and spreads [D] from a few samples' rows [R, D]."""
        rows = torch.cat(list(states)).float().nan_to_num(0.0, 0.0, 0.0) if states else torch.empty(0)
        if len(rows):
            self._centre = rows.median(dim=0).values
            spread = (rows - self._centre).abs().median(dim=0).values
            self._scale = spread.clamp(min=1e-6 * float(spread.max()) + 1e-30)

    def add(self, sample: str, held: Held) -> None:
        """The rows of one sample; once ``MOST_TOKENS`` are held, nothing more is tested."""
        if self._centre is None or self._scale is None or self._held >= MOST_TOKENS:
            return
        rows = (held.states.float().nan_to_num(0.0, 0.0, 0.0) - self._centre) / self._scale
        projected = rows.clamp(-CLIP, CLIP) @ self._signs
        self._rows[sample] = (projected / projected.norm(dim=-1, keepdim=True).clamp(min=1e-12)).numpy()
        self._tokens[sample] = held.input_ids[held.places]
        self._held += len(held.places)

    def test(self) -> dict[str, Matching]:
        """The matching of every sample that has at least two rows whose tokens other samples have too."""
        counts = Counter(token for tokens in self._tokens.values() for token in tokens.tolist())
        codes = {token: index for index, token in enumerate(counts)}
        size = np.array(list(counts.values()), dtype=np.int64)
        total = np.zeros((len(codes), PROJECTIONS))
        coded = {
            name: np.array([codes[token] for token in tokens.tolist()], dtype=np.int64)
            for name, tokens in self._tokens.items()
        }
        for name, code in coded.items():
            np.add.at(total, code, self._rows[name])
        tested = {}
        for name, code in coded.items():
            present, place, own = np.unique(code, return_inverse=True, return_counts=True)
            usable = thinned(np.flatnonzero(size[code] > own[place]), MOST_ROWS)
            if len(usable) < 2:
                continue
            rows = self._rows[name]
            others = total[present]
            np.subtract.at(others, place, rows)
            centroid = others[place[usable]]
            centroid /= np.maximum(np.linalg.norm(centroid, axis=1, keepdims=True), 1e-12)
            tested[name] = matching(rows[usable] @ centroid.T)
        return tested

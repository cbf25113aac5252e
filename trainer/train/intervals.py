"""What pairs of runs tell: the mean difference, and the interval that seeds and held-out samples leave.

Shapes: S seeds, N held-out samples.
"""

import statistics
from dataclasses import dataclass

from torch import Tensor

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom; from there on 2.26 is at most 13 % too wide."""
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Difference:
    """A mean difference of acceptance, its standard error over seeds, and the half-width of its 95 % interval."""

    mean: float
    standard_error: float
    half_width: float


def paired_difference(recipe: Tensor, original: Tensor, slots: Tensor) -> Difference:
    """From overlaps summed per sample fp64 [S, N] of either side and the slots of each sample fp64 [N]; S at least 2.

    The interval adds what another seed and what other held-out text would change: Student's t over the seeds, and the
    normal one over the samples' parts of the mean, samples being drawn as a whole.
    """
    total, parts = slots.sum(), recipe - original
    by_seed = (parts.sum(1) / total).tolist()
    mean = statistics.fmean(by_seed)
    error = statistics.stdev(by_seed) / len(by_seed) ** 0.5
    count = len(slots)
    beside = parts.mean(0) - mean * slots
    text = float((beside.square().sum() * count / max(1, count - 1)).sqrt() / total)
    t = _T_95[min(len(by_seed) - 1, len(_T_95)) - 1]
    return Difference(mean, error, ((t * error) ** 2 + (_NORMAL_95 * text) ** 2) ** 0.5)

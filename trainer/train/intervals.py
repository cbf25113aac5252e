"""What pairs of runs tell: the mean difference, and the interval that seeds and held-out samples leave.

Shapes: S seeds, N held-out samples.
"""

import math
import statistics
from dataclasses import dataclass

from torch import Tensor

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom."""
_NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Difference:
    """A mean difference of acceptance, its standard error over seeds, and the half-width of its 95 % interval, infinite
    for one held-out sample."""

    mean: float
    standard_error: float
    half_width: float


def paired_difference(recipe: Tensor, original: Tensor, slots: Tensor) -> Difference:
    """From overlaps summed per sample fp64 [S, N] of either side and the slots of each sample fp64 [N]; S at least 2.

    The interval adds what another seed and what other held-out text would change: Student's t over the seeds, and over
    the samples' parts of the mean, samples being drawn as a whole.
    """
    total, parts = slots.sum(), recipe - original
    by_seed = (parts.sum(1) / total).tolist()
    mean = statistics.fmean(by_seed)
    error = statistics.stdev(by_seed) / len(by_seed) ** 0.5
    count = len(slots)
    if count == 1:
        return Difference(mean, error, math.inf)
    beside = parts.mean(0) - mean * slots
    text = float((beside.square().sum() * count / (count - 1)).sqrt() / total)
    return Difference(mean, error, math.hypot(_student_95(len(by_seed) - 1) * error, _student_95(count - 1) * text))


def _student_95(freedom: int) -> float:
    """The two-sided 95 % point of Student's t, to 0.003 (beyond the table: Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = _NORMAL_95
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2

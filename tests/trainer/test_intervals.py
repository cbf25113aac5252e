"""The interval of a paired difference: seeds and held-out samples both widen it, and it covers what it says."""

import math

import pytest
import torch

from trainer.train.paired import paired_difference


def test_the_error_is_that_of_the_mean_of_the_differences_over_seeds() -> None:
    slots = torch.tensor([50.0, 50.0], dtype=torch.float64)
    recipe, original = (torch.tensor(x).double()[:, None].expand(-1, 2) / 2 for x in ((51, 60, 42), (50, 61, 45)))
    found = paired_difference(recipe, original, slots)
    assert found.mean == pytest.approx(-0.01)
    assert found.standard_error == pytest.approx(math.sqrt((0.02**2 + 0.0**2 + 0.02**2) / 2) / math.sqrt(3))
    # Samples that agree add nothing: the seeds alone are left.
    assert found.half_width == pytest.approx(4.303 * found.standard_error)


def test_samples_that_disagree_widen_the_interval_though_every_seed_says_the_same() -> None:
    slots = torch.full((4,), 10.0, dtype=torch.float64)
    original = torch.zeros(2, 4, dtype=torch.float64)
    even = paired_difference(original + 1, original, slots)
    mixed = paired_difference(original + torch.tensor([4.0, 0, 0, 0]), original, slots)
    assert (even.mean, even.half_width) == pytest.approx((0.1, 0.0))
    assert mixed.mean == pytest.approx(0.1)
    assert mixed.half_width == pytest.approx(3.182 * 0.1)


def test_one_held_out_sample_leaves_the_interval_unknown() -> None:
    found = paired_difference(torch.ones(2, 1).double(), torch.zeros(2, 1).double(), torch.tensor([10.0]).double())
    assert (found.mean, found.half_width) == (pytest.approx(0.1), math.inf)


@pytest.mark.parametrize("samples", [2, 3, 5, 12, 60])
def test_the_interval_holds_the_true_difference_in_95_of_100_experiments(samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Few samples of one length each: of others, no interval of their sums keeps its share.
    slots = (
        torch.randint(50, 200, (60,), generator=generator).double() if samples == 60 else torch.ones(samples) * 100.0
    )
    covered = 0
    for _ in range(400):
        noise = 0.02 * torch.randn(samples, generator=generator).double()
        noise = noise + 0.003 * torch.randn(3, 1, generator=generator)
        noise = noise + 0.01 * torch.randn(3, samples, generator=generator)
        found = paired_difference((noise + 0.005) * slots, torch.zeros(3, samples), slots)
        covered += abs(found.mean - 0.005) <= found.half_width
    assert 0.93 <= covered / 400 <= 1.0

"""What `plan` and `train` quote of the drafters that were measured."""

from itertools import pairwise

from hiddenstore.inspect.forecast import LENGTHS, NGRAM_FLOOR, expectation


def test_a_number_of_tokens_is_told_what_the_measured_sizes_on_both_sides_of_it_reached() -> None:
    (small, low, _), (large, high, _) = LENGTHS[1:3]
    line = expectation((small + large) // 2)
    assert f"{low:.2f}" in line
    assert f"{high:.2f}" in line
    assert line.count("tokens") == 2
    assert f"floor {NGRAM_FLOOR:.2f}" in line


def test_fewer_or_more_tokens_than_any_measured_are_told_of_the_nearest_size_alone() -> None:
    for tokens, (_, length, _how) in ((1, LENGTHS[0]), (10**12, LENGTHS[-1])):
        line = expectation(tokens)
        assert f"{length:.2f}" in line
        assert " and " not in line


def test_the_measured_sizes_ascend_and_so_do_their_lengths() -> None:
    assert all(small < large and low < high for (small, low, _), (large, high, _how) in pairwise(LENGTHS))

"""Global batches and packs are functions of the lengths in reading order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstore.data.order import first_fit, global_batches

lengths_lists = st.lists(st.integers(1, 50), max_size=60)


def test_a_batch_takes_consecutive_samples_up_to_its_budget() -> None:
    batches = list(global_batches([4, 4, 4, 2, 9], np.arange(5), batch_tokens=10, pack_tokens=9))
    assert [(b.start, b.stop) for b in batches] == [(0, 2), (2, 4), (4, 5)]
    assert batches[0].packs == ((0, 1),)


def test_packs_are_filled_first_fit() -> None:
    assert first_fit([5, 6, 3, 4, 2], 10) == [[0, 2, 4], [1, 3]]


def test_a_sample_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens"):
        next(global_batches([3, 11], np.arange(2), batch_tokens=20, pack_tokens=10))


@settings(max_examples=100, deadline=None)
@given(lengths_lists, st.integers(50, 120), st.integers(50, 200), st.randoms())
def test_every_sample_is_in_exactly_one_pack_within_budget(
    lengths: list[int], pack_tokens: int, extra: int, random: object
) -> None:
    order = np.array(random.sample(range(len(lengths)), len(lengths)), dtype=np.int64)  # type: ignore[attr-defined]
    batch_tokens = pack_tokens + extra
    batches = list(global_batches(lengths, order, batch_tokens, pack_tokens))
    positions = [p for b in batches for pack in b.packs for p in pack]
    assert sorted(positions) == list(range(len(lengths)))
    ordered = [lengths[int(i)] for i in order]
    for batch in batches:
        assert sum(ordered[batch.start : batch.stop]) <= batch_tokens
        assert batch.stop == len(lengths) or sum(ordered[batch.start : batch.stop + 1]) > batch_tokens
        assert all(sum(ordered[p] for p in pack) <= pack_tokens for pack in batch.packs)
        assert all(list(pack) == sorted(pack) for pack in batch.packs)


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.integers(50, 120))
def test_starting_at_any_batch_continues_as_if_never_interrupted(lengths: list[int], budget: int) -> None:
    order = np.arange(len(lengths))[::-1].copy()
    whole = list(global_batches(lengths, order, budget, budget))
    for index, batch in enumerate(whole):
        assert list(global_batches(lengths, order, budget, budget, batch.stop)) == whole[index + 1 :]


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.sampled_from([1, 2, 3, 4, 8]))
def test_ranks_together_hold_the_samples_of_one_rank_in_balanced_shares(lengths: list[int], world_size: int) -> None:
    for batch in global_batches(lengths, np.arange(len(lengths)), 200, 60):
        split = [batch.packs_of(rank, world_size) for rank in range(world_size)]
        shares = [[p for pack in packs for p in pack] for packs in split]
        assert sorted(p for share in shares for p in share) == list(range(batch.start, batch.stop))
        assert all(sum(lengths[p] for p in pack) <= 60 for packs in split for pack in packs)
        loads = [sum(lengths[p] for p in share) for share in shares]
        assert max(loads) - min(loads) <= max(batch.lengths)
        assert min(map(len, shares)) > 0 or max(map(len, shares)) <= 1


def test_a_batch_that_first_fit_would_cut_into_three_packs_gives_two_ranks_one_each() -> None:
    lengths = [30, 30, 30, 40, 40, 30]
    (batch,) = global_batches(lengths, np.arange(6), batch_tokens=200, pack_tokens=100)
    assert len(batch.packs) == 3
    split = [batch.packs_of(rank, 2) for rank in range(2)]
    assert [len(packs) for packs in split] == [1, 1]
    assert [sum(lengths[p] for p in packs[0]) for packs in split] == [100, 100]

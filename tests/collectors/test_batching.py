"""Batches: complete, bounded, and a pure function of the unit."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from collectors.engines.hf import MIN_FILL, plan_batches
from hiddenstore.targets.rope import rope_boundary

lengths_of_units = st.lists(st.integers(1, 3000), min_size=0, max_size=60)


@given(lengths_of_units, st.integers(1, 8192))
def test_every_sample_is_in_exactly_one_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= budget or len(batch) == 1
        assert sum(lengths[i] for i in batch) >= MIN_FILL * padded


@given(lengths_of_units, st.integers(1, 8192), st.integers(1, 3000))
def test_no_batch_mixes_samples_from_both_sides_of_the_rope_boundary(
    lengths: list[int], budget: int, boundary: int
) -> None:
    for batch in plan_batches(lengths, budget, boundary):
        assert len({lengths[i] > boundary for i in batch}) == 1


def test_equal_units_have_equal_batches() -> None:
    assert plan_batches([7, 7, 3, 9], 21) == [[2], [0, 1], [3]]


def test_only_length_dependent_rotary_embeddings_have_a_boundary() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert rope_boundary(SimpleNamespace(rope_parameters=longrope)) == 4096
    assert rope_boundary(SimpleNamespace(rope_scaling={"type": "dynamic"}, max_position_embeddings=2048)) == 2048
    assert rope_boundary(SimpleNamespace(rope_parameters={"rope_type": "llama3"})) is None
    assert rope_boundary(SimpleNamespace()) is None

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import default_aux_layers, from_convention, to_convention


@pytest.mark.parametrize(
    ("layers", "expected"), [(32, [1, 15, 28]), (36, [1, 17, 32]), (24, [1, 11, 20]), (8, [1, 3, 4])]
)
def test_eagle3_defaults_are_the_fields(layers: int, expected: list[int]) -> None:
    assert default_aux_layers("eagle3", layers) == expected


@pytest.mark.parametrize(("layers", "expected"), [(32, [1, 8, 15, 22, 29]), (36, [1, 9, 17, 25, 33])])
def test_dflash_defaults_are_the_fields(layers: int, expected: list[int]) -> None:
    assert default_aux_layers("dflash", layers) == expected


def test_a_colliding_layer_moves_up_on_a_shallow_target() -> None:
    assert default_aux_layers("eagle3", 6) == [1, 2, 3]


@given(st.integers(3, 200))
def test_default_layers_are_distinct_ascending_and_inside_the_target(layers: int) -> None:
    found = default_aux_layers("eagle3", layers)
    assert found == sorted(set(found))
    assert len(found) == 3
    assert found[0] >= 0
    assert found[-1] < layers


def test_a_target_with_too_few_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="reads 3 aux layers, but the target has 2"):
        default_aux_layers("eagle3", 2)


def test_the_same_tensors_have_three_published_spellings() -> None:
    assert to_convention([1, 15, 28], "vllm") == [2, 16, 29]
    assert to_convention([1, 15, 28], "hf") == [2, 16, 29]
    assert to_convention([1, 15, 28], "output") == [1, 15, 28]


@given(st.lists(st.integers(-1, 100)), st.sampled_from(["hf", "vllm", "output"]))
def test_conventions_convert_back_and_forth(layers: list[int], convention: str) -> None:
    assert from_convention(to_convention(layers, convention), convention) == layers

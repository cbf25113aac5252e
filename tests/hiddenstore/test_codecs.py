"""Codecs: exactness, the error bound of q8 and the finiteness of what it decodes, over adversarial bit patterns.

Shapes: L layers, T tokens, D width.
"""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenstore.codecs import CODECS, DEFAULT_RECIPE, RECIPES, Encoded, get_codec, get_recipe
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS
from hiddenstore.errors import ConfigError

KINDS = ("bits", "normal", "subnormal", "huge", "sinks", "constant", "scaled")


def make_states(kind: str, layers: int, tokens: int, width: int, seed: int) -> Tensor:
    """bfloat16 [L, T, D] of one kind of difficulty."""
    rng = np.random.default_rng(seed)
    if kind in ("bits", "subnormal"):
        bits = rng.integers(0, 1 << 16, (layers, tokens, width), dtype=np.uint16)
        if kind == "subnormal":
            bits &= 0x80FF
        return torch.from_numpy(bits).view(torch.bfloat16)
    values = rng.standard_normal((layers, tokens, width))
    if kind == "huge":
        values *= 10.0 ** rng.uniform(-38, 39, (layers, tokens, 1))
    elif kind == "sinks":
        values[:, :1] *= 1500.0
        values[:, -1:, :1] = 3e4
    elif kind == "constant":
        values[..., ::2] = 1.0
        values[..., 1::4] = 0.0
        values *= rng.random((layers, tokens, 1)) < 0.5
    elif kind == "scaled":
        values *= np.exp(3 * rng.standard_normal((layers, 1, width)))
        values += 100 * rng.standard_normal((layers, 1, width))
    return torch.from_numpy(np.clip(values, -3.38e38, 3.38e38)).bfloat16()


states_of_any_kind = st.builds(
    make_states,
    st.sampled_from(KINDS),
    st.integers(1, 2),
    st.integers(0, 40),
    st.sampled_from([1, 3, 31, 32, 33, 64]),
    st.integers(0, 2**32 - 1),
)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


def as_float(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).double()


def ulp(values: Tensor) -> Tensor:
    """Distance from |bf16| to the next number above, float64."""
    magnitude = values.view(torch.int16) & 0x7FFF
    step = torch.where(magnitude == 0x7F7F, magnitude - 1, magnitude)
    return (step + 1).view(torch.bfloat16).double() - step.view(torch.bfloat16).double()


@pytest.mark.parametrize("name", ["bf16", "lossless"])
@given(states=states_of_any_kind)
@settings(max_examples=40, deadline=None)
def test_verbatim_codecs_give_back_every_bit(name: str, states: Tensor) -> None:
    codec = get_codec(name)
    encoded = codec.encode(states)
    assert [codes.dtype for codes in encoded.codes] == [torch.uint16] * len(states)
    assert same_bits(codec.decode(encoded), states)


@given(states=states_of_any_kind)
@settings(max_examples=300, deadline=None)
@example(states=make_states("bits", 1, 1, 1, 0))
@example(states=torch.full((1, 2, 4), 3.3895e38).bfloat16() * torch.tensor([1.0, -1.0]).bfloat16()[:, None])
def test_q8_holds_its_bound_per_element_and_keeps_odd_rows_exactly(states: Tensor) -> None:
    codec = get_codec("q8")
    encoded = codec.encode(states)
    decoded = codec.decode(encoded)
    raw = torch.zeros(states.shape[:2], dtype=torch.bool)
    index = torch.from_numpy(encoded.small[RAW_INDEX].astype(np.int64))
    raw[index[:, 0], index[:, 1]] = True
    assert same_bits(decoded[raw], states[raw])
    assert torch.isfinite(states[~raw]).all(), "a non-finite row was quantised"
    assert torch.isfinite(decoded[~raw]).all(), "a finite row decoded to NaN or Inf"
    token_scale = as_float(encoded.small["token_scale"])[:, :, None]
    channel_scale = as_float(encoded.small["channel_scale"])[:, None, :]
    bound = token_scale * channel_scale / 2 + torch.maximum(ulp(states), ulp(decoded))
    error = (decoded.double() - states.double()).abs()
    assert (error <= bound)[~raw].all(), f"error over bound by {float((error / bound)[~raw].max())}"


@given(states=states_of_any_kind)
@settings(max_examples=60, deadline=None)
def test_q8_small_arrays_have_the_documented_shapes_and_meaning(states: Tensor) -> None:
    layers, tokens, width = states.shape
    codec = get_codec("q8")
    encoded = codec.encode(states)
    sizes = {"L": layers, "T": tokens, "D": width, "N": len(encoded.small[RAW_INDEX])}
    for name, field in codec.small.items():
        assert encoded.small[name].shape == field.shape(sizes), name
        assert encoded.small[name].dtype == np.dtype(field.dtype), name
    places = [tuple(place) for place in encoded.small[RAW_INDEX].tolist()]
    assert places == sorted(set(places))
    zero_scale = np.argwhere(encoded.small["token_scale"] == 0).tolist()
    assert [tuple(place) for place in zero_scale] == places
    assert all(not encoded.codes[layer][row].any() for layer, row in places)


@given(states=states_of_any_kind, cut=st.tuples(st.integers(0, 40), st.integers(0, 40)))
@settings(max_examples=40, deadline=None)
def test_q8_rows_decode_alone_as_they_do_together(states: Tensor, cut: tuple[int, int]) -> None:
    codec = get_codec("q8")
    encoded = codec.encode(states)
    whole = codec.decode(encoded)
    low, high = sorted(min(place, states.shape[1]) for place in cut)
    index = encoded.small[RAW_INDEX]
    inside = (index[:, 1] >= low) & (index[:, 1] < high)
    part = Encoded(
        [codes[low:high] for codes in encoded.codes],
        {
            **encoded.small,
            "token_scale": encoded.small["token_scale"][:, low:high],
            RAW_INDEX: index[inside] - np.array([0, low], dtype=np.int32),
            RAW_ROWS: encoded.small[RAW_ROWS][inside],
        },
    )
    assert same_bits(codec.decode(part), whole[:, low:high])


def test_q8_keeps_attention_sinks_raw_and_everything_else_in_codes() -> None:
    states = make_states("normal", 2, 2000, 64, 0)
    states[:, ::500] *= 1500
    encoded = get_codec("q8").encode(states)
    assert encoded.small[RAW_INDEX].tolist() == [[layer, row] for layer in (0, 1) for row in (0, 500, 1000, 1500)]


def test_q8_keeps_a_row_raw_when_one_huge_element_would_eat_its_codes() -> None:
    states = make_states("normal", 1, 300, 4096, 0)
    states[0, 7, 11] = 200.0
    assert get_codec("q8").encode(states).small[RAW_INDEX].tolist() == [[0, 7]]


@pytest.mark.parametrize("kind", ["normal", "scaled"])
def test_q8_error_is_under_one_percent_of_each_channels_deviation(kind: str) -> None:
    states = make_states(kind, 1, 3000, 256, 1)
    decoded = get_codec("q8").decode(get_codec("q8").encode(states))
    deviation = states.double().std(dim=1)
    error = (decoded.double() - states.double()).square().mean(dim=1).sqrt()
    rounding = states.double().abs().mean(dim=1) * 2.0**-8
    assert (error <= 0.012 * deviation + rounding).all()


def test_q8_statistics_ignore_a_channel_that_is_almost_always_constant() -> None:
    states = make_states("normal", 1, 1000, 64, 2)
    states[0, :, 5] = 1.0
    states[0, ::7, 5] = 1.5
    encoded = get_codec("q8").encode(states)
    assert len(encoded.small[RAW_INDEX]) == 0
    error = (get_codec("q8").decode(encoded).double() - states.double()).abs().max()
    assert error < 0.1


@pytest.mark.parametrize("name", sorted(CODECS))
def test_equal_states_give_equal_bytes_whatever_the_thread_count(name: str) -> None:
    states = make_states("scaled", 2, 700, 96, 3)
    digests = set()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            encoded = get_codec(name).encode(states)
            digest = hashlib.sha256(b"".join(codes.numpy().tobytes() for codes in encoded.codes))
            for field in sorted(encoded.small):
                digest.update(encoded.small[field].tobytes())
            digests.add(digest.hexdigest())
    finally:
        torch.set_num_threads(threads)
    assert len(digests) == 1


@pytest.mark.parametrize("name", sorted(CODECS))
def test_encode_takes_layers_one_after_the_other_and_leaves_them_unchanged(name: str) -> None:
    states = make_states("sinks", 3, 50, 33, 4)
    before = states.clone()
    codec = get_codec(name)
    stacked, streamed = codec.encode(states), codec.encode(layer for layer in states)
    assert same_bits(states, before)
    assert same_bits(codec.decode(stacked), codec.decode(streamed))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_decode_writes_into_the_given_tensor_and_refuses_a_wrong_one(name: str) -> None:
    codec = get_codec(name)
    states = make_states("normal", 2, 9, 32, 5)
    encoded = codec.encode(states)
    out = torch.zeros(2, 9, 32, dtype=torch.bfloat16)
    assert codec.decode(encoded, out) is out
    assert same_bits(out, codec.decode(encoded))
    with pytest.raises(ValueError, match="out must be bfloat16"):
        codec.decode(encoded, torch.zeros(2, 9, 32))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_no_layers_encode_to_nothing(name: str) -> None:
    encoded = get_codec(name).encode(torch.empty(0, 7, 32, dtype=torch.bfloat16))
    assert encoded.codes == []
    assert get_codec(name).decode(encoded).shape[0] == 0


def test_unknown_codec_and_recipe_name_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean lossless") as codec_error:
        get_codec("losless")
    assert codec_error.value.kind == "codec-unknown"
    with pytest.raises(ConfigError, match="did you mean safe") as recipe_error:
        get_recipe("save")
    assert recipe_error.value.kind == "recipe-unknown"


def test_every_recipe_names_codecs_that_exist() -> None:
    assert DEFAULT_RECIPE in RECIPES
    for name in RECIPES:
        recipe = get_recipe(name)
        assert {recipe.aux, recipe.final} <= set(CODECS)

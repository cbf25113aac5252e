"""Codecs: exactness, the error bounds of q8 and q4 and the finiteness of what they decode, over hostile bit patterns.

Shapes: L layers, T tokens, D width.
"""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hiddenstore.codecs import CODECS, affine, get_codec
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, Encoded, fresh
from hiddenstore.codecs.klt import KLT
from hiddenstore.errors import ConfigError

QUANTISED = ("q8", "q4")
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
        values[..., 3::4] *= -0.0
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


def step_sizes(name: str, encoded: Encoded, width: int) -> Tensor:
    """Distance of neighbouring codes in units of the channel scale, float64 [L, T, D], from the stored bytes alone."""
    token_scale = as_float(encoded.small["token_scale"])[:, :, None]
    if name == "q8":
        return token_scale.expand(-1, -1, width)
    groups = -(-width // 32)
    bits = torch.stack(encoded.codes)[:, :, 16 * groups :].contiguous()
    scales = bits.view(torch.float8_e4m3fn).double().abs()
    return token_scale * scales[:, :, torch.arange(width) % groups]


@pytest.mark.parametrize("name", QUANTISED)
@given(states=states_of_any_kind)
@settings(max_examples=300, deadline=None)
@example(states=make_states("bits", 1, 1, 1, 0))
@example(states=make_states("sinks", 1, 40, 96, 0))
@example(states=torch.full((1, 2, 4), 3.3895e38).bfloat16() * torch.tensor([1.0, -1.0]).bfloat16()[:, None])
@example(states=torch.tensor([[[1.0, -0.0, 0.0], [float("nan"), 1.0, 0.0], [-1.0, float("-inf"), 2.0]]]).bfloat16())
def test_quantised_codecs_hold_their_bound_per_element_and_keep_odd_rows_exactly(name: str, states: Tensor) -> None:
    codec = get_codec(name)
    encoded = codec.encode(states)
    decoded = codec.decode(encoded)
    raw = torch.zeros(states.shape[:2], dtype=torch.bool)
    index = torch.from_numpy(encoded.small[RAW_INDEX].astype(np.int64))
    raw[index[:, 0], index[:, 1]] = True
    assert same_bits(decoded[raw], states[raw])
    assert torch.isfinite(states[~raw]).all(), "a non-finite row was quantised"
    assert torch.isfinite(decoded[~raw]).all(), "a finite row decoded to NaN or Inf"
    channel_scale = as_float(encoded.small["channel_scale"])[:, None, :]
    bound = step_sizes(name, encoded, states.shape[2]) * channel_scale / 2 + torch.maximum(ulp(states), ulp(decoded))
    error = (decoded.double() - states.double()).abs()
    assert (error <= bound)[~raw].all(), f"error over bound by {float((error / bound)[~raw].max())}"


@pytest.mark.parametrize("name", QUANTISED)
@given(states=states_of_any_kind)
@settings(max_examples=60, deadline=None)
def test_arrays_of_quantised_codecs_have_the_documented_shapes_and_meaning(name: str, states: Tensor) -> None:
    layers, tokens, width = states.shape
    codec = get_codec(name)
    encoded = codec.encode(states)
    assert [tuple(codes.shape) for codes in encoded.codes] == [(tokens, codec.code_columns(width))] * layers
    parts = codec.row_parts(width)
    assert not parts or sum(part.size for part in parts) == codec.code_columns(width)
    sizes = {"L": layers, "T": tokens, "D": width, "N": len(encoded.small[RAW_INDEX])}
    for name, field in codec.small.items():
        assert encoded.small[name].shape == field.shape(sizes), name
        assert encoded.small[name].dtype == np.dtype(field.dtype), name
    places = [tuple(place) for place in encoded.small[RAW_INDEX].tolist()]
    assert places == sorted(set(places))
    zero_scale = np.argwhere(encoded.small["token_scale"] == 0).tolist()
    assert [tuple(place) for place in zero_scale] == places
    assert all(not encoded.codes[layer][row].any() for layer, row in places)


@pytest.mark.parametrize("name", QUANTISED)
@given(states=states_of_any_kind, cut=st.tuples(st.integers(0, 40), st.integers(0, 40)))
@settings(max_examples=40, deadline=None)
def test_rows_decode_alone_as_they_do_together(name: str, states: Tensor, cut: tuple[int, int]) -> None:
    codec = get_codec(name)
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


@pytest.mark.parametrize("name", QUANTISED)
def test_attention_sinks_are_kept_raw_and_everything_else_in_codes(name: str) -> None:
    states = make_states("normal", 2, 2000, 64, 0)
    states[:, ::500] *= 1500
    encoded = get_codec(name).encode(states)
    assert encoded.small[RAW_INDEX].tolist() == [[layer, row] for layer in (0, 1) for row in (0, 500, 1000, 1500)]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_row_is_kept_raw_when_one_huge_element_would_eat_its_codes(name: str) -> None:
    states = make_states("normal", 1, 300, 4096, 0)
    states[0, 7, 11] = 200.0
    assert get_codec(name).encode(states).small[RAW_INDEX].tolist() == [[0, 7]]


@pytest.mark.parametrize("kind", ["normal", "scaled"])
@pytest.mark.parametrize(("name", "share"), [("q8", 0.012), ("q4", 0.12)])
def test_error_is_a_small_share_of_each_channels_deviation(name: str, share: float, kind: str) -> None:
    states = make_states(kind, 1, 3000, 256, 1)
    decoded = get_codec(name).decode(get_codec(name).encode(states))
    deviation = states.double().std(dim=1)
    error = (decoded.double() - states.double()).square().mean(dim=1).sqrt()
    rounding = states.double().abs().mean(dim=1) * 2.0**-8
    assert (error <= share * deviation + rounding).all()


@pytest.mark.parametrize(("name", "most"), [("q8", 0.1), ("q4", 0.6)])
def test_statistics_ignore_a_channel_that_is_almost_always_constant(name: str, most: float) -> None:
    states = make_states("normal", 1, 1000, 64, 2)
    states[0, :, 5] = 1.0
    states[0, ::7, 5] = 1.5
    encoded = get_codec(name).encode(states)
    assert len(encoded.small[RAW_INDEX]) == 0
    error = (get_codec(name).decode(encoded).double() - states.double()).abs().max()
    assert error < most


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 4096])
def test_q4_decodes_as_its_formula_says_in_plain_numpy(width: int) -> None:
    states = make_states("scaled", 1, 20, width, 6)
    encoded = get_codec("q4").encode(states)
    rows, groups = encoded.codes[0].numpy(), -(-width // 32)
    bits = rows[:, 16 * groups :].astype(np.int64)
    exponent, mantissa, sign = (bits >> 3) & 15, bits & 7, np.where(bits & 128, -1.0, 1.0)
    group_scale = sign * np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    expected = np.empty((20, width), dtype=np.float32)
    for d in range(width):
        half = rows[:, d] & 15 if d < 16 * groups else rows[:, d - 16 * groups] >> 4
        code = np.where(half < 8, half, half.astype(np.int64) - 16).astype(np.float32)
        step = (group_scale[:, d % groups] * as_float(encoded.small["token_scale"])[0].numpy()).astype(np.float32)
        scale = as_float(encoded.small["channel_scale"])[0, d].float().numpy()
        offset = as_float(encoded.small["channel_offset"])[0, d].float().numpy()
        expected[:, d] = (code * step) * scale + offset
    decoded = get_codec("q4").decode(encoded)[0]
    raw = encoded.small[RAW_INDEX][:, 1]
    assert same_bits(without(decoded, raw), without(torch.from_numpy(expected).bfloat16(), raw))


def test_q4_uses_every_code_and_takes_four_and_a_quarter_bits() -> None:
    states = make_states("normal", 1, 400, 4096, 7)
    encoded = get_codec("q4").encode(states)
    packed = encoded.codes[0][:, :2048]
    assert set(torch.cat([packed & 15, packed >> 4]).unique().tolist()) == set(range(16))
    assert get_codec("q4").row_bits(4096) / 4096 == pytest.approx(4.254, abs=1e-3)


def without(rows: Tensor, indices: np.ndarray) -> Tensor:
    """Rows without some of them."""
    keep = torch.ones(len(rows), dtype=torch.bool)
    keep[torch.from_numpy(indices.astype(np.int64))] = False
    return rows[keep]


def test_the_group_scales_of_zeros_have_no_sign() -> None:
    for zero in (0.0, -0.0):
        (codes,) = get_codec("q4").encode([torch.full((4, 64), zero, dtype=torch.bfloat16)]).codes
        assert codes.shape == (4, 34)
        assert not (codes[:, 32:] & 128).any()


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("kind", ["scaled", "sinks"])
def test_a_gpu_makes_the_same_bytes_and_reads_them_back_alike(name: str, kind: str) -> None:
    codec, states = get_codec(name), make_states(kind, 2, 300, 97, 8)
    here, there = codec.encode(states), codec.encode(states.cuda())
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here.codes, there.codes, strict=True))
    assert all(np.array_equal(here.small[field], there.small[field]) for field in codec.small)
    assert same_bits(codec.decode(there).cpu(), codec.decode(here))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_encode_takes_layers_one_after_the_other_and_leaves_them_unchanged(name: str) -> None:
    states = make_states("sinks", 3, 50, 33, 4)
    before = states.clone()
    codec = get_codec(name)
    stacked, streamed = codec.encode(states), codec.encode(layer for layer in states)
    assert same_bits(states, before)
    assert same_bits(codec.decode(stacked), codec.decode(streamed))


@pytest.mark.parametrize("cuts", [[10], [0, 0, 3], [1, 2, 299, 300]])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_layers_in_parts_have_the_codes_of_whole_ones(name: str, cuts: list[int]) -> None:
    states, codec = make_states("sinks", 2, 300, 33, 6), get_codec(name)
    whole, parts = codec.encode(states), codec.encode_layers(layer.tensor_split(cuts) for layer in states).joined()
    assert all(torch.equal(one, other) for one, other in zip(whole.codes, parts.codes, strict=True))
    assert all(np.array_equal(whole.small[field], parts.small[field]) for field in codec.small)


@pytest.mark.parametrize("width", [33, 64])
@pytest.mark.parametrize("name", QUANTISED)
def test_codes_do_not_depend_on_the_block_they_are_made_in_nor_on_broken_rows_in_it(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, codec = make_states("normal", 2, 40, width, 7), get_codec(name)
    states[:, [1, 6]] = float("nan")
    whole = codec.encode(states)
    monkeypatch.setitem(affine._BLOCK_ELEMENTS, "cpu", 4 * width)
    blocks = codec.encode(states)
    assert whole.small[RAW_INDEX].tolist() == [[0, 1], [0, 6], [1, 1], [1, 6]]
    assert all(torch.equal(one, other) for one, other in zip(whole.codes, blocks.codes, strict=True))
    assert all(np.array_equal(whole.small[field], blocks.small[field]) for field in codec.small)


@pytest.mark.parametrize("shape", [(0, 7), (3, 5), (600, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_fresh_memory_has_shape_and_type_and_starts_on_a_line(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = fresh(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert tensor.data_ptr() % 64 == 0
    tensor.fill_(3)
    assert bool((tensor == 3).all())


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", [*QUANTISED, "q3", "klt"])
def test_the_default_type_of_new_tensors_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    states = make_states("scaled", 2, 300, 40, 3)
    data = KLT.fit(list(states))
    codec = KLT.of("klt-test", lambda: data) if name == "klt" else get_codec(name)
    encoded = codec.encode(states)
    decoded = codec.decode(encoded)
    torch.set_default_dtype(dtype)
    try:
        read, again = codec.decode(encoded), codec.encode(states)
        assert KLT.fit(list(states)) == data
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_bits(read, decoded)
    assert all(torch.equal(one, other) for one, other in zip(again.codes, encoded.codes, strict=True))
    assert all(np.array_equal(again.small[field], encoded.small[field]) for field in encoded.small)


def test_an_unknown_codec_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean lossless") as error:
        get_codec("losless")
    assert error.value.kind == "name-unknown"

"""The kernels that decode a pack on a GPU, run by triton's interpreter."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.affine import _DECODING, AffineCodec, Q8Codec, _e4m3_values, _kernel_layout
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS
from hiddenstore.codecs.compiled import gpu_kernels
from hiddenstore.codecs.klt import KLT, MOST_BITS, TRANSFORM
from hiddenstore.data.packed import moved_at_once

pytest.importorskip("triton")
from hiddenstore.codecs import gpu_kernels as kernels

pytestmark = pytest.mark.parity
LENGTHS = (7, 0, 1, 20, 3)


def spans(lengths: Sequence[int]) -> list[slice]:
    stops = np.cumsum(lengths).tolist()
    return [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


@pytest.mark.parametrize("width", [72, 100, 1100])
@pytest.mark.parametrize("name", ["q8", "q4", "q4q3", "q3"])
def test_a_pack_of_several_samples_has_the_bits_of_torch(name: str, width: int) -> None:
    codec, layers, rows = get_codec(name), 3, spans(LENGTHS)
    assert isinstance(codec, AffineCodec)
    states = [torch.randn(layers, length, width) * torch.linspace(0.1, 9, width) for length in LENGTHS]
    # Far louder than the others, so kept as it is.
    states[3][1, 5] *= 1e4
    encoded = [codec.encode(sample.bfloat16()) for sample in states if sample.shape[1]]
    encoded.insert(1, codec.encode(states[1].bfloat16()))
    assert any(len(one.small[RAW_INDEX]) for one in encoded)
    codes = torch.cat([torch.stack(list(one.codes)) for one in encoded], 1)
    small = moved_at_once([one.small for one in encoded], torch.device("cpu"))
    found, expected = (torch.full((layers, sum(LENGTHS), width), 7.0, dtype=torch.bfloat16) for _ in range(2))
    layout = _kernel_layout(type(codec), _DECODING)
    assert layout is not None
    kernels.decode(layout, codes, rows, small, _e4m3_values(torch.device("cpu")), found)
    for span, one in zip(rows, encoded, strict=True):
        raw = torch.from_numpy(one.small[RAW_INDEX].astype(np.int64))
        part = found[:, span]
        part[raw[:, 0], raw[:, 1]] = torch.from_numpy(one.small[RAW_ROWS].view(np.int16)).view(torch.bfloat16)
    codec.decode_pack(codes, rows, [one.small for one in encoded], expected)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("width", [40, 100, 1100])
def test_a_pack_of_klt_has_the_bits_of_torch_in_any_blocks_of_rows(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels._PLANES == MOST_BITS
    monkeypatch.setattr(kernels, "_KLT_BLOCK_ELEMENTS", 9 * width)
    rows, mixing = spans(LENGTHS), torch.randn(2, width, width) * torch.exp(-4 * torch.rand(2, width, 1))
    data = KLT.fit(list((torch.randn(2, 2000, width) @ mixing + 1).bfloat16()))
    codec = KLT.of("klt-test", lambda: data)
    states = [(torch.randn(2, length, width) @ mixing + 1).bfloat16() for length in LENGTHS]
    states[3][1, 5] = float("nan")
    encoded = [codec.encode(sample) for sample in states if sample.shape[1]]
    encoded.insert(1, codec.encode(states[0][:, :0]))
    codes = torch.cat([torch.stack(list(one.codes)) for one in encoded], 1)
    # As they are read: the second layer of the store first.
    places = np.array([1, 0], dtype=np.int32)
    small = [{**one, TRANSFORM: places} for one in moved_at_once([one.small for one in encoded], torch.device("cpu"))]
    found, expected = (torch.full((2, sum(LENGTHS), width), 7.0, dtype=torch.bfloat16) for _ in range(2))
    assert codec._decoded_by(kernels, codes, rows, small, found)
    codec.decode_pack(codes, rows, small, expected)
    for span, one in zip(rows, small, strict=True):
        raw = torch.from_numpy(one[RAW_INDEX].astype(np.int64))
        found[:, span][raw[:, 0], raw[:, 1]] = expected[:, span][raw[:, 0], raw[:, 1]]
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    small[3] |= {TRANSFORM: places[::-1]}
    assert not codec._decoded_by(kernels, codes, rows, small, found)


def test_a_pack_without_rows_stays_as_it_is() -> None:
    kernels.decode("q8", torch.zeros(2, 0, 8, dtype=torch.int8), [], [], torch.zeros(256), torch.zeros(2, 0, 8))
    kernels.decode_klt([], torch.zeros(2, 0, 4, dtype=torch.uint8), [], [], torch.zeros(2, 0, 8))


class OtherValues(Q8Codec):
    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        raise NotImplementedError


class OtherScales(Q8Codec):
    def _scaled(self, codes: Tensor, token_scale: Tensor, scale: Tensor, offset: Tensor, out: Tensor) -> None:
        raise NotImplementedError


def test_a_codec_that_decodes_otherwise_in_any_part_has_no_kernel() -> None:
    assert _kernel_layout(type(get_codec("q3")), _DECODING) == "q4"
    assert _kernel_layout(OtherValues, _DECODING) is None
    assert _kernel_layout(OtherScales, _DECODING) is None


def test_a_machine_without_a_compiler_is_told_once_and_decodes_by_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decode(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr(kernels, "decode", decode)
    here, gpu = torch.device("cpu"), torch.device("cuda", 7)
    failure = kernels.failure_on(here)
    monkeypatch.setattr(kernels, "failure_on", lambda _device: failure)
    assert gpu_kernels(gpu) is None
    assert gpu_kernels(gpu) is None
    gpu_kernels.cache_clear()
    said = capsys.readouterr().err
    assert said.count("Failed to find C compiler") == 1
    assert "apt-get install gcc python3-dev" in said


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_what_says_nothing_of_the_kernels_is_raised(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> None:
        raise error

    monkeypatch.setattr(kernels, "decode", decode)
    with pytest.raises(type(error), match=r"out of memory|device-side"):
        kernels.failure_on(torch.device("cpu"))


def test_what_triton_does_not_build_for_another_reason_is_said_without_a_word_of_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/cache/.triton")

    monkeypatch.setattr(kernels, "decode", decode)
    assert kernels.failure_on(torch.device("cpu")) == "[Errno 13] Permission denied: '/cache/.triton'"


def test_both_kernels_are_tried_before_one_is_used() -> None:
    assert kernels.failure_on(torch.device("cpu")) is None

"""Kernels that numba compiles for a CPU, beside torch's arithmetic; and memory that is used again."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hiddenstore.codecs import compiled, get_codec, memory
from hiddenstore.codecs.affine import AffineCodec, Q8Codec
from hiddenstore.codecs.base import EncodedLayers
from hiddenstore.codecs.memory import fresh
from hiddenstore.segments.encode import RowStats

TOKENS = 60
WIDTHS = [1, 7, 32, 33, 100, 576, 1000]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "_LEFT", compiled._Tally())
    monkeypatch.setattr(compiled, "_WORTH_COMPILING", 0)
    # Several blocks of every part, on threads of their own.
    monkeypatch.setattr(compiled, "_BLOCK_VALUES", 1 << 12)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    def run(work: Callable[[], object]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "_WORTH_COMPILING", 1 << 60)
            return work()

    return run


def states(width: int, seed: int, odd: bool) -> Tensor:
    """bf16 [T, D] with channels of many sizes; ``odd``: and with rows of every kind that is kept raw or nearly."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(TOKENS, width, generator=random) * torch.exp(2 * torch.randn(width, generator=random))
    values += 3 * torch.randn(width, generator=random)
    values[3], values[4] = 0.0, -0.0
    if odd:
        values[5] *= 1e4
        values[6, width // 2], values[7, 0], values[8, -1] = torch.nan, torch.inf, -torch.inf
        values[9] *= 1e30
        values[10], values[11], values[12], values[13] = 3e38, 1e-38, 1e-40, 1e-30
    return values.bfloat16()


def encoded(name: str, parts: list[Tensor], stats: list[RowStats]) -> EncodedLayers:
    codec = get_codec(name)
    assert isinstance(codec, AffineCodec)
    mask = np.arange(TOKENS) % 7 == 0
    fine = codec.fine_rows(mask, [len(part) for part in parts]) if name in ("q4q3", "q3") else None
    stats.append(RowStats())
    return codec.encode_layers([parts], None, fine, stats)


def equal(one: EncodedLayers, other: EncodedLayers) -> bool:
    codes = all(torch.equal(*pair) for pair in zip(one.codes[0], other.codes[0], strict=True))
    return codes and all(np.array_equal(values, other.small[name]) for name, values in one.small.items())


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["q8", "q4", "q4q3", "q3"])
def test_codes_scales_and_statistics_are_those_of_torch(
    name: str, width: int, odd: bool, by_torch: Callable[[Callable[[], object]], object]
) -> None:
    parts = list(states(width, 1, odd).split((13, 0, 46, 1)))
    here: list[RowStats] = []
    there: list[RowStats] = []
    found = encoded(name, parts, here)
    assert equal(found, by_torch(lambda: encoded(name, parts, there)))  # type: ignore[arg-type]
    assert here[0].summary() == there[0].summary()
    assert here[0].summary().rows == TOKENS


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["q8", "q4", "q4q3", "q3"])
def test_decoded_states_are_those_of_torch(
    name: str, width: int, by_torch: Callable[[Callable[[], object]], object]
) -> None:
    part = encoded(name, [states(width, 2, True)], []).joined()
    codec = get_codec(name)
    expected = by_torch(lambda: codec.decode(part))
    assert isinstance(expected, Tensor)
    assert torch.equal(codec.decode(part).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_that_are_only_measured_have_the_statistics_of_torch(
    width: int, odd: bool, by_torch: Callable[[Callable[[], object]], object]
) -> None:
    rows = states(width, 3, odd)

    def measured(of: Tensor) -> object:
        stats = RowStats()
        stats.measure(of)
        stats.measure(of[:0])
        return stats.summary()

    assert measured(rows) == by_torch(lambda: measured(rows))
    strided = torch.cat([rows, rows], dim=1)[:, :width]
    assert measured(strided) == measured(rows)


def test_kernels_are_what_encodes_decodes_and_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddenstore.codecs import cpu_kernels

    ran: list[str] = []

    def watched(name: str, kernel: Callable[..., object]) -> Callable[..., object]:
        def run(*arrays: object) -> object:
            ran.append(name)
            return kernel(*arrays)

        return run

    compiled._numba_kernels()
    monkeypatch.setattr(cpu_kernels, "ENCODERS", {"q8": watched("encode", cpu_kernels.encode_q8)})
    monkeypatch.setattr(cpu_kernels, "DECODERS", {"q8": watched("decode", cpu_kernels.decode_q8)})
    monkeypatch.setattr(cpu_kernels, "measure", watched("measure", cpu_kernels.measure))
    rows = states(32, 7, False)
    get_codec("q8").decode(encoded("q8", [rows], []).joined())
    RowStats().measure(rows)
    assert ran == ["encode", "decode", "measure"]


def test_rows_whose_squares_vanish_have_a_largest_value_all_the_same(
    by_torch: Callable[[Callable[[], object]], object],
) -> None:
    rows = torch.full((4, 64), 1e-30).bfloat16()

    def measured() -> float:
        stats = RowStats()
        stats.measure(rows)
        return stats.peak

    assert measured() == by_torch(measured) == float(rows[0, 0])


def test_what_does_not_fit_is_refused_as_by_torch() -> None:
    codec, out = get_codec("q8"), torch.empty((40, 64), dtype=torch.bfloat16)
    part = codec.encode(states(64, 5, False)[None, :40])
    short = {**part.small, "token_scale": part.small["token_scale"][:, :10]}
    narrow = {**part.small, "channel_scale": part.small["channel_scale"][:, :60]}
    for small in (short, narrow):
        with pytest.raises(RuntimeError, match="size of tensor"):
            codec.decode_rows(part.codes[0], small, 0, 0, out)
    with pytest.raises(RuntimeError, match="size of tensor"):
        codec.decode_rows(part.codes[0], part.small, 0, 0, out[:39])
    assert isinstance(codec, AffineCodec)
    with pytest.raises(RuntimeError, match="size of tensor"):
        codec.encode_layers([[states(66, 5, False)]], part.small)


def test_parts_of_a_layer_are_encoded_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddenstore.codecs import affine

    names = set()
    blocks = compiled.in_blocks

    def watched(lengths: Sequence[int], width: int, work: Callable[[int, slice], int]) -> list[tuple[int, slice, int]]:
        def named(part: int, rows: slice) -> int:
            names.add(threading.current_thread().name)
            return work(part, rows)

        return blocks(lengths, width, named)

    monkeypatch.setattr(affine, "in_blocks", watched)
    # Each less than a block.
    encoded("q8", list(states(1000, 6, False).split(3)), [])
    assert threading.current_thread().name not in names


def test_a_child_forked_while_a_thread_compiles_can_decode() -> None:
    code = """
import os, threading, time, numpy as np, torch
from hiddenstore.codecs import compiled, get_codec
compiled._LEFT.values = 1 << 62
compiled.cpu_kernels(1)
codec = get_codec("q8")
part = codec.encode(torch.ones(1, 4, 32).bfloat16())
thread = threading.Thread(target=get_codec("q4").encode, args=(torch.ones(1, 4, 32).bfloat16(),))
thread.start()
time.sleep(0.3)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(codec.decode(part), torch.ones(1, 4, 32).bfloat16()) else 3)
print(os.waitpid(child, 0)[1], flush=True)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr


def test_a_process_compiles_once_it_has_had_what_pays_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_WORTH_COMPILING", 1000)
    assert compiled.cpu_kernels(600) is None
    assert compiled.cpu_kernels(600) is None
    assert compiled.cpu_kernels(1) is compiled._numba_kernels()
    assert compiled._numba_kernels() is not None


def test_a_process_that_takes_longer_for_as_many_values_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(compiled, "monotonic", lambda: now)
    monkeypatch.setattr(compiled, "_LEFT", compiled._Tally())
    monkeypatch.setattr(compiled, "_WORTH_COMPILING", 1000)
    for _ in range(9):
        now += 40
        assert compiled.cpu_kernels(400) is None
    now += 10
    assert compiled.cpu_kernels(400) is None
    now += 1000
    assert compiled.cpu_kernels(1) is compiled._numba_kernels()


def test_without_numba_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda _name: None)
    compiled._numba_kernels.cache_clear()
    assert compiled.cpu_kernels(1) is None
    compiled._numba_kernels.cache_clear()


def test_a_numba_that_does_not_compile_is_told_once_and_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hiddenstore.codecs import cpu_kernels

    def measure(*_: object) -> None:
        raise RuntimeError("Unable to find target for this triple")

    monkeypatch.setattr(cpu_kernels, "measure", measure)
    compiled._numba_kernels.cache_clear()
    assert compiled.cpu_kernels(1) is None
    assert compiled.cpu_kernels(1) is None
    compiled._numba_kernels.cache_clear()
    assert capsys.readouterr().err.count("Unable to find target for this triple") == 1


class OtherCodes(Q8Codec):
    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor, fine: Tensor | None = None) -> None:
        super().codes_of(y, codes, token_scale, peak, fine)
        codes.zero_()


def test_a_codec_that_encodes_otherwise_is_not_encoded_by_a_kernel() -> None:
    found = OtherCodes().encode_layers([[states(32, 4, False)]])
    assert not found.codes[0][0].any()


def test_memory_is_used_again_when_the_last_view_of_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SPARE", memory._Spare())
    one = fresh((5000, 1024), torch.uint8)
    where, view = one.data_ptr(), one[10:].numpy()
    del one
    other = fresh((5000, 1024), torch.uint8)
    assert other.data_ptr() != where
    view[:] = 7
    other.fill_(9)
    assert (view == 7).all()
    del view
    again = fresh((5000, 512), torch.bfloat16)
    assert again.data_ptr() == where
    assert again.data_ptr() % 64 == 0


def test_spare_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SPARE", memory._Spare())
    monkeypatch.setattr(memory, "_MOST_SPARE_BYTES", 20 << 20)
    for size in (5, 6, 7, 8.5, 30):
        fresh((int(size * (1 << 20)),), torch.uint8)
    kept = [len(block.memory) >> 20 for block in memory._SPARE._blocks]
    # The oldest go; what is larger than all that is kept takes nothing's place.
    assert kept == [7, 9]

"""The blosc buffers of ``lossless`` against numcodecs: what is read back, and how large they are."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from hiddenstore.codecs import blosc_chunks


def states(rows: int, width: int) -> np.ndarray:
    """uint16 [rows, width]: the bits of bf16 numbers, channels of unlike size."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, width, generator=generator) * (0.6 * torch.randn(width, generator=generator)).exp()
    return values.bfloat16().view(torch.uint16).numpy()


def random_bits(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, count, dtype=np.uint16)


@given(
    count=st.integers(1, 3000),
    kind=st.sampled_from(["states", "zeros", "random", "low bytes alone", "high bytes alone"]),
)
@settings(max_examples=60, deadline=None)
def test_numcodecs_reads_every_buffer_and_none_grows_beyond_its_header(count: int, kind: str) -> None:
    values = {
        "states": states(1, count)[0],
        "zeros": np.zeros(count, np.uint16),
        "random": random_bits(count),
        "low bytes alone": random_bits(count) & np.uint16(0xFF),
        "high bytes alone": random_bits(count) & np.uint16(0xFF00),
    }[kind]
    packed = blosc_chunks.compress(values)
    assert np.array_equal(np.frombuffer(blosc.decompress(packed), np.uint16), values)
    assert blosc_chunks.sizes(packed) == (len(packed), values.nbytes)
    assert len(packed) <= values.nbytes + blosc_chunks.HEADER_BYTES


@pytest.mark.parametrize("rows", [128, 9])
def test_a_chunk_is_no_larger_than_what_numcodecs_makes_of_it(rows: int) -> None:
    # The rows beyond those held are zeros, as at the end of an array.
    values = np.zeros((128, 4096), np.uint16)
    values[:rows] = states(rows, 4096)
    packed = blosc_chunks.compress(values)
    theirs = blosc.compress(values, b"zstd", 1, shuffle=blosc.SHUFFLE, blocksize=blosc_chunks.BLOCK_BYTES)
    assert len(packed) <= len(theirs)
    if rows == 128:
        assert len(packed) < 0.70 * values.nbytes


def test_threads_make_the_bytes_that_one_makes() -> None:
    chunks = [states(64, 512) + np.uint16(number) for number in range(8)]
    alone = [blosc_chunks.compress(chunk).tobytes() for chunk in chunks]
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        found[number] = blosc_chunks.compress(chunks[number]).tobytes()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(chunks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(chunks))] == alone


@pytest.mark.parametrize(
    ("place", "reason"), [(4, "header"), (12, "header"), (16, "does not decompress"), (20, "does not decompress")]
)
def test_a_buffer_with_other_lengths_or_places_is_an_error(place: int, reason: str) -> None:
    packed = blosc_chunks.compress(states(4, 256)).copy()
    packed[place] ^= 0xFF
    with pytest.raises(ValueError, match=reason):
        blosc_chunks.decompress(packed, np.zeros(4 * 256 * 2, np.uint8))

"""Blosc buffers of ``lossless``: zstd 1 over shuffled bytes, one block each; their header is checked before it is used.

One block, because with several their order would depend on blosc's threads.
"""

import numpy as np
from numcodecs import blosc

BLOCK_BYTES = 1 << 20
HEADER_BYTES = 16


def compress(values: np.ndarray) -> bytes:
    """A contiguous array of at most one block (or of one row) as one buffer."""
    packed: bytes = blosc.compress(values, b"zstd", 1, shuffle=blosc.SHUFFLE, blocksize=BLOCK_BYTES)
    return packed


def sizes(packed: np.ndarray) -> tuple[int, int]:
    """Stored and decoded bytes that the buffer at the start of uint8 ``packed`` claims; ValueError without a header."""
    if len(packed) < HEADER_BYTES:
        raise ValueError("ends inside a blosc header")
    decoded, _, stored = (int.from_bytes(packed[at : at + 4].tobytes(), "little") for at in (4, 8, 12))
    return stored, decoded


def decompress(packed: np.ndarray, target: np.ndarray) -> None:
    """One buffer uint8 [n] into uint8 ``target``; ValueError when it is not one of exactly that size."""
    # blosc trusts its header, so that is compared before anything is written.
    if sizes(packed) != (len(packed), target.size):
        raise ValueError("has a blosc header that is not its own")
    try:
        blosc.decompress(packed, target)
    except (RuntimeError, ValueError) as error:
        raise ValueError("does not decompress") from error

"""``lossless``: bf16 bits behind blosc(zstd 1, shuffle, typesize 2, blocksize 1 MiB).

The block must span whole byte planes: at blosc's default block size the exponent plane no longer compresses and the
ratio falls from 1.45x to 1.26x without a word. A chunk is one block, so the bytes do not depend on blosc's threads.
"""

from hiddenstore.codecs.bf16 import VerbatimCodec

LOSSLESS_CHUNK_BYTES = 1 << 20

LOSSLESS = VerbatimCodec(name="lossless", bits=11.0, compressed=True, chunk_bytes=LOSSLESS_CHUNK_BYTES)

"""What is known before anything is spent: whether what a job has left to write fits beside its store, from counts and
the bits of its recipe; and what text gives a drafter, measured on one real model. Nothing is read.

Shapes: L stored layers, D target width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hiddenstore.codecs import get_layout
from hiddenstore.codecs.base import RAW_ROWS, mean_row_bits
from hiddenstore.console.text import count, size
from hiddenstore.inputs import count_units
from hiddenstore.segments.base import Container, unit_tokens
from hiddenstore.store import Store
from schemas.capture import CaptureSpec

# Token id and mask of one token, and the position of one final row.
_BYTES_OF_TOKEN, _BYTES_OF_ROW = 5, 4

EXPECTED_DRAFTER = "eagle3"
MEASURED_ON = "EAGLE-3.1 on SmolLM2-135M, drafts of 3"
NGRAM_FLOOR = 1.30
# (tokens of text, accepted length over 51 held-out answers, how they were read): `python -m benchmarks.expect` on the
# store of `hiddenstore demo --target smollm2`, median of three seeds, and that demo's own drafter.
LENGTHS = ((10_000, 1.12, ""), (30_000, 1.25, ""), (100_000, 1.34, ""), (300_000, 1.43, ""), (440_000, 1.54, " twice"))


@dataclass(frozen=True)
class Counts:
    """What segments hold: samples, their tokens and supervised tokens, and rows of the final hidden. Of
    ``shared_tokens`` the aux layers stand in another sample; ``lengths``: tokens of the first samples, where known, for
    a unit ends with a sample and so seldom full."""

    samples: int
    tokens: int
    supervised_tokens: int
    final_rows: int
    shared_tokens: int = 0
    lengths: Sequence[int] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Room:
    """What segments take, about: bytes, segments, and files in them."""

    size_bytes: int
    segments: int
    files: int


def room_for(counts: Counts, capture: CaptureSpec, container: Container) -> Room:
    """What samples take in the codecs of ``capture``."""
    aux, final = get_layout(capture.codecs.aux), get_layout(capture.codecs.final)
    layers, width = len(capture.stored_layers), capture.target.hidden_size
    row_bits = mean_row_bits(aux, width, counts.tokens, counts.supervised_tokens, counts.samples)
    bits = (counts.tokens - counts.shared_tokens) * layers * row_bits + counts.final_rows * final.row_bits(width)
    if RAW_ROWS in aux.small:
        # The first token of a sample is where a model lets attention rest, and its states stand far out of the others.
        bits += counts.samples * layers * 16 * width
    budget, read = unit_tokens(capture), sum(counts.lengths)
    units = counts.tokens * count_units(counts.lengths, budget) / read if read else counts.tokens / budget
    segments = max(1, math.ceil(units))
    extra = container.overhead(capture, counts.samples, segments)
    values = int(bits / 8) + counts.tokens * _BYTES_OF_TOKEN + counts.final_rows * _BYTES_OF_ROW
    return Room(values + extra.size_bytes, segments, extra.files)


def shortage(store: Store, needed: int, job: str, hint: str) -> str | None:
    """What to say where a ``job`` has ``needed`` bytes left to write and fewer are free beside a local store; None if
    they fit."""
    free = store.fs.free_bytes()
    if free is None or needed <= free:
        return None
    return (
        f"what is left takes about {size(needed)} and {size(free)} are free at {store.path}: {job} will stop when the "
        f"disk is full, and go on once there is room; {hint}"
    )


def expectation(tokens: int) -> str:
    """One line: what the measured sizes next to ``tokens`` read came to, and on what. Another target, other text and
    another drafter come to other lengths: a scale, not a promise."""
    larger = next((index for index, (size, *_) in enumerate(LENGTHS) if tokens < size), len(LENGTHS))
    near = LENGTHS[max(0, larger - 1) : larger + 1]
    reached = " and ".join(f"{length:.2f} after {count(size)} tokens{how}" for size, length, how in near)
    return f"{MEASURED_ON}, reached {reached} of training text (n-gram floor {NGRAM_FLOOR:.2f})"

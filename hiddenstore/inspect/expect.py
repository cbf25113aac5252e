"""What text gives a drafter, measured on one real model: what `plan` and `train` quote before anything is spent."""

from hiddenstore.console.text import count

EXPECTED_DRAFTER = "eagle3"
MEASURED_ON = "EAGLE-3.1 on SmolLM2-135M, drafts of 3"
NGRAM_FLOOR = 1.30
# (tokens of text, accepted length over 51 held-out answers, how they were read): `python -m benchmarks.expect` on the
# store of `hiddenstore demo --target smollm2`, median of three seeds, and that demo's own drafter.
LENGTHS = ((10_000, 1.12, ""), (30_000, 1.25, ""), (100_000, 1.34, ""), (300_000, 1.43, ""), (440_000, 1.54, " twice"))


def expectation(tokens: int) -> str:
    """One line: what the measured sizes next to ``tokens`` read came to, and on what. Another target, other text and
    another drafter come to other lengths: a scale, not a promise."""
    larger = next((index for index, (size, *_) in enumerate(LENGTHS) if tokens < size), len(LENGTHS))
    near = LENGTHS[max(0, larger - 1) : larger + 1]
    reached = " and ".join(f"{length:.2f} after {count(size)} tokens{how}" for size, length, how in near)
    return f"{MEASURED_ON}, reached {reached} of training text (n-gram floor {NGRAM_FLOOR:.2f})"

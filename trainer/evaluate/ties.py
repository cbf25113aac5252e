"""When two tokens are one to the arithmetic: their logits lie within a step of the dtype they are computed in."""

from math import frexp

FRACTION_BITS = {"bfloat16": 7, "float16": 10}
ROUNDING_FP32 = 1e-3
"""What sums of thousands of fp32 products, added in another order, come to in a logit."""
LARGEST_UNSAID = 63.0
"""Logits are taken to stay below 64 where an engine gives log-probabilities only, which hide their size."""


def tie_gap(logit: float | None, dtype: str = "bfloat16") -> float:
    """The widest gap below a top ``logit`` that is a tie: one step of ``dtype``, which at [2^k, 2^(k+1)) is 2^(k-7) in
    bf16 and 2^(k-10) in fp16; in fp32, whose steps are finer than its sums, a constant. None: of unknown size."""
    if dtype not in FRACTION_BITS:
        return ROUNDING_FP32
    _, exponent = frexp(LARGEST_UNSAID if logit is None else logit)
    return 2.0 ** (exponent - 1 - FRACTION_BITS[dtype])

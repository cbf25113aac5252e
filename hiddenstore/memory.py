"""How this process takes memory from the system."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_MOST = 32 << 20
"""The largest threshold glibc takes."""
_TRIM_MOST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of up to 32 MiB instead of returning them to the kernel; False without glibc. A
    step frees and asks again for the same tensors. Each one returned costs a fault for every page of the next: 5,000 to
    10,000 of them a step, 5 to 10 % of the CPU time of an EAGLE-3 step of 512 tokens, and a tenth of a step that
    answers 60 prompts at once (benchmarks/results/answers-2026-11-25.md)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_MOST)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_MOST))

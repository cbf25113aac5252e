"""Activation checkpointing: a layer's inner values are made again in the backward instead of being kept.

A drafter wraps what it wants recomputed, one layer or one TTT step at a time, and keeps only what passes between them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

R = TypeVar("R")


def recomputed(asked: bool, layer: Callable[..., R], *args: Any) -> R:
    """``layer(*args)``; with ``asked`` only its arguments and results stay until the backward.

    The layer must draw no random numbers, and must run no collective: ranks differ in how often they recompute.
    """
    if not asked or not torch.is_grad_enabled():
        return layer(*args)
    out: R = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
    return out

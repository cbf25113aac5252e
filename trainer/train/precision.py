"""In which precision a run multiplies: ``train.precision=auto`` measures it once, and the run keeps what was found.

A CPU with AMX or AVX512-BF16 multiplies bf16 two to eight times as fast as fp32; others emulate it and are slower.
"""

import time

import torch

from hiddenstore.targets.load import pick_device
from hiddenstore.targets.matmul import linear
from trainer.config import DrafterConfig, TrainConfig

ROWS = 512
"""Rows of the product measured, as a pack of short samples has them."""
NARROWEST = 512
"""Narrower drafters stay in fp32: most of their step is no product."""
FEWEST_TIMES = 1.3
"""How many times as fast a bf16 product must be: casts and what is not a product take a part of it back."""
_ROUNDS = 5


def resolved(config: TrainConfig, *, measure: bool = True) -> TrainConfig:
    """The settings with ``train.precision`` of ``auto`` replaced on a CPU; on other devices it stays, and means bf16.
    Without ``measure`` it is fp32, as in the runs of earlier versions that say ``auto``. Raises ConfigError:
    ``device-unavailable``."""
    if config.train.precision != "auto" or torch.device(pick_device(config.train.device)).type != "cpu":
        return config
    precision = "bf16" if measure and is_faster_in_bf16(config.drafter) else "fp32"
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def multiplies_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether a run with these settings, resolved, multiplies bf16 on that device."""
    return config.train.precision == "bf16" or (config.train.precision == "auto" and device.type == "cuda")


def is_faster_in_bf16(drafter: DrafterConfig) -> bool:
    """Whether this CPU multiplies the drafter's MLP markedly faster in bf16; measured in some tens of milliseconds."""
    return drafter.hidden_size >= NARROWEST and bf16_speedup(drafter.hidden_size, drafter.intermediate_size) > (
        FEWEST_TIMES
    )


def bf16_speedup(width: int, inner: int) -> float:
    """How many times as fast this CPU multiplies rows [512, width] with a weight [inner, width] in bf16 as in fp32, by
    the fastest of a few tries in turn, which other processes disturb least."""
    x, weight = torch.randn(ROWS, width), torch.randn(inner, width)
    pairs = ((x, weight), (x.bfloat16(), weight.bfloat16()))
    fastest = [float("inf"), float("inf")]
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for index, (rows, columns) in enumerate(pairs):
                began = time.perf_counter()
                linear(rows, columns)
                fastest[index] = min(fastest[index], time.perf_counter() - began)
    return fastest[0] / fastest[1]

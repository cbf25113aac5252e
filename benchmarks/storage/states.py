"""The data of the storage benchmark: synthetic states from a fixed seed, and how they compare with genuine ones.

The generator is that of ``benchmarks/storage_codecs.py``, older than every codec but ``bf16``, ``lossless`` and ``q8``:
lognormal channel scales (sigma 0.6), six massive channels (x 60), token norms (sigma 0.3), each token half the noise of
the one before it, one token in a thousand a sink (x 1500). Here it runs sample by sample, so that any size fits into
memory.

Shapes: L layers, t tokens of a sample, D width.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

LAYERS = 4
WIDTH = 4096
SEED = 0
SUPERVISED = 0.6
MEDIAN_TOKENS = 700
SINK_EVERY = 1000


def sample_lengths(logical_bytes: int, width: int = WIDTH) -> list[int]:
    """Tokens of each sample, lognormal around 700, until their bf16 states reach ``logical_bytes``."""
    rng = np.random.default_rng(SEED)
    lengths: list[int] = []
    while sum(lengths) * LAYERS * width * 2 < logical_bytes:
        lengths.append(int(np.clip(MEDIAN_TOKENS * np.exp(0.7 * rng.standard_normal()), 64, 2048)))
    return lengths


def channel_scales(width: int) -> torch.Tensor:
    """fp32 [D], the same for every sample and layer."""
    scales = torch.exp(0.6 * torch.randn(width, generator=torch.Generator().manual_seed(SEED)))
    scales[:: max(1, width // 6)] *= 60
    return scales


def synthetic_sample(index: int, first_token: int, tokens: int, width: int = WIDTH) -> torch.Tensor:
    """bfloat16 [L, t, D] of the ``index``-th sample, whose first token is number ``first_token`` of the data."""
    generator = torch.Generator().manual_seed(SEED + 1 + index)
    scales = channel_scales(width)
    states = torch.empty(LAYERS, tokens, width, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        noise = torch.randn(tokens, width, generator=generator)
        noise[1:] += 0.5 * noise[:-1].clone()
        norms = torch.exp(0.3 * torch.randn(tokens, 1, generator=generator))
        norms[-first_token % SINK_EVERY :: SINK_EVERY] *= 1500
        states[layer] = noise.mul_(norms).mul_(scales)
    return states


def loss_mask(tokens: int) -> np.ndarray:
    """uint8 [t]: the last 60 % are supervised."""
    return (np.arange(tokens) >= round(tokens * (1 - SUPERVISED))).astype(np.uint8)


@dataclass(frozen=True)
class RawStates:
    """Samples end to end in one file of bf16 bits, each [L, t, D]: the source of every format, and the raw baseline."""

    path: Path
    lengths: list[int]
    width: int = WIDTH

    @property
    def logical_bytes(self) -> int:
        return sum(self.lengths) * LAYERS * self.width * 2

    def offset(self, index: int) -> int:
        """First byte of a sample."""
        return sum(self.lengths[:index]) * LAYERS * self.width * 2

    def shape(self, index: int) -> tuple[int, int, int]:
        return LAYERS, self.lengths[index], self.width

    def sample(self, index: int) -> np.ndarray:
        """uint16 [L, t, D], read from the file."""
        shape = self.shape(index)
        values = np.fromfile(self.path, np.uint16, count=int(np.prod(shape)), offset=self.offset(index))
        return values.reshape(shape)

    def write(self) -> None:
        """Generate and write every sample."""
        with self.path.open("wb") as file:
            for index, tokens in enumerate(self.lengths):
                states = synthetic_sample(index, sum(self.lengths[:index]), tokens, self.width)
                states.view(torch.uint16).numpy().tofile(file)


def layer_statistics(states: torch.Tensor) -> dict[str, Any]:
    """What matters to a codec in bf16 [t, D]: row norms, channel spread, and the entropy of the exponents."""
    values = states.float()
    rms = values.square().mean(dim=1).sqrt()
    typical = values[rms < 6 * rms.median()]
    channels = typical.abs().median(dim=0).values
    exponents = (states.view(torch.int16).int() >> 7) & 0xFF
    share = torch.bincount(exponents.flatten(), minlength=256).double() / exponents.numel()
    entropy = -(share[share > 0] * share[share > 0].log2()).sum()
    neighbours = torch.nn.functional.cosine_similarity(values[1:], values[:-1], dim=1)
    return {
        "tokens": states.shape[0],
        "width": states.shape[1],
        "rms_median": float(rms.median()),
        "rms_max_over_median": float(rms.max() / rms.median()),
        "sink_share": float((rms >= 6 * rms.median()).double().mean()),
        "channel_p99_over_median": float(channels.quantile(0.99) / channels.median()),
        "channel_max_over_median": float(channels.max() / channels.median()),
        "exponent_bits": float(entropy),
        "neighbour_cosine": float(neighbours.mean()),
    }

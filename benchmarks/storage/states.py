"""The data of the storage benchmark: synthetic states from a fixed seed, or those of a store.

Lognormal channel scales (sigma 0.6), six massive channels (x 60), token norms (sigma 0.3), each token half the noise of
the one before it, one token in a thousand a sink (x 1500); drawn sample by sample, so that any size fits into memory.

Shapes: L layers, t tokens of a sample, D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from hiddenstore.store import Store

LAYERS = 4
WIDTH = 4096
SEED = 0
SUPERVISED = 0.6
MEDIAN_TOKENS = 700
SINK_EVERY = 1000
PT_BF16 = "pt bf16 per sample"


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


def synthetic_bits(lengths: list[int], width: int) -> Iterator[np.ndarray]:
    """uint16 [L, t, D] of each sample in turn."""
    first = 0
    for index, tokens in enumerate(lengths):
        yield synthetic_sample(index, first, tokens, width).view(torch.uint16).numpy()
        first += tokens


def loss_mask(tokens: int) -> np.ndarray:
    """uint8 [t]: the last 60 % are supervised."""
    return (np.arange(tokens) >= round(tokens * (1 - SUPERVISED))).astype(np.uint8)


def stored_lengths(store: Store, logical_bytes: int) -> list[int]:
    """Tokens of the first samples of a store of three aux layers and every final row, until their states reach
    ``logical_bytes``. Raises ValueError: it holds other states."""
    capture, lengths = store.capture, list[int]()
    if len(capture.stored_layers) != LAYERS - 1 or capture.final != "all" or not capture.stores_final:
        raise ValueError(
            f"{store.fs.root}: expected {LAYERS - 1} aux layers and the final hidden of every token, as `hiddenstore "
            "collect DATA -o STORE --target T --recipe raw --layers A,B,C --final all` captures them"
        )
    for _, entry in store.entries:
        lengths.append(entry.tokens)
        if sum(lengths) * LAYERS * capture.target.hidden_size * 2 >= logical_bytes:
            break
    return lengths


def stored_bits(store: Store, count: int) -> Iterator[np.ndarray]:
    """uint16 [L, t, D] of the first samples of such a store."""
    for _, entry in islice(store.entries, count):
        record = store.read(entry.id)
        yield torch.cat([record.aux, record.final[None]]).view(torch.uint16).numpy()


@dataclass(frozen=True)
class RawStates:
    """Samples end to end in one file of bf16 bits, each [L, t, D]: the source of every format, and the raw baseline.
    ``store``: whose states they are; None: synthetic."""

    path: Path
    lengths: list[int]
    width: int = WIDTH
    store: Store | None = None

    @property
    def logical_bytes(self) -> int:
        return sum(self.lengths) * LAYERS * self.width * 2

    def shape(self, index: int) -> tuple[int, int, int]:
        return LAYERS, self.lengths[index], self.width

    def sample(self, index: int) -> np.ndarray:
        """uint16 [L, t, D], read from the file."""
        shape = self.shape(index)
        first_byte = sum(self.lengths[:index]) * LAYERS * self.width * 2
        values = np.fromfile(self.path, np.uint16, count=int(np.prod(shape)), offset=first_byte)
        return values.reshape(shape)

    def write(self) -> None:
        """Generate or copy every sample."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        source = synthetic_bits(self.lengths, self.width)
        if self.store is not None:
            source = stored_bits(self.store, len(self.lengths))
        with self.path.open("wb") as file:
            for bits in source:
                bits.tofile(file)

    def shortened(self, logical_bytes: int) -> "RawStates":
        """The first samples of the same, until their states reach so many bytes."""
        sizes = np.cumsum(self.lengths) * LAYERS * self.width * 2
        return replace(self, lengths=self.lengths[: int(np.searchsorted(sizes, logical_bytes)) + 1])


def peer_sizes(raw: RawStates, folder: Path) -> dict[str, float]:
    """Bytes a token of one ``torch.save`` file of bf16, and of fp8 E4M3 with one fp32 scale a token."""
    states = torch.from_numpy(raw.sample(0)).view(torch.bfloat16)
    ids = torch.zeros(states.shape[1], dtype=torch.int64)
    scale = states.float().abs().amax(dim=2, keepdim=True) / 448
    codes = (states.float() / scale).to(torch.float8_e4m3fn)
    path, sizes = folder / "one.pt", {}
    for name, tensors in ((PT_BF16, {"hidden_states": states}), ("fp8 per token", {"codes": codes, "scale": scale})):
        torch.save({**tensors, "input_ids": ids, "loss_mask": ids}, path)
        sizes[name] = path.stat().st_size / states.shape[1]
        path.unlink()
    return sizes

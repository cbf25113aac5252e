"""What a GPU says: dequantising on it, and feeding a step of an 8B-shaped EAGLE-3 from packed bytes.

    python -m benchmarks.storage.gpu [--width 4096] [--tokens 8192] [--steps 20] [--device cuda]

Dequantise: GB of bf16 that leave the codec per second, codes on the device, best of the rounds. Feed: a store is read
by ``TokenBatches`` to the device while each step does the matrix products of one EAGLE-3 layer at 8B shapes, forward
and backward; the share of the time that the step waited for its batch. On a CPU the same code runs, for its test.

Shapes: L aux layers, T tokens of a pack, D width.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.storage.ours import AUX_LAYERS, write_store
from benchmarks.storage.states import synthetic_sample
from hiddenstore.codecs import RECIPES, Encoded, get_codec
from hiddenstore.data import TokenBatches
from hiddenstore.data.packed import small_on

STATES = ("raw", "safe", "compact")
FEED_WIDER = 14336 / 4096


def synchronise(device: torch.device) -> None:
    """Wait for the device, where there is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def dequantise(codec_name: str, width: int, tokens: int, rounds: int, device: torch.device) -> float:
    """GB of bf16 per second of decoding L x T x D on the device."""
    codec = get_codec(codec_name)
    encoded = codec.encode(synthetic_sample(0, 0, tokens, width).to(device))
    part = Encoded([codes.to(device) for codes in encoded.codes], small_on([encoded.small], device)[0])
    out = torch.empty((len(part.codes), tokens, width), dtype=torch.bfloat16, device=device)
    best = float("inf")
    for _ in range(rounds):
        synchronise(device)
        started = time.perf_counter()
        codec.decode(part, out)
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return out.numel() * 2 / 1e9 / best


class Products(torch.nn.Module):
    """The matrix products of EAGLE-3's only layer: fusing L layers, attention projections, gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wider = int(width * FEED_WIDER)
        self.fuse = torch.nn.Linear(len(AUX_LAYERS) * width, width, bias=False)
        self.attend = torch.nn.Linear(2 * width, width + width // 2, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, wider, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(wider, width, bias=False)

    def forward(self, aux: torch.Tensor) -> torch.Tensor:
        """aux [L, T, D] to [T, D]."""
        hidden = self.fuse(aux.permute(1, 0, 2).flatten(1))
        width = hidden.shape[1]
        hidden = hidden + self.out(self.attend(torch.cat([hidden, hidden], dim=1))[:, :width])
        return hidden + self.down(torch.nn.functional.silu(self.gate(hidden)) * self.up(hidden))


def feed(store: Path, tokens: int, steps: int, device: torch.device, ttt: int = 7) -> dict[str, float]:
    """Share of the time spent waiting for batches, and tokens a second, over ``steps`` of ``ttt`` passes each."""
    from hiddenstore.store import Store

    batches = TokenBatches(Store.open(store), batch_tokens=tokens, device=device)
    model = Products(batches.store.capture.target.hidden_size).to(device, torch.bfloat16)
    iterator = iter(batches)
    next(iterator)
    waited = seen = 0.0
    synchronise(device)
    started = time.perf_counter()
    for _ in range(steps):
        batch = next(iterator)
        for pack in batch.packs:
            for _ in range(ttt):
                model(pack.aux).float().square().mean().backward()
            seen += pack.tokens
        synchronise(device)
        waited += batch.wait_s
    seconds = time.perf_counter() - started
    iterator.close()  # type: ignore[attr-defined]
    return {"data_wait_fraction": waited / seconds, "tokens_per_s": seen / seconds}


def make_store(folder: Path, recipe: str, width: int, samples: int, tokens: int) -> Path:
    """A store of equal samples of one recipe."""

    def states() -> Iterator[np.ndarray]:
        for index in range(samples):
            yield synthetic_sample(index, index * tokens, tokens, width).view(torch.uint16).numpy()

    write_store(folder, recipe, states, [tokens] * samples, width)
    return folder / "store"


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Every recipe of states on the device asked for."""
    device = torch.device(arguments.device)
    found: dict[str, object] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for recipe in STATES:
            speed = dequantise(RECIPES[recipe][0], arguments.width, arguments.tokens, arguments.rounds, device)
            store = make_store(Path(folder) / recipe, recipe, arguments.width, arguments.samples, arguments.tokens // 4)
            fed = feed(store, arguments.tokens, arguments.steps, device)
            found[recipe] = {"codec": RECIPES[recipe][0], "dequantise_gb_per_s": speed, **fed}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192, help="of a pack")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, default=None)
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()

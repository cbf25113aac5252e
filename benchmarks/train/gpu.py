"""What a GPU says of whole steps at the shapes of 8B and 70B targets: tokens a second, MFU, peak memory.

    python -m benchmarks.train.gpu [--only eagle3-8b …] [--steps 5] [--recompute] [--peak-tflops 989] [--device cuda]

Random tensors on the device, every token supervised, bf16 products over fp32 master weights, the trainer's own
objective, clip and AdamW; nothing is read from a store (`benchmarks.storage.gpu` says what feeding costs). MFU counts
the products the mathematics needs, not those a recomputation repeats. On a CPU the same runs in fp32, for its test.

Shapes: T tokens, L aux layers, D width, V target vocabulary, U draft vocabulary, F MLP width, N blocks of B slots.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.train.case import NORM_EPS
from hiddenstore.data import PackedBatch
from hiddenstore.head import HeadBundle
from schemas.capture import HeadSpec
from trainer.config import OptimConfig
from trainer.drafters import drafter_kind
from trainer.drafters.base import TargetSide
from trainer.run.optim import Optimizer
from trainer.vocab import DraftVocab

PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}
"""Dense bf16 of the vendor's sheets."""


@dataclass(frozen=True)
class Shape:
    """One row: drafter and dimensions. steps: TTT steps; layers, block, anchors: of DFlash."""

    drafter: str
    tokens: int
    width: int = 4096
    wider: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    draft: int = 32_000
    steps: int = 7
    layers: int = 5
    block: int = 16
    anchors: int = 512

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (1, 15, 28) if self.drafter == "eagle3" else (1, 8, 15, 22, 29)

    @property
    def drafter_settings(self) -> dict[str, Any]:
        own = {"num_layers": self.layers, "block_size": self.block, "mask_token_id": 0}
        return {
            "aux_layers": self.aux_layers,
            "hidden_size": self.width,
            "intermediate_size": self.wider,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position": self.tokens,
            "vocab_size": self.draft if self.drafter == "eagle3" else self.vocab,
            **(own if self.drafter == "dflash" else {}),
        }

    @property
    def loss_settings(self) -> dict[str, Any]:
        return {"steps": self.steps} if self.drafter == "eagle3" else {"num_anchors": self.anchors}

    @property
    def tera(self) -> float:
        """TFLOP one step needs, forward and backward."""
        return (self.products + self.attention) / 1e12

    @property
    def products(self) -> float:
        """FLOP of the matrix products but for attention."""
        return eagle3_products(self) if self.drafter == "eagle3" else dflash_products(self)

    @property
    def attention(self) -> float:
        """FLOP of attention: two products forward, five backward; blocks see half of the tokens on average."""
        inner = self.heads * self.head_dim
        if self.drafter == "eagle3":
            return 7 * self.steps * self.tokens**2 * inner
        return 14 * self.layers * self.anchors * self.block * inner * (self.tokens / 2 + self.block)


SEVENTY = Shape("eagle3", 8192, width=8192, wider=28672, heads=64)
ROWS = {
    **{f"eagle3-8b-{tokens}": Shape("eagle3", tokens) for tokens in (2048, 4096, 8192, 16384, 32768)},
    **{f"dflash-8b-{tokens}": Shape("dflash", tokens) for tokens in (2048, 8192, 32768)},
    "eagle3-70b-8192": SEVENTY,
}


def eagle3_products(s: Shape) -> float:
    """Three products a trained matrix and row, two where no gradient of the input is asked. Embeddings are projected
    once for all TTT steps; the teacher's head is once and forward alone."""
    qkv, inner = (s.heads + 2 * s.kv_heads) * s.head_dim, s.heads * s.head_dim
    once = 4 * s.tokens * (len(s.aux_layers) * s.width**2 + s.width * qkv) + 2 * s.tokens * s.width * s.vocab
    layer = s.width * qkv + inner * s.width + 3 * s.width * s.wider
    return once + 6 * s.steps * s.tokens * (layer + s.width * s.draft)


def dflash_products(s: Shape) -> float:
    """The same for blocks: mask slots enter layer 0 as one row, the last layer serves slots that are taught, and the
    head is frozen."""
    inner, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    slots, taught = s.anchors * s.block, s.anchors * (s.block - 1)
    rows = (s.layers - 1) * slots + taught
    context = 4 * s.tokens * len(s.aux_layers) * s.width**2 + 6 * s.layers * s.tokens * s.width * 2 * kv
    first = 4 * s.anchors * s.width * (inner + 2 * kv)
    later = 6 * s.width * ((rows - slots) * inner + (s.layers - 1) * slots * 2 * kv)
    return context + first + later + 6 * rows * s.width * (inner + 3 * s.wider) + 4 * taught * s.width * s.vocab


class Run:
    """The drafter of a shape on a device, and one update of it."""

    def __init__(self, shape: Shape, device: torch.device, *, recompute: bool = False) -> None:
        self.device = device
        kind = drafter_kind(shape.drafter)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        spec = HeadSpec(norm_flavour="rms", norm_eps=NORM_EPS, tied=False)
        one = torch.ones(shape.width, device=device, dtype=torch.bfloat16)
        head = HeadBundle(spec, normal(shape.vocab, shape.width), normal(shape.vocab, shape.width) / 16, one)
        config = kind.config.model_validate(shape.drafter_settings)
        full = config.vocab_size == shape.vocab
        vocab = DraftVocab.full(shape.vocab) if full else DraftVocab.of_ids(torch.arange(shape.draft), shape.vocab)
        if not full:
            # The target's choice lies inside the draft vocabulary nearly always.
            assert head.lm_head is not None
            head.lm_head[shape.draft :] /= 4
        side = TargetSide(head, vocab.to(device))
        self.model = kind.build(config, side, 0).to(device)
        self.model.borrow(head)
        self.model.train()
        self.model.recompute = recompute
        self.objective = kind.objective(self.model, side, kind.loss.model_validate(shape.loss_settings))
        self._optimizer = Optimizer(self.model, OptimConfig(), 1_000_000)
        rows = torch.arange(shape.tokens, device=device)
        self._batch = PackedBatch(
            input_ids=torch.randint(0, shape.draft, (shape.tokens,), generator=generator, device=device),
            loss_mask=torch.ones_like(rows, dtype=torch.bool),
            positions=rows,
            document=torch.zeros_like(rows),
            aux=normal(len(shape.aux_layers), shape.tokens, shape.width),
            final=normal(shape.tokens, shape.width),
            final_rows=rows,
            sample_ids=["0" * 32],
        )

    def losses(self, step: int) -> Any:
        """Plan and forward of an update."""
        self.model.moment = (0, step)
        work = self.objective.plan(self._batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.objective.losses(work, self.objective.divisors(work))

    def update(self, step: int) -> float:
        """One update; the loss."""
        found = self.losses(step)
        found.total.backward()
        self._optimizer.step(step)
        return float(found.value)


def measure(
    shape: Shape, device: torch.device, steps: int, peak_tflops: float | None, *, recompute: bool = False
) -> dict[str, Any]:
    """Tokens and TFLOP a second, MFU where the peak is known, and the peak of allocated memory."""
    run = Run(shape, device, recompute=recompute)
    cuda = device.type == "cuda"
    for step in range(2):
        run.update(step)
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    for step in range(steps):
        loss = run.update(2 + step)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - started) / steps
    return {
        "tokens": shape.tokens,
        "seconds_per_step": seconds,
        "tokens_per_s": shape.tokens / seconds,
        "tflop_per_step": shape.tera,
        "mfu": None if peak_tflops is None else shape.tera / seconds / peak_tflops,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "loss": loss,
    }


def every_row(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each row asked for, or why it did not run."""
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = arguments.peak_tflops or next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    found: dict[str, Any] = {"device": name, "peak_tflops": peak, "torch": torch.__version__}
    for label, shape in ROWS.items():
        if arguments.only and not any(label.startswith(start) for start in arguments.only):
            continue
        try:
            small = replace(shape, **arguments.shrink)
            found[label] = measure(small, device, arguments.steps, peak, recompute=arguments.recompute)
        except torch.OutOfMemoryError as error:
            found[label] = {"failed": str(error).splitlines()[0]}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(label, json.dumps(found[label]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names start so")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", action="store_true", help="layers are made again in the backward")
    parser.add_argument("--peak-tflops", type=float, default=None, help="of the device, dense bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", type=json.loads, default={}, help="dimensions as JSON, to try the script")
    print(json.dumps(every_row(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()

"""Whether a transform codec would pay: drafters trained in pairs on states that a Karhunen-Loève transform has rounded.

RAW is a store of exact states. The transform of a layer is that of its normalised rows (median and mean distance by
channel, root mean square by row) in CALIBRATION tokens of the training split; each component takes a whole number of
bits, one at least and BITS on average, where the next bit lowers the error most, and the uniform quantiser of a normal
variable. Rows that are far louder than the others stay as they are. States are stored as bf16 after rounding: this
measures a loss, not bytes. Recipes by name stand beside it, in the same pairs.
Usage: python -m benchmarks.transform RAW --target DIR [--bits 3.5 3.0] [--recipes rebuilt …] [--drafter dspark]
[--seeds 3] [--settings key.path=value …]
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from hiddenstore.codecs import CODECS
from hiddenstore.codecs.base import EncodedLayers
from hiddenstore.codecs.verbatim import VerbatimCodec
from hiddenstore.store import Store
from trainer.train.paired import measure_paired

CALIBRATION = 16_384
LOUD = 16.0
"""Times the median row from which a row stays as it is."""
GAUSSIAN_STEPS = (1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""Step of the best uniform quantiser of 1 to 8 bits for a normal variable (Max 1960, table II)."""


@dataclass(frozen=True, eq=False)
class Transform:
    """Of one layer: offset and scale fp32 [D], basis fp32 [D, D] by columns, bits int64 [D] and step fp32 [D] of each
    component, ``loud`` the root mean square from which a row is left alone."""

    offset: Tensor
    scale: Tensor
    basis: Tensor
    bits: Tensor
    step: Tensor
    loud: float

    @classmethod
    def of(cls, rows: Tensor, bits: float) -> "Transform":
        """From calibration rows [n, D]."""
        rows = rows.float()
        offset = rows.median(0).values
        scale = (rows - offset).abs().mean(0).clamp(min=1e-6)
        normal = (rows - offset) / scale
        size = normal.square().mean(1).sqrt()
        loud = float(size.median()) * LOUD
        normal = (normal / size[:, None])[size < loud]
        variance, basis = torch.linalg.eigh(normal.T @ normal / len(normal))
        variance = variance.clamp(min=1e-12)
        shares = allocation(variance.tolist(), round(bits * len(variance)))
        step = torch.tensor([GAUSSIAN_STEPS[b - 1] for b in shares]) * variance.sqrt()
        return cls(offset, scale, basis, torch.tensor(shares), step, loud)

    def rounded(self, states: Tensor) -> Tensor:
        """bf16 [n, D] after rounding."""
        normal = (states.float() - self.offset) / self.scale
        size = normal.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)
        half = (2.0 ** (self.bits - 1)) - 0.5
        levels = ((normal / size) @ self.basis / self.step - 0.5).round() + 0.5
        coded = (levels.clamp(-half, half) * self.step) @ self.basis.T * size
        back = (coded * self.scale + self.offset).to(torch.bfloat16)
        return torch.where(size < self.loud, back, states)


def allocation(variances: Sequence[float], total: int) -> list[int]:
    """Bits of each component: one, then the rest where a bit takes most of the error, up to eight."""
    bits = [1] * len(variances)
    worst = [(-variance / 4, index) for index, variance in enumerate(variances)]
    heapq.heapify(worst)
    for _ in range(total - len(variances)):
        error, index = heapq.heappop(worst)
        bits[index] += 1
        if bits[index] < len(GAUSSIAN_STEPS):
            heapq.heappush(worst, (error / 4, index))
    return bits


@dataclass(frozen=True)
class TransformCodec(VerbatimCodec):
    """bf16 of rounded states; ``transforms`` by the layer's place."""

    transforms: tuple[Transform, ...] = field(default=(), compare=False)
    exact: bool = False
    same_layer: float = 4e-3

    def encode_layers(
        self, layers: Iterable[Sequence[Tensor]], shared: Mapping[str, np.ndarray] | None = None
    ) -> EncodedLayers:
        pairs = zip(layers, self.transforms, strict=False)
        return super().encode_layers([[transform.rounded(part) for part in parts] for parts, transform in pairs])


def calibration_rows(store: Store) -> Tensor:
    """States bf16 [L, n, D] of the first training samples by id."""
    parts, total = [], 0
    for sample in sorted(entry.id for _, entry in store.entries if entry.split == "train"):
        parts.append(store[sample].aux)
        total += parts[-1].shape[1]
        if total >= CALIBRATION:
            break
    return torch.cat(parts, 1)


def error(rows: Tensor, transform: Transform) -> float:
    """Root mean square error of normalised rows that are not loud, as a share of their own."""
    scaled = [(part.float() - transform.offset) / transform.scale for part in (rows, transform.rounded(rows))]
    quiet = scaled[0].square().mean(1).sqrt() < transform.loud
    return float(((scaled[1] - scaled[0])[quiet].square().mean() / scaled[0][quiet].square().mean()).sqrt())


class Steps:
    """A line every hundred steps."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, total: int, doing: str) -> None:
        self.done += 1
        if self.done % 100 == 0:
            report.progress(f"{self.done} of {total} steps: {doing}")


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("raw")
    options.add_argument("--target", required=True, help="folder of the target")
    options.add_argument("--bits", type=float, nargs="*", default=[3.5])
    options.add_argument("--recipes", nargs="*", default=["rebuilt"])
    options.add_argument("--drafter", default="eagle3")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--settings", nargs="*", default=[], help="of train")
    options.add_argument("--name", default="transform")
    args = options.parse_args()
    store, recipes, errors = Store.open(args.raw), list(args.recipes), {}
    rows = calibration_rows(store)
    for bits in args.bits:
        # The lowest layer is rebuilt.
        transforms = tuple(Transform.of(layer, bits) for layer in rows[1:])
        name = f"klt{bits:g}"
        CODECS.rows[name] = TransformCodec(name=name, bits=bits, transforms=transforms)
        recipes.append(f"aux={name},final=rebuilt")
        errors[name] = [round(error(*pair), 4) for pair in zip(rows[1:], transforms, strict=True)]
    pairs = measure_paired(store, recipes, range(args.seeds), args.settings, Steps(), args.target, None, args.drafter)
    lines = [
        [row.recipe, f"{100 * row.difference:+.2f}", f"{100 * row.standard_error:.2f}", _percent(row.half_width)]
        for row in pairs
    ]
    head = ["recipe", "points of acceptance", "standard error", "half-width of the 95 % interval"]
    first = pairs[0]
    page = [
        f"# {'States rounded by a transform' if args.bits else 'Recipes in pairs'}, {report.today()}\n",
        f"{args.drafter}, {first.steps} steps, {len(first.seeds)} seeds in pairs, {' '.join(args.settings)}; mean "
        f"overlap of first drafts on original held-out states "
        f"{100 * sum(first.original_acceptance) / len(first.seeds):.2f}.",
        *(f"Error of {name} by layer, normalised: {' '.join(map(str, one))}." for name, one in errors.items()),
        "",
        report.table(head, lines),
    ]
    document = {"drafter": args.drafter, "errors": errors, "paired": [row.model_dump(mode="json") for row in pairs]}
    report.publish(args.name, document, args.results, page)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


if __name__ == "__main__":
    main()

"""What recipes cost a drafter: acceptance of drafters trained in pairs on exact states and on those of each recipe.

RAW is a store of exact states. Every pair has the same order and the same initial weights, and is judged on original
held-out states. Usage: python -m benchmarks.paired RAW --target DIR [--recipes rebuilt-klt …] [--drafter dspark]
[--seeds 3] [--first-seed 0] [--processes 1] [--settings key.path=value …]
"""

import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks import report
from hiddenstore.store import Store
from schemas.advice import PairedRow
from trainer.train.paired import (
    FEWEST_SEEDS,
    HeldOut,
    PairPlan,
    overlaps_of_seed,
    pair_rows,
    paired_copies,
)


class Steps:
    """A line every hundred steps of a seed."""

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
    options.add_argument("--recipes", nargs="*", default=["rebuilt", "rebuilt-klt"])
    options.add_argument("--drafter", default="eagle3")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--first-seed", type=int, default=0)
    options.add_argument("--processes", type=int, default=1, help="seeds at once: small steps leave a GPU idle")
    options.add_argument("--settings", nargs="*", default=[], help="of train")
    options.add_argument("--name", default="recipes")
    args = options.parse_args()
    if args.seeds < FEWEST_SEEDS:
        options.error(f"--seeds {args.seeds}: of fewer than {FEWEST_SEEDS} pairs no interval is known")
    store, seeds = Store.open(args.raw), range(args.first_seed, args.first_seed + args.seeds)
    with TemporaryDirectory() as folder:
        original, copies, plan = paired_copies(
            store, args.recipes, seeds, args.settings, Path(folder), args.target, args.drafter
        )
        threads = max(1, torch.get_num_threads() // args.processes)
        began, by_seed = time.monotonic(), list[dict[str, HeldOut]]()
        of_seed = partial(_of_seed, original.path, {name: copy.path for name, copy in copies.items()}, plan, threads)
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            for one in pool.map(of_seed, seeds):
                by_seed.append(one)
                if len(by_seed) >= FEWEST_SEEDS:
                    # What was measured is kept at any stop.
                    _publish(args, pair_rows(plan, by_seed, store, (time.monotonic() - began) / 60))


def _publish(args: Namespace, pairs: list[PairedRow]) -> None:
    lines = [
        [row.recipe, f"{100 * row.difference:+.2f}", f"{100 * row.standard_error:.2f}", _percent(row.half_width)]
        for row in pairs
    ]
    head = ["recipe", "points of acceptance", "standard error", "half-width of the 95 % interval"]
    first = pairs[0]
    page = [
        f"# Recipes in pairs, {report.today()}\n",
        f"{args.drafter}, {first.steps} steps, seeds {first.seeds[0]} to {first.seeds[-1]} in pairs, "
        f"{' '.join(args.settings)}; mean overlap of first drafts on original held-out states "
        f"{100 * sum(first.original_acceptance) / len(first.seeds):.2f}.\n",
        report.table(head, lines),
    ]
    document = {"drafter": args.drafter, "paired": [row.model_dump(mode="json") for row in pairs]}
    report.publish(args.name, document, args.results, page)


def _of_seed(original: str, copies: dict[str, str], plan: PairPlan, threads: int, seed: int) -> dict[str, HeldOut]:
    torch.set_num_threads(threads)
    stores = {name: Store.open(path) for name, path in copies.items()}
    steps = partial(Steps(), plan.steps * (1 + len(copies)))
    return overlaps_of_seed(Store.open(original), stores, plan, seed, steps)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


if __name__ == "__main__":
    main()

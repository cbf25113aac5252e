"""What recipes cost a drafter: acceptance of drafters trained in pairs on exact states and on those of each recipe.

RAW is a store of exact states. Every pair has the same order and the same initial weights, and is judged on original
held-out states. Usage: python -m benchmarks.paired RAW --target DIR [--recipes rebuilt-klt …] [--drafter dspark]
[--seeds 3] [--settings key.path=value …]
"""

from benchmarks import report
from hiddenstore.store import Store
from trainer.train.paired import measure_paired


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
    options.add_argument("--recipes", nargs="*", default=["rebuilt", "rebuilt-klt"])
    options.add_argument("--drafter", default="eagle3")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--settings", nargs="*", default=[], help="of train")
    options.add_argument("--name", default="recipes")
    args = options.parse_args()
    store = Store.open(args.raw)
    pairs = measure_paired(
        store, args.recipes, range(args.seeds), args.settings, Steps(), args.target, None, args.drafter
    )
    lines = [
        [row.recipe, f"{100 * row.difference:+.2f}", f"{100 * row.standard_error:.2f}", _percent(row.half_width)]
        for row in pairs
    ]
    head = ["recipe", "points of acceptance", "standard error", "half-width of the 95 % interval"]
    first = pairs[0]
    page = [
        f"# Recipes in pairs, {report.today()}\n",
        f"{args.drafter}, {first.steps} steps, {len(first.seeds)} seeds in pairs, {' '.join(args.settings)}; mean "
        f"overlap of first drafts on original held-out states "
        f"{100 * sum(first.original_acceptance) / len(first.seeds):.2f}.\n",
        report.table(head, lines),
    ]
    document = {"drafter": args.drafter, "paired": [row.model_dump(mode="json") for row in pairs]}
    report.publish(args.name, document, args.results, page)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


if __name__ == "__main__":
    main()

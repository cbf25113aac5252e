"""What more text gives: tokens of training text → accepted length and speed, for EAGLE-3.1 and two block drafters.

STORE holds answers that TARGET wrote itself, with a validation split: that of ``hiddenstore demo --target smollm2`` is
one. A run reads so many tokens once; all else is as ``hiddenstore train`` derives it. Speed is that of drafts of 3 on
this machine, in process: a draft and its check cost the same whatever the drafter has learnt. A finished run is not
repeated, so the same command goes on after a stop.
Usage: python -m benchmarks.expect STORE --target T --runs DIR [--tokens 10000 30000 …] [--seeds 3] [--only ROW …]
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks import report
from benchmarks.commands import Command
from benchmarks.drafter_quality import BATCH_TOKENS, BY_NAME, Bench, Quality, Row

TOKENS = (10_000, 30_000, 100_000, 300_000)
DRAFT_LEN, WHOLE_BLOCK = "3", "7"
ROWS = (Row("eagle3.1", BY_NAME["eagle3.1 3 TTT steps"].words), BY_NAME["dflash"], BY_NAME["dspark"])


@dataclass(frozen=True)
class Point:
    """One drafter after so much text: its seeds, and tokens/s over plain decoding at an accepted length of 1."""

    row: str
    tokens: int
    seeds: Sequence[Quality]
    speed_of_one: float

    def lengths(self, draft_len: str = DRAFT_LEN) -> list[float]:
        """Accepted length of each seed."""
        return [one["chains"][draft_len]["accepted_length"] for one in self.seeds]

    def cells(self) -> list[Any]:
        """A line of the table."""
        cpu_s = statistics.median(one["train_cpu_s"] for one in self.seeds)
        speed = statistics.median(self.lengths()) * self.speed_of_one
        lengths = [report.spread(self.lengths(draft_len)) for draft_len in (DRAFT_LEN, WHOLE_BLOCK)]
        return [self.row, f"{self.tokens:,}", len(self.seeds), *lengths, f"{speed:.2f}x", f"{cpu_s:.0f}"]


def measure(arguments: Any) -> tuple[list[Point], Quality]:
    """Every drafter, size by size and seed by seed, so that a stop leaves each drafter equally far."""
    points: list[Point] = []
    floors: Quality = {}
    command = Command()
    rows = [row for row in ROWS if row.name in arguments.only]
    for tokens in arguments.tokens:
        bench = Bench(arguments.store, arguments.runs / str(tokens), tokens // BATCH_TOKENS, command)
        bench.runs.mkdir(parents=True, exist_ok=True)
        for row in rows:
            seeds = [bench.measure(row, seed) for seed in range(arguments.seeds)]
            run = str(bench.runs / f"{row.folder}-seed0")
            points.append(Point(row.name, tokens, seeds, speed_of_one(command, run, arguments)))
            report.progress(f"{row.name} {tokens:,}: {report.spread(points[-1].lengths())}")
        floors = floors or bench.floors()
    return points, floors


def speed_of_one(command: Command, run: str, arguments: Any) -> float:
    """Seconds of a plain token over those of a draft and its check."""
    words = ("--draft-len", DRAFT_LEN, "--costs", "--target", arguments.target)
    judged = command.answer("eval", run, arguments.store, *words)
    return float(judged["token_s"]) / float(judged["sweep"][0]["draft_s"])


def draw(points: Sequence[Point], floor: float, path: Path) -> None:
    """Accepted length over tokens as SVG: a line per drafter through the medians, a mark per seed."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    for name in dict.fromkeys(point.row for point in points):
        line = [point for point in points if point.row == name]
        sizes = [point.tokens for point in line]
        (drawn,) = axes.plot(sizes, [statistics.median(point.lengths()) for point in line], label=name)
        for point in line:
            axes.plot([point.tokens] * len(point.seeds), point.lengths(), "o", ms=4, color=drawn.get_color())
    axes.axhline(floor, ls=":", color="gray", label="n-gram floor")
    axes.set(xscale="log", xlabel="tokens of training text, read once", ylabel="accepted length, drafts of 3")
    axes.legend()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


def main() -> None:
    """Measure, and write the table, the figures and the picture."""
    parser = report.parser(__doc__)
    parser.add_argument("store")
    parser.add_argument("--target", required=True)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--seeds", type=int, default=3)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    points, floors = measure(arguments)
    floor = floors["ngram"][DRAFT_LEN]
    drafts = [f"drafts of {draft_len}" for draft_len in (DRAFT_LEN, WHOLE_BLOCK)]
    head = ["drafter", "tokens", "seeds", *drafts, "tokens/s over plain", "CPU s to train"]
    page = [
        f"# What more text gives, {report.today()}\n",
        f"{report.machine_line()} Text read once in steps of {BATCH_TOKENS:,} tokens; accepted length over "
        f"{floors['validation']['samples']} held-out answers; median of the seeds, lowest and highest in brackets. "
        f"N-gram floor of the largest table, drafts of {DRAFT_LEN}: {floor:.3f}. Tokens/s: drafts of {DRAFT_LEN}, in "
        "process, from what drafts cost here.\n",
        report.table(head, [point.cells() for point in points]) + "\n",
        f"![accepted length over tokens](expect-{report.today()}.svg)",
    ]
    rows = [{"row": p.row, "tokens": p.tokens, "speed_of_one": p.speed_of_one, "seeds": p.seeds} for p in points]
    report.publish("expect", {**floors, "points": rows}, arguments.results, page)
    if arguments.results is not None:
        draw(points, floor, arguments.results / f"expect-{report.today()}.svg")


if __name__ == "__main__":
    main()

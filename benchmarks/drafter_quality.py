"""Every drafter from one store with an equal budget: accepted length of chains of 3 and 7 over several seeds.

STORE holds what ``hiddenstore collect --layers all-drafters`` makes of answers that the target itself wrote at
temperature 0.8, with a validation split (``prepare --val 6%``); ``answers.jsonl`` of ``hiddenstore demo`` are such
answers. Every run takes the same steps of the same batches; learning rates and all else are the defaults that
``hiddenstore train`` derives. Training and judging go through the command line. A finished run is not repeated, so the
same command goes on after a stop.
Usage: python -m benchmarks.drafter_quality STORE --runs DIR [--seeds 3] [--steps 300] [--target NAME] [--only ROW …]
"""

import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.commands import Command
from benchmarks.report import spread

BATCH_TOKENS = 1000
CHAINS = (3, 7)
RESULT = "quality.json"

Quality = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One drafter and recipe. longest: most tokens it drafts at a time."""

    name: str
    words: tuple[str, ...]
    longest: int = max(CHAINS)

    @property
    def folder(self) -> str:
        return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in self.name)


EAGLE3 = Row("eagle3", ("--drafter", "eagle3"))
ROWS = (
    Row("eagle1", ("--drafter", "eagle1")),
    Row("medusa", ("--drafter", "medusa"), longest=4),
    EAGLE3,
    Row("eagle3.1", ("--drafter", "eagle3", "drafter.fc_norm=true", "drafter.norm_output=true")),
    Row("eagle3 2 layers", ("--drafter", "eagle3", "drafter.num_layers=2")),
    Row("eagle3 lk_lambda", ("--drafter", "eagle3", "loss.kind=lk_lambda")),
    Row("dflash", ("--drafter", "dflash")),
    Row("dflash dpace", ("--drafter", "dflash", "loss.weighting=dpace")),
    Row("dflash distilled", ("--drafter", "dflash", "loss.distil=1.0")),
)


@dataclass(frozen=True)
class Bench:
    """Where runs lie, what they train on, and for how long."""

    store: str
    runs: Path
    steps: int
    command: Command

    def measure(self, row: Row, seed: int) -> Quality:
        """Train and judge one seed of a row; a finished one is read back."""
        words = [*row.words, *budget(self.steps, seed)]
        run = self.runs / f"{row.folder}-seed{seed}"

        def make() -> Quality:
            cpu_s = self.command.cpu_s("train", self.store, "-o", str(run), "-q", *words)
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [line for line in map(json.loads, lines) if "loss" in line]
            facts = {
                "lr": max(line["lr"] for line in steps),
                "tokens": sum(line["tokens"] for line in steps),
                "skipped_steps": sum(line["skipped"] for line in steps),
                "last_loss": steps[-1]["loss"],
            }
            chains = self.judge(run, [min(length, row.longest) for length in CHAINS])
            return {"row": row.name, "train_cpu_s": round(cpu_s, 1), **facts, "chains": chains}

        return once(run, {"seed": seed, "words": words}, make)

    def judge(self, run: Path, lengths: Sequence[int]) -> Quality:
        """Accepted lengths of chains, on the validation split."""
        judged = self.command.answer("eval", str(run), self.store, "--draft-len", ",".join(map(str, lengths)))
        names = ("accepted_length", "slot_accepted_length", "per_position", "drafts")
        return {str(one["draft_len"]): {name: one[name] for name in names} for one in judged["sweep"]}

    def floors(self) -> Quality:
        """The n-gram floor of each chain length, over the same text; of any run, as it depends on the text alone."""
        run = min(self.runs.glob(f"*-seed0/{RESULT}")).parent
        answers = {
            str(length): self.command.answer("eval", str(run), self.store, "--draft-len", str(length))
            for length in CHAINS
        }
        sizes = {name: answers[str(CHAINS[0])][name] for name in ("samples", "tokens")}
        return {"ngram": {key: one["ngram_accepted_length"] for key, one in answers.items()}, "validation": sizes}


def once(run: Path, key: Quality, make: Callable[[], Quality]) -> Quality:
    """The result of a run with this key, made and written unless its folder has it."""
    file = run / RESULT
    if file.exists():
        result: Quality = json.loads(file.read_text(encoding="utf-8"))
        if key.items() <= result.items():
            return result
    shutil.rmtree(run, ignore_errors=True)
    result = {**make(), **key}
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def budget(steps: int, seed: int) -> list[str]:
    """The settings all runs share."""
    return [
        f"data.batch_tokens={BATCH_TOKENS}",
        f"data.pack_tokens={BATCH_TOKENS}",
        f"train.max_steps={steps}",
        f"train.seed={seed}",
        "train.validate_every=0",
        "train.checkpoint_every=0",
    ]


def table(results: Sequence[Quality]) -> str:
    """A line per drafter and learning rate: medians over the seeds, lowest and highest in brackets."""
    groups: dict[tuple[str, float], list[Quality]] = {}
    for one in results:
        groups.setdefault((one["row"], one["lr"]), []).append(one)
    lines = []
    for (name, rate), group in groups.items():
        cells = [name, f"{rate:.1e}", len(group)]
        longest = str(max(map(int, group[0]["chains"])))
        for length in CHAINS:
            key = str(length) if str(length) in group[0]["chains"] else longest
            lengths = spread([one["chains"][key]["accepted_length"] for one in group])
            cells.append(lengths + ("" if key == str(length) else f", chain of {key}: its longest"))
        positions = zip(*(one["chains"][longest]["per_position"] for one in group), strict=True)
        cells.append(" ".join(f"{statistics.median(shares):.2f}" for shares in positions))
        cpu_s = statistics.median(one["train_cpu_s"] for one in group)
        lines.append([*cells, f"{group[0]['tokens']:,}", f"{cpu_s:.0f}"])
    chains = [f"chain of {length}" for length in CHAINS]
    head = ["drafter", "learning rate", "seeds", *chains, "accepted by position", "tokens", "CPU s"]
    return report.table(head, lines)


def publish(bench: Bench, target: str, results: Sequence[Quality], folder: Path | None) -> None:
    """Print and write what there is."""
    floors = bench.floors()
    floor = ", ".join(f"{value:.3f} for chains of {length}" for length, value in floors["ngram"].items())
    page = [
        f"# Drafters on {target}, {report.today()}",
        "",
        f"{bench.steps} steps of {BATCH_TOKENS:,} tokens, the same batches for all; median of the seeds, lowest and "
        f"highest in brackets. Accepted length over the {floors['validation']['samples']} held-out answers that the "
        "target wrote itself, bonus token counted, simulated by `hiddenstore eval`.",
        f"N-gram floor: {floor}. CPU s: one thread, median, with some ten to start the command.",
        "",
        table(results),
    ]
    facts = {"target": target, "steps": bench.steps, "batch_tokens": BATCH_TOKENS}
    report.publish(f"drafter_quality-{target}", {**facts, **floors, "rows": results}, folder, page)


def main() -> None:
    """Seed by seed, so that a stop leaves every drafter equally far."""
    parser = report.parser(__doc__)
    parser.add_argument("store")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--target", default="bundled", help="its name in the report")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.store, arguments.runs, arguments.steps, Command())
    rows = [row for row in ROWS if row.name in arguments.only]
    results = [bench.measure(row, seed) for seed in range(arguments.seeds) for row in rows]
    publish(bench, arguments.target, results, arguments.results)


if __name__ == "__main__":
    main()

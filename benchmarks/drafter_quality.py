"""Every drafter from one store with an equal budget: accepted length of chains of 3 and 7 over several seeds.

STORE holds what ``hiddenstore collect --layers all-drafters`` makes of answers that the target itself wrote at
temperature 0.8, with a validation split (``prepare --val 6%``); ``answers.jsonl`` of ``hiddenstore demo`` are such
answers. Every run takes the same steps of the same batches; learning rates and all else are the defaults that
``hiddenstore train`` derives. Training and judging go through the command line. A finished run is not repeated, so the
same command goes on after a stop. TEXT for trees is a small store of other answers (``prepare --val 0``).
Usage: python -m benchmarks.drafter_quality STORE --runs DIR [--seeds 3] [--steps 300] [--target NAME] [--trees TEXT]
[--only ROW …] [--once ROW …] [--rates]
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BATCH_TOKENS = 1000
CHAINS = (3, 7)
TREE = (5, 4)
RATE_FACTORS = (1 / 3, 3.0)
RESULT = "quality.json"

Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One drafter and recipe. longest: most tokens it drafts at a time."""

    name: str
    words: tuple[str, ...]
    longest: int = max(CHAINS)
    has_trees: bool = False

    @property
    def folder(self) -> str:
        return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in self.name)


ROWS = (
    Row("eagle1", ("--drafter", "eagle1"), has_trees=True),
    Row("medusa", ("--drafter", "medusa"), longest=4),
    Row("eagle3", ("--drafter", "eagle3"), has_trees=True),
    Row("eagle3.1", ("--drafter", "eagle3", "drafter.fc_norm=true", "drafter.norm_output=true")),
    Row("eagle3 2 layers", ("--drafter", "eagle3", "drafter.num_layers=2")),
    Row("eagle3 lk_lambda", ("--drafter", "eagle3", "loss.kind=lk_lambda")),
    Row("dflash", ("--drafter", "dflash")),
    Row("dflash dpace", ("--drafter", "dflash", "loss.weighting=dpace")),
    Row("dflash distilled", ("--drafter", "dflash", "loss.distil=1.0")),
)
SWEPT = ("eagle1", "medusa", "eagle3", "dflash")


class Command:
    """``hiddenstore`` as a process of one thread."""

    def __init__(self) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def cpu_s(self, *words: str) -> float:
        """Run it; user and system seconds it took.

        Raises:
            SystemExit: it failed.
        """
        process = subprocess.Popen([sys.executable, "-m", "hiddenstore.cli", *words], env=self.environment)
        _, status, usage = os.wait4(process.pid, 0)
        # Popen did not see the child end; without this it would wait for it again.
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"hiddenstore {' '.join(words)} ended with {process.returncode}")
        return usage.ru_utime + usage.ru_stime

    def answer(self, *words: str) -> Found:
        """What it answers with ``--json``."""
        command = [sys.executable, "-m", "hiddenstore.cli", *words, "--json"]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, check=True, text=True)
        found: Found = json.loads(done.stdout)
        return found


@dataclass(frozen=True)
class Bench:
    """Where runs are kept, what they train on, and for how long."""

    store: str
    runs: Path
    steps: int
    command: Command

    def measure(self, row: Row, seed: int, lr: float | None = None) -> Found:
        """Train and judge one seed of a row; a finished one is read back."""
        words = [*row.words, *budget(self.steps, seed), *([] if lr is None else [f"optim.lr={lr:.2g}"])]
        run = self.runs / f"{row.folder}-seed{seed}{'' if lr is None else f'-lr{lr:.2g}'}"
        file = run / RESULT
        if file.exists() and (known := json.loads(file.read_text(encoding="utf-8")))["words"] == words:
            return dict(known)
        shutil.rmtree(run, ignore_errors=True)
        cpu_s = self.command.cpu_s("train", self.store, "-o", str(run), "-q", *words)
        found = {"row": row.name, "seed": seed, "words": words, "train_cpu_s": round(cpu_s, 1), **_settings(run)}
        chains = [min(length, row.longest) for length in CHAINS]
        judged = self.command.answer("eval", str(run), self.store, "--draft-len", ",".join(map(str, chains)))
        found["chains"] = {str(one["draft_len"]): judgement(one) for one in judged["sweep"]}
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return found

    def measure_tree(self, row: Row, seed: int, text: str) -> Found:
        """A tree and a chain as deep, on the training split of the store ``text``; a finished one is read back."""
        run = self.runs / f"{row.folder}-seed{seed}"
        file = run / f"tree-{RESULT}"
        if not file.exists():
            shapes = f"{TREE[0]},{TREE[0]}x{TREE[1]}"
            judged = self.command.answer("eval", str(run), text, "--split", "train", "--draft-len", shapes)
            chain, tree = map(judgement, judged["sweep"])
            found = {"row": row.name, "seed": seed, "samples": judged["samples"], "tree": tree, "chain": chain}
            file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return dict(json.loads(file.read_text(encoding="utf-8")))

    def floors(self) -> Found:
        """The n-gram floor of each chain length, over the same text; of any run, as it depends on the text alone."""
        file = self.runs / "floors.json"
        if not file.exists():
            run = min(self.runs.glob(f"*-seed0/{RESULT}")).parent
            found = {
                str(length): self.command.answer("eval", str(run), self.store, "--draft-len", str(length))
                for length in CHAINS
            }
            floors = {key: one["ngram_accepted_length"] for key, one in found.items()}
            sizes = {name: one for name, one in next(iter(found.values())).items() if name in ("samples", "tokens")}
            file.write_text(json.dumps({"ngram": floors, "validation": sizes}, indent=2) + "\n", encoding="utf-8")
        floors = json.loads(file.read_text(encoding="utf-8"))
        return dict(floors)

    def start_up_cpu_s(self) -> float:
        """CPU seconds of a training command that are no training: a run of one step."""
        with tempfile.TemporaryDirectory() as folder:
            words = [*ROWS[1].words, *budget(1, 0)]
            return round(self.command.cpu_s("train", self.store, "-o", f"{folder}/run", "-q", *words), 1)


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


def _settings(run: Path) -> Found:
    """Learning rate and tokens read, from the folder of a run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    return {
        "lr": max(line["lr"] for line in steps),
        "tokens": sum(line["tokens"] for line in steps),
        "skipped_steps": sum(line["skipped"] for line in steps),
        "last_loss": steps[-1]["loss"],
    }


def judgement(one: Found) -> Found:
    """What is kept of one shape of draft in what ``hiddenstore eval`` answers."""
    return {name: one[name] for name in ("accepted_length", "slot_accepted_length", "per_position", "drafts")}


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.3f}" + (f" ({low:.3f}–{high:.3f})" if len(values) > 1 else "")


def table(results: Sequence[Found]) -> list[str]:
    """A Markdown table: a line per drafter."""
    head = ["drafter", "learning rate", *(f"chain of {length}" for length in CHAINS), "accepted by position", "CPU s"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in ROWS:
        found = [one for one in results if one["row"] == row.name]
        if not found:
            continue
        cells = [row.name, f"{found[0]['lr']:.1e}"]
        for length in CHAINS:
            key = str(min(length, row.longest))
            lengths = spread([one["chains"][key]["accepted_length"] for one in found])
            cells.append(lengths + ("" if length <= row.longest else f", chain of {row.longest}: its longest"))
        positions = zip(*(one["chains"][str(row.longest)]["per_position"] for one in found), strict=True)
        cells.append(" ".join(f"{statistics.median(shares):.2f}" for shares in positions))
        cells.append(f"{statistics.median(one['train_cpu_s'] for one in found):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def trees_table(trees: Sequence[Found]) -> list[str]:
    """Trees beside chains as deep, over the same text."""
    lines = [f"| drafter | tree of {TREE[0]}x{TREE[1]} | chain of {TREE[0]} |", "|---|---|---|"]
    for name in dict.fromkeys(one["row"] for one in trees):
        kinds = ([one[kind]["accepted_length"] for one in trees if one["row"] == name] for kind in ("tree", "chain"))
        lines.append(f"| {name} | {' | '.join(map(spread, kinds))} |")
    return lines


def rates_table(results: Sequence[Found], defaults: Sequence[Found]) -> list[str]:
    """Other learning rates beside the derived one, seed 0."""
    lines = ["| drafter | learning rate | chain of 3 | longest chain |", "|---|---|---|---|"]
    for name in SWEPT:
        mine = [one for one in results if one["row"] == name]
        mine += [one for one in defaults if one["row"] == name and one["seed"] == 0 and mine]
        for one in sorted(mine, key=lambda one: float(one["lr"])):
            lengths = [f"{chain['accepted_length']:.3f}" for chain in one["chains"].values()]
            mark = "" if one in results else " (derived)"
            lines.append(f"| {name} | {one['lr']:.1e}{mark} | {lengths[0]} | {lengths[-1]} |")
    return lines


def report(bench: Bench, target: str, results: Sequence[Found], trees: Sequence[Found], rates: Sequence[Found]) -> None:
    """Print and write what there is."""
    floors, start_up = bench.floors(), bench.start_up_cpu_s()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    document = {
        "benchmark": "drafter_quality",
        "date": today,
        "target": target,
        "steps": bench.steps,
        "batch_tokens": BATCH_TOKENS,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "start_up_cpu_s": start_up,
        **floors,
        "rows": results,
        "trees": trees,
        "rates": rates,
    }
    floor = ", ".join(f"{value:.3f} for chains of {length}" for length, value in floors["ngram"].items())
    seeds = len({one["seed"] for one in results})
    lines = [
        f"# Drafters on {target}, {today}",
        "",
        f"{bench.steps} steps of {BATCH_TOKENS:,} tokens, the same batches for all; median of {seeds} seeds, lowest "
        "and highest in brackets, seed 0 alone where there are none. Accepted length over the "
        f"{floors['validation']['samples']} held-out answers that the target wrote itself, bonus token counted, "
        "simulated by `hiddenstore eval`.",
        f"N-gram floor: {floor}. CPU s: one thread, median, of which {start_up:.0f} s start the command.",
        "",
        *table(results),
        *(["", f"Trees, {trees[0]['samples']} of other held-out answers:", "", *trees_table(trees)] if trees else []),
        *(["", "Learning rates, seed 0:", "", *rates_table(rates, results)] if rates else []),
    ]
    print("\n".join(lines))
    file = RESULTS / f"drafter_quality-{target}-{today}.json"
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Seed by seed, so that a stop leaves every drafter equally far, with the learning rates after the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--target", default="bundled", help="its name in the report")
    parser.add_argument("--trees", metavar="TEXT", help="also trees, slow to walk, on a small store of other answers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--once", nargs="+", choices=[row.name for row in ROWS], default=[], help="seed 0 alone")
    parser.add_argument("--rates", action="store_true", help="also a third and three times the derived learning rates")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.store, args.runs, args.steps, Command())
    rows = [row for row in ROWS if row.name in args.only]
    results = [bench.measure(row, 0) for row in rows]
    swept = [row for row in rows if row.name in SWEPT] if args.rates else []
    derived = {one["row"]: one["lr"] for one in results}
    rates = [bench.measure(row, 0, factor * derived[row.name]) for row in swept for factor in RATE_FACTORS]
    results += [bench.measure(row, seed) for seed in range(1, args.seeds) for row in rows if row.name not in args.once]
    wooded = [row for row in rows if row.has_trees and args.trees]
    trees = [bench.measure_tree(row, seed, args.trees) for seed in range(args.seeds) for row in wooded]
    report(bench, args.target, results, trees, rates)


if __name__ == "__main__":
    main()

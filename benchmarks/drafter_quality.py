"""Every drafter from one store with an equal budget: accepted length of chains of 3 and 7 over several seeds.

STORE holds what ``hiddenstore collect --layers all-drafters`` makes of answers that the target itself wrote at
temperature 0.8, with a validation split (``prepare --val 6%``); ``answers.jsonl`` of ``hiddenstore demo`` are such
answers. Every run takes the same steps of the same batches; learning rates and all else are the defaults that
``hiddenstore train`` derives, but for drafters of one forward: two layers and at most 128 blocks a sample, else they
cost several times an EAGLE-3. ``--vocab`` gives all but EAGLE-1 one draft vocabulary. A finished run is not repeated.
Usage: python -m benchmarks.drafter_quality STORE --runs DIR [--seeds 3] [--steps 300] [--target NAME] [--only ROW …]
[--vocab N] [--settings KEY=VALUE …]
"""

import json
import shutil
import statistics
from argparse import ArgumentParser, Namespace
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
SUMS = {"tokens": "tokens", "skipped_steps": "skipped"}

Quality = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One drafter and recipe. longest: most tokens it drafts at a time. whole: it has no draft vocabulary."""

    name: str
    words: tuple[str, ...]
    longest: int = max(CHAINS)
    whole: bool = False

    @property
    def folder(self) -> str:
        return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in self.name)


THREE_STEPS = ("--drafter", "eagle3", "loss.steps=3")
NORMS = ("drafter.fc_norm=true", "drafter.norm_output=true")
BLOCKS = ("drafter.num_layers=2", "loss.num_anchors=128")
ROWS = (
    Row("eagle1", ("--drafter", "eagle1"), whole=True),
    Row("medusa", ("--drafter", "medusa"), longest=4),
    Row("eagle3", ("--drafter", "eagle3")),
    Row("eagle3 3 TTT steps", THREE_STEPS),
    Row("eagle3.1", ("--drafter", "eagle3", *NORMS)),
    Row("eagle3.1 3 TTT steps", (*THREE_STEPS, *NORMS)),
    Row("eagle3 2 layers", ("--drafter", "eagle3", "drafter.num_layers=2")),
    Row("eagle3 lk_lambda", ("--drafter", "eagle3", "loss.kind=lk_lambda")),
    Row("peagle", ("--drafter", "peagle", "drafter.num_layers=2", "drafter.fc_norm=true", "loss.steps=7")),
    Row("dflash", ("--drafter", "dflash", *BLOCKS)),
    Row("dflash dpace", ("--drafter", "dflash", *BLOCKS, "loss.weighting=dpace")),
    Row("dflash distilled", ("--drafter", "dflash", *BLOCKS, "loss.distil=1.0")),
    Row("jetspec", ("--drafter", "dflash", *BLOCKS, "drafter.causal=true", "loss.distil=1.0")),
    Row("dspark", ("--drafter", "dspark", *BLOCKS)),
    Row("dflash2", ("--drafter", "dflash2", *BLOCKS), whole=True),
    Row("domino", ("--drafter", "domino", *BLOCKS), whole=True),
    Row("xpress", ("--drafter", "xpress", *BLOCKS), whole=True),
)
BY_NAME = {row.name: row for row in ROWS}


@dataclass(frozen=True)
class Bench:
    """Where runs lie, what they train on, and for how long. settings: of every row; vocab: tokens of the draft
    vocabulary, derived where None."""

    store: str
    runs: Path
    steps: int
    command: Command
    settings: tuple[str, ...] = ()
    vocab: int | None = None

    def run(self, row: Row, seed: int) -> Path:
        return self.runs / f"{row.folder}-seed{seed}"

    def measure(self, row: Row, seed: int) -> Quality:
        """Train and judge one seed of a row; a finished one is read back."""
        vocab = [] if row.whole or self.vocab is None else [f"drafter.vocab_size={self.vocab}"]
        words = [*row.words, *vocab, *self.settings, *budget(self.steps, seed)]
        run = self.run(row, seed)

        def make() -> Quality:
            cpu_s = self.command.cpu_s("train", self.store, "-o", str(run), "-q", *words)
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [line for line in map(json.loads, lines) if "loss" in line]
            facts = {"lr": max(line["lr"] for line in steps), "last_loss": steps[-1]["loss"]}
            facts |= {key: sum(line[name] for line in steps) for key, name in SUMS.items()}
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
        words = ("eval", str(run), self.store, "--draft-len")
        answers = {str(length): self.command.answer(*words, str(length)) for length in CHAINS}
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
    tokens = [f"data.batch_tokens={BATCH_TOKENS}", f"data.pack_tokens={BATCH_TOKENS}"]
    length = [f"train.max_steps={steps}", f"train.seed={seed}"]
    return [*tokens, *length, "train.validate_every=0", "train.checkpoint_every=0"]


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


def publish(bench: Bench, target: str, results: Sequence[Quality], folder: Path | None, name: str = "") -> None:
    """Print and write what there is, as ``name``, by default this benchmark's."""
    floors = bench.floors()
    floor = ", ".join(f"{value:.3f} for chains of {length}" for length, value in floors["ngram"].items())
    page = [
        f"# Drafters on {target}, {report.today()}\n",
        f"{bench.steps} steps of {BATCH_TOKENS:,} tokens, ours from the same batches; median of the seeds, lowest and "
        f"highest in brackets. Accepted length over the {floors['validation']['samples']} held-out answers that the "
        "target wrote itself, bonus token counted, simulated by `hiddenstore eval`.",
        f"N-gram floor: {floor}. CPU s: one thread, median, with some ten to start the command.",
        f"Settings of ours: {', '.join(bench.settings) or 'as derived'}; --vocab {bench.vocab or 'as derived'}.\n",
        table(results),
    ]
    facts: Quality = {"target": target, "steps": bench.steps, "batch_tokens": BATCH_TOKENS}
    facts |= {"settings": bench.settings, "vocab": bench.vocab}
    report.publish(f"{name or 'drafter_quality'}-{target}", {**facts, **floors, "rows": results}, folder, page)


def parser(text: str | None) -> ArgumentParser:
    """Of a command that trains rows."""
    options = report.parser(text)
    options.add_argument("store")
    options.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    options.add_argument("--target", default="bundled", help="its name in the report")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--only", nargs="*", choices=BY_NAME, default=list(BY_NAME), metavar="ROW")
    options.add_argument("--vocab", type=int, help="tokens of the draft vocabulary; default: as derived")
    options.add_argument("--settings", nargs="*", default=[], help="of every row, such as train.precision=bf16")
    return options


def measured(arguments: Namespace) -> tuple[Bench, list[Quality]]:
    """Seed by seed, so that a stop leaves every drafter equally far."""
    arguments.runs.mkdir(parents=True, exist_ok=True)
    shared = Command(), tuple(arguments.settings), arguments.vocab
    bench, seeds = Bench(arguments.store, arguments.runs, arguments.steps, *shared), range(arguments.seeds)
    return bench, [bench.measure(BY_NAME[name], seed) for seed in seeds for name in arguments.only]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    bench, results = measured(arguments)
    publish(bench, arguments.target, results, arguments.results)


if __name__ == "__main__":
    main()

"""Accepted length of the demo's drafter over several seeds, live, on the demo's held-out questions.

``hiddenstore demo DIR`` first, then ``python benchmarks/demo_seeds.py DIR --seeds 0 1 2``. Every seed trains with the
demo's own settings on the demo's store; seed 0 is the demo's own run. Prints a table, writes a dated JSON.
"""

import statistics
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.commands import Command
from collectors.cli.demo import DRAFTER, PIPELINE
from hiddenstore.cli.run import Pipeline, setting_words
from hiddenstore.settings import load

TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NAMES = ("accepted_length", "simulated_accepted_length", "untrained_accepted_length", "ngram_accepted_length")
NAMES += ("prompts", "identical_to_greedy")


def train(folder: Path, settings: list[str], seed: int) -> tuple[str, float | None]:
    """The run of a seed and the seconds it took; a run that exists is taken as it is."""
    run = folder / DRAFTER / ("run" if seed == 0 else f"run-seed-{seed}")
    if run.exists():
        return str(run), None
    started = time.monotonic()
    words = [str(folder / "store"), *settings, f"train.seed={seed}", "-o", str(run)]
    Command().run([*TWO_RANKS, "-m", "hiddenstore.cli", "train", "-q", *words])
    return str(run), round(time.monotonic() - started, 1)


def main() -> None:
    """Train, decode, print, write."""
    parser = report.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    pipeline = load(Pipeline, arguments.folder / PIPELINE)
    decode = pipeline.decode or {}
    settings = [word for word in setting_words(pipeline.drafters[DRAFTER].settings) if "train.seed=" not in word]
    words = [
        "--target",
        pipeline.target,
        "--prompts",
        str(decode["prompts"]),
        "-n",
        str(decode["count"]),
        "--untrained",
    ]
    words += ["--draft-len", str(decode["draft-len"]), "--max-new-tokens", str(decode["max-new-tokens"])]
    rows = []
    for seed in arguments.seeds:
        run, seconds = train(arguments.folder, settings, seed)
        answer = Command().answer("decode", run, *words)
        rows.append({"seed": seed, "train_s": seconds, **{name: answer[name] for name in NAMES}})
        report.progress(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    median = statistics.median(row["accepted_length"] for row in rows)
    result = {"settings": settings, "median_accepted_length": median, "rows": rows}
    report.publish("demo_seeds", result, arguments.results)


if __name__ == "__main__":
    main()

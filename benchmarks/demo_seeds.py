"""Accepted length of the demo's drafter over several seeds, live, on the demo's held-out questions.

``hiddenstore demo DIR`` first, then ``python benchmarks/demo_seeds.py DIR --seeds 0 1 2``. Every seed trains with the
demo's own settings on the demo's store; seed 0 is the demo's own run. Prints a table, writes a dated JSON.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from collectors.demo import TARGET_DIR
from collectors.demo.walk import ANSWER_TOKENS, CHAIN, PROMPTS, TRAIN_SETTINGS

RESULTS = Path(__file__).parent / "results"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = ["-m", "hiddenstore.cli"]


def train(folder: Path, seed: int) -> tuple[Path, float | None]:
    """The run of a seed and the seconds it took; a run that exists is taken as it is."""
    run = folder / ("run" if seed == 0 else f"run-seed-{seed}")
    if run.exists():
        return run, None
    started = time.monotonic()
    words = [str(folder / "store"), *TRAIN_SETTINGS, f"train.seed={seed}", "-o", str(run)]
    subprocess.run([*LAUNCH, *COMMAND, "train", "-q", *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return run, time.monotonic() - started


def decode(folder: Path, run: Path) -> dict[str, Any]:
    """What ``hiddenstore decode --json`` says."""
    words = ["--target", str(TARGET_DIR), "--prompts", str(folder / "held-out-questions.jsonl"), "-n", str(PROMPTS)]
    words += ["--draft-len", str(CHAIN), "--max-new-tokens", str(ANSWER_TOKENS), "--untrained", "--json"]
    done = subprocess.run(
        [sys.executable, *COMMAND, "decode", str(run), *words], stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Train, decode, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        run, seconds = train(args.folder, seed)
        found = decode(args.folder, run)
        names = ("accepted_length", "simulated_accepted_length", "untrained_accepted_length", "ngram_accepted_length")
        row = {"seed": seed, "train_s": seconds, **{name: found[name] for name in names}}
        row |= {"prompts": found["prompts"], "identical_to_greedy": found["identical_to_greedy"]}
        rows.append(row)
        print(
            "  ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    median = statistics.median(row["accepted_length"] for row in rows)
    print(f"median accepted length {median:.3f} over {len(rows)} seeds")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    document = {
        "benchmark": "demo_seeds",
        "date": today,
        "settings": list(TRAIN_SETTINGS),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "median_accepted_length": median,
        "rows": rows,
    }
    (RESULTS / f"demo_seeds_{today}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

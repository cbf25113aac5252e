"""A long run killed at random, and one moved between one and two processes, against the run nobody touched.

Killed: SIGKILL at random progress, then ``--resume``, until done; every metric and the last weights must be equal bit
for bit. Moved: begun by two processes, SIGTERM at random progress, then on with the other world size; the tokens and
taught slots of every step must be equal, the losses of the first 50 fp32 steps within 1e-4, and the end within the
spread of the seeds.
Usage: python benchmarks/long_run.py [--steps 2000] [--kills 8] [--moves 4] [--seed 0]
"""

import argparse
import datetime
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hiddenstore.testing.builders import make_store

RESULTS = Path(__file__).parent / "results"
SETTINGS = [
    "data.batch_tokens=160", "data.pack_tokens=80", "drafter.hidden_size=32", "drafter.intermediate_size=32",
    "drafter.num_heads=2", "drafter.num_kv_heads=1", "drafter.head_dim=8", "drafter.vocab_size=40", "loss.steps=3",
    "optim.lr=1e-3", "train.precision=fp32", "train.validate_every=0", "train.checkpoint_every=50",
]  # fmt: skip
TIMED = {"tokens_per_s", "data_wait_fraction"}
COMPARED_STEPS, TOLERANCE = 50, 1e-4
TAIL = 100
SEEDS = 3


def start(world_size: int, *words: str) -> list[subprocess.Popen[bytes]]:
    """``hiddenstore train`` as torchrun starts it."""
    code = "from hiddenstore.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if world_size > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        environment |= {"WORLD_SIZE": str(world_size)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, "train", "-q", *words],
            env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}),
        )
        for rank in range(world_size)
    ]


def stop_at(step: int, run: Path, processes: list[subprocess.Popen[bytes]], number: int) -> list[int]:
    """Send a signal to the last process once ``step`` is logged, unless the run ends first; the exit codes."""
    metrics = run / "metrics.jsonl"
    while any(process.poll() is None for process in processes):
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
            processes[-1].send_signal(number)
            break
        time.sleep(0.01)
    return [process.wait() for process in processes]


def straight(store: str, run: Path, steps: int, seed: int) -> None:
    """The run nobody touches."""
    (process,) = start(1, store, "-o", str(run), *SETTINGS, f"train.max_steps={steps}", f"train.seed={seed}")
    if process.wait():
        raise SystemExit(f"{run} failed")


def interrupted(
    store: str, run: Path, steps: int, at: list[int], choose: Callable[[int], tuple[int, int]]
) -> list[int]:
    """A run stopped near the steps ``at``. choose(part): world size of the part, and the signal that ends it.

    Returns the exit codes seen.
    """
    codes = []
    for part, step in enumerate([*at, steps + 1]):
        world_size, number = choose(part)
        begun = (run / "run.json").exists()
        words = ["--resume"] if begun else [*SETTINGS, f"train.max_steps={steps}"]
        codes += stop_at(step, run, start(world_size, store, "-o", str(run), *words), number)
    if codes[-1]:
        raise SystemExit(f"{run} ended with exit code {codes[-1]}")
    return codes


def metrics(run: Path) -> list[dict[str, Any]]:
    """Every step's record without its times."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMED} for record in found]


def weights(run: Path, steps: int) -> bytes:
    """The drafter after the last step."""
    return (run / f"checkpoints/step-{steps}/drafter.safetensors").read_bytes()


def tail(run: Path) -> float:
    """Mean loss of the last steps."""
    return statistics.mean(record["loss"] for record in metrics(run)[-TAIL:])


def compare(folder: Path, args: argparse.Namespace, chance: random.Random) -> dict[str, Any]:
    """Run everything; the findings."""
    store, steps = make_store(folder, samples=60, layers=(1, 3, 4)).path, args.steps
    seeds = [folder / f"seed-{seed}" for seed in range(SEEDS)]
    killed, moved = folder / "killed", folder / "moved"
    kills = sorted(chance.sample(range(1, steps), args.kills))
    moves = sorted(chance.sample(range(1, steps), args.moves))
    with ThreadPoolExecutor(SEEDS + 2) as side_by_side:
        alone = [side_by_side.submit(straight, store, path, steps, seed) for seed, path in enumerate(seeds)]
        codes = side_by_side.submit(interrupted, store, killed, steps, kills, lambda part: (1, signal.SIGKILL))
        switching = side_by_side.submit(
            interrupted, store, moved, steps, moves, lambda part: (2 - part % 2, signal.SIGTERM)
        )
    for done in (*alone, switching):
        done.result()
    one, two = metrics(seeds[0]), metrics(moved)
    first = zip(one[:COMPARED_STEPS], two[:COMPARED_STEPS], strict=True)
    ends = [tail(run) for run in seeds]
    spread = max(ends) - min(ends)
    return {
        "steps": steps,
        "kills_at": kills,
        "killed_processes": codes.result().count(-signal.SIGKILL),
        "killed_metrics_equal": metrics(killed) == one,
        "killed_weights_equal": weights(killed, steps) == weights(seeds[0], steps),
        "moves_at": moves,
        "moved_batches_equal": all(a[k] == b[k] for a, b in zip(one, two, strict=True) for k in ("tokens", "taught")),
        "moved_first_steps_difference": max(abs(b["loss"] / a["loss"] - 1) for a, b in first),
        "end_of_seeds": ends,
        "end_of_moved": tail(moved),
        "end_within_spread": abs(tail(moved) - ends[0]) <= spread,
    }


def main() -> None:
    """Run, print, write; exit 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--moves", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), args, random.Random(args.seed))
    for key, value in found.items():
        print(f"{key}: {value}")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    document = {
        "benchmark": "long_run",
        "date": today,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "settings": SETTINGS,
        "seconds": round(time.monotonic() - began, 1),
        **found,
    }
    (RESULTS / f"long_run_{args.steps}_{today}.json").write_text(
        json.dumps(document, indent=2) + "\n", encoding="utf-8"
    )
    holds = all(found[key] for key in found if key.endswith(("_equal", "_spread")))
    if not (holds and found["moved_first_steps_difference"] < TOLERANCE):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

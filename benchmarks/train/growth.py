"""How time and memory of an EAGLE-3 step grow with the tokens of a sample and with the TTT steps, measured and plotted.

A smaller drafter than the speed run's, so that 16,384 tokens take a minute: D=128, V=U=1,024. Each point is a process
of its own, CPU seconds of one step after another warmed it up, and the growth of its peak memory.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train.case import Case
from benchmarks.train.run import Bench, Row, need, two_packs_mb

SMALL = Case("eagle3", 1024, vocab=1024, draft=1024, width=128, wider=512, heads=2, kv_heads=1)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
STEPS = tuple(range(1, 9))
HELD = Row("ours", "OursHeld")


def measure(bench: Bench, tokens: tuple[int, ...] = TOKENS, steps: tuple[int, ...] = STEPS) -> list[dict[str, Any]]:
    """Every point: tokens, steps, CPU seconds a step, bytes."""
    cases = [replace(SMALL, tokens=count) for count in reversed(tokens)]
    cases += [replace(SMALL, steps=count) for count in steps if count != SMALL.steps]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda case: point(bench, case), cases))


def point(bench: Bench, case: Case) -> dict[str, Any]:
    """One case in a fresh process."""
    folder = bench.root / f"growth-{case.tokens}-{case.steps}"
    case.save(folder)
    count = 1 if case.tokens > 4096 else 3
    with bench.process(HELD) as worker:
        need(worker.ask("open", folder=str(folder), prefetch_mb=two_packs_mb(case)))
        need(worker.ask("steps", count=1))
        seconds = need(worker.ask("steps", count=count))["cpu"]
        growth = need(worker.ask("memory", count=0))["growth_bytes"]
    return {"tokens": case.tokens, "steps": case.steps, "cpu": seconds, "bytes": growth}


def fits(points: list[dict[str, Any]]) -> dict[str, float]:
    """What the points say of the laws.

    exponent_*: slope of the logarithm over the last four lengths. memory_square: bytes per token and token in a fit of
    memory by a square, beside ``dense``, what one fp32 score a head for every pair of a step would take.
    steps_linear: R² of a line through the seconds by TTT steps; steps_last: the last added step over the mean one.
    """
    by_tokens, by_steps = series(points)
    t, cpu, used = (np.array([p[key] for p in by_tokens], float) for key in ("tokens", "cpu", "bytes"))
    k, step_cpu = (np.array([p[key] for p in by_steps], float) for key in ("steps", "cpu"))
    line = np.polyfit(k, step_cpu, 1)
    left = step_cpu - np.polyval(line, k)
    added = np.diff(step_cpu)
    return {
        "exponent_cpu": float(np.polyfit(np.log(t[-4:]), np.log(cpu[-4:]), 1)[0]),
        "exponent_bytes": float(np.polyfit(np.log(t[-4:]), np.log(used[-4:]), 1)[0]),
        "memory_square": float(np.polyfit(t, used, min(2, len(t) - 1))[0]) if len(t) > 2 else 0.0,
        "dense": 4.0 * SMALL.heads,
        "steps_linear": float(1 - left.var() / step_cpu.var()),
        "steps_last": float(added[-2:].mean() / added.mean()),
        "bytes_per_token": float(used[-1] / t[-1]),
    }


def series(points: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The points by tokens at 7 steps, and by steps at 1,024 tokens, each ascending."""
    by_tokens = [p for p in points if p["steps"] == SMALL.steps]
    by_steps = [p for p in points if p["tokens"] == SMALL.tokens]
    return sorted(by_tokens, key=lambda p: p["tokens"]), sorted(by_steps, key=lambda p: p["steps"])


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds and kilobytes per token by length, and seconds and megabytes a step by TTT steps."""
    from matplotlib.figure import Figure

    by_tokens, by_steps = series(points)
    figure = Figure(figsize=(9, 6), layout="constrained")
    (time, memory), (step_time, step_memory) = figure.subplots(2, 2)
    tokens = [p["tokens"] for p in by_tokens]
    steps = [p["steps"] for p in by_steps]
    panels = (
        (time, tokens, [p["cpu"] / p["tokens"] * 1e3 for p in by_tokens], "CPU ms per token"),
        (memory, tokens, [p["bytes"] / p["tokens"] / 1e3 for p in by_tokens], "peak growth, kB per token"),
        (step_time, steps, [p["cpu"] for p in by_steps], "CPU s per step"),
        (step_memory, steps, [p["bytes"] / 1e6 for p in by_steps], "peak growth, MB"),
    )
    for axes, x, y, label in panels:
        axes.plot(x, y, "o-", color="tab:blue")
        axes.set_ylim(0, 1.15 * max(y))
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.set_xlabel(f"tokens of the sample (TTT {SMALL.steps})")
    for axes in (step_time, step_memory):
        axes.set_xticks(steps)
        axes.set_xlabel(f"TTT steps (T = {SMALL.tokens:,})")
    figure.suptitle(f"EAGLE-3 step, D={SMALL.width}, V=U={SMALL.vocab:,}, fp32, one thread")
    figure.savefig(path, dpi=90)

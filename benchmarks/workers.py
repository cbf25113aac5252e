"""Workers: processes that answer requests as JSON lines, each of one environment and one checkout, measured in turn.

A worker module ends with ``serve(make)``; the methods of what ``make`` returns are the requests. Rounds go from worker
to worker, so that whatever else the machine does costs all of them alike.
"""

import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

Answer = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of a table: the class behind it, what it is measured in, and where it runs. ``folder``: what it reads or
    writes. ``checkout``: the repository whose worker it is."""

    label: str
    kind: str
    measures: tuple[str, ...] = ()
    folder: str = ""
    python: str | Path = sys.executable
    checkout: Path = ROOT


@dataclass
class Timing:
    """CPU and wall seconds of a row by measure, one a round, other facts of it, or why it did not run."""

    row: Row
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None

    def add(self, measure: str, answer: Answer, unit: float = 1.0) -> None:
        """A round's answer; seconds are divided by ``unit``, what else it says are facts of the last round."""
        self.failed = answer.get("failed")
        if self.failed is None:
            self.cpu.setdefault(measure, []).append(answer["cpu"] / unit)
            self.wall.setdefault(measure, []).append(answer["wall"] / unit)
            self.facts.update((name, value) for name, value in answer.items() if name not in ("cpu", "wall"))

    def median(self, measure: str) -> float | None:
        """CPU seconds; None where it did not run."""
        values = self.cpu.get(measure)
        return statistics.median(values) if values and self.failed is None else None

    def ratios(self, other: "Timing", measure: str) -> list[float]:
        """CPU seconds of the other over these, round by round: lower quartile, median, upper quartile."""
        pairs = zip(other.cpu[measure], self.cpu[measure], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3

    def document(self) -> dict[str, Any]:
        """For the JSON of a result."""
        return {"row": self.row.label, "cpu_s": self.cpu, "wall_s": self.wall, **self.facts, "failed": self.failed}


class WorkerProcess:
    """``module`` run as a row says, with these arguments; what it prints besides its answers is added to ``errors``."""

    def __init__(
        self, row: Row, module: str, arguments: Sequence[str], errors: Path, environment: Mapping[str, str] = ONE_THREAD
    ) -> None:
        command, env = [row.python, "-m", module, *arguments], {**os.environ, **environment}
        pipe = subprocess.PIPE
        with errors.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=row.checkout, env=env
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def ask(self, op: str, **options: Any) -> Answer:
        """What the worker answers, ``failed`` where it could not."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps({"op": op, **options}) + "\n")
            self._requests.flush()
        line = self._answers.readline()
        return json.loads(line) if line else {"failed": "the worker died"}

    def demand(self, op: str, **options: Any) -> Answer:
        """An answer without which there is nothing to measure. Raises RuntimeError: the worker could not."""
        answer = self.ask(op, **options)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def close(self) -> None:
        """End the worker."""
        self._requests.close()
        self._process.wait()
        self._answers.close()


@contextlib.contextmanager
def running(start: Callable[[Row], WorkerProcess], rows: Sequence[Row]) -> Iterator[list[WorkerProcess]]:
    """A worker a row, ended with the block."""
    with contextlib.ExitStack() as stack:
        workers = []
        for row in rows:
            workers.append(start(row))
            stack.callback(workers[-1].close)
        yield workers


@dataclass(frozen=True)
class Turns:
    """How rows take turns. ``requests(turn)``: options by measure; ``before``: what happens ahead of each request.
    ``unit`` divides the seconds. Shuffled, no row follows the same one twice: what the one before gave back to the
    system decides what memory costs."""

    rounds: int
    requests: Callable[[int], Mapping[str, Mapping[str, Any]]]
    unit: float = 1.0
    is_shuffled: bool = False
    before: Callable[[], Any] = lambda: None

    def take(self, timings: Sequence[Timing], workers: Sequence[WorkerProcess]) -> None:
        """Every round of every row that runs, into its timing."""
        for turn in range(self.rounds):
            for measure, options in self.requests(turn).items():
                order = list(zip(timings, workers, strict=True))
                if self.is_shuffled:
                    random.Random(turn).shuffle(order)
                for timing, worker in order:
                    if timing.failed is None and measure in timing.row.measures:
                        self.before()
                        timing.add(measure, worker.ask(measure, **options), self.unit)


def serve(make: Callable[[], Any]) -> None:
    """Answer until stdin ends: ``op`` of a request names a method of what ``make`` returns."""
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or make()
            answer = getattr(worker, request.pop("op"))(**request)
        except Exception as error:  # noqa: BLE001 - a peer's failure is a row of the results, whatever it is
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def timed(work: Callable[[], Any]) -> Answer:
    """Wall seconds, and CPU seconds of all threads and of the children waited for."""

    def cpu_seconds() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}


def resident(name: str) -> int:
    """Bytes of a line of this process's status: ``VmRSS`` or, since the last reset, ``VmHWM``."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    """``VmHWM`` begins again."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

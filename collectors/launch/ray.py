"""The Ray launcher: actors that open the job once and capture the units they are handed.

A store needs no coordination: a unit is committed once, whoever tries. A lost actor makes way for a new one: calls to
one that Ray restarts would wait for the room that a lost node took with it.
"""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray

from collectors.capture.job import CollectReport, begin_report, new_rejects, open_job, pending_tokens
from collectors.capture.options import CollectOptions
from collectors.engines.resources import gpus_of
from hiddenstore.commit import read_commit
from hiddenstore.console.progress import Progress
from hiddenstore.console.text import plural
from hiddenstore.errors import CaptureError, ConfigError, HiddenstoreError, InterruptError, Kind
from hiddenstore.files.layout import STORE_JSON, commit_path
from hiddenstore.fs import open_filesystem
from hiddenstore.inputs import PreparedInput
from hiddenstore.process import Drain, Rank
from hiddenstore.store import Store
from hiddenstore.writer import PendingUnit, pending_units

ATTEMPTS = 3
# Network file systems show a new file to other machines within a minute.
VISIBLE_WITHIN_S = 60
STOP_WITHIN_S = 60.0


class UnitWorker:
    """An actor: it runs one unit while it writes the one before. Raises what ``collect`` raises."""

    def __init__(self, options: CollectOptions, rank: Rank) -> None:
        self._options, self._rank, self._drain = options, rank, Drain()
        self._turn, self._opened = threading.Lock(), ExitStack()

    def open(self) -> list[str]:
        """Load the engine, create or open the store, register the input; returns what a person should be told."""
        notes: list[str] = []
        self._job = self._opened.enter_context(open_job(self._options, self._rank, self._drain, notes.append))
        return notes

    def capture(self, name: str) -> tuple[float, float, float, int]:
        """Commit one unit, unless it is; so far: seconds of forward, of comparing and of waiting for writes, and how
        many samples were compared."""
        with self._turn:
            behind = self._job.capture_named(name)
        if behind is not None:
            behind.result()
        report = self._job.report
        return report.forward_s, report.compare_s, report.wait_s, report.compared_samples

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """Drop the open unit, finish writing the one before, end the engine."""
        self._drain.request()
        with self._turn:
            self._opened.close()


def on_ray(options: CollectOptions, workers: int | None, drain: Drain, note: Callable[[str], None]) -> CollectReport:
    """Collect with Ray actors, on the cluster that RAY_ADDRESS names or else on one started here.

    Raises as ``collect``, and ``ray-unreachable``, ``launcher-resources``, ``store-not-shared``, ``workers-lost``.
    """
    with ExitStack() as stack:
        # Ray prints what happens to workers on stdout, where the answer of a command goes.
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        if not ray.is_initialized():
            _connect(os.environ.get("RAY_ADDRESS") or "local")
            stack.callback(ray.shutdown)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        size, resources = spread(nodes, workers, options)
        note(f"{plural(size, 'worker')} on {plural(len(nodes), 'Ray node')}; ray status says whether there is room")
        calls = {"max_concurrency": 2, "concurrency_groups": {"control": 1}, "scheduling_strategy": "SPREAD"}
        start = partial(ray.remote(**calls, **resources)(UnitWorker).remote, options.absolute())
        return _Dealer(start, size, drain, note).run(options)


def spread(nodes: list[dict[str, float]], workers: int | None, options: CollectOptions) -> tuple[int, dict[str, float]]:
    """How many workers, and what Ray sets aside for each: a group of GPUs of one node, or a share of its cores."""
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    if options.server is None and (options.device.startswith("cuda") or (options.device == "auto" and any(gpus))):
        each = gpus_of(options.tensor_parallel, options.extra)
        room = sum(count // each for count in gpus)
        if (workers or 1) > room:
            raise ConfigError(
                f"{plural(workers or 1, 'worker')} with {plural(each, 'GPU')} each cannot be "
                f"placed; GPUs per node of the Ray cluster: {', '.join(map(str, gpus)) or 'none'}",
                kind=Kind.LAUNCHER_RESOURCES,
                hint=f"--launcher ray:{room}" if room else "a smaller --tensor-parallel, or --device cpu",
            )
        return workers or room, {"num_cpus": 1, "num_gpus": each}
    cores = [node["CPU"] for node in nodes if node.get("CPU", 0) > 0] or [1.0]
    workers = workers or len(cores)
    share = min(cores) / math.ceil(workers / len(cores))
    # Ray sets aside entire cores, or a part of one.
    return workers, {"num_cpus": math.floor(share) or math.floor(share * 100) / 100}


class _Dealer:
    """Hands units to workers and takes back those of lost ones; the call that opens a job has the unit ''."""

    def __init__(self, start: Callable[[Rank], Any], size: int, drain: Drain, note: Callable[[str], None]) -> None:
        # A worker that replaces another has the same to tell, once is enough.
        self.start, self.size, self.drain, self.note = start, size, drain, cache(note)
        self.actors: dict[int, Any] = {}
        self.calls: dict[Any, tuple[int, Any, str]] = {}
        self.totals: dict[Any, tuple[float, float, int]] = {}
        self.units: deque[str] = deque()
        self.pending: dict[str, PendingUnit] = {}
        self.losses: Counter[str] = Counter()
        self.report, self.progress = CollectReport("", "", workers=size), Progress("collect")

    def run(self, options: CollectOptions) -> CollectReport:
        self.fs = open_filesystem(options.store)
        try:
            for worker in range(self.size):
                self._open(worker)
            self._until(lambda: bool(self._ready()))
            self._require_shared(STORE_JSON)
            store, began, lost = Store.open(options.store), time.monotonic(), self.report.workers_lost
            self.report, self.budget = begin_report(store, PreparedInput.open(options.data).info)
            self.report.workers, self.report.workers_lost = self.size, lost
            tokens = pending_tokens(store, self.report.input)
            self.pending = pending_units(store, self.report.input)
            self.units.extend(unit for unit in tokens if unit in self.pending)
            with Progress("collect", sum(tokens.values()), "tokens") as self.progress:
                self._until(lambda: not self.units and not any(unit for *_, unit in self.calls.values()))
        finally:
            # Workers drop their open units and write those before; what went wrong is known already.
            if calls := [self.actors[worker].close.remote() for worker in self._ready()]:
                ray.wait(calls, num_returns=len(calls), timeout=STOP_WITHIN_S)
            for actor in self.actors.values():
                ray.kill(actor)
        totals = map(sum, zip((0.0, 0.0, 0.0, 0), *self.totals.values(), strict=True))
        self.report.forward_s, self.report.compare_s, self.report.wait_s, self.report.compared_samples = totals
        self.report.seconds = time.monotonic() - began
        self.report.pending_units = len(pending_tokens(store, self.report.input))
        return self.report

    def _ready(self) -> set[int]:
        return self.actors.keys() - {worker for worker, _, unit in self.calls.values() if not unit}

    def _open(self, worker: int) -> None:
        # Ray shows an actor its own GPUs only, so each is the first worker of a machine of its own.
        self.actors[worker] = actor = self.start(Rank(worker, self.size))
        self.calls[actor.open.remote()] = (worker, actor, "")

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.drain.requested:
                raise InterruptError("stopped by a signal; open units were dropped", kind=Kind.INTERRUPTED)
            busy = Counter(worker for worker, *_ in self.calls.values())
            for limit in (0, 1):
                for worker in self._ready():
                    # A unit that was lost goes alone, so that no other is lost with it.
                    if self.units and busy[worker] <= (0 if self.losses[self.units[0]] else limit):
                        unit, actor = self.units.popleft(), self.actors[worker]
                        self.calls[actor.capture.remote(unit)] = (worker, actor, unit)
                        busy[worker] += 1
            for call in ray.wait(list(self.calls), timeout=1.0)[0]:
                self._finish(call, *self.calls.pop(call))

    def _finish(self, call: Any, worker: int, actor: Any, unit: str) -> None:
        try:
            answer = ray.get(call)
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            if isinstance(cause, HiddenstoreError):
                raise cause from None
            why = " ".join(f"{type(cause).__name__}: {cause}".split()).partition(" Some common causes")[0]
            self._lose(worker, actor, unit, why)
            return
        if not unit:
            for text in answer:
                self.note(text)
            return
        self.totals[actor] = answer
        pending = self.pending[unit]
        path = commit_path(unit, pending.revision)
        self._require_shared(path)
        record = read_commit(self.fs, path.rpartition("/")[2]).record
        self.report.add(record, pending.replaces)
        self.report.show(self.progress, workers=len(self._ready()), lost=self.report.workers_lost)
        self.budget.spend(new_rejects(record, pending.replaces))

    def _require_shared(self, path: str) -> None:
        for _ in range(VISIBLE_WITHIN_S):
            if self.fs.size(path) is not None:
                return
            self.drain.wait(1.0)
        raise ConfigError(
            f"a worker wrote {path} into its own {self.fs.root}, which is not the folder of that name here",
            kind=Kind.STORE_NOT_SHARED,
            hint="put DATA, the target and the store into folders that every node mounts",
        )

    def _lose(self, worker: int, actor: Any, unit: str, why: str) -> None:
        """Put a unit back, last: one that ends every worker is then tried when the others are done."""
        if unit:
            self.units.append(unit)
            self.losses[unit] += 1
        if self.actors[worker] is not actor:
            return
        self.report.workers_lost += 1
        lost, loss = self.report.workers_lost, f"with {unit or 'no unit'} in hand: {why}"
        self.progress.log(f"worker {worker} was lost {loss}")
        ray.kill(actor)
        if self.losses[unit] >= ATTEMPTS or lost >= ATTEMPTS * self.size + self.report.units:
            raise CaptureError(
                f"workers were lost {lost} times, the last {loss}",
                kind=Kind.WORKERS_LOST,
                hint="what is committed stays, the same command does the rest; out of memory: a smaller --batch-tokens",
            )
        self._open(worker)


def _connect(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    # States never pass through Ray, so its own memory may be small.
    more = {"include_dashboard": False, "object_store_memory": 100 << 20} if address == "local" else {}
    host, _, port = address.rpartition(":")
    try:
        # Where nothing listens Ray would try for minutes; forms other than HOST:PORT are left to it.
        if host and "/" not in host and port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the Ray cluster at RAY_ADDRESS={address} cannot be used: {str(error).partition(chr(10))[0]}",
            kind=Kind.RAY_UNREACHABLE,
            hint="ray status; or unset RAY_ADDRESS to start one here",
        ) from error
    # Ray makes SIGTERM end the process at once, where it is called from the main thread.
    with suppress(ValueError):
        signal.signal(signal.SIGTERM, handler)

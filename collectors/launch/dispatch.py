"""The driver of a launched job: it holds the queue of units, hands them out, and takes back those of lost workers.

Nothing is coordinated in the store. A unit is committed once whoever tries, so a unit handed out twice costs time only.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collectors.check import RejectBudget
from collectors.job import CollectReport
from collectors.job_open import CollectOptions
from collectors.launch.crew import Crew, Lost
from collectors.launch.report import WorkerReport, shares
from collectors.launch.worker import Answer, Failure, Opened
from hiddenstore.cli.terminal import plural
from hiddenstore.commit import read_commit
from hiddenstore.errors import CaptureError, ConfigError, InterruptError
from hiddenstore.fs import Filesystem, open_filesystem
from hiddenstore.inputs import PreparedInput
from hiddenstore.layout import STORE_JSON, commit_path
from hiddenstore.progress import Progress
from hiddenstore.rank import Drain
from hiddenstore.store import Store
from hiddenstore.writer import pending_units
from schemas.manifest import CommitRecord

# A unit that ends its worker this often ends the job; so does every worker lost this often with no unit done between.
ATTEMPTS = 3
LOOK_EVERY_S = 1.0
SAID_AFTER_S = 60.0
STOP_WITHIN_S = 60.0
# Network file systems show a new file to other machines within a minute.
SEEN_WITHIN_S = 60.0


@dataclass
class Slot:
    """A place for a worker, and the units that the worker in it has not finished."""

    report: WorkerReport
    ready: bool = False
    calling: bool = True
    seen: bool = False
    held: list[str] = field(default_factory=list)
    ready_since_s: float | None = None


class Dispatch:
    """One job over a crew."""

    def __init__(self, crew: Crew, options: CollectOptions, drain: Drain, note: Callable[[str], None]) -> None:
        self._crew, self._options, self._drain, self._note = crew, options, drain, note
        self._samples = PreparedInput.open(options.data).info.samples
        self._slots = [Slot(WorkerReport(index)) for index in range(crew.size)]
        self._queue: deque[str] = deque()
        self._tokens: dict[str, int] = {}
        self._attempts: Counter[str] = Counter()
        self._losses_in_a_row = 0
        self._began_s = time.monotonic()
        self._said: set[str] = set()
        self._progress = Progress("collect")
        self.report = CollectReport(str(options.store), "", workers=[slot.report for slot in self._slots])

    def run(self) -> CollectReport:
        """Capture every pending unit.

        Raises:
            HiddenstoreError: what a worker raised, once.
            CaptureError: ``unit-lost``, ``workers-lost``; ``too-many-rejects`` counted over all workers.
            ConfigError: ``store-not-shared``.
            InterruptError: open units are dropped, the same command resumes.
        """
        try:
            for index in range(self._crew.size):
                self._start(index)
            self._until(lambda: bool(self.report.input))
            began = time.monotonic()
            with Progress("collect", sum(self._tokens.values()), "tokens") as self._progress:
                self._until(self._is_done)
            self.report.seconds = time.monotonic() - began
        finally:
            self._end()
        self.report.pending_units = len(pending_units(self._store, self.report.input))
        return self.report

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._drain.requested:
                raise InterruptError("stopped by a signal; open units were dropped", kind="interrupted")
            for index, answer in self._crew.wait(LOOK_EVERY_S):
                self._take(index, answer)
            self._hand_out()
            self._show()

    def _is_done(self) -> bool:
        return not self._queue and not any(slot.held for slot in self._slots)

    def _take(self, index: int, answer: Any) -> None:
        slot = self._slots[index]
        slot.calling = False
        if isinstance(answer, Lost):
            self._lose(index, answer.why)
        elif isinstance(answer, Failure):
            raise answer.error()
        elif isinstance(answer, Opened):
            self._opened(slot, answer)
        elif isinstance(answer, Answer):
            self._count(slot, answer)

    def _start(self, index: int) -> None:
        self._slots[index].calling = True
        self._crew.start(index)
        self._crew.call(index, "open")

    def _opened(self, slot: Slot, opened: Opened) -> None:
        slot.ready, slot.seen = True, False
        slot.ready_since_s = slot.ready_since_s or time.monotonic()
        if opened.host not in slot.report.hosts:
            slot.report.hosts.append(opened.host)
        for text in opened.notes:
            if text not in self._said:
                self._said.add(text)
                self._note(text)
        if self.report.input:
            return
        self._require_shared(slot, open_filesystem(self._options.store), STORE_JSON)
        self._store = Store.open(self._options.store)
        self.report.store, self.report.input = self._store.path, opened.digest
        self.report.resumed_units = opened.committed_units
        earlier = [record for record in self._store.commits() if record.input == opened.digest]
        self._budget = RejectBudget(self._samples, [reject for record in earlier for reject in record.rejects])
        self._tokens = opened.pending
        self._queue.extend(opened.pending)

    def _count(self, slot: Slot, answer: Answer) -> None:
        slot.report.forward_s += answer.forward_s
        slot.report.wait_s += answer.wait_s
        self.report.forward_s += answer.forward_s
        self.report.wait_s += answer.wait_s
        self.report.compared_samples += answer.compared_samples
        for unit in answer.finished:
            slot.held.remove(unit)
            self._losses_in_a_row = 0
            self._progress.advance(self._tokens[unit])
        for record in answer.records:
            if not slot.seen:
                self._require_shared(slot, self._store.fs, commit_path(record.unit))
                slot.seen = True
            self._add(slot, record)
            self._budget.spend(record.rejects)

    def _add(self, slot: Slot, record: CommitRecord) -> None:
        slot.report.units += 1
        slot.report.tokens += record.tokens
        self.report.add(record)

    def _hand_out(self) -> None:
        """A unit to every worker that waits; one without a next unit writes its last."""
        for index, slot in enumerate(self._slots):
            if slot.calling or not slot.ready:
                continue
            # A unit that was lost before is run with no other in hand, which would be lost with it again.
            if self._queue and not (slot.held and self._attempts[self._queue[0]]):
                unit = self._queue.popleft()
                slot.held.append(unit)
                self._call(index, "capture", unit)
            elif slot.held:
                self._call(index, "flush")

    def _call(self, index: int, method: str, *arguments: Any) -> None:
        self._slots[index].calling = True
        self._crew.call(index, method, *arguments)

    def _lose(self, index: int, why: str) -> None:
        """Put the worker's units back, last: one that ends every worker is then tried when the others are done."""
        slot = self._slots[index]
        slot.report.losses += 1
        slot.ready = False
        self._losses_in_a_row += 1
        held, slot.held = slot.held, []
        for unit in held:
            if not self._committed_by_the_lost(slot, unit):
                self._queue.append(unit)
                self._attempts[unit] += 1
        self._crew.kill(index)
        self._progress.log(f"worker {index} was lost, {plural(len(held), 'unit')} in hand: {why}")
        self._require_hope([unit for unit in held if self._attempts[unit] >= ATTEMPTS], why)
        self._start(index)

    def _committed_by_the_lost(self, slot: Slot, unit: str) -> bool:
        path = commit_path(unit)
        if self._store.fs.size(path) is None:
            return False
        record = read_commit(self._store.fs, path.rpartition("/")[2]).record
        self._add(slot, record)
        self._progress.advance(self._tokens[unit])
        self._budget.spend(record.rejects)
        return True

    def _require_hope(self, spent: list[str], why: str) -> None:
        rest = "what is committed stays; the same command does the rest"
        if spent:
            raise CaptureError(
                f"unit {', '.join(spent)} was lost {ATTEMPTS} times with the worker that held it, the last time: {why}",
                kind="unit-lost",
                hint=f"{rest}; out of memory: a smaller --batch-tokens",
            )
        if self._losses_in_a_row >= ATTEMPTS * len(self._slots):
            raise CaptureError(
                f"{self._losses_in_a_row} workers were lost and no unit was done between, the last: {why}",
                kind="workers-lost",
                hint=rest,
            )

    def _require_shared(self, slot: Slot, fs: Filesystem, path: str) -> None:
        """A worker on another machine may have written into a folder of its own; what it wrote must be seen here."""
        until_s = time.monotonic() + SEEN_WITHIN_S
        while fs.size(path) is None:
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"worker {slot.report.index} on {slot.report.hosts[-1]} wrote {path} into its own {fs.root}, which "
                    f"is not the folder of that name here",
                    kind="store-not-shared",
                    hint="put DATA, the target and the store into folders that every node mounts",
                )
            self._drain.wait(LOOK_EVERY_S)

    def _show(self) -> None:
        now_s = time.monotonic()
        for slot in self._slots:
            if slot.ready_since_s is not None:
                slot.report.seconds = now_s - slot.ready_since_s
        if not self.report.input:
            self._say_that_it_waits(now_s)
            return
        workers = self.report.workers
        self._progress.advance(
            0,
            units=f"{self.report.units}/{len(self._tokens)}",
            workers=sum(slot.ready for slot in self._slots),
            lost=sum(worker.losses for worker in workers),
            target=f"{shares([100 * worker.forward_share for worker in workers])} %",
            waiting=f"{shares([100 * worker.wait_share for worker in workers])} %",
        )

    def _say_that_it_waits(self, now_s: float) -> None:
        text = f"no worker is ready after {SAID_AFTER_S:.0f} s: it loads the target, or the cluster has no room for it"
        if now_s - self._began_s > SAID_AFTER_S and text not in self._said:
            self._said.add(text)
            self._note(text)

    def _end(self) -> None:
        """Let every worker drop its open unit and write the one before, then end it."""
        ready = [index for index, slot in enumerate(self._slots) if slot.ready]
        for index in ready:
            self._crew.stop(index)
        until_s = time.monotonic() + STOP_WITHIN_S
        for method in ("flush", "close"):
            for index in ready:
                if not self._slots[index].calling:
                    self._call(index, method)
            self._gather(ready, until_s)
        for index in range(len(self._slots)):
            self._crew.kill(index)

    def _gather(self, ready: list[int], until_s: float) -> None:
        """Answers to the calls under way, for as long as there is time; what went wrong is known already."""
        while any(self._slots[index].calling for index in ready) and time.monotonic() < until_s:
            for index, _answer in self._crew.wait(LOOK_EVERY_S):
                self._slots[index].calling = False

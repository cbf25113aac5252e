"""One worker of a launched job: it opens the job once, then captures the units it is handed, one call each.

Errors a person should read come back as values: their classes take keyword arguments, which no launcher's own
serialisation keeps.
"""

import platform
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from collectors.job import CollectJob, open_job
from collectors.job_open import CollectOptions
from hiddenstore import errors
from hiddenstore.errors import HiddenstoreError, InterruptError
from hiddenstore.inputs import PreparedInput, Unit, unit_tokens
from hiddenstore.rank import Drain, Rank
from hiddenstore.registered import RegisteredInput
from schemas.manifest import CommitRecord


@dataclass(frozen=True)
class Failure:
    """A HiddenstoreError on its way to the driver."""

    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: HiddenstoreError) -> "Failure":
        return cls(type(error).__name__, dict(error.__dict__))

    def error(self) -> HiddenstoreError:
        """The error as the worker raised it."""
        fields = dict(self.fields)
        raised: HiddenstoreError = getattr(errors, self.name)(fields.pop("message"), **fields)
        return raised


@dataclass(frozen=True)
class Opened:
    """The worker is ready. ``pending``: tokens of every unit without a commit record, in input order."""

    host: str
    digest: str
    pending: dict[str, int]
    committed_units: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a call came to. ``finished``: units that need nothing more; ``records``: those this worker committed.

    ``forward_s``, ``wait_s`` and ``compared_samples`` count from the answer before.
    """

    finished: tuple[str, ...]
    records: tuple[CommitRecord, ...]
    forward_s: float
    wait_s: float
    compared_samples: int


class UnitReader:
    """Units by name. The input is a stream: going forward reads on, going back begins again."""

    def __init__(self, prepared: PreparedInput, names: list[str], max_tokens: int) -> None:
        self._prepared, self._max_tokens = prepared, max_tokens
        self._index = {name: index for index, name in enumerate(names)}
        self._next = 0
        self._units = prepared.units(max_tokens)

    def find(self, name: str) -> Unit:
        """The unit of this name, which the store has registered."""
        wanted = self._index[name]
        if wanted < self._next:
            self._units, self._next = self._prepared.units(self._max_tokens), 0
        for unit in self._units:
            self._next = unit.index + 1
            if unit.index == wanted:
                return unit
        raise AssertionError(f"the input ends before its registered unit {name}")


class CaptureWorker:
    """Everything but ``stop`` is called one at a time; ``stop`` comes from another thread."""

    def __init__(self, options: CollectOptions, rank: Rank) -> None:
        self._options, self._rank = options, rank
        self._drain = Drain()
        self._stack = ExitStack()
        self._behind: str | None = None

    def open(self) -> Opened | Failure:
        """Load the engine, create or open the store, register the input."""
        notes: list[str] = []
        try:
            self._job: CollectJob = self._stack.enter_context(
                open_job(self._options, self._rank, self._drain, notes.append)
            )
            pending = self._job.pending()
            names = RegisteredInput(self._job.store.fs, self._job.digest).units
        except HiddenstoreError as error:
            self._stack.close()
            return Failure.of(error)
        self._reader = UnitReader(self._job.prepared, names, unit_tokens(self._job.store.capture))
        committed = self._job.report.resumed_units
        return Opened(platform.node(), self._job.digest, pending, committed, tuple(notes))

    def capture(self, unit: str) -> Answer | Failure:
        """Run one unit and leave it to the thread that writes; answers for the unit before it.

        A unit that somebody has committed is finished at once; once ``stop`` was called, the open unit is dropped.
        """
        if self._job.is_committed(unit):
            return self._answer((unit,), ())
        try:
            found = self._reader.find(unit)
            if self._drain.requested:
                return self.flush()
            record = self._job.capture(found)
        except InterruptError:
            return self.flush()
        except HiddenstoreError as error:
            return Failure.of(error)
        behind, self._behind = self._behind, unit
        return self._settled(behind, record)

    def flush(self) -> Answer | Failure:
        """Wait until the last unit is written; answers for it."""
        try:
            record = self._job.settle()
        except HiddenstoreError as error:
            return Failure.of(error)
        behind, self._behind = self._behind, None
        return self._settled(behind, record)

    def stop(self) -> None:
        """Drop the open unit as soon as the engine can."""
        self._drain.request()

    def close(self) -> None:
        """End the engine and remove its scratch files."""
        self._stack.close()

    def _settled(self, unit: str | None, record: CommitRecord | None) -> Answer:
        return self._answer(() if unit is None else (unit,), () if record is None else (record,))

    def _answer(self, finished: tuple[str, ...], records: tuple[CommitRecord, ...]) -> Answer:
        report = self._job.report
        answer = Answer(finished, records, report.forward_s, report.wait_s, report.compared_samples)
        report.forward_s = report.wait_s = 0.0
        report.compared_samples = 0
        return answer

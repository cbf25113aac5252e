"""One registered input of a dump, read, checked, encoded and committed unit by unit."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from collectors.check import CheckSpec, RejectBudget, check_unit
from collectors.engines import Captured
from collectors.importers.deleting import SourceKeeper, read_back
from collectors.importers.opening import ImportOptions, OpenedDump, states_of_sample
from collectors.importers.peer import PeerSample, Unusable
from collectors.importers.report import ImportReport
from collectors.importers.scan import ScannedInput
from collectors.target import EngineTarget
from hiddenstore.calibration import take_slice, write_slice
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.errors import InterruptError
from hiddenstore.inputs import Unit, unit_tokens
from hiddenstore.layout import commit_path
from hiddenstore.progress import Progress
from hiddenstore.rank import Drain
from hiddenstore.records import Record, Sample
from hiddenstore.registered import RegisteredInput
from hiddenstore.store import Store
from hiddenstore.writer import pending_units, register_input, write_unit
from schemas.manifest import CommitRecord, Engine, Reject


@dataclass
class ImportJob:
    """One registered input of the dump."""

    store: Store
    target: EngineTarget
    scanned: ScannedInput
    opened: OpenedDump
    options: ImportOptions
    drain: Drain
    report: ImportReport

    def __post_init__(self) -> None:
        prepared = self.scanned.prepared
        self._digest = register_input(self.store, prepared)
        self.report.inputs.append(self._digest)
        earlier = [reject for record in self._records() for reject in record.rejects]
        places = prepared.info.rows_read
        self._budget = RejectBudget(places, earlier)
        allowed = max(1, int(places * self.options.max_rejects))
        self._budget.allowed = max(0, allowed - sum(self.scanned.rejects.values()))
        self._keeper = SourceKeeper(self.opened.source, self.opened.places) if self.options.delete_source else None
        self._check = CheckSpec(
            self.opened.columns.aux_layers, self.opened.capture.final_norm, self.opened.evidence.typical_norms
        )
        stated = self.opened.source.stated
        name = f"import:{self.opened.peer.name}"
        self._engine = Engine(name=name, version=stated.version, settings=dict(stated.facts))

    def run(self) -> None:
        """Import what is pending; see ``import_dump``."""
        registered = RegisteredInput(self.store.fs, self._digest)
        pending = set(pending_units(self.store, self._digest))
        self.report.resumed_units += len(registered.units) - len(pending)
        if self._keeper is not None:
            self._let_go_of_earlier(pending)
        rows = zip(registered.table["unit"].to_pylist(), registered.table["tokens"].to_pylist(), strict=True)
        total = sum(tokens for unit, tokens in rows if unit in pending)
        with Progress("import", total, "tokens") as progress, ThreadPoolExecutor(1, "commit") as worker:
            behind: Future[CommitRecord | None] | None = None
            for unit in self._units(pending):
                read = self._read(unit)
                self._settle(behind, progress)
                behind = worker.submit(self._commit, unit, *read)
                del read
            self._settle(behind, progress)
        if self.drain.requested and pending_units(self.store, self._digest):
            raise InterruptError("stopped by a signal", kind="interrupted")
        self.report.pending_units += len(pending_units(self.store, self._digest))
        if self._keeper is not None:
            self.report.deleted_files, self.report.kept_files = self._keeper.deleted, self._keeper.kept

    def _units(self, pending: set[str]) -> Iterator[Unit]:
        if not pending:
            return
        for unit in self.scanned.prepared.units(unit_tokens(self.store.capture)):
            if self.drain.requested:
                return
            if unit.name in pending and self.store.fs.size(commit_path(unit.name)) is None:
                yield unit

    def _read(self, unit: Unit) -> tuple[list[Sample], Captured, list[Reject]]:
        """Samples of a unit that can be read, their states end to end, and what was refused."""
        capture, width = self.store.capture, self.target.head.hidden_size
        with_final = capture.final != "none"
        aux = torch.empty((len(capture.aux_layers), unit.tokens, width), dtype=torch.bfloat16)
        final = torch.empty((unit.tokens if with_final else 0, width), dtype=torch.bfloat16)
        kept: list[Sample] = []
        rejects: list[Reject] = []
        end = 0
        for sample in unit.samples:
            rows = slice(end, end + sample.tokens)
            try:
                peer = self.opened.source.read(sample.source, states=True)
                held = states_of_sample(sample, peer, self.opened.columns, aux[:, rows])
                if held is not None:
                    final[rows] = held
            except Unusable as unusable:
                detail = f"{sample.source}: {unusable.detail}"
                rejects.append(Reject(id=sample.id, tokens=sample.tokens, reason=unusable.reason, detail=detail))
                continue
            self.report.rounded += _is_wider(peer)
            kept.append(sample)
            end = rows.stop
        ids = np.concatenate([np.zeros(0, np.int32), *(sample.input_ids for sample in kept)])
        nothing = torch.zeros(0, dtype=torch.long)
        return kept, Captured(ids, aux[:, :end], final[:end] if with_final else final, nothing, nothing), rejects

    def _commit(
        self, unit: Unit, samples: list[Sample], captured: Captured, unread: list[Reject]
    ) -> CommitRecord | None:
        """Check, encode and publish one unit; runs in the worker thread."""
        capture, head = self.store.capture, self.target.head
        with_final = capture.final != "none"
        rows = [np.arange(sample.tokens if with_final else 0, dtype=np.int32) for sample in samples]
        rejects = unread + [
            _placed(reject, samples) for reject in check_unit(samples, captured, rows, head, self._check)
        ]
        self._budget.spend(rejects)
        refused = {reject.id for reject in rejects}
        records = [record for record in _records(samples, captured, with_final) if record.sample.id not in refused]
        if unit.index == 0 and (taken := take_slice(records, capture)) is not None:
            write_slice(self.store.fs, taken, capture)
        records = [with_top_tokens(record, head, capture) for record in records]
        record = write_unit(self.store, unit.name, self._digest, records, rejects, self._engine)
        if record is not None and self._keeper is not None:
            read_back(self.store, record, records)
            self._keeper.stored([sample.source for sample in samples if sample.id not in refused])
        return record

    def _let_go_of_earlier(self, pending: set[str]) -> None:
        """Sources of units that were committed before this run, once they are read back."""
        places = {sample.id: sample.source for sample in self.scanned.prepared.samples()}
        for record in self._records():
            if record.unit not in pending and self._keeper is not None:
                mine = [places[sample.id] for sample in record.samples if sample.id in places]
                if self._keeper.has_any(mine):
                    read_back(self.store, record, ())
                self._keeper.stored(mine)

    def _records(self) -> list[CommitRecord]:
        return [record for record in Store.open(self.store.fs).commits() if record.input == self._digest]

    def _settle(self, behind: "Future[CommitRecord | None] | None", progress: Progress) -> None:
        """Wait for the unit in the worker, so that at most two are in memory, and count it."""
        record = None if behind is None else behind.result()
        if record is None:
            return
        report = self.report
        report.units += 1
        report.samples += len(record.samples)
        report.tokens += record.tokens
        report.bytes_stored += record.bytes_stored
        report.rejects.update(reject.reason for reject in record.rejects)
        done = record.tokens + sum(reject.tokens for reject in record.rejects)
        progress.advance(done, samples=report.samples, rejects=report.rejects.total())


def _records(samples: Sequence[Sample], captured: Captured, with_final: bool) -> Iterator[Record]:
    start = 0
    for sample in samples:
        rows = slice(start, start + sample.tokens)
        held = captured.final[rows] if with_final else captured.final
        places = np.arange(sample.tokens if with_final else 0, dtype=np.int32)
        yield Record(sample, captured.aux[:, rows], held, places)
        start = rows.stop


def _placed(reject: Reject, samples: Sequence[Sample]) -> Reject:
    """A reject whose detail names the place in the dump."""
    place = next(sample.source for sample in samples if sample.id == reject.id)
    return reject.model_copy(update={"detail": f"{place}: {reject.detail}"})


def _is_wider(peer: PeerSample) -> bool:
    held = [states.dtype for states in (peer.columns, peer.final) if states is not None]
    return any(dtype != torch.bfloat16 for dtype in held)

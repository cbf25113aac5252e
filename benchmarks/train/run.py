"""One interleaved run of a case: each engine in a process and an environment of its own, step by step in turns."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.train.case import Case
from benchmarks.worker_process import ONE_THREAD, ROOT, WorkerProcess

ENVIRONMENT = {
    **ONE_THREAD,
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # Without it the peers' modules do not import where there is no GPU.
    "TRITON_INTERPRET": "1",
}
PEERS_PYTHON = ROOT / ".venv-parity" / "bin" / "python"


@dataclass(frozen=True)
class Row:
    """A line of a table and the class behind it; ours run in this environment, peers in theirs."""

    label: str
    kind: str

    @property
    def is_ours(self) -> bool:
        return self.kind.startswith("Ours")


OURS = Row("hiddenstore, reading a bf16 store", "Ours")
EAGLE3 = (
    OURS,
    Row("hiddenstore, reading a q8 store", "OursQ8"),
    Row("hiddenstore, batch held in memory", "OursHeld"),
    Row("SpecForge 0.2, sdpa", "SpecForge"),
    Row("speculators 0.9, sdpa", "Speculators"),
    Row("speculators 0.9, eager", "SpeculatorsEager"),
    Row("ModelOpt 0.47, sdpa", "ModelOpt"),
)
DFLASH = (
    OURS,
    Row("hiddenstore, batch held in memory", "OursHeld"),
    Row("SpecForge 0.2, sdpa", "SpecForgeDFlash"),
    Row("SpecForge 0.2, eager", "SpecForgeDFlashEager"),
    Row("speculators 0.9, eager", "SpeculatorsDFlash"),
    Row("speculators 0.9, sdpa", "SpeculatorsDFlashSdpa"),
)


def worker_process(row: Row, errors: Path) -> WorkerProcess:
    """The worker of one engine, in its environment."""
    python = sys.executable if row.is_ours else PEERS_PYTHON
    return WorkerProcess([python, "-m", "benchmarks.train.worker", row.kind], ENVIRONMENT, errors)


@dataclass
class Found:
    """What one row measured: CPU and wall seconds of each step, the peer's losses beside ours at its settings, or why
    it did not run."""

    row: Row
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    our_losses: list[float] = field(default_factory=list)
    failed: str | None = None

    @property
    def difference(self) -> float | None:
        """Largest relative difference between the peer's losses and ours."""
        pairs = list(zip(self.losses, self.our_losses, strict=True))
        return max(abs(theirs - ours) / abs(ours) for theirs, ours in pairs) if pairs else None


class Bench:
    """Cases under ``root``; ``rows`` of each drafter can be fewer in tests."""

    def __init__(self, root: Path, rows: dict[str, Sequence[Row]] | None = None) -> None:
        self.root = root
        self.rows = rows or {"eagle3": EAGLE3, "dflash": DFLASH}

    def prepare(self, case: Case, name: str) -> Path:
        """Write a case's tensors and the weights all engines start from."""
        folder = self.root / name
        case.save(folder)
        with self.process(OURS) as worker:
            need(worker.ask("open", folder=str(folder)))
            need(worker.ask("save_weights"))
        return folder

    def speed(self, cases: dict[str, Case], rounds: int, warm: int = 2) -> dict[str, list[Found]]:
        """Of each case: compare every peer's losses with ours, then take turns."""
        rows, found = self.rows[next(iter(cases.values())).drafter], {}
        folders = {name: self.prepare(case, name) for name, case in cases.items()}
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(self.process(row)) for row in rows]
            for name, case in cases.items():
                found[name] = [Found(row) for row in rows]
                self._open(case, folders[name], found[name], workers)
                self._take_turns(found[name], workers, [warm] + [case.steps_a_turn] * rounds)
        return found

    def memory(self, case: Case, name: str, count: int = 2) -> dict[str, Any]:
        """Growth of the peak over the imported process, each engine alone; ours reads ahead two packs."""
        folder, found = self.prepare(case, name), {}
        for row in self.rows[case.drafter]:
            with self.process(row) as worker:
                options = {"prefetch_mb": two_packs_mb(case)} if row.is_ours else {}
                opened = worker.ask("open", folder=str(folder), **options)
                found[row.label] = opened if "failed" in opened else worker.ask("memory", count=count)
        return found

    def products_share(self, name: str, count: int = 4) -> dict[str, float]:
        """See `Ours.products_share`."""
        with self.process(OURS) as worker:
            need(worker.ask("open", folder=str(self.root / name)))
            shares: dict[str, float] = need(worker.ask("products_share", count=count))["shares"]
        return shares

    @contextlib.contextmanager
    def process(self, row: Row) -> Iterator[WorkerProcess]:
        """A worker that ends with the block."""
        worker = worker_process(row, self.root / "errors.log")
        try:
            yield worker
        finally:
            worker.close()

    def _open(self, case: Case, folder: Path, found: Sequence[Found], workers: Sequence[WorkerProcess]) -> None:
        with ThreadPoolExecutor(2) as pool:
            opened = list(pool.map(lambda worker: worker.ask("open", folder=str(folder)), workers))
        for one, worker, answer in zip(found, workers, opened, strict=True):
            one.failed = answer.get("failed")
            if one.failed is None and not one.row.is_ours:
                self._compare(case, one, worker, workers[0], answer["equal"])

    @staticmethod
    def _take_turns(found: Sequence[Found], workers: Sequence[WorkerProcess], turns: Sequence[int]) -> None:
        for turn, count in enumerate(turns):
            for one, worker in zip(found, workers, strict=True):
                if one.failed is None:
                    answer = worker.ask("steps", count=count)
                    one.failed = answer.get("failed")
                    if one.failed is None and turn:
                        one.cpu.append(answer["cpu"])
                        one.wall.append(answer["wall"])

    def _compare(
        self, case: Case, one: Found, worker: WorkerProcess, ours: WorkerProcess, equal: dict[str, Any]
    ) -> None:
        options: dict[str, Any] = {}
        if case.drafter == "dflash":
            step = max(1, (case.tokens - case.first_supervised - 2 * case.block) // case.anchors)
            options["anchors"] = [case.first_supervised + i * step for i in range(case.anchors)]
        else:
            equal = equal | {"steps": case.steps}
        theirs = worker.ask("losses", **options)
        mine = ours.ask("losses", settings=equal, **options)
        one.failed = theirs.get("failed") or mine.get("failed")
        if one.failed is None:
            one.losses, one.our_losses = theirs["losses"], mine["losses"]


def two_packs_mb(case: Case) -> int:
    """Room for two packs of the case."""
    return max(1, round(2 * (len(case.aux_layers) + 1) * case.tokens * case.width * 2 / 1e6))


def need(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without which there is nothing to measure."""
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return answer

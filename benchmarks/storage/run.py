"""One interleaved run of every row: each format in its own process, rounds turn by turn, medians of CPU seconds."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.storage.states import RawStates, sample_lengths
from benchmarks.worker_process import ONE_THREAD, WorkerProcess

BUDGET = 256 << 20
# Writes are judged by their smallest figure, which takes more rounds to find.
WRITE_ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """A line of a table: a format's class, the folder it reads, and the measures it takes part in."""

    label: str
    kind: str
    folder: str
    measures: tuple[str, ...] = ("sequential", "random")


REFERENCE = Row("torch.load per sample, copied into the pack", "TorchFiles", "pt")
CHECKED = Row("hiddenstore raw, every chunk checked", "Ours", "raw-store", ("sequential", "random", "layer"))
UNCHECKED = Row("hiddenstore raw, no checksums", "OursUnchecked", "raw-store")

GROUPS: dict[str, tuple[Row, ...]] = {
    "read": (
        Row("raw file, preadv", "Preadv", "raw"),
        REFERENCE,
        Row("torch.load per sample, dropped at once", "TorchFilesDropped", "pt"),
        Row("safetensors per sample", "Safetensors", "safetensors"),
        UNCHECKED,
        CHECKED,
        Row("zarr-python on our store", "StockZarr", "raw-store"),
        Row("zarrs on our store", "StockZarrs", "raw-store"),
        Row("tensorstore on our store", "StockTensorstore", "raw-store"),
        Row("hiddenstore q8, to packed bytes", "SafePacked", "safe-store"),
        Row("hiddenstore compact, to packed bytes", "CompactPacked", "compact-store"),
        Row("hiddenstore q8, dequantised on the CPU", "SafeDecoded", "safe-store"),
        Row("hiddenstore compact, dequantised on the CPU", "CompactDecoded", "compact-store"),
    ),
    "loaders": (
        REFERENCE,
        UNCHECKED,
        CHECKED,
        Row("MosaicML MDS", "Mds", "mds"),
        Row("LitData", "LitData", "litdata"),
        Row("WebDataset, stock", "WebDataset", "webdataset", ("sequential",)),
        Row("Lance", "Lance", "lance"),
    ),
    "lossless": (
        REFERENCE,
        Row("hiddenstore lossless", "OursLossless", "lossless-store"),
        Row("zarr-python on our lossless store", "StockZarr", "lossless-store", ("sequential",)),
        Row("MosaicML MDS zstd", "MdsZstd", "mds-zstd", ("sequential",)),
        Row("LitData zstd", "LitDataZstd", "litdata-zstd", ("sequential",)),
    ),
    "write": (
        Row("torch.save per sample", "TorchFiles", "w-pt", ("write",)),
        Row("safetensors per sample", "Safetensors", "w-safetensors", ("write",)),
        Row("safetensors per sample, made durable and hashed", "SafetensorsSealed", "w-sealed", ("write",)),
        Row("zarr-python, sharded", "ZarrSharded", "w-zarr", ("write",)),
        Row("part: one plain file, made durable", "PlainFile", "w-plain", ("write",)),
        Row("part: sha256 of the bytes", "Sha256", "w-sha256", ("write",)),
        Row("part: crc32c of the chunks", "Crc32c", "w-crc32c", ("write",)),
        Row("hiddenstore raw, files of encoded units", "RawSegment", "w-segment", ("write",)),
        Row("hiddenstore raw, statistics and commit too", "Ours", "w-raw", ("write",)),
        Row("hiddenstore q8, encode to commit", "Safe", "w-safe", ("write",)),
    ),
}
MAKERS = {"raw-store": "Ours", "safe-store": "Safe", "compact-store": "Compact", "lossless-store": "OursLossless"}


def worker_process(kind: str, folder: Path, raw: RawStates, errors: Path) -> WorkerProcess:
    """The worker of one format."""
    command = [sys.executable, "-m", "benchmarks.storage.worker", kind, str(folder), str(raw.path)]
    return WorkerProcess([*command, json.dumps(raw.lengths), str(raw.width)], ONE_THREAD, errors)


@dataclass
class Found:
    """What one row measured: CPU and wall seconds per logical GB of each measure, or why it did not run."""

    row: Row
    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    stored_bytes: float = 0.0
    failed: str | None = None

    def take(self, measure: str, answer: dict[str, Any], gb: float) -> None:
        if "failed" in answer:
            self.failed = answer["failed"]
            return
        self.cpu.setdefault(measure, []).append(answer["cpu"] / gb)
        self.wall.setdefault(measure, []).append(answer["wall"] / gb)
        self.stored_bytes = answer.get("stored_bytes", self.stored_bytes)


class Bench:
    """The folders of one run under ``root``; ``width`` is smaller in tests only."""

    def __init__(self, root: Path, gb: float, rounds: int, width: int) -> None:
        self.root, self.rounds = root, rounds
        self.raw = RawStates(root / "raw" / "raw.u16", sample_lengths(int(gb * 1e9), width), width)
        some = sample_lengths(int(gb * 1e9 / 4), width)
        self.some = RawStates(self.raw.path, some, width)
        self.stored: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def generate(self) -> None:
        """The raw file every format is written from."""
        self.raw.path.parent.mkdir(parents=True, exist_ok=True)
        self.raw.write()

    def group(self, name: str, skip: Sequence[str] = ()) -> list[Found]:
        """Write what a group reads and is not there yet, then measure its rows turn by turn."""
        rows = [row for row in GROUPS[name] if row.kind not in skip]
        raw = self.some if name == "write" else self.raw
        if name != "write":
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self._make, dict.fromkeys((row.folder, row.kind) for row in rows)))
        found = [Found(row, stored_bytes=self.stored.get(row.folder, 0.0)) for row in rows]
        with self._workers(rows, raw) as workers:
            for one, worker in zip(found, workers, strict=True):
                one.failed = self.failed.get(one.row.folder)
                if name != "write" and one.failed is None:
                    one.failed = worker.ask("open").get("failed")
                    if one.failed is None and "same" in (checked := worker.ask("check")) and not checked["same"]:
                        lossy = one.row.folder in ("safe-store", "compact-store") or one.row.kind == "TorchFilesDropped"
                        one.failed = None if lossy else "did not give back what was written"
            for turn in range(self.rounds * (WRITE_ROUNDS if name == "write" else 1)):
                for measure in dict.fromkeys(measure for row in rows for measure in row.measures):
                    # What the row before gave back to the system decides what memory costs: never the same one twice.
                    for place in np.random.default_rng(turn).permutation(len(rows)):
                        one, worker = found[place], workers[place]
                        if measure in one.row.measures and one.failed is None:
                            if measure == "write":
                                # Nobody pays for writing back what another left in the page cache.
                                os.sync()
                            answer = worker.ask(measure, **_options(measure, turn))
                            one.take(measure, answer, raw.logical_bytes / 1e9)
        return found

    def drop(self, *folders: str) -> None:
        """Free the page cache and the disk of what later groups do not read."""
        for folder in folders:
            shutil.rmtree(self.root / folder, ignore_errors=True)
            shutil.rmtree(self.root / f"{folder}-cache", ignore_errors=True)

    def ask_alone(self, kind: str, folder: str, op: str, **options: Any) -> dict[str, Any]:
        """One question to a fresh process."""
        worker = worker_process(kind, self.root / folder, self.raw, self.root / "errors.log")
        try:
            return worker.ask(op, **options)
        finally:
            worker.close()

    def _make(self, wanted: tuple[str, str]) -> None:
        folder, kind = wanted
        if folder in self.stored or folder == "raw" or folder in self.failed:
            return
        self.stored[folder] = 0.0
        answer = self.ask_alone(MAKERS.get(folder, kind), folder, "write", keep=True)
        if "failed" in answer:
            self.failed[folder] = answer["failed"]
        else:
            self.stored[folder] = answer["stored_bytes"]

    @contextlib.contextmanager
    def _workers(self, rows: Sequence[Row], raw: RawStates) -> Iterator[list[WorkerProcess]]:
        workers = [worker_process(row.kind, self.root / row.folder, raw, self.root / "errors.log") for row in rows]
        try:
            yield workers
        finally:
            for worker in workers:
                worker.close()


def _options(measure: str, turn: int) -> dict[str, Any]:
    return {"write": {"keep": False}, "sequential": {}}.get(measure, {"seed": turn})

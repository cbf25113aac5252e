"""Reading what the page cache does not hold: the disk decides, so wall seconds and bytes that were fetched count.

The files of a format are dropped from the cache before each round. A store is read in a random order of its samples by
the threads that read ahead of a trainer; the raw file from its first byte to its last in calls of 1 MiB, as ``dd``
does.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, table
from benchmarks.workers import Answer, Row, Timing, timed
from hiddenstore.data.read import Filler, Job, Prefetch, SampleSlot
from hiddenstore.threads import reading_threads

CALL_BYTES = 1 << 20
AHEAD_BYTES = 256 << 20
FILE = Row("raw file in order, as dd", "Preadv", ("cold",), "raw")
ROWS = (
    FILE,
    Row("hiddenstore raw, every chunk checked", "RawPacked", ("cold",), "raw-store"),
    Row("hiddenstore q8, to packed bytes", "SafePacked", ("cold",), "safe-store"),
    Row("hiddenstore compact, to packed bytes", "CompactPacked", ("cold",), "compact-store"),
)
TIME = Bar("time of a stored byte, at random, against the raw file in order", 1.2, False)
FETCHED = Bar("bytes fetched, against those stored", 1.01, False)


def drop_cache(folder: Path) -> None:
    """Let the page cache forget the files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_cold(folder: Path, work: Callable[[], Any]) -> Answer:
    """Seconds of a read of what is not cached, and the bytes that this process fetched from the disk for it."""
    drop_cache(folder)
    before = _fetched()
    answer = timed(work)
    return {**answer, "fetched_bytes": _fetched() - before}


def read_in_order(path: Path) -> None:
    """A whole file into the same memory, call by call."""
    buffer = memoryview(bytearray(CALL_BYTES))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def warm(folder: Path) -> None:
    """Let the page cache have the files of a folder, as it has what went through it when it was written."""
    for path in filter(Path.is_file, folder.rglob("*")):
        read_in_order(path)


def read_ahead(filler: Filler, slots: Sequence[SampleSlot]) -> None:
    """Every sample as a pack, by as many threads as read for a trainer."""
    jobs: Iterator[Job[int]] = (Job(number, ((slot,),)) for number, slot in enumerate(slots))
    for _ in Prefetch(filler, AHEAD_BYTES, reading_threads(False)).run(jobs):
        pass


def lines_of(timings: Sequence[Timing], logical_bytes: int) -> list[str]:
    """A table of GB/s and of what was fetched, and the bars."""
    by_row = {timing.row: timing for timing in timings}
    file_s = _seconds(by_row[FILE], logical_bytes)
    rows, bars = [], []
    for row, timing in by_row.items():
        seconds = _seconds(timing, logical_bytes)
        share = timing.facts["fetched_bytes"] / timing.facts["stored_bytes"]
        spread = sorted(1 / one for one in seconds)
        fast = f"{statistics.median(spread):.2f} ({spread[0]:.2f}–{spread[-1]:.2f})"
        rows.append([row.label, f"{timing.facts['stored_bytes'] / 1e9:.2f}", fast, f"{share:.3f}"])
        if row != FILE:
            ratio = statistics.median(seconds) / statistics.median(file_s)
            bars += [_named(TIME, row).judge(ratio), _named(FETCHED, row).judge(share)]
    head = ["format", "stored GB", "GB of stored bytes a second", "fetched of what is stored"]
    return [table(head, rows), "", table(["claim", "figure", "limit", "met"], bars)]


def _seconds(timing: Timing, logical_bytes: int) -> list[float]:
    """Wall seconds of each round per stored GB."""
    return [one * logical_bytes / timing.facts["stored_bytes"] for one in timing.wall["cold"]]


def _named(bar: Bar, row: Row) -> Bar:
    return Bar(f"{row.label}: {bar.claim}", bar.limit, bar.is_least)


def _fetched() -> int:
    """Bytes that this process had the block layer read."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

"""Packs of samples read by threads ahead of their use, under a byte budget, in a fixed order."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from hiddenstore.data.fill import Filler, Pack, SampleSlot, packed_samples
from hiddenstore.data.packed import Buffers, room_bytes

# Tiny samples would otherwise fill the byte budget with thousands of jobs before the first is handed out.
JOBS_AHEAD = 32
# The first batch does not wait until all that may be ahead of it is queued.
STARTED_AT_ONCE = 2

K = TypeVar("K")


@dataclass(frozen=True)
class Job(Generic[K]):
    """Packs to read together, and the caller's note ``key`` that comes back with them."""

    key: K
    packs: tuple[tuple[SampleSlot, ...], ...]


@dataclass
class _Running(Generic[K]):
    key: K
    packs: list[Pack]
    reads: list[Future[None]]
    size_bytes: int


class Prefetch(Generic[K]):
    """Reads jobs in threads and hands them out in order.

    The packs waiting in at most ``JOBS_AHEAD`` jobs and those handed out last take at most ``budget_bytes``, or as much
    as one job that waits and one that is out. Threads, not processes: records are large, and moving them between
    processes costs five times the reading (docs/design/004). An error of a read is raised at its job and ends the
    iteration; no sample is ever left out.
    """

    def __init__(self, filler: Filler, budget_bytes: int, threads: int, pinned: bool = False) -> None:
        self._filler = filler
        self._budget = budget_bytes
        self._threads = threads
        self._buffers = Buffers(budget_bytes, pinned)

    def run(self, jobs: Iterator[Job[K]]) -> Generator[tuple[K, list[Pack]], None, None]:
        """``(key, packs)`` of every job, in the order of ``jobs``."""
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="hiddenstore-read")
        waiting: deque[_Running[K]] = deque()
        used_bytes = out_bytes = 0
        upcoming = next(jobs, None)
        try:
            while waiting or upcoming is not None:
                for _ in range(STARTED_AT_ONCE):
                    if upcoming is not None and (not waiting or self._fits(used_bytes, len(waiting), upcoming)):
                        waiting.append(self._start(pool, upcoming))
                        used_bytes += waiting[-1].size_bytes
                        upcoming = next(jobs, None)
                done = waiting.popleft()
                for read in done.reads:
                    read.result()
                # The consumer still has the packs before these while it waits.
                used_bytes -= out_bytes
                out_bytes = done.size_bytes
                key, packs = done.key, done.packs
                del done
                yield key, packs
                del packs
        finally:
            for job in waiting:
                for read in job.reads:
                    read.cancel()
            pool.shutdown(wait=True, cancel_futures=True)

    def _fits(self, used_bytes: int, ahead: int, job: Job[K]) -> bool:
        return ahead < JOBS_AHEAD and used_bytes + self._size(job) <= self._budget

    def _size(self, job: Job[K]) -> int:
        return sum(room_bytes(self._filler.members(pack)) for pack in job.packs)

    def _start(self, pool: ThreadPoolExecutor, job: Job[K]) -> _Running[K]:
        packs, reads = [], []
        for slots in job.packs:
            pack = self._filler.empty(slots, self._buffers)
            reads += [pool.submit(self._filler.fill, pack, sample) for sample in packed_samples(slots)]
            packs.append(pack)
        return _Running(job.key, packs, reads, self._size(job))

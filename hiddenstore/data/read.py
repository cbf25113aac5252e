"""Packs of samples read by threads ahead of their use, under a byte budget, in a fixed order.

Shapes: T tokens of a pack, L captured layers, D target width, R rows of the final hidden in a pack.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hiddenstore.errors import CorruptionError
from hiddenstore.records import Record

# Tiny samples would otherwise fill the byte budget with thousands of jobs before the first is handed out.
JOBS_AHEAD = 32

_BYTES_PER_STATE = 2
_BYTES_PER_TOKEN = 8 + 1 + 8 + 8

K = TypeVar("K")


@dataclass(frozen=True)
class SampleSlot:
    """A sample to read and how much of a pack it takes: aux rows and rows of the final hidden."""

    id: str
    tokens: int
    final_rows: int


@dataclass(eq=False)
class PackedBatch:
    """Samples end to end; attention stays inside one ``document``.

    input_ids int64 [T]; loss_mask bool [T], unshifted; positions int64 [T], restarting at every sample; document
    int64 [T], index of the sample in the pack; aux bfloat16 [L, T, D]; final bfloat16 [R, D]; final_rows int64 [R],
    the row of the pack each final hidden belongs to, ascending.
    """

    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    document: Tensor
    aux: Tensor
    final: Tensor
    final_rows: Tensor
    sample_ids: list[str]

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same pack on ``device``; copies from pinned memory overlap with computation."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: t.to(device, non_blocking=True) for name, t in tensors.items() if isinstance(t, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Shape:
    """What every pack of a run has in common: captured layers, target width, pinned memory."""

    layers: int
    width: int
    pinned: bool = False

    def pack_bytes(self, slots: Sequence[SampleSlot]) -> int:
        tokens, rows = sum(s.tokens for s in slots), sum(s.final_rows for s in slots)
        states = (self.layers * tokens + rows) * self.width * _BYTES_PER_STATE
        return states + tokens * _BYTES_PER_TOKEN + rows * 8

    def empty_pack(self, slots: Sequence[SampleSlot]) -> PackedBatch:
        """A pack with room for ``slots``. Pinned memory comes from torch's caching allocator, which reuses it."""
        T, R = sum(s.tokens for s in slots), sum(s.final_rows for s in slots)

        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=self.pinned)

        return PackedBatch(
            input_ids=room(T, dtype=torch.int64),
            loss_mask=room(T, dtype=torch.bool),
            positions=room(T, dtype=torch.int64),
            document=room(T, dtype=torch.int64),
            aux=room(self.layers, T, self.width, dtype=torch.bfloat16),
            final=room(R, self.width, dtype=torch.bfloat16),
            final_rows=room(R, dtype=torch.int64),
            sample_ids=[slot.id for slot in slots],
        )


def place(pack: PackedBatch, record: Record, document: int, start: int, final_start: int) -> None:
    """Copy ``record`` into rows ``start`` … of ``pack`` and rows ``final_start`` … of its final hiddens."""
    sample = record.sample
    here, final_here = slice(start, start + sample.tokens), slice(final_start, final_start + record.final.shape[0])
    pack.input_ids[here] = torch.from_numpy(sample.input_ids)
    pack.loss_mask[here] = torch.from_numpy(sample.loss_mask) != 0
    pack.positions[here] = torch.arange(sample.tokens)
    pack.document[here] = document
    pack.aux[:, here] = record.aux
    pack.final[final_here] = record.final
    pack.final_rows[final_here] = torch.from_numpy(record.final_rows).to(torch.int64) + start


@dataclass(frozen=True)
class Job(Generic[K]):
    """Packs to read together, and the caller's note ``key`` that comes back with them."""

    key: K
    packs: tuple[tuple[SampleSlot, ...], ...]


@dataclass
class _Running(Generic[K]):
    key: K
    packs: list[PackedBatch]
    parts: list[Future[None]]
    size_bytes: int


class Prefetch(Generic[K]):
    """Reads jobs in threads and hands them out in order.

    At most ``budget_bytes`` of packs in ``JOBS_AHEAD`` jobs wait to be handed out, at least one job. Threads,
    not processes: records are large, and moving them between processes costs five times the reading. An error of a
    read is raised at its job and ends the iteration; no sample is ever left out.
    """

    def __init__(self, read: Callable[[str], Record], shape: Shape, budget_bytes: int, threads: int) -> None:
        self._read = read
        self._shape = shape
        self._budget = budget_bytes
        self._threads = threads

    def run(self, jobs: Iterator[Job[K]]) -> Generator[tuple[K, list[PackedBatch]], None, None]:
        """``(key, packs)`` of every job, in the order of ``jobs``."""
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="hiddenstore-read")
        waiting: deque[_Running[K]] = deque()
        held = 0
        upcoming = next(jobs, None)
        try:
            while waiting or upcoming is not None:
                while upcoming is not None and (not waiting or self._fits(held, len(waiting), upcoming)):
                    waiting.append(self._start(pool, upcoming))
                    held += waiting[-1].size_bytes
                    upcoming = next(jobs, None)
                done = waiting.popleft()
                for part in done.parts:
                    part.result()
                held -= done.size_bytes
                yield done.key, done.packs
                del done
        finally:
            for job in waiting:
                for part in job.parts:
                    part.cancel()
            pool.shutdown(wait=True, cancel_futures=True)

    def _fits(self, held: int, ahead: int, job: Job[K]) -> bool:
        return ahead < JOBS_AHEAD and held + self._size(job) <= self._budget

    def _size(self, job: Job[K]) -> int:
        return sum(self._shape.pack_bytes(pack) for pack in job.packs)

    def _start(self, pool: ThreadPoolExecutor, job: Job[K]) -> _Running[K]:
        packs, parts = [], []
        for slots in job.packs:
            pack = self._shape.empty_pack(slots)
            start = final_start = 0
            for document, slot in enumerate(slots):
                parts.append(pool.submit(self._fill, pack, slot, document, start, final_start))
                start += slot.tokens
                final_start += slot.final_rows
            packs.append(pack)
        return _Running(job.key, packs, parts, self._size(job))

    def _fill(self, pack: PackedBatch, slot: SampleSlot, document: int, start: int, final_start: int) -> None:
        record = self._read(slot.id)
        found = (record.sample.tokens, record.aux.shape[1], record.final.shape[0], len(record.final_rows))
        if found != (slot.tokens, slot.tokens, slot.final_rows, slot.final_rows):
            raise CorruptionError(
                f"sample {slot.id}: expected {slot.tokens} tokens and {slot.final_rows} final rows, "
                f"found tokens, aux rows, final rows, final positions = {found}",
                kind="sample-shape",
                samples=(slot.id,),
            )
        place(pack, record, document, start, final_start)

"""Packs of samples read from a store by threads ahead of their use, under a byte budget, in a fixed order.

Shapes: T tokens of a pack, L layers read, D target width, R final rows of a pack, k top tokens, C columns of a code
array.
"""

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_layout
from hiddenstore.codecs.base import Encoded, small_of_rows
from hiddenstore.data.packed import Buffers, EncodedPack, Members, PackedBatch, apart, room_bytes
from hiddenstore.data.view import WHOLE, SampleView
from hiddenstore.errors import CorruptionError, Kind
from hiddenstore.records import TopK, drafter_positions
from hiddenstore.segments.many import MANY_BYTES, UNITS_TOGETHER
from hiddenstore.segments.rows import row_numbers
from hiddenstore.segments.segment import SegmentReader, read_together
from hiddenstore.threads import Threads
from schemas.manifest import ImageEntry

if TYPE_CHECKING:
    from hiddenstore.store import Store

# Tiny samples would otherwise fill the byte budget with thousands of jobs before the first is handed out.
JOBS_AHEAD = 32
SMALL_BYTES = 1 << 19
"""Samples that take less room in a pack are read together."""
# The first batch does not wait until all that may be ahead of it is queued.
STARTED_AT_ONCE = 4

K = TypeVar("K")


@dataclass(frozen=True)
class SampleSlot:
    """A sample to read and how much of a pack it takes: aux rows and final rows."""

    id: str
    tokens: int
    final_rows: int


@dataclass(frozen=True)
class PackedSample:
    """Where a sample lies in its pack."""

    slot: SampleSlot
    document: int
    start: int
    final_start: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.slot.tokens)

    @property
    def final_rows(self) -> slice:
        return slice(self.final_start, self.final_start + self.slot.final_rows)


def packed_samples(slots: Sequence[SampleSlot]) -> list[PackedSample]:
    """Samples end to end."""
    samples, start, final_start = [], 0, 0
    for document, slot in enumerate(slots):
        samples.append(PackedSample(slot, document, start, final_start))
        start += slot.tokens
        final_start += slot.final_rows
    return samples


class Pack(Protocol):
    """What a filler makes."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The decoded pack on a device."""


class Filler(Protocol):
    """One way to make packs. ``fill`` and ``fill_many`` are called from many threads, one of them once per sample."""

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        """Shapes and types of the tensors of a pack of ``slots``."""

    def empty(self, slots: Sequence[SampleSlot], buffers: Buffers) -> Pack:
        """A pack with room for ``slots``."""

    def fill(self, pack: Pack, sample: PackedSample) -> None:
        """Read a sample into the pack; CorruptionError ``sample-shape`` when it is not as long as its slot."""

    def fill_many(self, pack: Pack, samples: Sequence[PackedSample]) -> None:
        """The same of small samples, together where that is cheaper."""


_Placed = tuple[SegmentReader, int, PackedSample]


class DecodedFiller:
    """Packs of the stored ``layers`` decoded on the CPU, straight into their memory; ``final``: with their final rows,
    whose states are left out where they are rebuilt."""

    def __init__(self, store: "Store", layers: Sequence[int], final: bool, view: SampleView = WHOLE) -> None:
        capture = store.capture
        self._store, self._layers, self._final, self._view = store, tuple(layers), final, view
        self._width = capture.target.hidden_size
        self._topk = capture.topk if final and capture.holds_topk else 0
        self._stores_final = not self._topk and not capture.rebuilds_final

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        T, R = sum(slot.tokens for slot in slots), sum(slot.final_rows for slot in slots)
        members = {
            **_token_members(T, R),
            "aux": ((len(self._layers), T, self._width), torch.bfloat16),
            "final": ((R if self._stores_final else 0, self._width), torch.bfloat16),
        }
        if self._topk:
            members["ids"] = ((R, self._topk), torch.int64)
            members["log_probs"] = ((R, self._topk), torch.float32)
            members["lse"] = ((R,), torch.float32)
        return members

    def empty(self, slots: Sequence[SampleSlot], buffers: Buffers) -> PackedBatch:
        members = self.members(slots)
        tensors = apart(buffers.take(room_bytes(members)), members)
        topk = TopK(*(tensors.pop(name) for name in ("ids", "log_probs", "lse"))) if self._topk else None
        return PackedBatch(**tensors, sample_ids=[slot.id for slot in slots], topk=topk)

    def fill(self, pack: Pack, sample: PackedSample) -> None:
        assert isinstance(pack, PackedBatch)
        aux, final = pack.aux[:, sample.rows], None
        if self._final:
            final = pack.final[sample.final_rows] if self._stores_final else pack.final
        if sample.slot.tokens == self._view.max_tokens:
            reader, index = self._store.reader_of(sample.slot.id)
            stored = reader.read(index, self._layers, self._final)
            record = self._view.cut(stored)
            tokens, final_rows = record.sample.tokens, len(record.final_rows)
            _require(sample.slot, (tokens, record.aux.shape[1], final_rows, final_rows))
            aux.copy_(record.aux)
            if final is not None and self._stores_final:
                final.copy_(record.final)
        else:
            record = stored = self._store.read_into(sample.slot.id, aux, final, self._layers)
        rows = len(record.final_rows) if record.topk is None else record.topk.rows
        _require(sample.slot, (record.sample.tokens, record.aux.shape[1], rows, len(record.final_rows)))
        if pack.topk is not None:
            assert record.topk is not None
            pack.topk.ids[sample.final_rows] = record.topk.ids
            pack.topk.log_probs[sample.final_rows] = record.topk.log_probs
            pack.topk.lse[sample.final_rows] = record.topk.lse
        self._view.require_rows(stored.sample, self._store.capture, self._layers, self._final)
        mask = self._view.mask(stored.sample)[: sample.slot.tokens]
        _put(vars(pack), sample, record.sample.input_ids, mask, record.final_rows, record.sample.images)

    def fill_many(self, pack: Pack, samples: Sequence[PackedSample]) -> None:
        assert isinstance(pack, PackedBatch)
        units = self._store.readers_of([sample.slot.id for sample in samples])
        while some := list(islice(units, UNITS_TOGETHER)):
            self._fill_from(
                pack,
                [
                    (reader, index, samples[number])
                    for reader, indices, numbers in some
                    for index, number in zip(indices.tolist(), numbers, strict=True)
                ],
            )

    def _fill_from(self, pack: PackedBatch, placed: Sequence[_Placed]) -> None:
        """Small samples in the order of their units."""
        # What is read together passes through memory that no budget counts.
        most = max(1, MANY_BYTES // (2 * self._width * (len(self._layers) + 1)))
        ends = np.cumsum([sample.slot.tokens for *_, sample in placed]) // most
        cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(placed)]
        for part in (placed[low:high] for low, high in pairwise(cuts)):
            together = [one for one in part if self._is_as_stored(*one)]
            if len(together) < 2 or not self._fill_together(pack, together):
                together = []
            done = {sample.document for *_, sample in together}
            for *_, sample in part:
                if sample.document not in done:
                    self.fill(pack, sample)

    def _is_as_stored(self, reader: SegmentReader, index: int, sample: PackedSample) -> bool:
        """Whether a pack takes a sample with the mask and the length it has, and with positions that count up."""
        is_whole = self._view.loss_on == "stored" and sample.slot.tokens != self._view.max_tokens
        return is_whole and not _images_of(self._store, reader, index)

    def _fill_together(self, pack: PackedBatch, placed: Sequence[_Placed]) -> bool:
        """Samples in the order of their units at once; False where each has to be read by itself."""
        samples = [sample for *_, sample in placed]
        slots = [(sample.slot.tokens, sample.slot.final_rows, sample.start, sample.final_start) for sample in samples]
        lengths, counts, starts, final_starts = np.array(slots, dtype=np.int64).T
        units = [
            (reader, np.array([index for _, index, _ in of_unit], dtype=np.int64))
            for reader, of_unit in groupby(placed, itemgetter(0))
        ]
        stored = [reader.lengths(indices) for reader, indices in units]
        tokens, final_rows = (np.concatenate(column) for column in zip(*stored, strict=True))
        if not np.array_equal(tokens, lengths) or not np.array_equal(final_rows * self._final, counts):
            return False
        aux = torch.empty((len(self._layers), int(lengths.sum()), self._width), dtype=torch.bfloat16)
        final = torch.empty((int(counts.sum()), self._width), dtype=torch.bfloat16) if self._final else None
        many = read_together(units, aux, final, self._layers)
        if many is None:
            return False
        rows, final_rows = row_numbers(starts, lengths), row_numbers(final_starts, counts)
        pack.aux.index_copy_(1, torch.from_numpy(rows), aux)
        if final is not None:
            pack.final.index_copy_(0, torch.from_numpy(final_rows), final)
        pack.input_ids.numpy()[rows] = many.input_ids
        pack.loss_mask.numpy()[rows] = many.loss_mask != 0
        pack.positions.numpy()[rows] = rows - np.repeat(starts, lengths)
        pack.document.numpy()[rows] = np.repeat([sample.document for sample in samples], lengths)
        pack.final_rows.numpy()[final_rows] = many.final_rows + np.repeat(starts, counts)
        return True


class EncodedFiller:
    """Packs of stored bytes, decoded where ``EncodedPack.to`` moves them."""

    def __init__(self, store: "Store", layers: Sequence[int], final: bool, view: SampleView = WHOLE) -> None:
        capture = store.capture
        self._store, self._layers, self._final, self._view = store, tuple(layers), final, view
        self._width, self._codecs = capture.target.hidden_size, capture.codecs
        self._stores_rows = not capture.rebuilds_final
        layouts = get_layout(capture.codecs.aux), get_layout(capture.codecs.final)
        self._codes = [(one.code_columns(self._width), getattr(torch, one.code_dtype)) for one in layouts]

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        T, R = sum(slot.tokens for slot in slots), sum(slot.final_rows for slot in slots)
        (aux, aux_type), (final, final_type) = self._codes
        return {
            **_token_members(T, R),
            "aux_codes": ((len(self._layers), T, aux), aux_type),
            "final_codes": ((int(self._final and self._stores_rows), R, final), final_type),
        }

    def empty(self, slots: Sequence[SampleSlot], buffers: Buffers) -> EncodedPack:
        members, samples = self.members(slots), packed_samples(slots)
        tensors = apart(buffers.take(room_bytes(members)), members)
        return EncodedPack(
            aux_codes=tensors.pop("aux_codes"),
            final_codes=tensors.pop("final_codes"),
            tensors=tensors,
            rows=[sample.rows for sample in samples],
            final_rows=[sample.final_rows for sample in samples],
            sample_ids=[slot.id for slot in slots],
            codecs=self._codecs,
            width=self._width,
            aux_small=[{} for _ in slots],
            final_small=[{} for _ in slots],
        )

    def fill(self, pack: Pack, sample: PackedSample) -> None:
        assert isinstance(pack, EncodedPack)
        slot = sample.slot
        reader, index = self._store.reader_of(slot.id)
        if self._view.loss_on == "stored":
            input_ids, loss_mask = reader.tokens(index)
        else:
            stored = reader.sample(index)
            self._view.require_rows(stored, self._store.capture, self._layers, self._final)
            input_ids, loss_mask = stored.input_ids, self._view.mask(stored)
        # numpy cuts in a tenth of the time torch takes.
        out = pack.aux_codes.numpy()[:, sample.rows], pack.final_codes.numpy()[:, sample.final_rows]
        if slot.tokens == self._view.max_tokens:
            input_ids, loss_mask = input_ids[: slot.tokens], loss_mask[: slot.tokens]
            aux, final, final_rows = self._cut(slot, reader.read_encoded(index, self._layers, self._final), out)
        else:
            aux, final, final_rows = reader.read_encoded(index, self._layers, self._final, out)
        _require(slot, (len(input_ids), slot.tokens, len(final_rows), len(final_rows)))
        pack.aux_small[sample.document] = aux.small
        pack.final_small[sample.document] = final.small
        images = _images_of(self._store, reader, index)
        _put(pack.tensors, sample, input_ids, loss_mask, final_rows, images)

    def fill_many(self, pack: Pack, samples: Sequence[PackedSample]) -> None:
        for sample in samples:
            self.fill(pack, sample)

    def _cut(
        self,
        slot: SampleSlot,
        read: tuple[Encoded, Encoded, np.ndarray],
        out: tuple[np.ndarray, np.ndarray],
    ) -> tuple[Encoded, Encoded, np.ndarray]:
        """The first rows of a longer sample, its codes copied to ``out``."""
        *groups, final_rows = read
        kept = []
        for encoded, places, rows, field in zip(
            groups, out, (slot.tokens, slot.final_rows), ("aux", "final"), strict=True
        ):
            for codes, place in zip(encoded.codes, places, strict=True):
                np.copyto(place, codes[:rows].numpy())
            fields = get_layout(getattr(self._codecs, field)).small
            small = small_of_rows(fields, encoded.small, len(places), range(rows)) if encoded.small else {}
            kept.append(Encoded([], small))
        return kept[0], kept[1], final_rows[: slot.final_rows]


def _token_members(T: int, R: int) -> Members:
    return {
        "input_ids": ((T,), torch.int64),
        "loss_mask": ((T,), torch.bool),
        "positions": ((T,), torch.int64),
        "document": ((T,), torch.int64),
        "final_rows": ((R,), torch.int64),
    }


def _images_of(store: "Store", reader: SegmentReader, index: int) -> tuple[ImageEntry, ...]:
    return () if store.capture.images is None else reader.record.samples[index].images


def _put(
    tensors: dict[str, Tensor],
    sample: PackedSample,
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    final_rows: np.ndarray,
    images: Sequence[ImageEntry],
) -> None:
    # numpy starts a short copy in a tenth of the time torch takes.
    rows = sample.rows
    tensors["input_ids"].numpy()[rows] = input_ids
    np.not_equal(loss_mask, 0, out=tensors["loss_mask"].numpy()[rows])
    tensors["positions"].numpy()[rows] = drafter_positions(len(input_ids), images)
    tensors["document"].numpy()[rows] = sample.document
    tensors["final_rows"].numpy()[sample.final_rows] = final_rows + np.int64(sample.start)


def _require(slot: SampleSlot, lengths: tuple[int, int, int, int]) -> None:
    """``lengths``: tokens, aux rows, final rows and final positions that a sample turned out to have."""
    if lengths != (slot.tokens, slot.tokens, slot.final_rows, slot.final_rows):
        raise CorruptionError(
            f"sample {slot.id}: expected {slot.tokens} tokens and {slot.final_rows} final rows, "
            f"found tokens, aux rows, final rows, final positions = {lengths}",
            kind=Kind.SAMPLE_SHAPE,
            samples=(slot.id,),
        )


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
        pool = Threads(self._threads, thread_name_prefix="hiddenstore-read")
        waiting: deque[_Running[K]] = deque()
        used_bytes = out_bytes = 0
        upcoming = next(jobs, None)
        is_finalizing = sys.is_finalizing
        try:
            while waiting or upcoming is not None:
                for _ in range(STARTED_AT_ONCE):
                    if upcoming is None or (waiting and not self._fits(used_bytes, len(waiting), upcoming)):
                        break
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
            # An interpreter that ends has ended the threads, and may have emptied the modules that would end them here.
            if not is_finalizing():
                for job in waiting:
                    for read in job.reads:
                        read.cancel()
                pool.shutdown(wait=True, cancel_futures=True)

    def _fits(self, used_bytes: int, ahead: int, job: Job[K]) -> bool:
        size = sum(room_bytes(self._filler.members(slots)) for slots in job.packs)
        return ahead < JOBS_AHEAD and used_bytes + size <= self._budget

    def _start(self, pool: Threads, job: Job[K]) -> _Running[K]:
        packs, reads, before = [], [], self._buffers.taken
        for slots in job.packs:
            # What is made in inference mode can be filled in no thread that is not.
            with torch.inference_mode(False):
                pack, samples = self._filler.empty(slots, self._buffers), packed_samples(slots)
            token_bytes = room_bytes(self._filler.members(slots)) // max(1, sum(slot.tokens for slot in slots))
            small = [sample for sample in samples if sample.slot.tokens * token_bytes < SMALL_BYTES]
            if len(small) > 1:
                reads.append(pool.submit(self._filler.fill_many, pack, small))
                samples = [sample for sample in samples if sample.slot.tokens * token_bytes >= SMALL_BYTES]
            reads += [pool.submit(self._filler.fill, pack, sample) for sample in samples]
            packs.append(pack)
        return _Running(job.key, packs, reads, self._buffers.taken - before)

"""Global batches over a store: a plain ``IterableDataset`` that restarts exactly anywhere, under any world size."""

import hashlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from hiddenstore.data.order import BatchPlan, Order, global_batches
from hiddenstore.data.packed import PackedBatch, complete
from hiddenstore.data.read import DecodedFiller, EncodedFiller, Job, Prefetch, SampleSlot
from hiddenstore.data.view import WHOLE, SampleView, in_split
from hiddenstore.errors import ConfigError, ConflictError, Kind
from hiddenstore.index.table import Ids
from hiddenstore.store import Store
from hiddenstore.targets.identity import target_words
from hiddenstore.targets.rebuild import layers_to_read
from hiddenstore.threads import reading_threads
from schemas.manifest import Split

PREFETCH_BYTES = 1 << 30
CHECKED_SAMPLES = 32
"""Samples whose mask is looked at before the first batch; each is looked at again where it is read."""


@dataclass(frozen=True)
class Cursor:
    """Where a run stands: ``samples`` of ``epoch`` are consumed. Says nothing of ranks, so any world size resumes it.

    ``snapshot`` is the digest of the sorted sample ids the order was made of.
    """

    seed: int
    epoch: int
    samples: int
    snapshot: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the four members."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any] | str) -> "Cursor":
        """The inverse of ``to_json``; also of its text."""
        members = json.loads(value) if isinstance(value, str) else value
        return cls(int(members["seed"]), int(members["epoch"]), int(members["samples"]), str(members["snapshot"]))


@dataclass(eq=False)
class GlobalBatch:
    """One step of a run as one rank sees it.

    packs: this rank's, possibly none; cursor: the position after this batch; samples and all_sample_ids: those of every
    rank together, in the global order; wait_s: seconds the consumer waited for this batch, the
    start of its copies to the device and the blocks of a store of rebuilt states included.
    """

    packs: list[PackedBatch]
    cursor: Cursor
    samples: int
    all_sample_ids: list[str]
    wait_s: float


@dataclass(eq=False, repr=False, kw_only=True)
class TokenBatches(IterableDataset[GlobalBatch]):
    """The global batches of one split of a store, packed to a token budget.

    Every ``iter()`` starts at ``cursor`` or at what ``load_state_dict`` got. ``state_dict()`` is the position after
    the batch handed out last.

    Example:
        for batch in TokenBatches(hiddenstore.open("store"), batch_tokens=16384, device="cuda"):
            for pack in batch.packs:
                loss = model(pack)
    """

    store: "Store" = field(kw_only=False)
    batch_tokens: int
    """Tokens of a global batch, over all ranks; a longer sample is a batch alone."""
    pack_tokens: int | None = None
    """Tokens of a pack, at least the longest sample's; default: ``batch_tokens``, one pack a batch on each rank."""
    split: Split = "train"
    layers: Sequence[int] | None = None
    """Aux layers to read, in the order of packs; default: all, ascending."""
    final: bool = True
    """Whether to read what the store holds at the final rows."""
    seed: int = 0
    """Of the order, unless a cursor names another."""
    rank: int | None = None
    """Which share of every global batch is read, from 0; default: the first. Several ranks have to name theirs."""
    world_size: int = 1
    """How many shares a global batch is cut into: ranks that hold parts of one sequence have one share together."""
    epochs: int | None = None
    """The iteration ends once so many epochs are complete; None never ends."""
    cursor: Cursor | None = None
    """Where to start; default: the first sample of epoch 0."""
    prefetch_bytes: int = PREFETCH_BYTES
    """Memory for the packs read ahead and the one handed out."""
    threads: int | None = None
    """Threads that read; default: as many as the cores, or the network a store is behind, keep busy."""
    view: SampleView = WHOLE
    """How many tokens of a sample are read, and which of them teach."""
    device: torch.device | str = "cpu"
    """Where packs come; to any but the CPU their stored bytes move from pinned memory and are decoded there."""

    def __post_init__(self) -> None:
        self.wait_s = 0.0
        self._layers = _layers_of(self.store, self.layers)
        self._final = self.final and self.store.capture.final != "none"
        self._read = layers_to_read(self.store.capture, self._layers, self._final)
        if set(self._layers) == set(self._read) and not (self._final and self.store.capture.rebuilds_final):
            self._read = self._layers
        self._pack_tokens = self.batch_tokens if self.pack_tokens is None else self.pack_tokens
        self._table = self.store.catalog.table
        samples = in_split(self.store, self.split)
        # None for all of them: a row number a sample is memory.
        self._rows = None if bool(samples.all()) else np.flatnonzero(samples).astype(np.int32)
        self._lengths = self._table.tokens if self._rows is None else self._table.tokens[self._rows]
        if self.view.max_tokens is not None:
            self._lengths = np.minimum(self._lengths, self.view.max_tokens)
        self._check()
        self._order = Order(self._ids)
        start = self.cursor or Cursor(self.seed, 0, 0, self._order.digest)
        self.load_state_dict(start.to_json())

    @property
    def digest(self) -> str:
        """Digest of the sample ids of this split: the key of the order."""
        return self._order.digest

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the split, in the order of the store."""
        record, position = self._table.record, self._table.position
        if self._rows is not None:
            record, position = record[self._rows], position[self._rows]
        return self._ids.take(np.lexsort((position, record)))[:]

    @property
    def _ids(self) -> Ids:
        """Those of the split, sorted."""
        return self._table.ids if self._rows is None else self._table.ids.take(self._rows)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, over all ranks."""
        return int(self._lengths.sum(dtype=np.int64))

    def plan(self, epoch: int, start: int = 0) -> Iterator[tuple[BatchPlan, list[SampleSlot]]]:
        """Every global batch of an epoch from sample ``start`` on, with its samples in the global order."""
        return self._plan(self._start.seed, epoch, start)

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Global batches of an epoch; epochs differ a little because their orders do."""
        return sum(1 for _ in self.plan(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batch handed out last, as JSON values."""
        return self._reached.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a cursor; its seed replaces the one given at construction. Raises ConflictError:
        the cursor belongs to other samples."""
        cursor = Cursor.from_json(state)
        if cursor.snapshot != self._order.digest:
            raise ConflictError(
                f"the cursor was made over other samples ({cursor.snapshot[:12]}…) than the {self.split} split of "
                f"{self.store.path} holds ({self._order.digest[:12]}…): the store gained or lost samples since",
                kind=Kind.CURSOR_MISMATCH,
                hint="open the store at the snapshot the run names",
            )
        if cursor.epoch < 0 or not 0 <= cursor.samples <= len(self._lengths):
            raise ConfigError(f"{cursor} lies outside {len(self._lengths)} samples", kind=Kind.CURSOR_INVALID)
        self._start = self._reached = cursor

    def require_one_order(self) -> None:
        """Compare with all ranks of ``torch.distributed`` what batches are cut from; every rank calls it, before its
        first batch. Nothing else says that ranks opened a growing store at different moments: each would follow an
        order of its own; nor that they named no ``rank`` and ``world_size``: all would read the same. Every share has
        to be read by equally many ranks. Without a process group it does nothing. Raises ConflictError:
        ``ranks-differ``."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        cut = (self._start.to_json(), self.batch_tokens, self._pack_tokens, self.view.max_tokens, self.world_size)
        key = hashlib.blake2b(repr(cut).encode(), digest_size=6).digest()
        share = -1 if self.rank is None else self.rank
        sent = torch.tensor([len(self._lengths), int.from_bytes(key, "big"), share])
        if distributed.get_backend() == "nccl":
            sent = sent.cuda()
        received = [torch.empty_like(sent) for _ in range(distributed.get_world_size())]
        distributed.all_gather(received, sent)
        ranks: dict[tuple[int, ...], list[str]] = {}
        shares: Counter[int] = Counter()
        for rank, one in enumerate(received):
            *order, share = one.tolist()
            ranks.setdefault(tuple(order), []).append(str(rank))
            shares[share] += 1
        if len(ranks) > 1:
            each = "; ".join(f"{count:,} samples on ranks {', '.join(those)}" for (count, _), those in ranks.items())
            where = shlex.quote(str(self.store.path))
            raise ConflictError(
                f"the ranks do not cut the same batches from the {self.split} split of {self.store.path}: {each}; they "
                "opened it at different moments, or with other settings",
                kind=Kind.RANKS_DIFFER,
                hint=f"hiddenstore snapshot {where} NAME, and have every rank open {where}@NAME",
            )
        self._require_shares(shares)

    def _require_shares(self, shares: Counter[int]) -> None:
        """``shares``: how many ranks of the process group read each; -1 is none named."""
        count = shares.total()
        each = count // self.world_size
        if count == 1 or (each * self.world_size == count and shares == dict.fromkeys(range(self.world_size), each)):
            return
        named = ", ".join("none" if share < 0 else f"rank={share}" for share in sorted(shares.elements()))
        raise ConflictError(
            f"{count} ranks do not read equal shares of the {self.split} split of {self.store.path}: they name {named} "
            f"of world_size={self.world_size}, and would train on some samples again and on others never",
            kind=Kind.RANKS_DIFFER,
            hint="TokenBatches(…, rank=distributed.get_rank(), world_size=distributed.get_world_size())",
        )

    def __iter__(self) -> Iterator[GlobalBatch]:
        if get_worker_info() is not None:
            raise ConfigError(
                "TokenBatches reads ahead in threads; a DataLoader over it must have num_workers=0",
                kind=Kind.PACK_INVALID,
            )
        self._reached = self._start
        device = torch.device(self.device)
        filler = (DecodedFiller if device.type == "cpu" else EncodedFiller)(
            self.store, self._read, self._final, self.view
        )
        # The blocks are gigabytes: not where all that is read is stored.
        is_rebuilt = self._read != self._layers or (self._final and self.store.capture.rebuilds_final)
        rebuilder = self.store.rebuilder(device) if is_rebuilt else None
        threads = self.threads or reading_threads(self.store.fs.prefers_few_files)
        prefetch = Prefetch[_JobKey](filler, self.prefetch_bytes, threads, pinned=device.type == "cuda")
        jobs = prefetch.run(self._jobs())
        try:
            while True:
                begun = time.perf_counter()
                job = next(jobs, None)
                if job is None:
                    return
                key, packs = job[0], [pack.to(device) for pack in job[1]]
                if rebuilder is not None:
                    packs = [complete(pack, rebuilder, self._layers, self._final) for pack in packs]
                # The memory of what was read is free for others once it has moved.
                del job
                wait_s = time.perf_counter() - begun
                self.wait_s += wait_s
                self._reached = key.cursor
                yield GlobalBatch(packs, key.cursor, len(key.ids), key.ids, wait_s)
                # The consumer may be done with them before the next ones come to the device.
                del packs
        finally:
            jobs.close()

    def _plan(self, seed: int, epoch: int, start: int) -> Iterator[tuple[BatchPlan, list[SampleSlot]]]:
        order = self._order.permutation(seed, epoch)
        for batch in global_batches(self._lengths, order, self.batch_tokens, self._pack_tokens, start):
            yield batch, self._slots(order[batch.start : batch.stop])

    def _slots(self, order: np.ndarray) -> list[SampleSlot]:
        table, rows = self._table, order if self._rows is None else self._rows[order]
        final_rows = table.final_rows[rows] if self._final else np.zeros(len(rows), dtype=np.int32)
        slots = zip(table.ids.take(rows)[:], self._lengths[order].tolist(), final_rows.tolist(), strict=True)
        return [SampleSlot(*slot) for slot in slots]

    def _jobs(self) -> "Iterator[Job[_JobKey]]":
        seed, epoch, start = self._start.seed, self._start.epoch, self._start.samples
        while self.epochs is None or epoch < self.epochs:
            for batch, slots in self._plan(seed, epoch, start):
                packs = tuple(
                    tuple(self._as_read(slots[position - batch.start]) for position in pack)
                    for pack in batch.packs_of(self.rank or 0, self.world_size)
                )
                is_last = batch.stop == len(self._lengths)
                cursor = Cursor(seed, epoch + is_last, 0 if is_last else batch.stop, self._start.snapshot)
                yield Job(_JobKey(cursor, [slot.id for slot in slots]), packs)
            epoch, start = epoch + 1, 0

    def _as_read(self, slot: SampleSlot) -> SampleSlot:
        """A slot with those final rows alone that lie before its sample is cut."""
        if not slot.final_rows or slot.tokens != self.view.max_tokens:
            return slot
        reader, index = self.store.reader_of(slot.id)
        return replace(slot, final_rows=int(np.searchsorted(reader.final_rows(index), slot.tokens)))

    def _check(self) -> None:
        if not 0 <= (self.rank or 0) < self.world_size:
            raise ConfigError(f"rank {self.rank} is outside 0…{self.world_size - 1}", kind=Kind.PACK_INVALID)
        if min(self._pack_tokens, self.batch_tokens) < 1:
            raise ConfigError(
                f"pack_tokens {self._pack_tokens} and batch_tokens {self.batch_tokens} must be 1 at least",
                kind=Kind.PACK_INVALID,
            )
        for name, least in {"epochs": 0, "threads": 1, "prefetch_bytes": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}, it must be {least} at least", kind=Kind.PACK_INVALID)
        if self.view.shortfall(self.store.capture, self._read, self._final)[0]:
            for slot in self._slots(np.arange(min(CHECKED_SAMPLES, len(self._lengths)))):
                self.view.require_rows(self.store.sample(slot.id), self.store.capture, self._read, self._final)
        (longest,) = self._slots(np.argmax(self._lengths, keepdims=True))
        if longest.tokens > self._pack_tokens:
            raise ConfigError(
                f"sample {longest.id} of {self.store.path} has {longest.tokens} tokens, "
                f"more than pack_tokens ({self._pack_tokens})",
                kind=Kind.SAMPLE_TOO_LONG,
                hint=f"set pack_tokens to at least {longest.tokens}, or max_tokens to less",
            )


@dataclass(frozen=True)
class _JobKey:
    cursor: Cursor
    ids: list[str]


def _layers_of(store: "Store", layers: Sequence[int] | None) -> tuple[int, ...]:
    stored = store.capture.aux_layers
    missing = sorted(set(layers or ()) - set(stored))
    if missing:
        numbers = ",".join(str(layer) for layer in sorted({*stored, *missing}))
        target = shlex.join(target_words(store.capture.target))
        raise ConfigError(
            f"{store.path} holds layers {list(stored)}, not {missing}",
            kind=Kind.LAYER_MISSING,
            hint=f"hiddenstore collect DATA -o STORE {target} --layers {numbers}",
        )
    return stored if layers is None else tuple(layers)

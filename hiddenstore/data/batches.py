"""Global batches over a store: a plain ``IterableDataset`` that restarts exactly anywhere, under any world size."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hiddenstore.data.fill import Decoded, SampleSlot, StillEncoded
from hiddenstore.data.order import Order
from hiddenstore.data.pack import BatchPlan, global_batches
from hiddenstore.data.packed import PackedBatch
from hiddenstore.data.read import Job, Prefetch
from hiddenstore.errors import ConfigError, ConflictError
from hiddenstore.identity import target_word
from schemas.manifest import Split

if TYPE_CHECKING:
    import numpy as np

    from hiddenstore.store import Store

PREFETCH_BYTES = 1 << 30


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

    packs: this rank's, possibly none; cursor: the place after this batch; samples and all_sample_ids: those of every
    rank together, in the global order; wait_s: seconds the consumer waited for this batch, the
    start of its copies to the device included.
    """

    packs: list[PackedBatch]
    cursor: Cursor
    samples: int
    all_sample_ids: list[str]
    wait_s: float


class TokenBatches(IterableDataset[GlobalBatch]):
    """The global batches of one split of a store, packed to a token budget.

    Every ``iter()`` starts at the cursor given at construction or to ``load_state_dict``. ``state_dict()`` is the place
    after the batch handed out last. ``epochs`` ends the iteration once that many epochs are complete; None never ends.
    ``pack_tokens`` defaults to ``batch_tokens`` (one pack a batch on each rank).
    Packs come on ``device``; to any but the CPU their stored bytes move from pinned memory and are decoded there.

    Example:
        for batch in TokenBatches(hiddenstore.open("store"), batch_tokens=16384, device="cuda"):
            for pack in batch.packs:
                loss = model(pack)
    """

    def __init__(
        self,
        store: "Store",
        *,
        split: Split = "train",
        layers: Sequence[int] | None = None,
        final: bool = True,
        batch_tokens: int,
        pack_tokens: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        cursor: Cursor | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        threads: int = 4,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.store = store
        self.split = split
        self.layers = _chosen_layers(store, layers)
        self.final = final and store.capture.final != "none"
        self.batch_tokens = batch_tokens
        self.pack_tokens = batch_tokens if pack_tokens is None else pack_tokens
        self.rank, self.world_size, self.epochs = rank, world_size, epochs
        self.prefetch_bytes, self.threads, self.device = prefetch_bytes, threads, torch.device(device)
        self.wait_s = 0.0
        self._slots = _slots_of(store, split, self.final)
        self._check()
        self._order = Order([slot.id for slot in self._slots])
        self._start = cursor or Cursor(seed, 0, 0, self._order.digest)
        self._reached = self._start
        self.load_state_dict(self._start.to_json())

    @property
    def digest(self) -> str:
        """Digest of the sample ids of this split: the key of the order."""
        return self._order.digest

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the split, in the order of the store."""
        return [slot.id for slot in self._slots]

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, over all ranks."""
        return sum(slot.tokens for slot in self._slots)

    def plan(self, epoch: int, start: int = 0) -> Iterator[tuple[BatchPlan, list[str]]]:
        """Every global batch of an epoch from sample ``start`` on, with its sample ids in the global order."""
        order = self._order.permutation(self._start.seed, epoch)
        for batch in global_batches(self._lengths(), order, self.batch_tokens, self.pack_tokens, start):
            yield batch, [self._slots[int(i)].id for i in order[batch.start : batch.stop]]

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Global batches of an epoch; epochs differ a little because their orders do."""
        return sum(1 for _ in self.plan(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batch handed out last, as JSON values."""
        return self._reached.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a cursor; its seed replaces the one given at construction.

        Raises:
            ConflictError: the cursor belongs to other samples.
        """
        cursor = Cursor.from_json(state)
        if cursor.snapshot != self._order.digest:
            raise ConflictError(
                f"the cursor was made over other samples ({cursor.snapshot[:12]}…) than the {self.split} split of "
                f"{self.store.path} holds ({self._order.digest[:12]}…): the store gained or lost samples since",
                kind="cursor-mismatch",
                hint="open the store at the snapshot the run names",
            )
        if cursor.epoch < 0 or not 0 <= cursor.samples <= len(self._slots):
            raise ConfigError(f"{cursor} lies outside {len(self._slots)} samples", kind="cursor-invalid")
        self._start = self._reached = cursor

    def __iter__(self) -> Iterator[GlobalBatch]:
        if get_worker_info() is not None:
            raise ConfigError(
                "TokenBatches reads ahead in threads; a DataLoader over it must have num_workers=0", kind="workers"
            )
        self._reached = self._start
        filler = (Decoded if self.device.type == "cpu" else StillEncoded)(self.store, self.layers, self.final)
        pinned = torch.cuda.is_available()
        ahead = Prefetch[_Note](filler, self.prefetch_bytes, self.threads, pinned).run(self._jobs())
        try:
            while True:
                asked = time.perf_counter()
                found = next(ahead, None)
                if found is None:
                    return
                note, packs = found[0], [pack.to(self.device) for pack in found[1]]
                del found
                wait_s = time.perf_counter() - asked
                self.wait_s += wait_s
                self._reached = note.cursor
                yield GlobalBatch(packs, note.cursor, len(note.ids), note.ids, wait_s)
        finally:
            ahead.close()

    def _jobs(self) -> "Iterator[Job[_Note]]":
        cursor = self._start
        while self.epochs is None or cursor.epoch < self.epochs:
            order = self._order.permutation(cursor.seed, cursor.epoch)
            last = cursor
            batches = global_batches(self._lengths(), order, self.batch_tokens, self.pack_tokens, cursor.samples)
            for batch in batches:
                slots = [self._slots[int(i)] for i in order[batch.start : batch.stop]]
                mine = batch.packs_of(self.rank, self.world_size)
                packs = tuple(tuple(slots[p - batch.start] for p in pack) for pack in mine)
                cursor = self._after(last, batch.stop)
                yield Job(_Note(cursor, [slot.id for slot in slots]), packs)
            cursor = replace(last, epoch=last.epoch + 1, samples=0)

    def _after(self, cursor: Cursor, consumed: int) -> Cursor:
        if consumed == len(self._slots):
            return replace(cursor, epoch=cursor.epoch + 1, samples=0)
        return replace(cursor, samples=consumed)

    def _lengths(self) -> "np.ndarray":
        import numpy as np

        return np.array([slot.tokens for slot in self._slots], dtype=np.int64)

    def _check(self) -> None:
        if not self._slots:
            held = sorted({entry.split for _, entry in self.store.entries})
            raise ConfigError(
                f"{self.store.path} holds no {self.split} samples; splits with samples: {', '.join(held) or 'none'}",
                kind="split-empty",
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is outside 0…{self.world_size - 1}", kind="rank")
        if not 0 < self.pack_tokens <= self.batch_tokens:
            raise ConfigError(
                f"pack_tokens {self.pack_tokens} must lie in 1…batch_tokens ({self.batch_tokens})", kind="pack-tokens"
            )
        longest = max(self._slots, key=lambda slot: slot.tokens)
        if longest.tokens > self.pack_tokens:
            raise ConfigError(
                f"sample {longest.id} of {self.store.path} has {longest.tokens} tokens, "
                f"more than pack_tokens ({self.pack_tokens})",
                kind="sample-too-long",
                hint=f"set pack_tokens (and batch_tokens) to at least {longest.tokens}",
            )


@dataclass(frozen=True)
class _Note:
    cursor: Cursor
    ids: list[str]


def _chosen_layers(store: "Store", layers: Sequence[int] | None) -> tuple[int, ...]:
    held = store.capture.aux_layers
    chosen = held if layers is None else tuple(sorted(set(layers)))
    missing = [layer for layer in chosen if layer not in held]
    if missing:
        wanted = ",".join(str(layer) for layer in sorted({*held, *missing}))
        raise ConfigError(
            f"{store.path} holds layers {list(held)}, not {missing}",
            kind="layers-missing",
            hint=f"hiddenstore collect DATA -o STORE --target {target_word(store.capture.target)} --layers {wanted}",
        )
    return chosen


def _slots_of(store: "Store", split: str, final: bool) -> list[SampleSlot]:
    return [
        SampleSlot(entry.id, entry.tokens, entry.final_rows if final else 0)
        for _, entry in store.entries
        if entry.split == split
    ]

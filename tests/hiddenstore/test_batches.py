"""Reading a store for training: one global order under any world size, exact from any restart point."""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hiddenstore.data import Cursor, GlobalBatch, PackedBatch, SampleDataset, TokenBatches, loader
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, Kind
from hiddenstore.index.table import SPLITS, Ids, SampleTable, joined
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from schemas.manifest import SampleEntry, Split

WIDTH = 8
LAYERS = (1, 4)


class MemoryStore:
    """What ``TokenBatches`` asks of a store, over records in memory; ``broken`` ids raise, ``short`` ones lie."""

    path = "memory"
    fs = SimpleNamespace(prefers_few_files=False)

    def __init__(self, lengths: Sequence[int], validation: int = 0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.records: dict[str, Record] = {}
        self.samples: list[SampleEntry] = []
        self.capture = SimpleNamespace(
            aux_layers=LAYERS,
            stored_layers=LAYERS,
            rebuilds_final=False,
            final="supervised",
            holds_topk=False,
            images=None,
            target=SimpleNamespace(hidden_size=WIDTH, name="tiny", revision=None),
        )
        self.broken: set[str] = set()
        self.reading = self.most_reading = 0
        self._lock = threading.Lock()
        for index, tokens in enumerate(lengths):
            ids = rng.integers(0, 1000, tokens).astype(np.int32)
            ids[0] = index
            mask = (rng.random(tokens) < 0.6).astype(np.uint8)
            rows = final_row_positions(mask, "supervised")
            split: Split = "validation" if index < validation else "train"
            sample = Sample(sample_id(ids, mask), ids, mask, np.zeros((0, 3), np.int32), split)
            aux = torch.from_numpy(rng.standard_normal((2, tokens, WIDTH))).to(torch.bfloat16)
            final = torch.from_numpy(rng.standard_normal((len(rows), WIDTH))).to(torch.bfloat16)
            self.records[sample.id] = Record(sample, aux, final, rows)
            self.samples.append(
                SampleEntry(
                    id=sample.id,
                    split=split,
                    start=0,
                    tokens=tokens,
                    supervised=sample.supervised,
                    final_start=0,
                    final_rows=len(rows),
                )
            )

    def rebuilder(self, device: torch.device) -> None:
        """Everything is held."""

    def reader_of(self, sample_id: str) -> "tuple[MemoryStore, int]":
        return self, list(self.records).index(sample_id)

    def readers_of(self, sample_ids: Sequence[str]) -> "Iterator[tuple[MemoryStore, np.ndarray, list[int]]]":
        places = np.array([self.reader_of(sample_id)[1] for sample_id in sample_ids])
        order = np.argsort(places)
        yield self, places[order], order.tolist()

    def lengths(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Nothing is read together here."""
        return np.zeros(0), np.zeros(0)

    @property
    def catalog(self) -> SimpleNamespace:
        columns = {
            "record": np.zeros(len(self.samples), np.int32),
            "position": np.arange(len(self.samples), dtype=np.int32),
            "tokens": np.array([entry.tokens for entry in self.samples], np.int32),
            "supervised": np.array([entry.supervised for entry in self.samples], np.int32),
            "final_rows": np.array([entry.final_rows for entry in self.samples], np.int32),
            "split": np.array([SPLITS.index(entry.split) for entry in self.samples], np.uint8),
        }
        return SimpleNamespace(table=joined([SampleTable(Ids.of([entry.id for entry in self.samples]), columns)]))

    def read_into(self, sample_id: str, aux: torch.Tensor, final: torch.Tensor | None, layers: Sequence[int]) -> Record:
        with self._lock:
            self.reading += 1
            self.most_reading = max(self.most_reading, self.reading)
        try:
            if sample_id in self.broken:
                raise CorruptionError(f"sample {sample_id} is damaged", kind=Kind.CHUNK_CORRUPT, samples=(sample_id,))
            record = self.records[sample_id]
            held = record.aux[[LAYERS.index(layer) for layer in layers]]
            rows = record.final_rows if final is not None else record.final_rows[:0]
            last = record.final[: len(rows)]
            for found, place in ((held, aux), (last, final)):
                if place is not None and found.shape == place.shape:
                    place.copy_(found)
            return Record(record.sample, held, last, rows)
        finally:
            with self._lock:
                self.reading -= 1


def batches_of(store: MemoryStore, **options: Any) -> TokenBatches:
    return TokenBatches(store, **{"batch_tokens": 60, "pack_tokens": 30, "epochs": 1, **options})  # type: ignore[arg-type]


def facts(batch: GlobalBatch) -> tuple[Any, ...]:
    return (batch.all_sample_ids, batch.cursor, batch.samples, [pack.sample_ids for pack in batch.packs])


def same_pack(a: PackedBatch, b: PackedBatch) -> bool:
    tensors = ("input_ids", "loss_mask", "positions", "document", "aux", "final", "final_rows")
    return a.sample_ids == b.sample_ids and all(torch.equal(getattr(a, n), getattr(b, n)) for n in tensors)


LENGTHS = [5, 12, 30, 7, 9, 22, 3, 18, 11, 6, 25, 14, 8, 2, 19, 10]


def test_a_pack_holds_its_samples_end_to_end() -> None:
    store = MemoryStore(LENGTHS)
    seen = []
    for batch in batches_of(store):
        for pack in batch.packs:
            start = final_start = 0
            for document, name in enumerate(pack.sample_ids):
                record = store.records[name]
                here = slice(start, start + record.sample.tokens)
                final_here = slice(final_start, final_start + len(record.final_rows))
                assert pack.input_ids[here].tolist() == record.sample.input_ids.tolist()
                assert pack.loss_mask[here].tolist() == (record.sample.loss_mask == 1).tolist()
                assert pack.positions[here].tolist() == list(range(record.sample.tokens))
                assert (pack.document[here] == document).all()
                assert torch.equal(pack.aux[:, here], record.aux)
                assert torch.equal(pack.final[final_here], record.final)
                assert (pack.final_rows[final_here] - start).tolist() == record.final_rows.tolist()
                start, final_start = here.stop, final_here.stop
                seen.append(name)
            assert pack.tokens == start <= 30
            assert pack.final.shape[0] == final_start
    assert sorted(seen) == sorted(store.records)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_world_size_reads_the_same_global_order_and_every_sample_once(world_size: int) -> None:
    store = MemoryStore(LENGTHS)
    alone = list(batches_of(store, epochs=2))
    ranks = [list(batches_of(store, epochs=2, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert all(len(rank) == len(alone) for rank in ranks)
    for step, whole in enumerate(alone):
        mine = [rank[step] for rank in ranks]
        assert all((b.all_sample_ids, b.cursor) == (whole.all_sample_ids, whole.cursor) for b in mine)
        parts = [part for b in mine for pack in b.packs for part in samples_of(pack)]
        assert sorted(sample for sample, _ in parts) == sorted(whole.all_sample_ids)
        expected = dict(part for pack in whole.packs for part in samples_of(pack))
        assert all(torch.equal(rows, expected[sample]) for sample, rows in parts)
        loads = [sum(pack.tokens for pack in b.packs) for b in mine]
        assert max(loads) - min(loads) <= max(LENGTHS)


def samples_of(pack: PackedBatch) -> list[tuple[str, torch.Tensor]]:
    """Each sample with its tokens, mask and states in one tensor."""
    rows = torch.cat([pack.input_ids[:, None].float(), pack.loss_mask[:, None].float(), *pack.aux.float()], 1)
    return [(sample, rows[pack.document == index]) for index, sample in enumerate(pack.sample_ids)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_restoring_at_every_batch_under_any_world_size_gives_the_same_tail(world_size: int) -> None:
    store = MemoryStore(LENGTHS)
    whole = [(b.all_sample_ids, b.cursor) for b in batches_of(store, epochs=3)]
    for step, (_, cursor) in enumerate(whole):
        state = json.loads(json.dumps(cursor.to_json()))
        rank = step % world_size
        resumed = batches_of(store, epochs=3, rank=rank, world_size=world_size, seed=99)
        resumed.load_state_dict(state)
        assert [(b.all_sample_ids, b.cursor) for b in resumed] == whole[step + 1 :]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=15), st.integers(20, 60), st.integers(0, 5), st.integers(1, 3))
def test_any_lengths_restart_exactly(lengths: list[int], budget: int, seed: int, epochs: int) -> None:
    store = MemoryStore(lengths)
    options = {"batch_tokens": budget, "pack_tokens": 20, "seed": seed, "epochs": epochs}
    source = batches_of(store, **options)
    whole = []
    for batch in source:
        whole.append((facts(batch), Cursor.from_json(source.state_dict())))
    assert sorted(i for (ids, *_), _ in whole for i in ids) == sorted([*store.records] * epochs)
    for step, (_, cursor) in enumerate(whole):
        assert [facts(b) for b in batches_of(store, **options, cursor=cursor)] == [f for f, _ in whole[step + 1 :]]


def test_an_epoch_ends_with_a_short_batch_and_the_next_one_has_another_order() -> None:
    store = MemoryStore(LENGTHS)
    batches = list(batches_of(store, epochs=2))
    half = len(batches) // 2
    ends = [b.cursor for b in batches if b.cursor.samples == 0]
    assert [(c.epoch, c.samples) for c in ends] == [(1, 0), (2, 0)]
    first = [i for b in batches if b.cursor.epoch == 0 or b.cursor == ends[0] for i in b.all_sample_ids]
    second = [i for b in batches for i in b.all_sample_ids][len(first) :]
    assert sorted(first) == sorted(second) == sorted(store.records)
    assert first != second
    assert half


def test_the_order_does_not_depend_on_how_the_store_lists_its_samples() -> None:
    store, other = MemoryStore(LENGTHS), MemoryStore(LENGTHS)
    other.samples = other.samples[::-1]
    assert [facts(b) for b in batches_of(store)] == [facts(b) for b in batches_of(other)]


def test_a_damaged_sample_surfaces_at_its_batch_and_is_never_skipped() -> None:
    store = MemoryStore(LENGTHS)
    plan = [[slot.id for slot in slots] for _, slots in batches_of(store).plan(0)]
    store.broken = {plan[2][0]}
    iterator = iter(batches_of(store))
    assert [next(iterator).all_sample_ids for _ in range(2)] == plan[:2]
    with pytest.raises(CorruptionError) as caught:
        next(iterator)
    assert caught.value.samples == (plan[2][0],)


def test_states_that_do_not_fit_their_commit_record_are_corruption() -> None:
    store = MemoryStore(LENGTHS)
    store.samples[3] = store.samples[3].model_copy(update={"tokens": 8})
    with pytest.raises(CorruptionError, match="expected 8 tokens") as caught:
        list(batches_of(store))
    assert (caught.value.kind, caught.value.samples) == ("sample-shape", (store.samples[3].id,))


def test_a_sample_longer_than_a_pack_is_named_with_the_fix() -> None:
    store = MemoryStore([5, 40])
    with pytest.raises(ConfigError) as caught:
        batches_of(store)
    assert caught.value.kind == "sample-too-long"
    assert store.samples[1].id in str(caught.value)
    assert "40" in str(caught.value.hint)


def test_splits_are_read_apart() -> None:
    store = MemoryStore(LENGTHS, validation=4)
    validation = [i for b in batches_of(store, split="validation") for i in b.all_sample_ids]
    assert sorted(validation) == sorted(e.id for e in store.samples[:4])
    with pytest.raises(ConfigError, match="no validation samples"):
        batches_of(MemoryStore(LENGTHS), split="validation")


def test_a_split_of_another_name_is_refused_with_the_splits_there_are(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=20)
    for reading in (TokenBatches, SampleDataset, loader):
        with pytest.raises(ConfigError, match="no val samples; splits with samples: train, validation") as caught:
            reading(store, split="val", **({"batch_tokens": 64} if reading is TokenBatches else {}))
        assert caught.value.kind == "split-empty"


def test_only_the_layers_asked_for_are_read() -> None:
    store = MemoryStore(LENGTHS)
    pack = next(iter(batches_of(store, layers=[4], final=False))).packs[0]
    assert pack.aux.shape[0] == 1
    assert pack.final.shape == (0, WIDTH)
    assert torch.equal(
        pack.aux[0, : len(store.records[pack.sample_ids[0]].sample.input_ids)], store.records[pack.sample_ids[0]].aux[1]
    )
    store.capture.target.name = "org/a; touch pwned"
    with pytest.raises(ConfigError) as caught:
        batches_of(store, layers=[2, 4])
    assert "--target 'org/a; touch pwned' --layers 1,2,4" in str(caught.value.hint)


@pytest.mark.parametrize("filler", ["DecodedFiller", "EncodedFiller"])
def test_layers_come_in_the_order_in_which_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filler: str
) -> None:
    from hiddenstore.data import batches, loader

    monkeypatch.setattr(batches, "DecodedFiller", getattr(batches, filler))
    store = make_store(tmp_path)
    packs = [pack for batch in TokenBatches(store, batch_tokens=64, layers=[3, 1], epochs=1) for pack in batch.packs]
    packs += list(loader(store, batch_size=2, layers=[3, 1]))
    for pack in packs:
        aux = torch.cat([store[sample_id].aux for sample_id in pack.sample_ids], dim=1)
        assert torch.equal(pack.aux, aux.flip(0))
    assert len(packs) > 2


def test_a_cursor_over_other_samples_is_refused() -> None:
    cursor = next(iter(batches_of(MemoryStore(LENGTHS)))).cursor
    with pytest.raises(ConflictError) as caught:
        batches_of(MemoryStore(LENGTHS[:-1]), cursor=cursor)
    assert caught.value.kind == "cursor-mismatch"


@pytest.mark.parametrize("changes", [{"samples": len(LENGTHS) + 1}, {"samples": -1}, {"epoch": -1}])
def test_a_cursor_beyond_the_samples_is_refused(changes: dict[str, int]) -> None:
    batches = batches_of(MemoryStore(LENGTHS))
    with pytest.raises(ConfigError, match="lies outside 16 samples") as caught:
        batches.load_state_dict(batches.state_dict() | changes)
    assert caught.value.kind == "cursor-invalid"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 2, "world_size": 2}, r"rank 2 is outside 0…1"),
        ({"rank": -1}, r"rank -1 is outside 0…0"),
        ({"pack_tokens": 0}, r"pack_tokens 0 and batch_tokens 60 must be 1 at least"),
        ({"pack_tokens": 60, "batch_tokens": 0}, r"pack_tokens 60 and batch_tokens 0 must be"),
        ({"threads": 0}, r"threads is 0, it must be 1 at least"),
        ({"epochs": -1}, r"epochs is -1, it must be 0 at least"),
        ({"prefetch_bytes": -1}, r"prefetch_bytes is -1, it must be 0 at least"),
    ],
)
def test_ranks_packs_and_readers_that_cannot_be_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        batches_of(MemoryStore(LENGTHS), **options)
    assert caught.value.kind == "pack-invalid"


def test_iterating_again_starts_where_the_first_iteration_did() -> None:
    batches = batches_of(MemoryStore(LENGTHS))
    assert [facts(b) for b in batches] == [facts(b) for b in batches]


def test_prefetch_stays_inside_its_byte_budget() -> None:
    store = MemoryStore(LENGTHS * 3)
    tight = batches_of(store, prefetch_bytes=1, threads=8, batch_tokens=30)
    longest_batch = max(len(slots) for _, slots in tight.plan(0))
    assert len(list(tight)) == tight.batches_per_epoch()
    assert store.most_reading <= longest_batch


def test_threads_end_when_the_consumer_stops_early() -> None:
    before = threading.active_count()
    iterator = iter(batches_of(MemoryStore(LENGTHS * 5), epochs=None))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_it_works_under_somebody_else_s_data_loader_but_not_with_workers() -> None:
    batches = batches_of(MemoryStore(LENGTHS))
    assert [facts(b) for b in DataLoader(batches, batch_size=None)] == [facts(b) for b in batches]
    with pytest.raises(RuntimeError, match="num_workers=0"):
        list(DataLoader(batches, batch_size=None, num_workers=1))


def test_waiting_is_measured() -> None:
    batches = batches_of(MemoryStore(LENGTHS))
    waits = [batch.wait_s for batch in batches]
    assert all(wait >= 0 for wait in waits)
    assert batches.wait_s == pytest.approx(sum(waits))


@pytest.mark.parametrize("codec", ["bf16", "lossless", "q8"])
def test_a_real_store_reads_the_same_from_every_restart_point(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path, samples=12, codec=codec)
    options: dict[str, Any] = {"batch_tokens": 80, "pack_tokens": 40, "epochs": 2}
    whole = list(TokenBatches(store, **options))
    for step, batch in enumerate(whole):
        tail = list(TokenBatches(Store.open(store.path), **options, cursor=batch.cursor))
        assert [facts(b) for b in tail] == [facts(b) for b in whole[step + 1 :]]
        packs = [
            (a, b) for x, y in zip(tail, whole[step + 1 :], strict=True) for a, b in zip(x.packs, y.packs, strict=True)
        ]
        assert all(same_pack(a, b) for a, b in packs)
    pack = whole[0].packs[0]
    record = store[pack.sample_ids[0]]
    assert torch.equal(pack.aux[:, : record.sample.tokens], record.aux)
    assert torch.equal(pack.final[: record.final.shape[0]], record.final)

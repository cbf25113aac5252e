"""What a training run sees of the stored samples: cut where asked, and taught where its own choice of tokens says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.data import SampleDataset, SampleView, TokenBatches
from hiddenstore.data.packed import Buffers, PackedBatch
from hiddenstore.data.read import DecodedFiller, EncodedFiller, SampleSlot, packed_samples
from hiddenstore.errors import ConfigError
from hiddenstore.records import Sample
from hiddenstore.records import sample_id as id_of
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, HEAD, capture_spec, make_store, random_records, target_files
from hiddenstore.writer import create_store, write_unit
from schemas.manifest import ImageEntry

CUT = 14

# What `rebuilt` leaves out is no filler's: tests/hiddenstore/test_rebuilt.py.
STORED = [*sorted(name for name, (_, final) in RECIPES.items() if final != "rebuilt"), "q4q3", "aux=klt,final=q8"]


def one_pack(store: Store, **view: Any) -> PackedBatch:
    total = sum(entry.tokens for _, entry in store.entries)
    return next(iter(TokenBatches(store, batch_tokens=total, view=SampleView(**view)))).packs[0]


@pytest.mark.parametrize(("recipe", "container"), [*((recipe, "zarr") for recipe in STORED), ("compact", "webdataset")])
def test_a_cut_sample_is_the_beginning_of_the_whole_one_bit_for_bit(
    tmp_path: Path, recipe: str, container: Any
) -> None:
    store = make_store(tmp_path, codec=recipe, container=container)
    kinds = [one_pack(store, max_tokens=CUT)]
    for sample_id in kinds[0].sample_ids:
        whole = store[sample_id]
        rows = whole.final_rows[whole.final_rows < CUT]
        slot = SampleSlot(sample_id, min(CUT, whole.sample.tokens), len(rows))
        for kind in (DecodedFiller, EncodedFiller):
            filler = kind(store, (1, 3), True, SampleView(max_tokens=CUT))
            pack = filler.empty([slot], Buffers(1 << 20))
            filler.fill(pack, packed_samples([slot])[0])
            cut = pack.to("cpu")
            assert torch.equal(cut.aux, whole.aux[:, :CUT])
            assert cut.input_ids.tolist() == whole.sample.input_ids[:CUT].tolist()
            assert cut.final_rows.tolist() == rows.tolist()
            if cut.topk is None:
                assert torch.equal(cut.final, whole.final[: len(rows)])
            else:
                assert whole.topk is not None
                assert torch.equal(cut.topk.log_probs, whole.topk.log_probs[: len(rows)])
    lengths = np.bincount(kinds[0].document.numpy())
    assert lengths.max() == CUT
    assert [min(CUT, store[name].sample.tokens) for name in kinds[0].sample_ids] == lengths.tolist()


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
@pytest.mark.parametrize(("layers", "final"), [((), True), ((1,), False)])
@pytest.mark.parametrize("recipe", ["safe", "compact", "q4q3"])
def test_a_cut_sample_is_read_without_layers_or_without_its_final_rows(
    tmp_path: Path, recipe: str, layers: tuple[int, ...], final: bool, container: Any
) -> None:
    store = make_store(tmp_path, codec=recipe, container=container)
    (whole,) = (store[name] for name in store.sample_ids[:1])
    rows = int((whole.final_rows < CUT).sum()) if final else 0
    packs = []
    for kind in (DecodedFiller, EncodedFiller):
        filler, slot = kind(store, layers, final, SampleView(max_tokens=CUT)), SampleSlot(whole.sample.id, CUT, rows)
        pack = filler.empty([slot], Buffers(1 << 20))
        filler.fill(pack, packed_samples([slot])[0])
        packs.append(pack.to("cpu"))
    assert all(pack.aux.shape[:2] == (len(layers), CUT) for pack in packs)
    assert torch.equal(packs[0].aux, packs[1].aux)
    assert torch.equal(packs[0].final, packs[1].final)
    assert torch.equal(packs[1].final, whole.final[:rows])


def test_samples_that_no_pack_could_hold_are_read_once_they_are_cut(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=12)
    with pytest.raises(ConfigError, match="more than pack_tokens"):
        TokenBatches(store, batch_tokens=CUT)
    batches = TokenBatches(store, batch_tokens=CUT, epochs=1, view=SampleView(max_tokens=CUT))
    assert sum(pack.tokens for batch in batches for pack in batch.packs) == batches.tokens


TURNS = np.array([[1, 0, 2], [2, 3, 5], [1, 5, 7], [2, 8, 10]], np.int32)
"""user 0…1, assistant 3…4, user 5…6, assistant 8…9; 2 and 7 are headers that belong to the template."""


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        ("stored", [8]),
        ("assistant", [3, 4, 8, 9]),
        ("last-turn", [8, 9]),
        ("all", [0, 1, 3, 4, 5, 6, 8, 9]),
    ],
)
def test_the_tokens_that_teach_are_read_off_the_turns(loss_on: Any, expected: list[int]) -> None:
    ids = np.arange(10, dtype=np.int32)
    sample = Sample("0" * 32, ids, (ids == 8).astype(np.uint8), TURNS)
    assert np.flatnonzero(SampleView(loss_on=loss_on).mask(sample)).tolist() == expected


def test_more_than_was_stored_teaches_only_where_the_final_rows_are(tmp_path: Path) -> None:
    everywhere = make_store(tmp_path / "all", final="all")
    assert bool(one_pack(everywhere, loss_on="all").loss_mask.all())
    assert not bool(one_pack(everywhere).loss_mask.all())
    supervised = make_store(tmp_path / "supervised")
    assert torch.equal(one_pack(supervised, loss_on="assistant").loss_mask, one_pack(supervised).loss_mask)
    with pytest.raises(ConfigError, match=r"data\.loss_on=all teaches token 0") as raised:
        one_pack(supervised, loss_on="all")
    assert raised.value.kind == "store-lacks-states"
    without = TokenBatches(supervised, batch_tokens=4096, final=False, view=SampleView(loss_on="all"))
    assert bool(next(iter(without)).packs[0].loss_mask.all())


def one_sample(folder: Path, supervised: list[int]) -> Store:
    """A store of ten tokens with ``TURNS``, of which the mask teaches those named."""
    ids = np.arange(10, dtype=np.int32)
    mask = np.isin(ids, supervised).astype(np.uint8)
    capture = capture_spec()
    store = create_store(folder, capture, HEAD, "safe", target_files())
    record = random_records([Sample(id_of(ids, mask), ids, mask, TURNS)], capture)
    write_unit(store, "u-000000", "0" * 64, record, (), ENGINE)
    return Store.open(folder)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (10, TURNS.tolist()),
        (9, [[1, 0, 2], [2, 3, 5], [1, 5, 7], [2, 8, 9]]),
        (8, [[1, 0, 2], [2, 3, 5], [1, 5, 7]]),
        (1, [[1, 0, 1]]),
    ],
)
def test_turns_end_where_a_sample_is_cut(tmp_path: Path, tokens: int, expected: list[list[int]]) -> None:
    store = one_sample(tmp_path, [3, 4])
    sample = SampleDataset(store, view=SampleView(max_tokens=tokens))[0].sample
    assert sample.spans.tolist() == expected
    assert sample.spans.dtype == np.int32
    assert store[0].sample.spans.tolist() == TURNS.tolist()


@pytest.mark.parametrize("words", [{"max_tokens": 0}, {"max_tokens": -3}, {"loss_on": "last_turn"}])
def test_a_view_that_cannot_be_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stored, assistant, last-turn, all") as caught:
        SampleView(**words)
    assert caught.value.kind == "option-invalid"


def test_images_that_begin_behind_the_cut_are_left_out() -> None:
    images = tuple(ImageEntry(sha256="0" * 64, start=start, height=1, width=3) for start in (1, 5))
    ids = np.arange(10, dtype=np.int32)
    (record,) = random_records(
        [Sample("0" * 32, ids, (ids == 8).astype(np.uint8), TURNS, images=images)], capture_spec()
    )
    for tokens, count in ((5, 1), (6, 2)):
        assert SampleView(max_tokens=tokens).cut(record).sample.images == images[:count]


@pytest.mark.parametrize("kind", [DecodedFiller, EncodedFiller])
def test_the_last_turn_of_a_cut_sample_is_the_last_one_of_the_whole(tmp_path: Path, kind: Any) -> None:
    store = one_sample(tmp_path, [3, 4, 8, 9])
    for tokens, taught in ((9, [8]), (6, [])):
        view = SampleView(max_tokens=tokens, loss_on="last-turn")
        rows = int((store[0].final_rows < tokens).sum())
        filler, slot = kind(store, (1, 3), True, view), SampleSlot(store.sample_ids[0], tokens, rows)
        pack = filler.empty([slot], Buffers(1 << 20))
        filler.fill(pack, packed_samples([slot])[0])
        assert torch.nonzero(pack.to("cpu").loss_mask).flatten().tolist() == taught
        assert np.flatnonzero(SampleDataset(store, view=view)[0].sample.loss_mask).tolist() == taught


@pytest.mark.parametrize("kind", [DecodedFiller, EncodedFiller])
def test_what_lies_past_the_cut_teaches_nothing_and_is_not_asked_for(tmp_path: Path, kind: Any) -> None:
    store, view = one_sample(tmp_path, [3, 4]), SampleView(max_tokens=6, loss_on="assistant")
    filler, slot = kind(store, (1, 3), True, view), SampleSlot(store.sample_ids[0], 6, 4)
    pack = filler.empty([slot], Buffers(1 << 20))
    filler.fill(pack, packed_samples([slot])[0])
    assert torch.nonzero(pack.to("cpu").loss_mask).flatten().tolist() == [3, 4]
    assert int(SampleDataset(store, view=view)[0].sample.supervised) == 2
    assert int(next(iter(TokenBatches(store, batch_tokens=9, view=view))).packs[0].loss_mask.sum()) == 2

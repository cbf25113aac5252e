"""Packs decoded in place and packs that stay encoded hold the very bits that single records hold."""

from pathlib import Path

import pytest
import torch

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.base import Encoded
from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.data import SampleDataset, SampleView, TokenBatches, batches, pack
from hiddenstore.data.packed import Buffers, PackedBatch, moved_at_once
from hiddenstore.data.read import (
    DecodedFiller,
    EncodedFiller,
    SampleSlot,
    packed_samples,
)
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store

TENSORS = ("input_ids", "loss_mask", "positions", "document", "aux", "final", "final_rows")

# What `rebuilt` leaves out is no filler's: tests/hiddenstore/test_rebuilt.py.
STORED = [*sorted(name for name, (_, final) in RECIPES.items() if final != "rebuilt"), "q4q3", "aux=klt,final=q8"]


def slots_of(store: Store, final: bool = True) -> list[SampleSlot]:
    """Samples of several units, not in the order of the store."""
    entries = [entry for _, entry in store.entries]
    return [SampleSlot(e.id, e.tokens, e.final_rows if final else 0) for e in (*entries[3:], *entries[:2])]


def plain_pack(store: Store, layers: list[int], final: bool = True) -> PackedBatch:
    """The same pack from single records, joined as the docstring of ``PackedBatch`` says."""
    records = [store.read(slot.id, layers=layers, final=final) for slot in slots_of(store)]
    starts = [sum(r.sample.tokens for r in records[:i]) for i in range(len(records))]
    return PackedBatch(
        input_ids=torch.cat([torch.from_numpy(r.sample.input_ids).long() for r in records]),
        loss_mask=torch.cat([torch.from_numpy(r.sample.loss_mask) == 1 for r in records]),
        positions=torch.cat([torch.arange(r.sample.tokens) for r in records]),
        document=torch.cat([torch.full((r.sample.tokens,), i) for i, r in enumerate(records)]),
        aux=torch.cat([r.aux for r in records], dim=1),
        final=torch.cat([r.final for r in records]),
        final_rows=torch.cat([torch.from_numpy(r.final_rows).long() + s for r, s in zip(records, starts, strict=True)]),
        sample_ids=[r.sample.id for r in records],
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    view = torch.int16 if one.dtype == torch.bfloat16 else one.dtype
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.view(view), other.view(view))


def filled(kind: type, store: Store, layers: list[int], final: bool = True) -> PackedBatch:
    filler, slots = kind(store, layers, final), slots_of(store, final)
    pack = filler.empty(slots, Buffers(1 << 20))
    for place in reversed(packed_samples(slots)):
        filler.fill(pack, place)
    return pack.to("cpu")


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
@pytest.mark.parametrize("recipe", STORED)
def test_both_kinds_of_pack_hold_the_bits_of_single_records(tmp_path: Path, recipe: str, container: str) -> None:
    store = make_store(tmp_path, samples=7, codec=recipe, container=container)
    wanted = plain_pack(store, [1, 3])
    for kind in (DecodedFiller, EncodedFiller):
        found = filled(kind, store, [1, 3])
        assert all(same_bits(getattr(found, name), getattr(wanted, name)) for name in TENSORS), kind
        assert found.sample_ids == wanted.sample_ids
        if recipe == "tiny":
            topk = [store.read(name).topk for name in wanted.sample_ids]
            assert found.topk is not None
            assert torch.equal(found.topk.ids, torch.cat([part.ids for part in topk if part is not None]))
            assert torch.equal(found.topk.log_probs, torch.cat([part.log_probs for part in topk if part is not None]))
            assert torch.equal(found.topk.lse, torch.cat([part.lse for part in topk if part is not None]))


@pytest.mark.parametrize("filler", ["DecodedFiller", "EncodedFiller"])
@pytest.mark.parametrize("recipe", [*STORED, "rebuilt"])
def test_a_loop_in_inference_mode_reads_what_any_other_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, filler: str
) -> None:
    monkeypatch.setattr(batches, "DecodedFiller", getattr(batches, filler))
    store = make_store(tmp_path, samples=7, codec=recipe)
    for view in (SampleView(), SampleView(max_tokens=12)):
        reader = TokenBatches(store, batch_tokens=128, epochs=1, view=view)
        wanted = [pack for batch in reader for pack in batch.packs]
        with torch.inference_mode():
            found = [pack for batch in reader for pack in batch.packs]
        assert len(found) == len(wanted) > 1 or view.max_tokens
        for one, other in zip(found, wanted, strict=True):
            assert all(same_bits(getattr(one, name), getattr(other, name)) for name in TENSORS)


@pytest.mark.parametrize("recipe", [*STORED, "rebuilt"])
def test_what_is_read_lies_on_the_cpu_whatever_the_default_device(tmp_path: Path, recipe: str) -> None:
    store = make_store(tmp_path, samples=7, codec=recipe)
    wanted = pack(list(SampleDataset(store)))
    with torch.device("meta"):
        records = [store[0], *store]
        found = pack(list(SampleDataset(store)))
        (batch,) = TokenBatches(store, batch_tokens=1000, epochs=1)
    assert {(record.aux.device.type, record.final.device.type) for record in records} == {("cpu", "cpu")}
    assert all(same_bits(getattr(found, name), getattr(wanted, name)) for name in TENSORS)
    assert all(getattr(batch.packs[0], name).device.type == "cpu" for name in TENSORS)


@pytest.mark.parametrize("codec", ["q8", "tiny"])
def test_a_pack_is_saved_and_loaded_and_a_part_of_it_alone(tmp_path: Path, codec: str) -> None:
    store, file = make_store(tmp_path, samples=7, codec=codec), tmp_path / "pack.pt"
    pack = filled(DecodedFiller, store, [1, 3])
    torch.save(pack, file)
    loaded = torch.load(file, weights_only=False)
    assert all(same_bits(getattr(loaded, name), getattr(pack, name)) for name in TENSORS)
    torch.save({"ids": pack.input_ids, "flags": pack.loss_mask}, file)
    assert torch.equal(torch.load(file)["ids"], pack.input_ids)
    assert file.stat().st_size < 9 * pack.tokens + 2000


@pytest.mark.parametrize("kind", [DecodedFiller, EncodedFiller])
def test_one_layer_without_the_final_is_a_pack_too(tmp_path: Path, kind: type) -> None:
    store = make_store(tmp_path, samples=6)
    wanted, found = plain_pack(store, [3], final=False), filled(kind, store, [3], final=False)
    assert all(same_bits(getattr(found, name), getattr(wanted, name)) for name in TENSORS)
    assert found.aux.shape[0] == 1
    assert found.final.shape == (0, 32)


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_small_arrays_moved_as_tensors_decode_to_the_same_bits(codec: str) -> None:
    states = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0))
    states[1, 3] *= 1e4
    encoded = get_codec(codec).encode(states.bfloat16())
    first, second = moved_at_once([encoded.small, encoded.small], torch.device("cpu"))
    assert isinstance(second["token_scale"], torch.Tensor)
    for moved in (first, second):
        assert same_bits(get_codec(codec).decode(Encoded(encoded.codes, moved)), get_codec(codec).decode(encoded))

"""Stores that leave out what the target's blocks bring back: every reader gives the same states, to the bit."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

import hiddenstore
from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.data import SampleView, TokenBatches
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.documents import seal
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.inspect.facts import info
from hiddenstore.records import Record, final_row_positions
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.segment import write_encoded
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE, block_parameters
from hiddenstore.targets.calibration import take_slice, write_slice
from hiddenstore.testing.builders import HEAD, capture_spec, make_samples, make_store, random_records, target_files
from hiddenstore.testing.suite import crash_points
from hiddenstore.testing.workload import Plan, Sweep
from hiddenstore.verify import verify
from hiddenstore.writer import create_store
from schemas.capture import Codecs
from schemas.manifest import StoreManifest

CONTAINERS = ("zarr", "webdataset")
WIDTH = 32


@pytest.fixture(scope="module", params=CONTAINERS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("rebuilt"), codec="rebuilt", container=request.param)


def captured(store: Store) -> dict[str, Record]:
    return {record.sample.id: record for record in random_records(make_samples(6), store.capture)}


def error_of(stored: torch.Tensor, original: torch.Tensor) -> float:
    return float((stored.float() - original.float()).norm() / original.float().norm())


def test_the_lowest_layer_and_the_final_hidden_take_no_bytes_and_come_back(store: Store) -> None:
    names = " ".join(file.path for record in store.commits() for file in record.files)
    assert "layer_1" not in names
    assert "final_token_scale" not in names
    for sample_id, original in captured(store).items():
        record = store[sample_id]
        assert record.aux.shape == original.aux.shape
        assert torch.equal(record.aux[0], original.aux[0])
        assert error_of(record.aux[1], original.aux[1]) < 0.1
        assert record.final_rows.tolist() == original.final_rows.tolist()
        assert 0 < error_of(record.final, original.final) < 0.2


def test_the_final_hidden_is_that_of_the_decoded_top_layer(store: Store) -> None:
    rebuilder = store.rebuilder()
    assert rebuilder is not None
    for record in store:
        again = rebuilder.final(record.aux[-1], [record.sample.tokens])
        assert torch.equal(record.final, again[torch.from_numpy(record.final_rows).long()])


def test_going_through_a_store_and_a_loader_give_what_reading_by_id_gives(store: Store) -> None:
    records = {record.sample.id: record for record in store}
    assert list(records) == list(store.sample_ids)
    for sample_id, record in records.items():
        assert torch.equal(record.aux, store[sample_id].aux)
        assert torch.equal(record.final, store[sample_id].final)
    for pack in hiddenstore.loader(store, batch_size=2, shuffle=False):
        assert torch.equal(pack.aux, torch.cat([records[sample_id].aux for sample_id in pack.sample_ids], dim=1))
        assert torch.equal(pack.final, torch.cat([records[sample_id].final for sample_id in pack.sample_ids]))
    for pack in hiddenstore.loader(store, batch_size=2, shuffle=False, layers=(3, 1)):
        aux = torch.cat([records[sample_id].aux for sample_id in pack.sample_ids], dim=1)
        assert torch.equal(pack.aux, aux.flip(0))


@pytest.mark.parametrize("layers", [None, (1,), (3,), (1, 3), (3, 1)])
@pytest.mark.parametrize("final", [True, False])
def test_batches_give_what_the_store_gives_whatever_is_asked(
    store: Store, layers: tuple[int, ...] | None, final: bool
) -> None:
    samples = 0
    for batch in TokenBatches(store, batch_tokens=96, layers=layers, final=final, epochs=1, split="train"):
        for pack in batch.packs:
            for document, sample_id in enumerate(pack.sample_ids):
                record, rows = store.read(sample_id, layers, final), pack.document == document
                assert torch.equal(pack.aux[:, rows], record.aux)
                assert torch.equal(pack.final[pack.document[pack.final_rows] == document], record.final)
                samples += 1
    assert samples == len([entry for _, entry in store.entries if entry.split == "train"])


def test_batches_of_what_is_stored_load_no_blocks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuilder(*_: object) -> None:
        raise AssertionError("gigabytes for nothing")

    monkeypatch.setattr(Store, "rebuilder", rebuilder)
    batches = list(TokenBatches(store, batch_tokens=96, layers=(3,), final=False, epochs=1))
    assert batches
    with pytest.raises(AssertionError, match="for nothing"):
        next(iter(TokenBatches(store, batch_tokens=96, layers=(3,), epochs=1)))


def test_a_batch_that_is_decoded_on_its_device_has_the_same_bits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddenstore.data import batches

    packs = [pack for batch in TokenBatches(store, batch_tokens=96, epochs=1) for pack in batch.packs]
    monkeypatch.setattr(batches, "DecodedFiller", batches.EncodedFiller)
    others = [pack for batch in TokenBatches(store, batch_tokens=96, epochs=1) for pack in batch.packs]
    assert len(packs) == len(others) > 1
    for pack, other in zip(packs, others, strict=True):
        assert torch.equal(pack.aux, other.aux)
        assert torch.equal(pack.final, other.final)


def test_a_resumed_iteration_has_the_same_bits(store: Store) -> None:
    whole = list(TokenBatches(store, batch_tokens=96, epochs=1))
    rest = list(TokenBatches(store, batch_tokens=96, epochs=1, cursor=whole[0].cursor))
    assert len(rest) == len(whole) - 1 > 0
    for one, other in zip(whole[1:], rest, strict=True):
        assert all(torch.equal(a.aux, b.aux) for a, b in zip(one.packs, other.packs, strict=True))
        assert all(torch.equal(a.final, b.final) for a, b in zip(one.packs, other.packs, strict=True))


def test_a_cut_sample_has_the_first_rows_of_the_whole_one(store: Store) -> None:
    view = SampleView(max_tokens=10)
    packs = [pack for batch in TokenBatches(store, batch_tokens=96, epochs=1, view=view) for pack in batch.packs]
    cut = [name for pack in packs for name in pack.sample_ids if store[name].sample.tokens > 10]
    assert cut
    for pack in packs:
        for document, sample_id in enumerate(pack.sample_ids):
            rows = pack.document == document
            record = store[sample_id]
            whole = record.aux[:, : int(rows.sum())].float()
            # Products of other shapes round otherwise in the last bit.
            assert error_of(pack.aux[:, rows], whole) < 0.01
            count = int((record.final_rows < int(rows.sum())).sum())
            mine = pack.final[pack.document[pack.final_rows] == document]
            assert len(mine) == count
            assert not count or error_of(mine, record.final[:count]) < 0.01


def test_closing_a_store_lets_go_of_its_blocks(store: Store) -> None:
    opened = Store.open(store.path)
    rebuilder = weakref.ref(opened.rebuilder())
    opened.close()
    assert rebuilder() is None
    assert opened.rebuilder() is not None


def test_a_layer_that_is_not_held_is_refused_by_its_number(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"layers \[2\] are not held, only \[1, 3\]"):
        store.read(store.sample_ids[0], [2])


def test_store_json_says_of_every_field_what_it_is_and_older_readers_refuse_it(store: Store) -> None:
    text = json.loads(store.fs.read(layout.STORE_JSON))["capture"]
    assert text["states"] == {"layer_1": "rebuilt", "layer_3": "stored", "final": "rebuilt"}
    assert info(store)["states"] == text["states"]
    other = capture_spec(codec="compact")
    assert "states" not in other.model_dump()
    members = other.model_dump(mode="json") | {"codecs": {"aux": "q4", "final": "recovered"}}
    manifest = StoreManifest.model_validate({**store.manifest.model_dump(), "capture": members})
    folder = LocalFilesystem(Path(store.path).parent / "later")
    folder.put_if_absent(layout.STORE_JSON, seal(manifest))
    with pytest.raises(FormatError, match="'recovered'") as error:
        Store.open(folder)
    assert error.value.kind == "plugin-missing"


def test_layers_that_do_not_reach_near_the_last_block_are_refused() -> None:
    with pytest.raises(ValidationError, match="the top aux layer is 2 of 8: 5 blocks lie behind it"):
        capture_spec(layers=(1, 2), codec="rebuilt")
    with pytest.raises(ValidationError, match="there is no aux layer"):
        capture_spec(layers=(), codec="rebuilt")
    with pytest.raises(ValidationError, match="aux layers need a codec"):
        Codecs(aux="rebuilt", final="q8")


def test_a_lowest_layer_too_high_to_rebuild_is_stored() -> None:
    capture = capture_spec(layers=(4, 6), codec="rebuilt")
    assert capture.states == {"layer_4": "stored", "layer_6": "stored", "final": "rebuilt"}
    assert capture.blocks == (7,)
    assert capture_spec(layers=(-1, 6), codec="rebuilt").blocks == (7,)
    assert capture_spec(layers=(2, 6), codec="rebuilt", final="none").blocks == (0, 1, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_copy_of_a_rebuilt_store_keeps_its_codes_and_its_blocks(store: Store, tmp_path: Path) -> None:
    other = next(name for name in CONTAINERS if name != store.manifest.container)
    run_copy(open_copy([store], tmp_path / "other", container=other))
    copied = Store.open(tmp_path / "other")
    for record in store:
        again = copied[record.sample.id]
        assert torch.equal(record.aux, again.aux)
        assert torch.equal(record.final, again.final)
    assert verify(tmp_path / "other", "bytes", also_stock=True).ok
    run_copy(open_copy([store], tmp_path / "raw", "raw"))
    plain = Store.open(tmp_path / "raw")
    assert plain.capture.states == {}
    assert BLOCKS_FILE not in [file.path for file in plain.manifest.target_files]
    assert all(torch.equal(plain[record.sample.id].final, record.final) for record in store)


def test_a_copy_without_blocks_says_which_option_brings_them(tmp_path: Path) -> None:
    source = make_store(tmp_path, codec="raw")
    with pytest.raises(ConfigError, match="does not keep the blocks of its target") as error:
        open_copy([source], tmp_path / "small", "rebuilt")
    assert error.value.kind == "blocks-unsupported"
    assert "--target" in (error.value.hint or "")
    assert not (tmp_path / "small").exists()


def test_verify_compares_with_the_states_as_captured(store: Store, tmp_path: Path) -> None:
    run_copy(open_copy([store], tmp_path / "copy"))
    copied, records = Store.open(tmp_path / "copy"), list(captured(store).values())
    states = take_slice(records, store.capture)
    assert states is not None
    assert write_slice(copied.fs, states, store.capture)
    report = verify(tmp_path / "copy", "meaning")
    assert report.measures["rebuilt_error_layer_1"] == report.measures["rebuilt_error_final"] == 0.0
    assert "rebuilt-differs" not in report.kinds
    other = replace(states, final=states.final + states.final.abs().mean())
    run_copy(open_copy([store], tmp_path / "wrong"))
    assert write_slice(Store.open(tmp_path / "wrong").fs, other, store.capture)
    assert verify(tmp_path / "wrong", "meaning").kinds["rebuilt-differs"] == 1


def test_verify_says_when_nothing_can_be_compared(store: Store) -> None:
    assert "rebuilt-undecided" in [note.kind for note in verify(store.path, "meaning").notes]


def test_a_store_that_names_no_blocks_is_found(tmp_path: Path) -> None:
    capture = capture_spec(codec="rebuilt")
    create_store(tmp_path / "store", capture, HEAD, "rebuilt", target_files())
    assert verify(tmp_path / "store").kinds == {"blocks-missing": 1}


def test_blocks_that_are_gone_are_named(store: Store, tmp_path: Path) -> None:
    run_copy(open_copy([store], tmp_path / "copy"))
    (tmp_path / "copy" / "target" / BLOCKS_FILE).unlink()
    with pytest.raises(HiddenstoreError, match=BLOCKS_FILE):
        Store.open(tmp_path / "copy")[0]
    assert "target-file-corrupt" in verify(tmp_path / "copy", "meaning").kinds


def test_a_writer_that_dies_anywhere_leaves_a_sound_store(tmp_path: Path) -> None:
    backend = lambda name: LocalFilesystem(tmp_path / name)  # noqa: E731
    tally = crash_points(backend, Plan(codec="rebuilt", container="webdataset"), step=10)
    assert tally.points > 3
    assert tally.failures == []


def test_damage_is_an_error_and_never_other_states(tmp_path: Path) -> None:
    sweep = Sweep(lambda name: LocalFilesystem(tmp_path / name), "rebuilt")
    for number, (_where, changes) in enumerate(sweep.cuts()):
        if number % 13 == 0:
            sweep.check(changes)
    for _where, changes in sweep.replays():
        sweep.check(changes)
    assert sweep.by_reader > 10


def test_at_a_width_of_4096_a_token_takes_less_than_a_seventh_of_bf16(tmp_path: Path) -> None:
    capture = capture_spec(layers=(1, 3, 4), width=4096, codec="rebuilt")
    (sample,) = make_samples(1)
    ids = np.arange(640, dtype=np.int32) % 64
    mask = (ids >= 26).astype(np.uint8)
    sample = replace(sample, input_ids=ids, loss_mask=mask)
    rows = final_row_positions(mask, "supervised")
    states = torch.randn(3, 640, 4096).bfloat16()
    unit = encode_records("unit", [Record(sample, states, states[0, : len(rows)], rows)], capture)
    files = write_encoded(LocalFilesystem(tmp_path), "segment", unit, capture)
    arrays = sum(file.size for file in files if not file.path.endswith("zarr.json"))
    assert 640 * 4 * 2 * 4096 / arrays > 7.3


def test_a_slice_begins_where_a_sample_does_so_that_it_can_be_rebuilt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.targets.calibration.MOST_TOKENS", 30)
    states = take_slice(captured(store).values(), store.capture)
    assert states is not None
    assert [(entry.start, entry.tokens) for entry in states.samples] == [(0, 30)]
    rebuilder = store.rebuilder()
    assert rebuilder is not None
    assert rebuilder.require_close(states, [store.sample(entry.id) for entry in states.samples]) == 1


def test_states_of_a_slice_without_a_final_row_prove_nothing_of_the_final_hidden(store: Store) -> None:
    first, *others = captured(store).values()
    bare = replace(first, final=first.final[:0], final_rows=first.final_rows[:0])
    rebuilder, counts = store.rebuilder(), []
    assert rebuilder is not None
    for records in ([bare], [bare, *others]):
        states = take_slice(records, store.capture)
        assert states is not None
        samples = [record.sample for record in others]
        samples = [replace(bare.sample, loss_mask=np.zeros_like(bare.sample.loss_mask)), *samples]
        counts.append(rebuilder.require_close(states, samples))
    assert counts == [0, len(others)]


def test_a_target_that_cannot_be_rebuilt_is_planned_for_in_every_other_recipe(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=8, hidden_size=32, num_attention_heads=2, hidden_size_per_layer_input=4)
    assert block_parameters(config, ()) == 0
    with pytest.raises(ConfigError, match="per-layer embeddings"):
        block_parameters(config, (0,))


SHAPE = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("family", "experts", "router"), [(Qwen3MoeConfig, "num_experts", 32), (DeepseekV3Config, "n_routed_experts", 33)]
)
def test_memory_holds_every_expert_and_a_token_is_multiplied_by_those_it_is_routed_to(
    family: Any, experts: str, router: int
) -> None:
    few, many = (family(**SHAPE, **ROUTED, **{experts: count}, n_group=1, topk_group=1) for count in (2, 8))
    blocks = (2, 3)
    added = block_parameters(many, blocks) - block_parameters(few, blocks)
    assert added == len(blocks) * 6 * (3 * 16 * 32 + router)
    assert block_parameters(few, blocks, a_token=True) == block_parameters(few, blocks)
    assert block_parameters(many, blocks, a_token=True) == block_parameters(few, blocks) + len(blocks) * 6 * router

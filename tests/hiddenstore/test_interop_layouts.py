"""Exporting a store in the layouts of SpecForge, ModelOpt and DeepSpec: documented keys, exact rows, refusals."""

import json
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hiddenstore.dumps import LAYOUTS, SHORT_NAMES, get_layout
from hiddenstore.dumps.common import export_samples
from hiddenstore.errors import ConfigError, FormatError, StorageError
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "made", samples=5, layers=(1, 3, 5), codec="bf16", final="all")


def by_tokens(store: Store) -> dict[tuple[int, ...], Record]:
    return {tuple(store.sample(name).input_ids.tolist()): store[name] for name in store.sample_ids}


def normed(store: Store, record: Record) -> torch.Tensor:
    return store.head().norm(record.final).bfloat16()


@pytest.mark.parametrize(
    ("name", "aux_key", "final_key", "pattern"),
    [
        ("specforge-eagle3", "aux_hidden_state", "hidden_state", "rows_0-2000/data_*.ckpt"),
        ("specforge-dflash", "hidden_states", None, "rows_0-2000/data_*.ckpt"),
        ("modelopt-hf", "aux_hidden_states", "hidden_states", "*.pt"),
    ],
)
def test_torch_dicts_hold_the_documented_keys_and_the_normed_final_hidden(
    store: Store, tmp_path: Path, name: str, aux_key: str, final_key: str | None, pattern: str
) -> None:
    report = export_samples(store, tmp_path / "out", get_layout(name))
    files, records = sorted((tmp_path / "out").glob(pattern)), by_tokens(store)
    assert (len(files), report.samples, report.layer_ids) == (5, 5, [1, 3, 5])
    for file in files:
        found = torch.load(file, weights_only=True)
        record = records[tuple(found["input_ids"].tolist())]
        assert np.array_equal(found["loss_mask"].numpy(), record.sample.loss_mask)
        columns = found[aux_key].reshape(record.sample.tokens, 3, 32)
        assert torch.equal(columns, record.aux.transpose(0, 1))
        assert (found[aux_key].dim() == 3) == name.startswith("specforge")
        if final_key is not None:
            assert report.normed
            assert torch.equal(found[final_key].reshape(-1, 32), normed(store, record))


def test_a_deepspec_cache_is_found_through_its_index(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.dumps.deepspec.SHARD_BYTES", 20_000)
    export_samples(store, tmp_path / "out", get_layout("deepspec"))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["version"], manifest["num_samples"], manifest["target_layer_ids"]) == (2, 5, [1, 3, 5])
    assert manifest["num_shards"] == len(manifest["shards"]) > 1
    records = by_tokens(store)
    for number, entry in enumerate(struct.iter_unpack("<QIIQQQQQ", (tmp_path / "out" / "samples.idx").read_bytes())):
        row, shard, tokens, at_ids, at_attention, at_mask, at_states, at_final = entry
        data = (tmp_path / "out" / manifest["shards"][shard]["file_name"]).read_bytes()
        record = records[tuple(np.frombuffer(data, "<i4", tokens, at_ids).tolist())]
        assert row == number
        assert data[at_attention : at_attention + tokens] == bytes([1] * tokens)
        assert data[at_mask : at_mask + tokens] == record.sample.loss_mask.tobytes()
        states = torch.from_numpy(np.frombuffer(data, "<u2", tokens * 96, at_states).copy()).view(torch.bfloat16)
        assert torch.equal(states.reshape(tokens, 3, 32), record.aux.transpose(0, 1))
        final = torch.from_numpy(np.frombuffer(data, "<u2", tokens * 32, at_final).copy()).view(torch.bfloat16)
        assert torch.equal(final.reshape(tokens, 32), normed(store, record))


def test_specforge_eagle3_takes_three_layers_and_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path / "made", layers=(1, 3), codec="bf16", final="all")
    with pytest.raises(ConfigError, match="exactly 3 layers"):
        export_samples(store, tmp_path / "out", get_layout("specforge"))
    assert export_samples(store, tmp_path / "out", get_layout("specforge-dflash")).layers == [1, 3]


def test_a_store_without_final_hidden_serves_only_a_layout_that_reads_none(tmp_path: Path) -> None:
    store = make_store(tmp_path / "made", layers=(1, 3, 5), codec="bf16", final="none")
    for name in set(LAYOUTS) - {"specforge-dflash"}:
        with pytest.raises(FormatError) as caught:
            export_samples(store, tmp_path / "out", get_layout(name))
        assert caught.value.kind == "final-missing"
    assert export_samples(store, tmp_path / "out", get_layout("specforge-dflash")).zero_rows == 0


def test_a_store_of_the_final_hidden_alone_serves_no_layout_of_aux_layers(tmp_path: Path) -> None:
    store = make_store(tmp_path / "made", layers=(), codec="bf16", final="all")
    with pytest.raises(FormatError, match="holds no aux layers; deepspec needs some") as caught:
        export_samples(store, tmp_path / "out", get_layout("deepspec"))
    assert caught.value.kind == "aux-missing"


def test_zeros_stand_where_nothing_is_held_and_are_not_normed_into_something(tmp_path: Path) -> None:
    store = make_store(tmp_path / "made", samples=3, layers=(1, 3, 5), codec="bf16")
    report = export_samples(store, tmp_path / "out", get_layout("modelopt"), missing_final="zeros")
    missing = 0
    for name in store.sample_ids:
        record, found = store[name], torch.load(tmp_path / "out" / f"{name}.pt", weights_only=True)["hidden_states"]
        held = np.zeros(record.sample.tokens, bool)
        held[record.final_rows] = True
        assert torch.equal(found[torch.from_numpy(held)], normed(store, record))
        assert not found[torch.from_numpy(~held)].any()
        missing += int((~held).sum())
    assert report.zero_rows == missing > 0


@pytest.mark.parametrize("name", [*LAYOUTS])
def test_a_disk_that_takes_no_more_bytes_is_named_in_every_layout(store: Store, tmp_path: Path, name: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match="out: File too large"):
            export_samples(store, tmp_path / "out", get_layout(name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()


def test_short_names_are_those_of_a_layout() -> None:
    assert {get_layout(name).name for name in SHORT_NAMES} == {"specforge-eagle3", "modelopt-hf"}
    assert {get_layout(name).name for name in LAYOUTS} == set(LAYOUTS)

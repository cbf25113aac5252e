"""Stores that were written once and never again: every version must read the same bits from them."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import hiddenstore
from hiddenstore.files.digests import PIECE_BYTES
from tests.golden.reading import (
    CHATS,
    DATA,
    EXPECTED,
    GOLDEN,
    STORES,
    TARGET,
    answer,
    batches_of,
    command,
    digest,
    files_of,
    info_of,
    samples_of,
    show_of,
    snapshot_name,
    verify_of,
)
from tests.golden.values import differences

FACTS = json.loads(EXPECTED.read_text())
NAMES = sorted(set(FACTS) - {"data"})
OTHER = {"zarr": "webdataset", "webdataset": "zarr", "zarr-shared": "webdataset"}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def members_of(document: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Those that were recorded; a later version may tell more."""
    return {member: document[member] for member in known}


def test_the_files_are_those_that_were_checked_in() -> None:
    assert {store.name for store in STORES.iterdir()} == set(NAMES)
    for store in NAMES:
        assert files_of(STORES / store) == FACTS[store]["files"], store
    assert files_of(DATA) == FACTS["data"]["files"]


@pytest.mark.parametrize(
    "pattern",
    [
        "store.json", "target/head.safetensors", "target/tokenizer.json", "inputs/*.parquet", "commits/*-000000.json",
        "commits/*.r1.json", "segments/*/zarr.json", "segments/*/samples.tar", "snapshots/*.json",
        "calibration/profile.json", "calibration/slice.json", "calibration/slice-*.safetensors", "advice/1.json",
        "index/*",
    ],
)  # fmt: skip
def test_every_kind_of_file_of_the_format_is_among_them(pattern: str) -> None:
    assert list(STORES.glob(f"*/{pattern}"))


def test_files_of_several_pieces_of_a_digest_and_samples_with_images_are_among_them() -> None:
    assert max(path.stat().st_size for path in STORES.rglob("samples.tar")) > PIECE_BYTES
    images = {name for name in NAMES if json.loads((STORES / name / "store.json").read_text())["format"] == 2}
    assert images == {"images-zarr", "images-webdataset"}


def test_rows_that_stand_once_are_among_them() -> None:
    for name in ("compact-zarr-shared", "q4q3-zarr-shared"):
        store = hiddenstore.open(STORES / name)
        (record,) = store.commits()
        shared = store.zarr(record.unit)["shared_rows"][...]
        assert sorted(shared[:, 1] > 0) == [False, False, True, True, True, True]
        # One begins with all of another, which begins as a third does.
        assert max(shared[:, 0]) > 0


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_both_containers_hold_every_codec_and_every_choice_of_final_rows(container: str) -> None:
    infos = [FACTS[store]["info"] for store in NAMES if FACTS[store]["info"]["container"] == container]
    assert {info["codecs"]["aux"] for info in infos} == {"bf16", "lossless", "q8", "q4"}
    assert {info["codecs"]["final"] for info in infos} == {"bf16", "lossless", "q8", "topk"}
    assert {info["final"] for info in infos} == {"all", "supervised", "none"}


def test_every_sample_reads_the_same_bits_in_the_same_order(name: str) -> None:
    samples = samples_of(STORES / name)
    assert list(samples) == [row["id"] for row in FACTS[name]["ls"]]
    assert samples == FACTS[name]["samples"]


def test_a_snapshot_holds_what_it_held(name: str) -> None:
    saved = {snapshot_name(entry) for entry in command("info", STORES / name)["snapshots"]}
    assert saved == set(FACTS[name]["snapshots"])
    for snapshot, ids in FACTS[name]["snapshots"].items():
        assert hiddenstore.open(STORES / name, snapshot).sample_ids == ids
        assert command("info", f"{STORES / name}@{snapshot}")["samples"] == len(ids)


def test_every_byte_verifies(name: str) -> None:
    assert verify_of(STORES / name) == FACTS[name]["verify"]
    assert FACTS[name]["verify"]["ok"]


def test_info_ls_and_show_say_the_same(name: str) -> None:
    facts = FACTS[name]
    assert members_of(info_of(STORES / name), facts["info"]) == facts["info"]
    rows = command("ls", STORES / name, "-n", "0")["rows"]
    assert [members_of(row, known) for row, known in zip(rows, facts["ls"], strict=True)] == facts["ls"]
    shown = show_of(STORES / name)
    assert list(differences(facts["show"], shown, exact=False)) == []
    last = facts["ls"][-1]["id"]
    for words in (("info",), ("ls",), ("stats",), ("show", last)):
        assert answer(words[0], STORES / name, *words[1:])[0] == 0, words


def test_show_draws_a_sample_that_holds_nan() -> None:
    code, shown, _ = answer("show", STORES / "raw-zarr", "0")
    assert code == 0
    (embeddings,) = (line for line in shown.splitlines() if "embeddings" in line)
    assert "nan" in embeddings
    assert "×▇" in embeddings


def test_batches_come_in_the_same_order_and_packed_alike(name: str) -> None:
    assert list(batches_of(STORES / name)) == FACTS[name]["batches"]


def test_a_copy_in_the_other_container_and_a_copy_back_read_the_same_bits(name: str, tmp_path: Path) -> None:
    container = FACTS[name]["info"]["container"]
    command("copy", STORES / name, tmp_path / "other", "--container", OTHER[container])
    command("copy", tmp_path / "other", tmp_path / "back", "--container", container)
    for store in ("other", "back"):
        assert samples_of(tmp_path / store) == FACTS[name]["samples"], store
        assert verify_of(tmp_path / store)["ok"]


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_the_exact_recipes_copy_bits_for_bits(container: str, tmp_path: Path) -> None:
    for store in ("raw-zarr", "raw-webdataset"):
        copy = tmp_path / store
        command("copy", STORES / store, copy, "--recipe", "lossless", "--container", container)
        assert samples_of(copy) == FACTS[store]["samples"]


def test_a_captured_store_still_means_what_it_says() -> None:
    document = command("verify", STORES / "collected-zarr", "--full", "--meaning")
    assert document["ok"], document["findings"]


def test_its_advice_is_the_advice_that_was_measured() -> None:
    assert command("info", STORES / "collected-zarr")["advice"]["chosen"] == "safe"


def test_the_conversations_prepare_to_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    command("prepare", CHATS.name, "-o", tmp_path / "data", "--target", TARGET.name, "--val", "20%")
    old, new = (json.loads((folder / "data.json").read_text()) for folder in (DATA, tmp_path / "data"))
    parts = [file["path"] for file in old["files"]]
    assert parts == [file["path"] for file in new["files"]]
    for document in (old, new):  # the bytes of parquet depend on the version of its library
        del document["files"], document["sha256"]
    assert members_of(new, old) == old
    for part in parts:
        assert pq.read_table(tmp_path / "data" / part).equals(pq.read_table(DATA / part))


def test_the_data_is_captured_into_the_golden_store_s_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    words = ("--target", TARGET.name, "--layers", "0,1", "--final", "all", "--recipe", "raw", "--device", "cpu")
    command("collect", DATA.name, "-o", tmp_path / "store", *words)
    old, new = hiddenstore.open(STORES / "collected-zarr"), hiddenstore.open(tmp_path / "store")
    for sample in new.sample_ids:
        known = FACTS["collected-zarr"]["samples"][sample]
        assert digest(new[sample].sample.input_ids.astype("<i4")) == known["tokens"]
        assert digest(new[sample].sample.loss_mask.astype("u1")) == known["mask"]
        for stored, captured in ((old[sample].aux, new[sample].aux), (old[sample].final, new[sample].final)):
            scale = float(captured.float().abs().max())
            assert torch.allclose(stored.float(), captured.float(), rtol=0.02, atol=0.02 * scale)


def test_a_complete_input_leaves_nothing_to_collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command("copy", STORES / "collected-zarr", tmp_path / "store")
    monkeypatch.chdir(GOLDEN)
    words = ("--target", TARGET.name, "--layers", "0,1", "--final", "all", "--device", "cpu")
    before = samples_of(tmp_path / "store")
    command("collect", DATA.name, "-o", tmp_path / "store", *words)
    assert samples_of(tmp_path / "store") == before

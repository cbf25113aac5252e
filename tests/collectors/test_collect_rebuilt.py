"""The recipe ``rebuilt`` through the command line: captured, copied, trained on, and refused where it cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from collectors.capture.job import open_job
from collectors.capture.options import CollectOptions
from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.data import TokenBatches
from hiddenstore.errors import CaptureError, ConfigError
from hiddenstore.inputs import Unit
from hiddenstore.process import Drain, Rank
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE
from hiddenstore.targets.calibration import read_slice
from hiddenstore.writer import create_store
from tests.accepting import repair_words
from tests.collectors.tiny import save_target
from tests.tiny_world import TRAIN, World, chat, error_of, run, write_rows

LAYERS = "0,1,2"
BESIDE = ("advice", "commits", "index", "store.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target, its DATA, and a store of each: ``raw``, ``rebuilt`` and a copy of the first as the second."""
    world = World(tmp_path_factory.mktemp("rebuilt"))
    save_target(world.root / "target")
    save_target(world.root / "other", seed=1)
    write_rows(world.root / "chats.jsonl", [chat(i) for i in range(24)])
    target = ("--target", world / "target")
    for words in (
        ("prepare", world / "chats.jsonl", "-o", world / "data", *target, "--val", "20%"),
        ("collect", world / "data", "-o", world / "raw", *target, "--layers", LAYERS, "--recipe", "raw"),
        ("collect", world / "data", "-o", world / "rebuilt", *target, "--layers", LAYERS, "--recipe", "rebuilt"),
        ("copy", world / "raw", world / "copied", "--recipe", "rebuilt", *target),
    ):
        assert run(*words, "-q") == 0, words
    return world


def test_a_capture_and_a_copy_of_a_raw_one_give_the_same_states_near_the_captured(place: World) -> None:
    raw, rebuilt, copied = (Store.open(place / name) for name in ("raw", "rebuilt", "copied"))
    assert rebuilt.manifest == copied.manifest
    assert rebuilt.capture.states == {
        "layer_0": "rebuilt",
        "layer_1": "stored",
        "layer_2": "stored",
        "final": "rebuilt",
    }
    assert rebuilt.totals["bytes_stored"] < 0.5 * raw.totals["bytes_stored"]
    for sample_id in raw.sample_ids:
        original, one, other = raw[sample_id], rebuilt[sample_id], copied[sample_id]
        assert torch.equal(one.aux, other.aux)
        assert torch.equal(one.final, other.final)
        assert torch.allclose(one.aux[0].float(), original.aux[0].float(), rtol=2**-7, atol=1e-2)
        assert (one.final - original.final).float().norm() < 0.2 * original.final.float().norm()


def test_verify_and_info_tell_what_is_rebuilt_and_what_lies_beside_it(
    place: World, capsys: pytest.CaptureFixture[str]
) -> None:
    # A random target's text does not look like its own.
    assert run("verify", place / "rebuilt", "--full", "--meaning", "--json") in (0, 3)
    report = json.loads(capsys.readouterr().out)
    assert "rebuilt-differs" not in [finding["kind"] for finding in report["findings"]]
    assert 0 <= report["measures"]["rebuilt_error_layer_0"] < 0.02
    assert 0 <= report["measures"]["rebuilt_error_final"] < 0.02
    assert run("info", place / "rebuilt", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    files = [path for path in Path(place / "rebuilt").rglob("*") if path.is_file()]
    counted = [path for path in files if path.parts[len(Path(place / "rebuilt").parts)] not in BESIDE]
    assert info["bytes_on_disk"] == sum(path.stat().st_size for path in counted)
    assert info["bytes_target"] == sum(path.stat().st_size for path in files if path.parent.name == "target")
    calibration = sum(path.stat().st_size for path in files if path.parent.name == "calibration")
    assert info["bytes_calibration"] == calibration > 0
    assert run("info", place / "rebuilt") == 0
    shown = capsys.readouterr().out
    assert "0 (rebuilt), 1, 2 + final rebuilt from layer 2" in shown
    assert "on disk with target" in " ".join(shown.split())


def test_a_drafter_trains_and_is_judged_on_rebuilt_states(place: World) -> None:
    assert run("train", place / "rebuilt", "-o", place / "run", *TRAIN, "-q") == 0
    assert run("eval", place / "run", place / "rebuilt", "-q") == 0
    for name in ("rebuilt", "copied"):
        words = ("--to", "specforge-eagle3", "--missing-final", "zeros", "-o", place / f"dump-{name}", "-q")
        assert run("export-data", place / name, *words) == 0
    dumps = [[*sorted(Path(place / f"dump-{name}").rglob("*.ckpt"))] for name in ("rebuilt", "copied")]
    assert len(dumps[0]) == len(Store.open(place / "rebuilt"))
    for one, other in zip(*dumps, strict=True):
        parts = [torch.load(path, weights_only=True) for path in (one, other)]
        assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])
        assert parts[0]["hidden_state"].any()


def test_plan_says_what_rebuilding_saves_and_takes(place: World, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", place / "data", "--target", place / "target", "--layers", LAYERS, "--recipe", "rebuilt")
    assert run(*words) == 0
    assert "training holds" in capsys.readouterr().err
    assert run(*words, "--json") == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}
    store = Store.open(place / "rebuilt")
    blocks = next(file.size for file in store.manifest.target_files if file.path == BLOCKS_FILE)
    added = rows["rebuilt"]["bytes_target"] - rows["compact"]["bytes_target"]
    assert added == pytest.approx(blocks, rel=0.05)
    assert rows["rebuilt"]["rebuild_flops"] == pytest.approx(2 * added / 4)
    assert rows["compact"]["rebuild_flops"] == 0


def test_advise_measures_rebuilt_where_it_has_the_blocks(place: World, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for name, words in (("raw", ()), ("raw", ("--target", place / "target")), ("rebuilt", ())):
        assert run("advise", place / name, *words, "--json") == 0
        rows[name, bool(words)] = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "rebuilt" not in rows["raw", False]
    measured, compact = rows["raw", True]["rebuilt"], rows["raw", True]["compact"]
    assert 0 < measured["kl"] < 1
    assert measured["kl"] == pytest.approx(rows["rebuilt", False]["rebuilt"]["kl"])
    assert measured["channel_errors"].keys() == {"layer_1", "layer_2"}
    store = Store.open(place / "rebuilt")
    stored = store.totals["bytes_stored"] / store.totals["tokens"]
    assert measured["bytes_per_token"] < 0.7 * compact["bytes_per_token"]
    assert measured["bytes_per_token"] < stored


def test_layers_that_end_too_early_are_refused_before_anything_is_written(
    place: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schemas.capture.MOST_BLOCKS", 1)
    words = ("collect", place / "data", "-o", place / "early", "--target", place / "target", "--layers", "0,1")
    assert run(*words, "--recipe", "rebuilt") == 2
    message, fix = error_of(capsys.readouterr().err)
    assert "the top aux layer is 1 of" in message
    assert "--recipe compact" in fix
    assert not Path(place / "early").exists()


@pytest.mark.parametrize("layers", ["1,2", "0,1"])
def test_a_copy_of_some_layers_is_compared_with_the_captured_states_of_those(place: World, layers: str) -> None:
    destination = place / f"copied-{layers}"
    words = (
        "copy",
        place / "raw",
        destination,
        "--layers",
        layers,
        "--recipe",
        "rebuilt",
        "--target",
        place / "target",
    )
    assert run(*words, "-q") == 0
    assert ",".join(map(str, Store.open(destination).capture.aux_layers)) == layers


def test_a_copy_refuses_the_blocks_of_another_target(place: World, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("copy", place / "raw", place / "wrong", "--recipe", "rebuilt", "--target", place / "other")
    assert run(*words) == 4
    message, fix = error_of(capsys.readouterr().err)
    assert "checkpoint_sha256" in message
    assert "--target" in fix
    assert not Path(place / "wrong").exists()


def test_a_copy_refuses_blocks_that_nothing_proves_or_that_the_slice_disproves(place: World, tmp_path: Path) -> None:
    source = Store.open(place / "raw")
    unstated = source.capture.target.model_copy(update={"checkpoint_sha256": None})
    files = {entry.path: source.target_file(entry.path) for entry in source.manifest.target_files}
    capture = source.capture.model_copy(update={"target": unstated})
    old = create_store(tmp_path / "old", capture, source.manifest.head, "raw", files)
    run_copy(open_copy([source], tmp_path / "old"))
    wide = {"recipe": "rebuilt", "target": place / "other"}
    with pytest.raises(CaptureError, match="as the target's blocks rebuild it") as disproved:
        open_copy([Store.open(old.fs)], tmp_path / "one", **wide)
    assert disproved.value.kind == "cross-check"
    for path in (tmp_path / "old" / "calibration").glob("slice*"):
        path.unlink()
    with pytest.raises(ConfigError, match="nothing shows that other is the target of") as unproved:
        open_copy([Store.open(old.fs)], tmp_path / "two", **wide)
    assert unproved.value.kind == "calibration-missing"
    assert not (tmp_path / "one").exists()
    assert not (tmp_path / "two").exists()


def test_an_engine_whose_states_the_blocks_do_not_bring_back_is_refused(place: World) -> None:
    store = Store.open(place / "rebuilt")
    states = read_slice(store.fs, store.capture)
    assert states is not None
    samples = [store.sample(entry.id) for entry in states.samples]
    rebuilder = store.rebuilder()
    assert rebuilder is not None
    rebuilder.require_close(states, samples)
    aux = states.aux.clone()
    aux[0] = aux[1]
    for wrong, field in ((replace(states, aux=aux), "layer_0"), (replace(states, final=-states.final), "final")):
        with pytest.raises(CaptureError, match=f"{field} as the target's blocks rebuild it") as error:
            rebuilder.require_close(wrong, samples)
        assert error.value.kind == "cross-check"


def test_a_process_proves_its_blocks_on_its_first_samples_whichever_unit_they_are_of(place: World) -> None:
    store = Store.open(place / "rebuilt")
    records = [*store]
    wrong = [replace(record, final=-record.final) for record in records]
    options = CollectOptions(place / "data", place / "rebuilt", place / "target", layers=LAYERS, recipe="rebuilt")
    with open_job(options, Rank(), Drain(), lambda _text: None) as job:
        job._keep_slice(Unit("empty", 1, []), [])
        job._keep_slice(Unit("nothing supervised", 1, []), [_unsupervised(record) for record in records])
        with pytest.raises(CaptureError, match="final as the target's blocks rebuild it") as error:
            job._keep_slice(Unit("later", 2, []), wrong)
        assert error.value.kind == "cross-check"
        job._keep_slice(Unit("later", 2, []), [])


def _unsupervised(record: Record) -> Record:
    mask = np.zeros_like(record.sample.loss_mask)
    return replace(
        record,
        sample=replace(record.sample, loss_mask=mask),
        final=record.final[:0],
        final_rows=record.final_rows[:0],
    )


def test_what_a_filter_leaves_is_rebuilt_too(place: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(place / "rebuilt")
    run_copy(open_copy([store], tmp_path / "part", keep=lambda _record, entry: entry.split == "validation"))
    part = Store.open(tmp_path / "part")
    assert 0 < len(part) < len(store)
    packs = [
        pack for batch in TokenBatches(part, batch_tokens=512, split="validation", epochs=1) for pack in batch.packs
    ]
    assert sum(len(pack.sample_ids) for pack in packs) == len(part)
    assert all(pack.aux.shape[0] == 3 and len(pack.final) == len(pack.final_rows) for pack in packs)
    capsys.readouterr()
    assert run("advise", str(tmp_path / "part")) == 0
    shown = capsys.readouterr()
    assert "rebuilt is not measured" in shown.err
    assert "rebuilt " not in shown.out


def test_what_a_repair_drops_is_captured_again_and_comes_back_rebuilt(place: World, tmp_path: Path) -> None:
    run_copy(open_copy([Store.open(place / "rebuilt")], tmp_path / "store"))
    whole = {record.sample.id: record for record in Store.open(tmp_path / "store")}
    shard = next((tmp_path / "store" / "segments").glob("*/layer_1/c/0/0"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert run(*repair_words(tmp_path / "store"), "-q") == 0
    lost = len(whole) - len(Store.open(tmp_path / "store"))
    assert lost > 0
    words = ("collect", place / "data", "-o", str(tmp_path / "store"), "--target", place / "target")
    assert run(*words, "--layers", LAYERS, "--recipe", "rebuilt", "-q") == 0
    again = Store.open(tmp_path / "store")
    assert set(again.sample_ids) == set(whole)
    for record in again:
        assert torch.allclose(record.aux[0].float(), whole[record.sample.id].aux[0].float(), rtol=2**-6, atol=1e-2)
        assert record.final.shape == whole[record.sample.id].final.shape


def test_a_record_that_is_gone_is_made_again_from_the_segment(place: World, tmp_path: Path) -> None:
    run_copy(open_copy([Store.open(place / "rebuilt")], tmp_path / "store"))
    for path in (tmp_path / "store" / "commits").glob("*.json"):
        path.write_bytes(path.read_bytes()[:100])
    run(*repair_words(tmp_path / "store"), "-q")
    again, whole = Store.open(tmp_path / "store"), Store.open(place / "rebuilt")
    assert set(again.sample_ids) == set(whole.sample_ids)
    assert all(torch.equal(again[name].final, whole[name].final) for name in whole.sample_ids)

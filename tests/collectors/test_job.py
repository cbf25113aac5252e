"""Whole collect runs on a tiny saved target: content, resume, refusals, rejects."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from collectors.capture import job
from collectors.capture.job import CollectOptions, CollectReport, collect, open_job
from collectors.checks import reference
from collectors.engines import Captured, CaptureRequest
from collectors.engines.hf import HfEngine
from collectors.targets.load import load_target
from hiddenstore.errors import (
    CaptureError,
    ConfigError,
    ConflictError,
    FormatError,
    HiddenstoreError,
    InterruptError,
    StorageError,
)
from hiddenstore.inputs import PreparedInput
from hiddenstore.process import Drain, Rank
from hiddenstore.store import Store
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from hiddenstore.verify.profile import read_profile
from schemas.manifest import Container
from tests.accepting import repair_all
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import LAYERS, save_target


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 80)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def options(tmp_path: Path, target: Path) -> CollectOptions:
    data = data_for_tiny(tmp_path / "data")
    return CollectOptions(data, tmp_path / "store", str(target), recipe="raw", layers="-1,1,3")


def run(options: CollectOptions, rank: Rank | None = None, drain: Drain | None = None) -> CollectReport:
    return collect(options, rank, drain, note=lambda _text: None)


def test_the_store_holds_what_a_direct_forward_computes(options: CollectOptions, target: Path) -> None:
    report = run(options)
    store, loaded = Store.open(options.store), load_target(str(target), device="cpu")
    samples = list(PreparedInput.open(options.data).samples())
    assert report.samples == len(samples) == len(store)
    assert report.pending_units == 0
    assert store.capture.final_norm == "pre_norm"
    for sample in samples:
        record = store[sample.id]
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        with torch.no_grad():
            states = loaded.model(input_ids=ids, output_hidden_states=True).hidden_states
        for slot, index in enumerate((0, 2)):
            torch.testing.assert_close(record.aux[slot].float(), states[index][0], rtol=2**-7, atol=1e-3)
        normed = loaded.head.norm(record.final.float())
        torch.testing.assert_close(normed, states[LAYERS][0][record.final_rows], rtol=2**-6, atol=1e-2)
        assert np.array_equal(record.sample.input_ids, sample.input_ids)


@pytest.mark.parametrize(
    ("name", "problem"), [("chats.jsonl", "is a file, not a store"), ("notes", "no store and not empty: it holds x")]
)
def test_a_place_that_is_no_stores_is_refused_before_the_target_is_opened(
    options: CollectOptions, tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x").touch()
    (tmp_path / "chats.jsonl").touch()
    with pytest.raises(ConflictError, match=problem) as caught:
        run(replace(options, store=tmp_path / name, target=str(tmp_path / "no target")))
    assert caught.value.kind == "output-exists"


def test_a_first_unit_says_how_long_it_all_takes_before_it_is_committed(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hiddenstore.console.progress.FIRST_LINE_S", 0.0)
    run(options)
    first = next(line for line in capsys.readouterr().err.splitlines() if " collect tokens=" in line)
    assert re.search(r"tokens=0/\d+ rate=[1-9]\S* eta=\S+ samples=0", first), first


def test_recipe_tiny_stores_what_the_target_predicts_at_each_final_row(options: CollectOptions, target: Path) -> None:
    run(options)
    run(replace(options, store=options.data.parent / "tiny", recipe="tiny"))
    raw, tiny = Store.open(options.store), Store.open(options.data.parent / "tiny")
    loaded = load_target(str(target), device="cpu")
    assert (tiny.manifest.recipe, tiny.capture.holds_topk) == ("tiny", True)
    for sample_id in raw.sample_ids:
        one, other = raw[sample_id], tiny[sample_id]
        assert other.topk is not None
        assert other.final.shape[0] == 0
        logits = loaded.head.logits(one.final)
        assert torch.equal(other.topk.ids[:, 0], logits.argmax(-1))
        torch.testing.assert_close(other.topk.lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert np.array_equal(one.final_rows, other.final_rows)


@pytest.mark.parametrize("layers", ["eagle1", "medusa"])
def test_drafters_that_read_the_final_hidden_refuse_top_tokens(options: CollectOptions, layers: str) -> None:
    with pytest.raises(ConfigError, match="top tokens instead of the final hidden") as error:
        run(replace(options, layers=layers, recipe="tiny"))
    assert (error.value.kind, error.value.hint) == ("final-unfit", "--recipe compact")
    assert not Path(options.store).exists()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_interrupted_run_resumes_to_the_same_bytes_under_any_world_size(
    options: CollectOptions, tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = replace(options, store=tmp_path / "straight")
    run(straight)
    drain = Drain()
    forwards = iter(range(100))
    forward = HfEngine._forward
    monkeypatch.setattr(
        HfEngine, "_forward", lambda self, ids: (next(forwards) == 2 and drain.request(), forward(self, ids))[1]
    )
    with pytest.raises(InterruptError) as caught:
        run(options, drain=drain)
    assert caught.value.exit_code == 75
    assert 0 < len(Store.open(options.store)) < 12
    for rank in range(world_size):
        run(options, Rank(rank, world_size))
    assert segment_bytes(options.store) == segment_bytes(straight.store)
    assert run(options).units == 0


def test_each_rank_does_its_own_units(options: CollectOptions) -> None:
    first = run(options, Rank(0, 2))
    second = run(options, Rank(1, 2))
    assert first.units > 0
    assert second.units > 0
    assert first.pending_units == second.units
    assert second.pending_units == 0
    assert (first.pending_ranks, second.pending_ranks) == ((1,), ())
    assert first.samples + second.samples == 12


@pytest.mark.parametrize(("final", "rows"), [("all", "every"), ("none", "no")])
def test_final_all_and_none_hold_every_and_no_row(options: CollectOptions, final: str, rows: str) -> None:
    run(replace(options, final=final))  # type: ignore[arg-type]
    store = Store.open(options.store)
    for sample_id in store.sample_ids:
        record = store[sample_id]
        expected = record.sample.tokens if rows == "every" else 0
        assert record.final.shape[0] == len(record.final_rows) == expected


def test_tars_hold_what_zarr_holds(options: CollectOptions, tmp_path: Path) -> None:
    run(options)
    tars = replace(options, store=tmp_path / "tars", container="webdataset")
    run(tars)
    assert run(tars).units == 0
    assert contents(Store.open(tars.store)) == contents(Store.open(options.store))
    with pytest.raises(ConflictError, match="container: webdataset stored, zarr asked"):
        run(replace(tars, container="zarr"))


def test_two_inputs_can_be_collected_into_one_store(options: CollectOptions, tmp_path: Path) -> None:
    run(options)
    run(replace(options, data=data_for_tiny(tmp_path / "more", samples=5, seed=9)))
    assert len(Store.open(options.store)) == 17


def test_samples_that_came_with_another_input_are_counted_before_they_are_captured_once_more(
    options: CollectOptions, tmp_path: Path
) -> None:
    run(options)
    samples = list(PreparedInput.open(options.data).samples())
    others = list(PreparedInput.open(data_for_tiny(tmp_path / "others", samples=5, seed=9)).samples())
    more = replace(options, data=data_for_tiny(tmp_path / "more", samples=[*samples[:4], *others]))
    notes: list[str] = []
    for _ in range(2):
        collect(more, note=notes.append)
    tokens = sum(sample.tokens for sample in samples[:4])
    (warning,) = (note for note in notes if note.startswith("warning: "))
    assert f"holds 4 of these 9 samples already, by another input: their {tokens:,} tokens" in warning
    assert len(Store.open(options.store)) == 17


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"layers": "1,9"}, ConfigError, "layers-invalid"),
        ({"layers": "eagel3"}, ConfigError, "layers-invalid"),
        ({"engine": "hg"}, ConfigError, "name-unknown"),
        ({"recipe": "smal"}, ConfigError, "name-unknown"),
        ({"dtype": "int3"}, ConfigError, "option-invalid"),
        ({"layers": "eagle1", "final": "supervised"}, ConfigError, "final-unfit"),
        ({"data": "nowhere"}, HiddenstoreError, "path-missing"),
        ({"target": "./nowhere"}, HiddenstoreError, "target-missing"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_written(
    options: CollectOptions, change: dict[str, str], error: type[HiddenstoreError], kind: str
) -> None:
    with pytest.raises(error) as caught:
        run(replace(options, **change))  # type: ignore[arg-type]
    assert caught.value.kind == kind
    assert not Path(options.store).exists()


def test_a_target_folder_without_config_is_named(options: CollectOptions, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json") as caught:
        run(replace(options, target=str(tmp_path / "empty")))
    assert caught.value.kind == "target-incomplete"


def test_data_of_another_tokenizer_is_refused(options: CollectOptions, tmp_path: Path) -> None:
    other = data_for_tiny(tmp_path / "other", tokenizer_sha256="5" * 64)
    with pytest.raises(FormatError, match="tokenizer 55555555") as caught:
        run(replace(options, data=other))
    assert caught.value.kind == "tokenizer-mismatch"
    assert not Path(options.store).exists()


def test_a_store_of_another_capture_is_refused(options: CollectOptions) -> None:
    run(options)
    before = segment_bytes(options.store)
    with pytest.raises(ConflictError, match="aux_layers") as caught:
        run(replace(options, layers="0,1"))
    assert caught.value.kind == "store-mismatch"
    assert segment_bytes(options.store) == before


def test_another_target_for_a_store_is_refused(options: CollectOptions, tmp_path: Path) -> None:
    run(options)
    with pytest.raises(ConflictError, match="weights_sha256") as caught:
        run(replace(options, target=str(save_target(tmp_path / "twin", seed=1))))
    assert caught.value.kind == "store-mismatch"


def test_a_target_that_computes_nan_writes_nothing(options: CollectOptions, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "sick")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CaptureError, match="layer 2") as caught:
        run(replace(options, target=str(folder)))
    assert caught.value.kind == "non-finite"
    assert not Path(options.store).exists()


def sicken(monkeypatch: pytest.MonkeyPatch, damage: object) -> None:
    capture = HfEngine.capture

    def sick(self: HfEngine, requests: list[CaptureRequest], *watched: object) -> Captured:
        captured = capture(self, requests, *watched)  # type: ignore[arg-type]
        damage(captured)  # type: ignore[operator]
        return captured

    monkeypatch.setattr(HfEngine, "capture", sick)


def test_one_sick_sample_is_rejected_with_its_layer_and_counted(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = iter(range(100))

    def damage(captured: Captured) -> None:
        if next(units) == 0:
            captured.aux[1, 2, 5] = float("nan")

    sicken(monkeypatch, damage)
    report = run(options)
    assert report.rejects == {"non-finite": 1}
    store = Store.open(options.store)
    (reject,) = [reject for record in store.commits() for reject in record.rejects]
    assert reject.detail.startswith("layer_1 holds NaN")
    assert reject.id not in store
    assert len(store) == 11


def test_too_many_rejects_stop_the_run_and_name_the_counts(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sicken(monkeypatch, lambda captured: captured.aux[1].fill_(float("inf")))
    with pytest.raises(
        CaptureError, match=r"samples rejected \(\d+ non-finite\), more than the 1 allowed of 12"
    ) as caught:
        run(options)
    assert caught.value.kind == "too-many-rejects"
    assert len(Store.open(options.store)) == 0


def test_the_rejects_of_every_rank_count_against_what_is_allowed_of_the_input(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(captured: Captured) -> None:
        captured.aux[1, 2, 5] = float("nan")

    drain, note = Drain(), lambda _text: None
    with open_job(options, Rank(0, 2), drain, note) as first, open_job(options, Rank(1, 2), drain, note) as second:
        sicken(monkeypatch, damage)
        units = list(PreparedInput.open(options.data).units(80))[:2]
        committed = first.capture(units[0]).result()
        assert committed is not None
        assert [reject.reason for reject in committed.rejects] == ["non-finite"]
        # The other rank was opened before: by its own count it may still reject one.
        with pytest.raises(CaptureError, match=r"2 samples rejected \(2 non-finite\), more than the 1 allowed of 12"):
            second.capture(units[1]).result()


@pytest.mark.parametrize("batch_tokens", [16_384, 1])
def test_what_does_not_fit_into_a_gpu_is_named_with_what_helps(
    options: CollectOptions, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(HfEngine, "_forward", full)
    with pytest.raises(StorageError, match=r"does not fit into the memory of .*: CUDA out of memory") as caught:
        run(replace(options, batch_tokens=batch_tokens))
    assert caught.value.kind == "out-of-memory"
    alone = batch_tokens == 1
    assert ("tokens alone" if alone else "a batch of") in caught.value.message
    assert ("--max-tokens" if alone else "--batch-tokens") in str(caught.value.hint)


def test_other_ranks_begin_a_store_when_the_first_one_has_given_it_its_layer_profile(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_POLL_S", 0.01)
    said: list[str] = []
    waiting = threading.Thread(
        target=reference.await_first, args=(options.store, Rank(1, 2), lambda: False, said.append)
    )
    waiting.start()
    while not said:
        time.sleep(0.01)
    assert waiting.is_alive()
    run(options, Rank(0, 2))
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(said) == 1
    assert "rank 1 of 2 waits for rank 0" in said[0]
    assert read_profile(Store.open(options.store).fs) is not None


def test_a_first_rank_that_never_comes_is_waited_for_so_long_and_no_longer(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_POLL_S", 0.01)
    monkeypatch.setattr(reference, "MOST_WAITED_S", 0.05)
    said: list[str] = []
    reference.await_first(options.store, Rank(3, 4), lambda: False, said.append)
    assert said[-1].startswith("warning: rank 0 did not begin the store")
    with pytest.raises(InterruptError):
        reference.await_first(options.store, Rank(3, 4), lambda: True, said.append)


def test_no_recipe_is_chosen_where_every_first_sample_is_rejected(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sicken(monkeypatch, lambda captured: captured.aux[1].fill_(float("inf")))
    with pytest.raises(CaptureError, match="none of the first 12 samples may be stored: layer_1 holds NaN") as caught:
        run(replace(options, recipe="auto"))
    assert caught.value.kind == "calibration-rejected"
    assert not Path(options.store).exists()


def test_final_rows_of_another_position_are_rejected(options: CollectOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    sicken(monkeypatch, lambda captured: captured.final.copy_(captured.final.roll(1, dims=0)))
    with pytest.raises(CaptureError, match="wrong-next-token"):
        run(options)


def test_a_failing_commit_stops_the_run(options: CollectOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(job, "write_unit", refuse)
    with pytest.raises(OSError, match="no space"):
        run(options)


def test_shallow_targets_say_which_layer_moved(options: CollectOptions) -> None:
    said: list[str] = []
    collect(replace(options, layers="eagle3"), note=said.append)
    assert "eagle3's defaults are 1, 1, 0, which collide" in said[0]
    assert Store.open(options.store).capture.aux_layers == (0, 1, 2)


@pytest.mark.parametrize(("container", "recipe"), [("zarr", "raw"), ("webdataset", "raw"), ("webdataset", "safe")])
def test_the_same_collect_brings_back_what_a_repair_dropped_a2(
    options: CollectOptions, container: Container, recipe: str
) -> None:
    options = replace(options, container=container, recipe=recipe)
    run(options)
    store = Store.open(options.store)
    expected = {name: store[name] for name in store.sample_ids}
    record = max(store.commits(), key=lambda r: len(r.samples))
    folder, victim = Path(store.path, record.segment), record.samples[0].id
    if container == "webdataset":
        path = folder / "samples.tar"
        place = path.read_bytes().index(f"{victim}.layer_1".encode()) + 512 + 130
    else:
        path, place = folder / "layer_1" / "c" / "0" / "0", 8
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    lost = repair_all(options.store).dropped
    assert lost == (len(record.samples) if container == "zarr" else 1)
    report = run(options)
    assert (report.units, report.samples, report.pending_units) == (1, lost, 0)
    again = Store.open(options.store)
    assert again.sample_ids == store.sample_ids
    for name, before in expected.items():
        if name != victim and container == "webdataset":
            assert torch.equal(again[name].aux.view(torch.uint16), before.aux.view(torch.uint16))
        torch.testing.assert_close(again[name].aux.float(), before.aux.float(), rtol=2**-6, atol=2e-2)
    assert verify(options.store, "bytes").findings == []
    assert run(options).units == 0

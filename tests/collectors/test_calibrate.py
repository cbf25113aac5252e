"""The slice a capture keeps, and ``--recipe auto``, on a tiny saved target."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from collectors.capture import job
from collectors.capture.job import collect
from collectors.capture.options import CollectOptions
from collectors.cli.collect import collect as command
from collectors.engines.hf import HfEngine
from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.codecs.fitted import fit
from hiddenstore.codecs.recipes import DEFAULT_RECIPE
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, InterruptError
from hiddenstore.inputs import PreparedInput
from hiddenstore.inspect.advise import advise_store
from hiddenstore.inspect.choice import RecipeLimits
from hiddenstore.inspect.facts import read_advice
from hiddenstore.process import Drain, Rank
from hiddenstore.store import Store
from hiddenstore.targets.calibration import read_slice, write_slice
from hiddenstore.verify import verify
from schemas.capture import CaptureSpec
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 80)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def options(tmp_path: Path, target: Path) -> CollectOptions:
    data = data_for_tiny(tmp_path / "data")
    return CollectOptions(data, tmp_path / "store", str(target), layers="0,2")


def run(options: CollectOptions, rank: Rank | None = None, drain: Drain | None = None) -> list[str]:
    said: list[str] = []
    collect(options, rank, drain, note=said.append)
    return said


def calibration_bytes(store: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((Path(store) / "calibration").iterdir())}


def test_the_slice_holds_the_first_unit_before_any_codec(options: CollectOptions, tmp_path: Path) -> None:
    run(options)
    run(replace(options, store=tmp_path / "raw", recipe="raw"))
    store, raw = Store.open(options.store), Store.open(tmp_path / "raw")
    taken = read_slice(store.fs, store.capture)
    assert taken is not None
    first = store.commits()[0].samples
    assert [sample.id for sample in taken.samples] == [sample.id for sample in first]
    records = [raw.read(sample.id) for sample in first]
    assert torch.equal(taken.aux.view(torch.int16), torch.cat([r.aux for r in records], 1).view(torch.int16))
    assert torch.equal(taken.final.view(torch.int16), torch.cat([r.final for r in records]).view(torch.int16))
    assert verify(store.path, "bytes").ok
    assert advise_store(store, RecipeLimits()).chosen


def test_top_tokens_in_the_store_leave_the_final_hidden_in_the_slice(options: CollectOptions) -> None:
    run(replace(options, recipe="tiny"))
    store = Store.open(options.store)
    taken = read_slice(store.fs, store.capture)
    assert taken is not None
    assert len(taken.final) == sum(sample.final_rows for sample in store.commits()[0].samples) > 0
    assert all(row.kl is not None for row in advise_store(store, RecipeLimits()).rows)


@pytest.mark.parametrize("recipe", ["safe", "auto"])
def test_the_slice_is_the_same_after_any_interruption_and_under_any_world_size(
    options: CollectOptions, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, recipe=recipe)
    straight = replace(options, store=tmp_path / "straight")
    run(straight)
    drain = Drain()
    write = job.write_unit
    monkeypatch.setattr(job, "write_unit", lambda *words: (drain.request(), write(*words))[1])
    with pytest.raises(InterruptError):
        run(options, Rank(1, 3), drain)
    monkeypatch.setattr(job, "write_unit", write)
    for rank in (2, 0, 1):
        run(options, Rank(rank, 3))
    assert Store.open(options.store).sample_ids == Store.open(straight.store).sample_ids
    assert calibration_bytes(options.store) == calibration_bytes(straight.store)


def test_the_default_is_safe_and_measures_nothing_first(options: CollectOptions) -> None:
    recipe = next(parameter for parameter in command.params if parameter.name == "recipe")
    assert recipe.default == options.recipe == DEFAULT_RECIPE == "safe"
    assert not any("KL" in line for line in run(options))
    assert read_advice(Store.open(options.store).fs) is None


def test_auto_creates_the_store_with_the_recipe_its_table_names(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[bool] = []
    forward = HfEngine._forward
    monkeypatch.setattr(
        HfEngine, "_forward", lambda self, ids: (forwards.append(Path(options.store).exists()), forward(self, ids))[1]
    )
    said = run(replace(options, recipe="auto"))
    assert forwards[0] is False
    store = Store.open(options.store)
    advice = read_advice(store.fs)
    assert advice is not None
    assert store.manifest.recipe == advice.chosen == "safe"
    assert any(line.startswith("→ safe") for line in said)
    taken = read_slice(store.fs, store.capture)
    assert taken is not None
    assert taken.tokens == sum(record.tokens for record in store.commits())
    assert verify(store.path, "bytes").ok


def test_auto_tries_rebuilt_and_says_why_it_took_no_smaller_recipe(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(replace(options, recipe="auto"))
    advice = read_advice(Store.open(options.store).fs)
    assert advice is not None
    assert "rebuilt" in [row.recipe for row in advice.rows]
    refused = [line.split()[1] for line in said if line.startswith("not ")]
    assert refused == ["rebuilt-q3-all", "rebuilt-q3", "rebuilt", "tiny", "compact"]
    assert any("; --recipe compact takes it all the same" in line for line in said)
    assert not any("--max-kl" in line or "--paired" in line for line in said)
    # The limits are the one choice's: let everything pass, and the smallest is taken.
    monkeypatch.setattr(job, "RecipeLimits", lambda: RecipeLimits(100.0, 100.0))
    loose = replace(options, store=Path(options.store).parent / "loose", recipe="auto")
    run(loose)
    store = Store.open(loose.store)
    assert store.manifest.recipe == "rebuilt-q3-all"
    assert store.capture.rebuilds_final
    assert verify(store.path, "bytes").ok


def test_auto_judges_rebuilt_on_the_beginning_of_a_sample_longer_than_the_slice_or_says_why_not(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = next(PreparedInput.open(options.data).samples())
    first = int(sample.loss_mask.argmax())
    assert 1 < first < sample.tokens - 1
    for tokens, is_measured in ((sample.tokens - 1, True), (first - 1, False)):
        monkeypatch.setattr("hiddenstore.targets.calibration.MOST_TOKENS", tokens)
        store = Path(options.store).parent / f"store-{tokens}"
        said = run(replace(options, store=store, recipe="auto"))
        advice = read_advice(Store.open(store).fs)
        assert advice is not None
        assert [row.kl is not None for row in advice.rows if row.recipe == "rebuilt"] == [True] * is_measured
        assert any("rebuilt is not measured: the first sample has no final row" in line for line in said) != is_measured
        assert next(row.kl for row in advice.rows if row.recipe == "safe") is not None


def test_auto_says_that_a_targets_states_cannot_be_rebuilt(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.targets.blocks.MOST_BYTES", 10)
    said = run(replace(options, recipe="auto"))
    assert any(line.startswith("rebuilt is not measured: states of a llama target cannot be rebuilt") for line in said)
    advice = read_advice(Store.open(options.store).fs)
    assert advice is not None
    assert "rebuilt" not in [row.recipe for row in advice.rows]


@pytest.mark.parametrize("final_or_layers", [{"layers": "eagle1"}, {"final": "none"}])
def test_auto_measures_captures_without_aux_layers_and_without_a_final_hidden(
    options: CollectOptions, final_or_layers: dict[str, Any]
) -> None:
    said = run(replace(options, recipe="auto", **final_or_layers))
    assert any("is the smallest recipe" in line for line in said)
    assert len(Store.open(options.store)) > 0


def test_states_cannot_be_rebuilt_from_no_layer(options: CollectOptions) -> None:
    with pytest.raises(ConfigError, match="there is no aux layer") as caught:
        run(replace(options, recipe="rebuilt", layers="eagle1"))
    assert caught.value.kind == "blocks-unsupported"


def test_auto_keeps_the_recipe_of_the_store_it_resumes(options: CollectOptions) -> None:
    run(replace(options, recipe="compact"))
    commits = Path(options.store) / "commits"
    for record in sorted(commits.iterdir())[1:]:
        record.unlink()
    said = run(replace(options, recipe="auto"))
    store = Store.open(options.store)
    assert store.manifest.recipe == "compact"
    assert len(store) == 12
    assert not any("KL" in line for line in said)


def test_a_rank_that_would_have_chosen_otherwise_takes_what_another_rank_settled(
    options: CollectOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = replace(options, store=tmp_path / "settled", recipe="lossless")
    run(settled)
    measure = job.calibrate

    def slower(*words: object) -> object:
        found = measure(*words)  # type: ignore[arg-type]
        shutil.copytree(settled.store, options.store)
        return found

    monkeypatch.setattr(job, "calibrate", slower)
    run(replace(options, recipe="auto"), Rank(1, 2))
    assert Store.open(options.store).manifest.recipe == "lossless"


def test_a_slice_that_is_there_is_not_written_again(options: CollectOptions, tmp_path: Path) -> None:
    run(options)
    store = Store.open(options.store)
    taken = read_slice(store.fs, store.capture)
    assert taken is not None
    before = os.stat(Path(options.store) / "calibration" / "slice.json").st_ino
    run(replace(options, data=data_for_tiny(tmp_path / "more", samples=5, seed=9)))
    assert not write_slice(store.fs, taken, store.capture)
    assert os.stat(Path(options.store) / "calibration" / "slice.json").st_ino == before


FITTED = "aux=klt,final=q8"


def test_a_fitted_codec_is_fitted_once_and_the_same_after_any_interruption(
    options: CollectOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, recipe=FITTED)
    straight = replace(options, store=tmp_path / "straight")
    assert any("klt is fitted to one sample of 1 first" in line for line in run(straight))
    drain, write = Drain(), job.write_unit
    monkeypatch.setattr(job, "write_unit", lambda *words: (drain.request(), write(*words))[1])
    with pytest.raises(InterruptError):
        run(options, Rank(1, 2), drain)
    monkeypatch.setattr(job, "write_unit", write)
    said = [run(options, Rank(rank, 2)) for rank in (1, 0)]
    assert not any("is fitted" in line for line in chain(*said))
    one, other = Store.open(options.store), Store.open(straight.store)
    assert (one.capture, one.sample_ids) == (other.capture, other.sample_ids)
    assert one.capture.codecs.aux.startswith("klt-")
    for record in one:
        assert torch.equal(record.aux.view(torch.int16), other.read(record.sample.id).aux.view(torch.int16))
    assert verify(one.path, "bytes").ok


def test_the_rank_that_makes_the_store_first_says_what_all_are_coded_by(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, recipe=FITTED)

    def slower(capture: CaptureSpec, states: Iterable[torch.Tensor]) -> tuple[CaptureSpec, dict[str, bytes]]:
        monkeypatch.setattr(job, "fit", fit)
        run(options, Rank(0, 2))
        return fit(capture, (part * 2 for part in states))

    monkeypatch.setattr(job, "fit", slower)
    run(options, Rank(1, 2))
    store = Store.open(options.store)
    assert len(store.commits()) == len(store.inputs()[store.commits()[0].input].units)
    assert verify(store.path, "bytes").ok


def test_a_lost_transform_comes_back_with_the_same_collect_or_is_missed_before_anything_is_captured(
    options: CollectOptions, tmp_path: Path
) -> None:
    options = replace(options, recipe=FITTED)
    run(options)
    store = Store.open(options.store)
    file = Path(store.path, "target", f"{store.capture.codecs.aux}.safetensors")
    whole = file.read_bytes()
    file.unlink()
    run(options)
    assert file.read_bytes() == whole
    assert verify(store.path, "bytes").ok
    file.unlink()
    other = replace(options, data=data_for_tiny(tmp_path / "other", seed=3))
    with pytest.raises(CorruptionError, match="is gone, and the states of this input are fitted by another") as caught:
        run(other)
    assert (caught.value.kind, caught.value.hint) == (
        "target-file-corrupt",
        f"hiddenstore copy ANOTHER_COPY {store.path}",
    )
    assert len(Store.open(store.path).inputs()) == 1


def test_a_store_of_another_recipe_is_refused_before_anything_is_fitted(options: CollectOptions) -> None:
    run(options)
    with pytest.raises(ConflictError, match=r"capture\.codecs\.aux: q8 stored, klt asked"):
        run(replace(options, recipe=FITTED))


def test_a_store_whose_transforms_are_of_more_layers_is_refused_before_a_forward_pass(
    options: CollectOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, recipe=FITTED, layers="0,2")
    run(options)
    run_copy(open_copy([Store.open(options.store)], tmp_path / "one", layers=[2]))
    monkeypatch.setattr(job.CollectJob, "run", lambda *_: pytest.fail("units were captured"))
    more = replace(options, store=tmp_path / "one", layers="2", data=data_for_tiny(tmp_path / "more", seed=5))
    with pytest.raises(ConfigError, match=r"one is fitted to more layers than the store holds") as caught:
        run(more)
    assert caught.value.kind == "codec-unfit"

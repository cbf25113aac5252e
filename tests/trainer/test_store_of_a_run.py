"""What a run is judged by: the store it was trained on, all that was read of it, or none where another lies there."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hiddenstore.cli import main
from hiddenstore.errors import CorruptionError
from hiddenstore.testing.builders import make_store
from tests.trainer.runs import WORDS
from trainer.train.loop import train
from trainer.train.run_folder import describe, training_store


def typed(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def trained(place: Path, *words: str) -> tuple[Path, Path]:
    """A store and a run of it."""
    store = Path(make_store(place, samples=12, layers=(1, 3, 4)).path)
    train(store, place / "run", words=[*WORDS, "train.max_steps=2", *words])
    return store, place / "run"


def test_a_run_serves_on_where_a_smaller_copy_has_taken_the_place_of_its_store(tmp_path: Path) -> None:
    store, run = trained(tmp_path)
    typed("copy", store, tmp_path / "smaller", "--recipe", "compact")
    store.rename(tmp_path / "original")
    (tmp_path / "smaller").rename(store)
    for judged in (store, tmp_path / "original"):
        shown = typed("eval", run, judged, "--json")
        assert f"{store} no longer holds what {run} was trained on" in " ".join(shown.stderr.split())
        assert json.loads(shown.stdout)["ngram_accepted_length"] >= 1
    typed("report", run, "-o", tmp_path / "run.html")
    typed("train", store, "-o", tmp_path / "next", *WORDS, "train.max_steps=1", f"train.init_from={run}")


def test_a_run_serves_on_where_a_store_of_other_units_has_taken_the_place_of_its_own(tmp_path: Path) -> None:
    store, run = trained(tmp_path / "a")
    store.rename(tmp_path / "original")
    Path(make_store(tmp_path / "b", samples=7, layers=(1, 3, 4), seed=5).path).rename(store)
    assert training_store(describe(run)) is None


def test_a_damaged_store_that_knows_the_run_is_not_taken_for_another(tmp_path: Path) -> None:
    store, run = trained(tmp_path)
    next((store / "commits").glob("*.json")).unlink()
    with pytest.raises(CorruptionError):
        training_store(describe(run))


def test_a_drafter_below_the_floor_is_told_to_train_on_only_where_its_store_is_left(tmp_path: Path) -> None:
    store, run = trained(tmp_path, "optim.lr=1e-9")
    for moved in (False, True):
        place = store.rename(tmp_path / "original") if moved else store
        said = " ".join(typed("eval", run, place).stderr.split())
        assert "more steps usually help" in said
        assert ("hiddenstore train" in said) != moved


def test_the_advice_below_the_floor_lets_a_run_go_on_that_ran_out_of_patience(tmp_path: Path) -> None:
    wild = ("optim.lr=3", "optim.schedule=constant", "train.spike_factor=none")
    store, run = trained(tmp_path, *wild, "train.max_steps=60", "train.patience=1", "train.validate_every=1")
    reached = describe(run).spec.step
    assert reached < 60
    advice = re.search(
        r"hiddenstore (train .*train\.patience=none)", " ".join(typed("eval", run, store).stderr.split())
    )
    assert advice is not None
    typed(*advice[1].replace("max_steps=100", f"max_steps={reached + 1}").split())
    assert describe(run).spec.step == reached + 1

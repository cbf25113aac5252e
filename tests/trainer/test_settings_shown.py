"""What a person is told before a run starts: every setting with its origin, the vocabulary's share, the duration."""

import json
from pathlib import Path

import pytest
import torch

from hiddenstore.cli import main
from hiddenstore.files.lock import FolderLock
from hiddenstore.process import Rank
from hiddenstore.settings import key_paths
from hiddenstore.store import Store
from tests.trainer.runs import WORDS, tiny_store
from trainer.parallel.group import ProcessGroup
from trainer.settings import config_class
from trainer.train.loop import forecast, seconds_per_step, train
from trainer.train.run_folder import TrainOptions
from trainer.train.state import TrainState, build_state
from trainer.train.step import steps


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return tiny_store(tmp_path)


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    with pytest.raises(SystemExit) as done:
        main(["train", *words, "--settings", "--json"])
    assert done.value.code == 0
    return {row["key"]: row for row in json.loads(capsys.readouterr().out)["settings"]}


def test_settings_lists_every_setting_with_its_value_origin_and_meaning(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    rows = answered(capsys, store.path, "optim.lr=0.5")
    assert {key.split(".", 1)[0] for key in rows} == {"data", "drafter", "loss", "optim", "train"}
    assert set(rows) == {".".join(key.split(".")[:2]) for key in key_paths(config_class("eagle3"))}
    assert all(row["why"] for row in rows.values())
    assert (rows["optim.lr"]["value"], rows["optim.lr"]["origin"]) == (0.5, "command line")
    assert rows["drafter.hidden_size"]["origin"] == "store"
    assert rows["optim.clip"]["origin"] == "default"
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_without_a_folder_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", store.path])
    assert done.value.code == 2
    assert "--out" in capsys.readouterr().err


def state_of(store: Store, run: Path) -> TrainState:
    words = (*WORDS, "train.max_steps=4", "train.validate_every=0")
    return build_state(TrainOptions(store.path, run, None, None, words), ProcessGroup(Rank()), FolderLock(run))


def test_a_forecast_leaves_the_run_as_it_would_have_been(store: Store, tmp_path: Path) -> None:
    plain, told = state_of(store, tmp_path / "plain"), state_of(store, tmp_path / "told")
    assert "a step of" in forecast(told)
    assert seconds_per_step(told) > 0
    losses = [[metrics.loss for _, metrics in steps(state)] for state in (plain, told)]
    assert losses[0] == losses[1]
    for one, other in zip(plain.model.parameters(), told.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_person_reads_the_duration_and_the_share_of_the_vocabulary_before_the_first_step(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", store.path, *WORDS, "train.max_steps=2", "-o", str(tmp_path / "run")])
    assert done.value.code == 0
    told = capsys.readouterr().err
    assert "of the supervised ones" in told
    assert "measured on one pack" in told
    assert train(store.path, tmp_path / "run", resume=True).was_finished

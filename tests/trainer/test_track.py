"""Trackers: what each is given, that a resumed run goes on in the same one, and that a broken one stops nothing."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from hiddenstore.errors import ConfigError
from hiddenstore.store import Store
from tests.tiny_world import run
from tests.trainer import runs
from trainer.train import track
from trainer.train.loop import train as run_training
from trainer.train.run_folder import branch, read_facts
from trainer.train.track import TRACKERS, TrackedRun

WORDS = [*runs.WORDS, "train.max_steps=4", "train.validate_every=2", "loss.steps=2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return runs.tiny_store(tmp_path_factory.mktemp("store"))


def train(store: Store, run: Path, *words: str, resume: bool = False) -> list[float]:
    """The losses of the run's own log."""
    given = [*words] if resume else [*WORDS, *words]
    run_training(store.path, run, words=given, resume=resume)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


class Kept:
    """A tracker of somebody else's package."""

    opened: list["Kept"] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.id, self.logged, self.closed = run, run.id, dict[tuple[str, int], float](), False
        self.opened.append(self)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged |= {(name, step): value for name, value in values.items()}

    def close(self) -> None:
        self.closed = True


class Broken(Kept):
    def log(self, values: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no way to postgresql://me:hunter2@server/runs")


class Shut(Kept):
    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError("no way to postgresql://me:hunter2@server/runs")


def test_a_tracker_gets_losses_and_validations_and_the_same_id_after_a_resume(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS.rows, "kept", Kept)
    monkeypatch.setattr(Kept, "opened", [])
    losses = train(store, tmp_path / "run", "train.tracker=kept")
    first = Kept.opened[0]
    assert [first.logged["train/loss", step] for step in range(1, 5)] == losses
    assert first.logged["train/acc@2", 3] >= 0
    assert {step for name, step in first.logged if name == "validation/loss@1"} == {2, 4}
    assert all(math.isfinite(value) for value in first.logged.values())
    assert first.closed
    assert first.run.settings["loss"]["steps"] == 2
    assert train(store, tmp_path / "run", "train.max_steps=6", resume=True)[:4] == losses
    second = Kept.opened[1]
    assert (second.id, second.run.start) == (first.id, 4)
    assert min(step for _, step in second.logged) == 5


def test_a_tracker_that_fails_is_said_once_and_the_training_goes_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TRACKERS.rows, "broken", Broken)
    assert run("train", store.path, "-o", str(tmp_path / "run"), *WORDS, "train.tracker=broken") == 0
    said = " ".join(capsys.readouterr().err.split())
    refusal = "ConnectionError: no way to postgresql://server/runs; the training goes on"
    assert said.count(f"broken logs no more: {refusal}") == 1
    assert "hunter2" not in said


def test_a_tracker_that_cannot_open_is_named_and_the_same_run_goes_on_without_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS.rows, "kept", Kept)
    monkeypatch.setitem(TRACKERS.rows, "shut", Shut)
    with pytest.raises(ConfigError, match="shut cannot be opened: ConnectionError: no way to postgresql://s") as caught:
        train(store, tmp_path / "run", "train.tracker=shut")
    assert caught.value.kind == "tracker-start"
    assert len(train(store, tmp_path / "run", "train.tracker=null", resume=True)) == 4


def test_a_run_that_branches_off_is_another_run_to_a_tracker(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS.rows, "kept", Kept)
    monkeypatch.setattr(Kept, "opened", [])
    train(store, tmp_path / "run", "train.tracker=kept")
    (tmp_path / "run/wandb").mkdir()
    branch(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "other/wandb").exists()
    train(store, tmp_path / "other", "train.max_steps=5", resume=True)
    first, second = Kept.opened
    assert first.id != second.id
    assert len(second.id) == 16


def test_a_tracker_that_is_not_known_or_not_installed_is_said_before_the_first_step(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"unknown tracker 'wand'.*did you mean wandb\?") as caught:
        train(store, tmp_path / "one", "train.tracker=wand")
    assert caught.value.kind == "name-unknown"

    def absent(package: str) -> object:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(track, "import_module", absent)
    with pytest.raises(ConfigError, match=r"train\.tracker=mlflow is set, but mlflow is not installed") as caught:
        train(store, tmp_path / "two", "train.tracker=mlflow")
    assert caught.value.hint == "pip install 'hiddenstore[mlflow]'"
    assert not (tmp_path / "one").exists()
    assert not (tmp_path / "two").exists()


def test_tensorboard_holds_every_step_and_validation_of_a_run_and_of_its_resume(store: Store, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(store, tmp_path / "run", "train.tracker=tensorboard")
    losses = train(store, tmp_path / "run", "train.max_steps=6", resume=True)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(dict(enumerate(losses, 1)))
    assert [event.step for event in events.Scalars("validation/loss@1")] == [2, 4, 6]


def test_mlflow_holds_the_curves_of_a_run_and_of_its_resume(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'hiddenstore[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train(store, tmp_path / "run", "train.tracker=mlflow")
    losses = train(store, tmp_path / "run", "train.max_steps=6", resume=True)
    client = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path / 'run/mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("hiddenstore").experiment_id])
    assert run.data.params["loss.steps"] == "2"
    history = sorted(client.get_metric_history(run.info.run_id, "train/loss"), key=lambda metric: metric.step)
    assert [metric.value for metric in history] == pytest.approx(losses)
    assert len(client.get_metric_history(run.info.run_id, "train/acc_2")) == len(losses)


def test_wandb_writes_a_run_that_needs_no_server(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'hiddenstore[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(store, tmp_path / "run", "train.tracker=wandb")
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    assert read_facts(tmp_path / "run").id in file.name
    assert b"train/loss" in file.read_bytes()

"""Where a run's curves also go: the table of trackers. ``metrics.jsonl`` stays the log; a tracker only shows it.

What a tracker raises while it logs ends its own log, never the training.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hiddenstore.console.output import output
from hiddenstore.errors import ConfigError, HiddenstoreError, Kind
from hiddenstore.registry import Registry
from trainer.config import LoopConfig


@dataclass(frozen=True)
class TrackedRun:
    """The run's folder, the step it begins after, and its settings. ``id`` is the same after every resume."""

    path: Path
    start: int
    settings: Mapping[str, Any]
    id: str


class Tracker(Protocol):
    """An open log of one run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Values by name, such as ``train/loss``, after an optimizer step."""

    def close(self) -> None:
        """Everything is logged, or the run was stopped."""


class TensorBoard:
    """``RUN/tensorboard``; what an interrupted run logged behind its checkpoint is purged."""

    def __init__(self, run: TrackedRun) -> None:
        _require("tensorboard")
        board = import_module("torch.utils.tensorboard")
        self._writer = board.SummaryWriter(str(run.path / "tensorboard"), purge_step=run.start + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases, by its own environment: ``WANDB_MODE=offline`` writes to ``RUN/wandb`` and asks no server.
    Steps that were logged before a resume are not logged again: the run goes through them with the same numbers."""

    def __init__(self, run: TrackedRun) -> None:
        project = os.environ.get("WANDB_PROJECT", "hiddenstore")
        options: dict[str, Any] = {"id": run.id, "resume": "allow", "name": run.path.name, "dir": str(run.path)}
        self._run = _require("wandb").init(project=project, config=dict(run.settings), **options)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow at ``MLFLOW_TRACKING_URI``; without it in the file ``RUN/mlflow.db``."""

    def __init__(self, run: TrackedRun) -> None:
        _require("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.path / 'mlflow.db').absolute()}"
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "hiddenstore")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        same = self._client.search_runs([experiment], f"tags.hiddenstore = '{run.id}'")
        tags = {"hiddenstore": run.id, "mlflow.runName": run.path.name}
        begun = same[0] if same else self._client.create_run(experiment, tags=tags)
        self._id: str = begun.info.run_id
        for section, values in () if same else run.settings.items():
            for key, value in values.items():
                self._client.log_param(self._id, f"{section}.{key}", value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        metric, now = import_module("mlflow.entities").Metric, import_module("time").time_ns() // 1_000_000
        # Its names know no @.
        named = ((name.replace("@", "_"), float(value)) for name, value in values.items())
        self._client.log_batch(self._id, metrics=[metric(name, value, now, step) for name, value in named])

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: Registry[Any] = Registry(
    "tracker",
    "hiddenstore.trackers",
    {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow},
    option="train.tracker",
)
"""What opens a tracker of a `TrackedRun`."""


def require_trackers(config: LoopConfig) -> None:
    """Raises ConfigError: ``name-unknown``, ``plugin-broken``, ``not-installed``: what no run can be shown in."""
    for name in tracker_names(config):
        if TRACKERS[name] in (TensorBoard, WandB, MLflow):
            _require(name)


def tracker_names(config: LoopConfig) -> list[str]:
    """Those that the settings name, each once."""
    names = ["tensorboard"] * config.tensorboard + ([] if config.tracker is None else [config.tracker])
    return list(dict.fromkeys(names))


class Tracked:
    """The trackers of a run, opened by name. Raises ConfigError: ``tracker-start``, and as `require_trackers`."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            try:
                self._open[name] = TRACKERS[name](run)
            except HiddenstoreError:
                self.close()
                raise
            except Exception as error:  # noqa: BLE001 - as below
                self.close()
                raise ConfigError(
                    f"{name} cannot be opened: {_said(error)}",
                    kind=Kind.TRACKER_START,
                    hint="the same command with --resume once it can; train.tracker=null trains without it",
                ) from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Values by name to every tracker that still takes them."""
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.log(values, step))

    def close(self) -> None:
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.close())

    def _try(self, name: str, action: Any) -> None:
        try:
            action(self._open[name])
        except Exception as error:  # noqa: BLE001 - a library of others, and a server behind it, may raise anything
            del self._open[name]
            output().warn(f"{name} logs no more: {_said(error)}; the training goes on")


def _said(error: Exception) -> str:
    # An address may hold a password.
    text = re.sub(r"://\S*@", "://", str(error))
    return f"{type(error).__name__}: {text[:200]}"


def _require(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        problem = f"train.tracker={package} is set, but {package} is not installed"
        raise ConfigError(problem, kind=Kind.NOT_INSTALLED, hint=f"pip install 'hiddenstore[{package}]'") from error

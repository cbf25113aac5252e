"""A run, or one of its checkpoints, as what is exported."""

import json
from pathlib import Path
from typing import Any

import yaml

from hiddenstore.errors import HiddenstoreError
from hiddenstore.identity import target_word
from hiddenstore.store import Store
from trainer.export.base import Checkpoint
from trainer.run.loaded import LoadedDrafter
from trainer.run.run_folder import CONFIG
from trainer.run.runs import RunInfo, describe


def checkpoint_of(loaded: LoadedDrafter, run: str | Path, target: str | None = None) -> Checkpoint:
    """The drafter that was loaded of ``run``, with how far it was trained to draft and its target's architecture.

    ``target`` names the target where a format does; the default is its hub id, where it has one.
    """
    info = describe(run)
    word = target_word(loaded.identity)
    return Checkpoint(
        loaded.model,
        loaded.vocab,
        loaded.head,
        loaded.identity,
        draft_len=_trained_steps(info),
        target_name=target or (None if word == "TARGET" else word),
        target_architectures=tuple(map(str, _target_config(info).get("architectures") or ())),
    )


def _trained_steps(info: RunInfo) -> int | None:
    """TTT steps of the run; None where its objective has none."""
    try:
        said = yaml.safe_load((info.run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    steps = (said.get("loss") or {}).get("steps") if isinstance(said, dict) else None
    return steps if isinstance(steps, int) else None


def _target_config(info: RunInfo) -> dict[str, Any]:
    """``config.json`` of the target as the store keeps it; empty where the store is gone."""
    try:
        found = json.loads(Store.open(info.spec.store).target_file("config.json"))
    except (HiddenstoreError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""A recipe from its first unfinished stage to its end."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenstore.cli.inner import do, do_on_ranks
from hiddenstore.cli.output import output
from hiddenstore.pipeline.journal import DoneStage, Journal, digest_of, digest_of_files
from hiddenstore.pipeline.recipe import Recipe
from hiddenstore.pipeline.stages import Stage, stages_of


@dataclass(frozen=True)
class Ran:
    """A stage after the run: its answer, its seconds, and whether an earlier run did it."""

    stage: Stage
    answer: Mapping[str, Any]
    seconds: float
    was_done: bool


def run(recipe: Recipe) -> list[Ran]:
    """Do every stage that is not done, in order; stop at the first that fails, which the same command repeats.

    Raises:
        ConfigError: a section holds what its command does not take; before anything is done.
        ConflictError: the folder is another's, or something in it was made by another recipe.
        HiddenstoreError: what a command raises.
    """
    stages = stages_of(recipe)
    journal = Journal(Path(recipe.out))
    ground = digest_of_files(recipe.inputs)
    done: dict[str, DoneStage] = {}
    ran = []
    for number, stage in enumerate(stages, 1):
        built_on = digest_of(_before(stage, done)) + ground
        found = journal.find(stage, built_on)
        output().note(f"\n{number}/{len(stages)}  {stage.name}{'  (done before)' if found else ''}")
        known = found or _do(stage, built_on)
        if found is None:
            journal.add(stage, known)
        done[stage.name] = known
        ran.append(Ran(stage, json.loads(known.answer), known.seconds, found is not None))
    return ran


def _before(stage: Stage, done: Mapping[str, DoneStage]) -> list[DoneStage]:
    """What a stage is built on: the capture, and the earlier stages of its own drafter."""
    drafter, _, _ = stage.name.rpartition("/")
    return [one for name, one in done.items() if "/" not in name or name.startswith(f"{drafter}/")]


def _do(stage: Stage, built_on: str) -> DoneStage:
    began = time.monotonic()
    words = stage.words
    if stage.going_on and stage.makes is not None and (stage.makes / "run.json").exists():
        words = stage.going_on
    elif stage.going_on and stage.makes is not None:
        # A run stopped before its first document has nothing to go on from.
        shutil.rmtree(stage.makes, ignore_errors=True)
    answer: Mapping[str, Any] = {}
    if stage.ranks > 1:
        do_on_ranks(stage.ranks, stage.command, words)
    else:
        answer = do(stage.command, *words)
    return DoneStage(
        stage=stage.name,
        words=stage.words,
        answer=json.dumps(answer, default=str),
        seconds=round(time.monotonic() - began, 3),
        built_on=built_on,
    )

"""A mirror is one run's: another's is refused, what a kill left half-way is brought again, the last checkpoint too."""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hiddenstore.errors import ConflictError
from tests.tiny_world import tree
from tests.trainer.runs import WORDS, tiny_store
from trainer.train import loop
from trainer.train.loop import train
from trainer.train.run_folder import TrainOptions
from trainer.train.storage import Mirror


def test_the_mirror_of_another_run_is_refused_before_a_step(tmp_path: Path) -> None:
    store, mirror = tiny_store(tmp_path).path, tmp_path / "mirror"
    train(store, tmp_path / "one", words=WORDS, mirror=str(mirror))
    with pytest.raises(ConflictError, match="holds the mirror of another run") as caught:
        train(store, tmp_path / "two", words=WORDS, mirror=str(mirror))
    assert caught.value.kind == "output-exists"
    assert not (tmp_path / "two").exists()


def test_of_two_runs_that_begin_together_with_one_mirror_the_later_is_refused_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, one, two, mirror = tiny_store(tmp_path).path, tmp_path / "one", tmp_path / "two", tmp_path / "mirror"
    train(store, one, words=WORDS)
    first, build_state = mirror_of(one, mirror), loop.build_state

    def while_another_begins(*args: Any) -> Any:
        assert not mirror.exists(), "the place was looked at before this run was made"
        first.claim()
        return build_state(*args)

    monkeypatch.setattr(loop, "build_state", while_another_begins)
    with pytest.raises(ConflictError, match=r"of another run than .*two, without a checkpoint") as caught:
        train(store, two, words=WORDS, mirror=str(mirror))
    monkeypatch.undo()
    assert caught.value.hint == f"remove it if that run has ended, or --resume --mirror {mirror}/two"
    assert not (two / "checkpoints").exists()
    assert (mirror / "run.json").read_bytes() == (one / "run.json").read_bytes()
    assert train(store, two, resume=True, mirror=f"{mirror}/two").steps == 12


def test_what_another_run_put_there_is_not_replaced_but_for_settings_that_changed(tmp_path: Path) -> None:
    store, one, two, mirror = tiny_store(tmp_path).path, tmp_path / "one", tmp_path / "two", tmp_path / "mirror"
    train(store, one, words=WORDS, mirror=str(mirror))
    train(store, two, words=[*WORDS, "train.seed=2"])
    before, other = tree(mirror), mirror_of(two, mirror)
    other.bring()
    assert other.behind is not None
    assert other.behind.kind == "output-exists"
    assert tree(mirror) == before
    train(store, one, words=["train.max_steps=13"], resume=True, mirror=str(mirror))
    after = tree(mirror)
    assert {name for name in before if after[name] != before[name]} == {"config.yaml"}
    assert after["config.yaml"] == (one / "config.yaml").read_bytes()


def mirror_of(run: Path, place: Path) -> Mirror:
    mirror = TrainOptions("store", run, mirror=str(place)).open_mirror()
    assert mirror is not None
    return mirror


def test_a_finished_run_brings_the_checkpoint_that_its_mirror_lacks(tmp_path: Path) -> None:
    store, run, mirror = tiny_store(tmp_path).path, tmp_path / "run", tmp_path / "mirror"
    train(store, run, words=WORDS, mirror=str(mirror))
    last = mirror / "checkpoints" / "step-12"
    (last / "state.json").unlink()
    (last / "drafter.safetensors").write_bytes(b"of another machine")
    assert train(store, run, resume=True, mirror=str(mirror)).was_finished
    assert (last / "state.json").is_file()
    assert (last / "drafter.safetensors").read_bytes() == (
        run / "checkpoints" / "step-12" / "drafter.safetensors"
    ).read_bytes()
    shutil.rmtree(run)
    assert train(store, run, words=["train.max_steps=13"], resume=True, mirror=str(mirror)).steps == 13


def test_a_kill_while_settings_are_replaced_leaves_a_mirror_that_a_run_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run, mirror = tiny_store(tmp_path).path, tmp_path / "run", tmp_path / "mirror"
    train(store, run, words=WORDS, mirror=str(mirror))
    old = (mirror / "config.yaml").read_bytes()
    new = (run / "config.yaml").read_bytes().replace(b"max_steps: 12", b"max_steps: 13")
    for last in range(12):
        place, left = tmp_path / f"mirror-{last}", [None] * last
        shutil.copytree(mirror, place)
        (run / "config.yaml").write_bytes(new)
        copied = mirror_of(run, place)
        with monkeypatch.context() as patch, suppress(Killed):
            for name in ("put_if_absent", "remove_tree"):
                patch.setattr(copied._fs, name, partial(mortal, getattr(copied._fs, name), left))
            copied.bring()
        shutil.rmtree(run)
        mirror_of(run, place).restore()
        assert (run / "config.yaml").read_bytes() in (old, new)
        mirror_of(run, place).bring()
        assert sorted(path.name for path in place.iterdir()) == sorted(path.name for path in mirror.iterdir())
    assert left


class Killed(BaseException):
    """No code of ours runs behind a kill."""


def mortal(operation: Any, left: list[None], *args: Any) -> Any:
    """An operation of a process that has this many of them before it."""
    if not left:
        raise Killed
    left.pop()
    return operation(*args)


def test_the_command_that_resumes_names_mirror_and_cache(tmp_path: Path) -> None:
    options = TrainOptions("s3://b/a store", tmp_path, cache="/scratch/c", mirror="s3://b/m")
    expected = f"hiddenstore train 's3://b/a store' -o {tmp_path} --resume --mirror s3://b/m --cache /scratch/c"
    assert options.resume_command == expected

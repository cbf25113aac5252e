"""A mirror is one run's: another's is refused, what a kill left half-way is brought again, the last checkpoint too."""

import shutil
from pathlib import Path

import pytest

from hiddenstore.errors import ConflictError
from tests.trainer.runs import WORDS, tiny_store
from trainer.train.loop import train
from trainer.train.run_folder import TrainOptions


def test_the_mirror_of_another_run_is_refused_before_a_step(tmp_path: Path) -> None:
    store, mirror = tiny_store(tmp_path).path, tmp_path / "mirror"
    train(store, tmp_path / "one", words=WORDS, mirror=str(mirror))
    with pytest.raises(ConflictError, match="holds the mirror of another run") as caught:
        train(store, tmp_path / "two", words=WORDS, mirror=str(mirror))
    assert caught.value.kind == "output-exists"
    assert not (tmp_path / "two").exists()


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


def test_the_command_that_resumes_names_mirror_and_cache(tmp_path: Path) -> None:
    options = TrainOptions("s3://b/a store", tmp_path, cache="/scratch/c", mirror="s3://b/m")
    expected = f"hiddenstore train 's3://b/a store' -o {tmp_path} --resume --mirror s3://b/m --cache /scratch/c"
    assert options.resume_command == expected

"""A validation says what the weights are worth, and not what was drawn for it or what nothing teaches."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.files.lock import FolderLock
from hiddenstore.process import Rank
from hiddenstore.records import Sample
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_samples, sample_id
from tests.trainer.runs import ON_CPU, WORDS, store_of, tiny_store
from trainer.parallel.group import ProcessGroup
from trainer.train.run_folder import TrainOptions
from trainer.train.state import TrainState, build_state
from trainer.train.step import steps, validate

BLOCKS = ["drafter.mask_token_id=0", "drafter.block_size=4", "loss.num_anchors=3"]
DRAWING = {
    "dflash": BLOCKS,
    "dspark": BLOCKS,
    "domino": BLOCKS,
    "xpress": [*BLOCKS, "drafter.xpress_rank=8"],
    "peagle": ["drafter.mask_token_id=0", "drafter.num_layers=1", "loss.steps=3"],
}
OTHERS = [word for word in ON_CPU if not word.startswith(("loss.", "drafter.hidden_size", "drafter.vocab"))]


@contextmanager
def fresh(store: Store, folder: Path, drafter: str, words: list[str]) -> Iterator[TrainState]:
    with FolderLock(folder / "run") as lock:
        options = TrainOptions(store.path, folder / "run", drafter, None, words)
        yield build_state(options, ProcessGroup(Rank()), lock)


@pytest.mark.parametrize("drafter", DRAWING)
def test_the_same_weights_validate_alike_after_whatever_step(drafter: str, tmp_path: Path) -> None:
    with fresh(tiny_store(tmp_path), tmp_path, drafter, [*OTHERS, *DRAWING[drafter]]) as state:
        values = []
        for step in range(3):
            state.model.rng_key = (0, step)
            validate(state)
            values.append(state.validation)
    assert values[0] == values[1] == values[2]


def test_a_drafter_knows_what_part_of_the_run_is_done_and_validates_as_at_its_end(tmp_path: Path) -> None:
    words = [*OTHERS, *DRAWING["domino"], "train.max_steps=4"]
    with fresh(tiny_store(tmp_path), tmp_path, "domino", words) as state:
        done = [state.model.progress for _ in steps(state)]
        assert done == [0, 0.25, 0.5, 0.75]
        validate(state)
        assert state.model.progress == 1


def shortened(one: Sample, tokens: int, *, taught: bool = True) -> Sample:
    ids, mask = one.input_ids[:tokens], np.full(tokens, taught, dtype=np.uint8)
    spans = np.array([[one.spans[-1, 0], 0, tokens]], np.int32)
    return replace(one, id=sample_id(ids, mask), input_ids=ids, loss_mask=mask, spans=spans)


def test_the_loss_of_a_validation_is_the_mean_over_the_depths_that_teach(tmp_path: Path) -> None:
    samples = [one if one.split == "train" else shortened(one, 4) for one in make_samples(20)]
    with fresh(store_of(tmp_path, samples), tmp_path, "eagle3", [*ON_CPU, "loss.steps=5"]) as state:
        validate(state)
    losses = state.validation["losses"]
    assert losses[3:] == [0, 0]
    assert min(losses[:2]) > 0
    taught = [loss for loss in losses if loss]
    assert state.validation["loss"] == pytest.approx(sum(taught) / len(taught))


def test_a_validation_split_that_teaches_nothing_is_no_loss_of_zero(tmp_path: Path) -> None:
    samples = [one if one.split == "train" else shortened(one, 6, taught=False) for one in make_samples(20)]
    with fresh(store_of(tmp_path, samples), tmp_path, "eagle3", ON_CPU) as state:
        validate(state)
        assert state.validation == {}


def test_the_next_commands_of_a_store_without_validation_samples_go_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, [replace(one, split="train") for one in make_samples(6)])
    monkeypatch.chdir(tmp_path)
    words = ["train", store.path, "-o", "run", *WORDS, "train.max_steps=1"]
    nexts = []
    for _ in range(3):
        result = CliRunner().invoke(main, words, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        nexts.append(result.stderr.rpartition("next: hiddenstore ")[2].strip())
        words = shlex.split(nexts[-1])
    assert nexts[:2] == [f"eval run {store.path} --split train", "export run --engine vllm -o drafter"]

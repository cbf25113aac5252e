"""Every way of sharing the work trains what one process trains, and any of them continues what another began."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenstore.errors import ConfigError
from hiddenstore.process import Rank
from hiddenstore.store import Store
from tests.trainer.runs import ON_CPU, tiny_store
from tests.trainer.two_ranks import Job, on_two_ranks
from trainer.parallel.context import context_group
from trainer.parallel.data_parallel import Ddp, parallelize
from trainer.parallel.group import ProcessGroup
from trainer.train import checkpoint
from trainer.train.loop import train

STEPS, CUT = 12, 5
SETTINGS = [
    *ON_CPU, "train.validate_every=12", "train.checkpoint_every=0", "optim.schedule=constant", "optim.warmup_ratio=0",
    "optim.lr=1e-3", "optim.kind=adamw",
]  # fmt: skip
WAYS = {
    "ddp": [],
    "fsdp": ["train.parallel=fsdp", "train.checkpoint_activations=true"],
    "context": ["train.context_parallel=2"],
    "context-of-shards": ["train.context_parallel=2", "train.parallel=fsdp"],
}
MUON = [*SETTINGS, "optim.kind=muon", "train.max_steps=4", "train.validate_every=0"]
DEEP = [*SETTINGS, "drafter.num_layers=2", "train.max_steps=4", "train.validate_every=0"]
FOLLOWED = [*SETTINGS, "train.follow=true", "train.max_steps=6", "train.validate_every=0"]
CHAINS = [
    *SETTINGS, "drafter.name=peagle", "drafter.mask_token_id=3", "drafter.num_layers=1", "data.batch_tokens=40",
    "loss.steps=2", "loss.keep_ratio=0.12", "loss.keep_least=0", "train.validate_every=0",
]  # fmt: skip
RESUMED = ["one-to-fsdp", "fsdp-to-one"]


@dataclass
class Runs:
    """``one``: the uninterrupted run of one process. The others began or ended on two ranks."""

    folder: Path
    store: Store

    def job(self, name: str, words: list[str], *, resume: bool = False) -> Job:
        return Job(self.store.path, str(self.folder / name), words, resume)

    def records(self, name: str, key: str) -> list[Any]:
        found = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return [record[key] for record in found if key in record]

    def checkpoint(self, name: str) -> checkpoint.Checkpoint:
        return checkpoint.load(self.folder / name / f"checkpoints/step-{STEPS}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("parallel")
    made = Runs(folder, tiny_store(folder))
    start, end = f"train.max_steps={CUT}", f"train.max_steps={STEPS}"
    train(made.store.path, folder / "one", words=SETTINGS)
    train(made.store.path, folder / "one-to-fsdp", words=[*SETTINGS, start])
    train(made.store.path, folder / "deep-one", words=DEEP)
    train(made.store.path, folder / "muon-one", words=MUON)
    train(made.store.path, folder / "follow-one", words=FOLLOWED)
    train(made.store.path, folder / "chains-one", words=CHAINS)
    on_two_ranks(
        [
            *(made.job(name, [*SETTINGS, *words]) for name, words in WAYS.items()),
            made.job("one-to-fsdp", [end, "train.parallel=fsdp"], resume=True),
            made.job("fsdp-to-one", [*SETTINGS, start, "train.parallel=fsdp"]),
            made.job("muon-ddp", MUON),
            made.job("muon-fsdp", [*MUON, "train.parallel=fsdp"]),
            made.job("follow", FOLLOWED),
            made.job("chains-ddp", CHAINS),
            made.job("chains-fsdp", [*CHAINS, "train.parallel=fsdp"]),
            made.job("deep", [*DEEP, "train.context_parallel=2", "train.checkpoint_activations=true"]),
        ]
    )
    train(made.store.path, folder / "fsdp-to-one", words=[end], resume=True)
    return made


@pytest.mark.parametrize("way", [*WAYS, *RESUMED])
def test_two_ranks_train_what_one_process_trains(runs: Runs, way: str) -> None:
    assert runs.records(way, "loss") == pytest.approx(runs.records("one", "loss"), rel=1e-5)
    for count in ("tokens", "taught"):
        assert runs.records(way, count) == runs.records("one", count)
    found, expected = runs.checkpoint(way), runs.checkpoint("one")
    assert found.state.cursor == expected.state.cursor
    for name, weight in expected.drafter.items():
        torch.testing.assert_close(found.drafter[name], weight, rtol=1e-4, atol=1e-4)


def test_every_layer_of_a_deep_drafter_sees_the_whole_sequence(runs: Runs) -> None:
    assert runs.records("deep", "loss") == pytest.approx(runs.records("deep-one", "loss"), rel=1e-5)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_muon_over_two_ranks_takes_the_steps_of_one_process(runs: Runs, way: str) -> None:
    assert runs.records(f"muon-{way}", "loss") == pytest.approx(runs.records("muon-one", "loss"), rel=1e-4)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_weight_that_no_pack_of_a_step_reaches_moves_over_two_ranks_as_in_one_process(runs: Runs, way: str) -> None:
    # A step that draws no chain reads nothing of what stands for its states.
    assert {second > 0 for _, second in runs.records("chains-one", "losses")} == {True, False}
    found, expected = (runs.checkpoint(f"chains-{name}").drafter["mask_hidden"] for name in (way, "one"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_two_ranks_that_follow_a_store_read_the_epochs_that_one_process_reads(runs: Runs) -> None:
    assert runs.records("follow", "loss") == pytest.approx(runs.records("follow-one", "loss"), rel=1e-5)
    own = json.loads((runs.folder / "follow/snapshot.json").read_text())["name"]
    assert [name for name in runs.store.fs.list("snapshots") if name.startswith(f"{own}.epoch-")]


@pytest.mark.parametrize("way", [*WAYS, *RESUMED])
def test_a_checkpoint_says_nothing_of_the_ranks_that_wrote_it(runs: Runs, way: str) -> None:
    found, expected = runs.checkpoint(way), runs.checkpoint("one")
    for part in ("drafter", "optimizer"):
        a, b = getattr(found, part), getattr(expected, part)
        assert {name: (t.shape, t.dtype) for name, t in a.items()} == {n: (t.shape, t.dtype) for n, t in b.items()}


@pytest.mark.parametrize("way", WAYS)
def test_validation_over_two_ranks_counts_what_one_process_counts(runs: Runs, way: str) -> None:
    (one,), (two,) = (runs.records(name, "validation") for name in ("one", way))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["accepted_length"] == pytest.approx(one["accepted_length"], rel=1e-2)
    assert two["text"] == one["text"]


def test_one_process_alone_has_nothing_to_shard() -> None:
    held = parallelize(torch.nn.Linear(2, 2), "fsdp", ProcessGroup(Rank()), torch.device("cpu"))
    assert isinstance(held, Ddp)


def test_a_context_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide 1 ranks") as caught:
        context_group(2, ProcessGroup(Rank()))
    assert "nproc-per-node 2" in str(caught.value.hint)


def test_a_drafter_that_cannot_split_a_sequence_refuses_a_context(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    with pytest.raises(ConfigError, match="medusa cannot split a sequence"):
        train(store, tmp_path / "run", drafter="medusa", words=["train.context_parallel=2"])
    # A mean over the shard is none over the pack.
    for words in (["loss.mix_hidden_states=no_replace"], ["loss.kind=lk_lambda", "loss.lk_blend=step"]):
        with pytest.raises(ConfigError, match=r"eagle3 cannot split a sequence .* with this loss"):
            train(store, tmp_path / "run", drafter="eagle3", words=["train.context_parallel=2", *words])

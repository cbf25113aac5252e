"""A run pins what it reads in the store; one that follows the store reads what collection commits meanwhile."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from collectors.capture.job import CollectOptions, collect
from hiddenstore.care.gc import gc
from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, StorageError
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, HEAD, capture_spec, memory_input, random_records, target_files
from hiddenstore.writer import create_store, register_input, write_unit
from tests.accepting import repair_all
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.trainer.runs import WORDS
from trainer.train import checkpoint
from trainer.train.log import RunLog, StepMetrics
from trainer.train.loop import train
from trainer.train.run_folder import branch, describe, training_store

FOLLOW = [
    *WORDS, "data.batch_tokens=80", "train.follow=true", "train.max_steps=18", "train.checkpoint_every=5",
    "train.validate_every=9",
]  # fmt: skip
INPUT = memory_input(samples=40)


class Killed(BaseException):
    """The process is gone: nothing is put away."""


def grow(location: Path, units: int) -> Store:
    """A store of which so many units are committed."""
    capture = capture_spec(layers=(1, 3, 4))
    store = create_store(location, capture, HEAD, "safe", target_files())
    register_input(store, INPUT)
    committed = {record.unit for record in store.commits()}
    for unit in list(INPUT.units())[:units]:
        if unit.name not in committed:
            write_unit(store, unit.name, INPUT.info.digest, random_records(unit.samples, capture), (), ENGINE)
    return Store.open(location)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, Callable[[], object]]], None]:
    """Lets something happen once a step is logged, while the run goes on."""
    record = RunLog.step

    def plan(events: Mapping[int, Callable[[], object]]) -> None:
        def step(log: RunLog, metrics: StepMetrics) -> None:
            record(log, metrics)
            if metrics.step in events:
                events[metrics.step]()

        monkeypatch.setattr(RunLog, "step", step)

    return plan


def lines(run: Path) -> list[dict[str, object]]:
    """Everything in the log but the times."""
    timed = {"tokens_per_s", "data_wait_fraction"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in records]


def epochs(run: Path) -> list[dict[str, object]]:
    return [line for line in lines(run) if "epoch" in line]


def train_samples(store: Store) -> int:
    return sum(entry.split == "train" for _, entry in store.entries)


def test_each_epoch_reads_what_is_committed_by_then_and_publishes_it(tmp_path: Path, at_step) -> None:
    store = tmp_path / "store"
    first = train_samples(grow(store, 3))
    at_step({1: lambda: grow(store, 6), 5: lambda: grow(store, 12)})
    train(store, tmp_path / "run", words=FOLLOW)
    begun = epochs(tmp_path / "run")
    assert begun[-1]["samples"] == train_samples(Store.open(store)) > first
    assert len({line["samples"] for line in begun}) > 1
    names = sorted(path.stem for path in (store / "snapshots").iterdir())
    own = json.loads((tmp_path / "run/snapshot.json").read_text())["name"]
    assert {own, *(f"{own}.epoch-{line['epoch']}" for line in begun)} <= set(names)
    for line in begun:
        assert train_samples(Store.open(store, f"{own}.epoch-{line['epoch']}")) == line["samples"]


def test_a_killed_run_that_follows_repeats_the_uninterrupted_one_bit_for_bit(tmp_path: Path, at_step) -> None:
    """Killed after an epoch has begun that no checkpoint knows, and resumed on a store that has grown since."""
    runs = {}
    for name in ("straight", "killed"):
        store, run = tmp_path / f"{name}-store", tmp_path / name
        grow(store, 3)

        def kill(store: Path = store) -> None:
            grow(store, 9)
            raise Killed

        events = {1: lambda store=store: grow(store, 6)}
        at_step({**events, 9: kill if name == "killed" else lambda store=store: grow(store, 9)})
        if name == "killed":
            with pytest.raises(Killed):
                train(store, run, words=FOLLOW)
            assert [line["epoch"] for line in epochs(run)][-1] > 1
            at_step({})
        train(store, run, words=FOLLOW if name == "straight" else (), resume=name == "killed")
        runs[name] = lines(run), (run / "checkpoints/step-18/drafter.safetensors").read_bytes()
    assert runs["killed"] == runs["straight"]


def test_a_branch_of_a_run_that_follows_reads_what_the_store_holds_and_leaves_that_run_its_lists(
    tmp_path: Path,
) -> None:
    store, run, other = tmp_path / "store", tmp_path / "run", tmp_path / "other"
    grow(store, 3)
    often = [*FOLLOW, "train.checkpoint_every=1", "train.validate_every=0", "train.keep=99"]
    train(store, run, words=[*often, "train.max_steps=9"])
    second = next(line for line in epochs(run) if line["epoch"] == 2)
    whole = train_samples(grow(store, 12))
    branch(run / "checkpoints" / f"step-{second['step'] + 1}", other)
    train(store, other, resume=True, words=["train.max_steps=18"])
    inherited, *later = epochs(other)[1:]
    assert inherited == second
    assert [line["samples"] for line in later] == [whole] * len(later) != []
    again = tmp_path / "again"
    branch(other / "checkpoints" / f"step-{second['step'] + 2}", again)
    train(store, again, resume=True, words=["train.max_steps=18"])
    assert epochs(again) == epochs(other)


def test_a_run_that_leaves_off_following_where_an_epoch_ends_stays_with_its_list(tmp_path: Path, at_step) -> None:
    """Killed in the third step, the first of an epoch whose list is published and that no checkpoint knows of."""
    store, run = tmp_path / "store", tmp_path / "run"
    first = train_samples(grow(store, 3))

    def kill() -> None:
        raise Killed

    at_step({1: lambda: grow(store, 12), 3: kill})
    with pytest.raises(Killed):
        train(store, run, words=[*FOLLOW, "train.checkpoint_every=1", "train.keep=4"])
    assert epochs(run)[0]["samples"] > first
    at_step({})
    for last in (3, 4):
        train(store, run, words=["train.follow=false", f"train.max_steps={last}"], resume=True)
    cursors = [checkpoint.read_state(run / f"checkpoints/step-{step}").cursor for step in (2, 3, 4)]
    assert len({cursor["snapshot"] for cursor in cursors}) == 1
    trained_on = training_store(describe(run))
    assert trained_on is not None
    assert train_samples(trained_on) == first


def test_a_run_that_leaves_off_following_ends_with_the_epochs_of_the_list_that_it_stays_with(tmp_path: Path) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    longest = max(entry.tokens for _, entry in grow(store, 2).entries)
    words = [*FOLLOW, f"data.pack_tokens={longest}", "train.checkpoint_every=1", "train.validate_every=0"]
    train(store, run, words=[*words, "train.max_steps=1"])
    grown = grow(store, 12)
    assert max(entry.tokens for _, entry in grown.entries) > longest
    train(store, run, words=["train.max_steps=5"], resume=True)
    (begun,) = epochs(run)
    assert begun["samples"] == train_samples(grown)
    report = train(store, run, words=["train.follow=false", "train.max_steps=none", "train.epochs=3"], resume=True)
    ended = checkpoint.read_state(report.checkpoint)
    assert (ended.cursor["epoch"], ended.cursor["samples"]) == (3, 0)
    assert ended.total_steps == ended.step == report.steps


def test_what_a_store_brings_may_be_longer_than_a_pack(tmp_path: Path, at_step) -> None:
    store = tmp_path / "store"
    longest = max(entry.tokens for _, entry in grow(store, 2).entries)
    at_step({1: lambda: grow(store, 12)})
    words = [*FOLLOW, f"data.pack_tokens={longest}", f"data.batch_tokens={longest}", "train.max_steps=30"]
    train(store, tmp_path / "run", words=words)
    assert max(entry.tokens for _, entry in Store.open(store).entries) > longest
    assert len(epochs(tmp_path / "run")) > 1


def test_a_run_goes_on_with_its_last_samples_while_the_store_cannot_be_read(tmp_path: Path, at_step) -> None:
    store = tmp_path / "store"
    grow(store, 3)
    record = next((store / "commits").iterdir())

    def hide() -> None:
        shutil.copy(record, tmp_path / "away")
        record.write_bytes(record.read_bytes()[:-9])

    at_step({1: hide, 6: lambda: (tmp_path / "away").rename(record)})
    plain = [word for word in FOLLOW if word != "train.follow=true"]
    result = CliRunner().invoke(main, ["train", str(store), "-o", str(tmp_path / "run"), "--follow", *plain])
    assert "epoch 2 reads no more than the one before it" in result.stderr
    assert (tmp_path / "run/checkpoints/step-18").is_dir()


def test_a_real_collect_feeds_a_run_that_follows_it(tmp_path: Path, at_step, monkeypatch: pytest.MonkeyPatch) -> None:
    data, target = data_for_tiny(tmp_path / "data", samples=60), save_target(tmp_path / "target")
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 120)
    store = tmp_path / "store"
    options = CollectOptions(str(data), str(store), str(target))
    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(collect, options, note=lambda _text: None)
        while not collecting.done() and len(list((store / "commits").glob("*.json"))) < 3:
            time.sleep(0.001)
        at_step({2: collecting.result})
        own = [word for word in FOLLOW if not word.startswith("data.")]
        train(store, tmp_path / "run", words=[*own, "data.batch_tokens=512", "data.pack_tokens=256"])
    assert epochs(tmp_path / "run")[-1]["samples"] == train_samples(Store.open(store))


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A store on a disk that is mounted read-only."""
    grow(tmp_path / "made", 3)
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    shutil.copytree(tmp_path / "made", disk / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    yield disk / "store"
    # Lazily: a store keeps its read handles while a test's frame is alive.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_run_that_follows_a_read_only_store_is_refused_and_leaves_nothing(read_only: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="a run that follows it publishes there") as error:
        train(read_only, tmp_path / "run", words=FOLLOW)
    assert error.value.kind == "store-read-only"
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_read_only_store_says_that_gc_cannot_know_of_it(read_only: Path, tmp_path: Path) -> None:
    words = ["train", str(read_only), "-o", str(tmp_path / "run"), *WORDS, "train.max_steps=1"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    assert "does not know of this run" in " ".join(result.stderr.split())


def test_a_run_on_a_snapshot_reads_what_it_names_also_when_it_is_resumed(tmp_path: Path) -> None:
    store = grow(tmp_path / "store", 3)
    store.save_snapshot("few")
    grow(tmp_path / "store", 6)
    for words in ([*WORDS, "train.max_steps=2"], ["--resume", "train.max_steps=3"]):
        result = CliRunner().invoke(main, ["train", f"{store.path}@few", "-o", str(tmp_path / "run"), *words])
        assert result.exit_code == 0, result.stderr
        assert f"over {train_samples(store)} samples" in result.stderr


def test_following_without_an_end_is_refused(tmp_path: Path) -> None:
    store = grow(tmp_path / "store", 3)
    with pytest.raises(ConfigError, match="max_steps says when to end"):
        train(store.path, tmp_path / "run", words=["train.follow=true"])


def test_gc_leaves_the_segments_that_a_run_reads_a4(tmp_path: Path) -> None:
    store = grow(tmp_path / "store", 3)
    train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=2"])
    record = store.commits()[0]
    damaged = Path(store.path, record.segment, "layer_1/c/0/0")
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert repair_all(store.path).dropped
    assert gc(store.path, dry_run=False, older_than_s=0, abandoned=True).remove == []
    damaged.write_bytes(whole)
    train(store.path, tmp_path / "run", words=["train.max_steps=4"], resume=True)
    for path in (tmp_path / "store/snapshots").iterdir():
        path.unlink()
    assert [item.path for item in gc(store.path, older_than_s=0).remove] == [record.segment]


def test_a_run_that_follows_is_judged_by_all_that_its_checkpoint_has_read(tmp_path: Path, at_step) -> None:
    """The second step ends the first epoch, and the third is of what the store has grown to."""
    store, run = tmp_path / "store", tmp_path / "run"
    first = train_samples(grow(store, 3))
    at_step({1: lambda: grow(store, 12)})
    train(store, run, words=[*FOLLOW, "train.max_steps=4", "train.checkpoint_every=1", "train.keep=4"])
    (begun,) = epochs(run)
    grow(store, 14)
    for step, samples in ((1, first), (2, first), (3, begun["samples"]), (4, begun["samples"])):
        trained_on = training_store(describe(run / f"checkpoints/step-{step}"))
        assert trained_on is not None
        assert train_samples(trained_on) == samples


def test_eval_vocab_and_export_data_read_of_a_snapshot_what_it_names(tmp_path: Path) -> None:
    def document(*words: str) -> dict[str, object]:
        result = CliRunner().invoke(main, [*words, "--json"])
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    store, run, data = grow(tmp_path / "store", 3), str(tmp_path / "run"), str(tmp_path / "data")
    store.save_snapshot("few")
    grow(tmp_path / "store", 6)
    few = f"{store.path}@few"
    train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=1"])
    assert document("eval", run, few)["samples"] == len(store) - train_samples(store)
    supervised = sum(entry.supervised for _, entry in store.entries if entry.split == "train")
    assert document("vocab", few)["supervised_tokens"] == supervised
    assert document("export-data", few, "--to", "specforge-dflash", "-o", data)["samples"] == len(store)

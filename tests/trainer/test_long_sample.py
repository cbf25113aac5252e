"""One sample much longer than the others: it is a batch alone, and what it takes is known before the first step."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hiddenstore.errors import StorageError
from hiddenstore.files.lock import FolderLock
from hiddenstore.process import Rank, from_environment
from hiddenstore.records import Sample, sample_id
from hiddenstore.store import Store
from hiddenstore.testing import builders
from tests.forked import Forked
from tests.trainer.runs import ON_CPU, WORDS, store_of, tiny_store
from tests.trainer.two_ranks import free_ports
from trainer import settings
from trainer.parallel.group import ProcessGroup, process_group
from trainer.settings import activation_bytes, load_config, state_bytes
from trainer.train import loop, step
from trainer.train.loop import walk_largest
from trainer.train.run_folder import TrainOptions
from trainer.train.state import TrainState, build_state, token_batches
from trainer.train.step import steps

SHORT, LONG, CHATS = 30, 3000, 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """60 samples of 30 tokens and one of 3,000."""
    rng = np.random.default_rng(0)
    samples = []
    for index in range(CHATS + 1):
        tokens = LONG if index == CHATS // 2 else SHORT
        ids = rng.integers(0, builders.VOCAB, tokens).astype(np.int32)
        mask = (np.arange(tokens) >= 8).astype(np.uint8)
        spans = np.array([[2, 8, tokens]], np.int32)
        samples.append(Sample(sample_id(ids, mask), ids, mask, spans, "train", f"chats:{index}"))
    return store_of(tmp_path_factory.mktemp("long"), samples)


def test_one_long_sample_leaves_batch_steps_and_rate_to_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "free_bytes", lambda: 1 << 50)
    monkeypatch.setattr(settings, "FEWEST_BATCH_TOKENS", 120)
    config = load_config(store, words=["optim.kind=muon"])
    assert (config.data.batch_tokens, config.data.pack_tokens) == (120, LONG)
    without = load_config(store, words=["optim.kind=muon", f"data.max_tokens={SHORT}"])
    assert (without.data.batch_tokens, without.data.pack_tokens) == (120, 120)
    # The long sample is one more, and may leave the batch before it part empty.
    assert settings._short_run(store, config)[1] - CHATS * SHORT / 120 in (1, 2)
    assert config.optim.lr == pytest.approx(without.optim.lr, rel=0.1)


@pytest.mark.parametrize("words", [("data.batch_tokens=50",), ("data.batch_tokens=110", "train.epochs=3")])
def test_the_rate_of_a_short_run_follows_the_steps_that_the_run_takes(
    store: Store, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(settings, "free_bytes", lambda: 1 << 50)
    config = load_config(store, words=["optim.kind=muon", "train.max_steps=none", f"data.max_tokens={SHORT}", *words])
    batches = token_batches(store, config, ProcessGroup(Rank()), torch.device("cpu"))
    true = sum(batches.batches_per_epoch(epoch) for epoch in range(config.train.epochs))
    factor, steps_taken = settings._short_run(store, config)
    # One of 30 tokens in 50, three in 110.
    assert (steps_taken, factor) == (true, pytest.approx(min(4, (500 / true) ** 0.5)))
    # From there on fewer batches than there are change nothing, and none is counted.
    monkeypatch.setattr(settings, "global_batches", None)
    long = load_config(store, words=["optim.kind=muon", "train.max_steps=none", "train.epochs=9000", *words[:1]])
    assert settings._short_run(store, long)[0] == 1


def test_a_batch_that_was_set_keeps_its_length_beside_a_longer_sample(store: Store) -> None:
    data = load_config(store, words=["data.batch_tokens=200"]).data
    assert (data.batch_tokens, data.pack_tokens) == (200, LONG)
    data = load_config(store, words=["data.batch_tokens=200", "data.max_tokens=100"]).data
    assert (data.batch_tokens, data.pack_tokens) == (200, 200)


def test_a_run_takes_the_long_sample_as_a_step_of_its_own(store: Store, tmp_path: Path) -> None:
    words = [*WORDS[2:], "data.batch_tokens=150", "train.max_steps=none", "train.validate_every=0"]
    state = state_of(store, tmp_path / "run", words, ProcessGroup(Rank()))
    seen = [(batch.samples, metrics.tokens) for batch, metrics in steps(state)]
    assert (1, LONG) in seen
    assert len(seen) in range(13, 15)
    assert max(tokens for samples, tokens in seen if samples > 1) <= 150


def test_a_sample_that_memory_may_not_hold_is_said_before_the_first_step_with_what_helps(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(settings, "output", lambda: SimpleNamespace(warn=warned.append, note=lambda text: None))
    monkeypatch.setattr(settings, "free_bytes", lambda: 1 << 50)
    usual = load_config(store)
    a_token, own = activation_bytes(usual), state_bytes(usual)
    assert warned == []
    monkeypatch.setattr(settings, "free_bytes", lambda: own + a_token * LONG // 2)
    cpu, pack = "train.device=cpu", "data.pack_tokens=3000"
    for words in (
        [],
        [pack, "data.max_tokens=1500"],
        ["train.checkpoint_activations=true"],
        ["train.context_parallel=2"],
    ):
        load_config(store, words=[cpu, *words])
    (said,) = warned
    assert "the longest sample has 3,000 tokens" in said
    assert "data.max_tokens=750 cuts it" in said
    assert "train.checkpoint_activations=true" in said
    assert "train.context_parallel=2 shares it" in said
    load_config(store, "dflash", words=[cpu, "drafter.mask_token_id=0"])
    assert "longest sample" in warned[1]
    assert "context_parallel" not in warned[1]


def test_a_long_sample_is_cut_to_what_its_blocks_leave_room_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(settings, "output", lambda: SimpleNamespace(warn=warned.append, note=lambda text: None))
    words = ["train.device=cpu", "drafter.mask_token_id=0", "loss.num_anchors=100"]
    monkeypatch.setattr(settings, "free_bytes", lambda: 1 << 50)
    usual = load_config(store, "dflash", words=words)
    context, block = activation_bytes(usual), activation_bytes(usual, 1) - activation_bytes(usual)
    for tokens, blocks in ((400, 100), (60, 60)):
        room = 2 * (context * tokens + block * blocks)
        assert room < context * LONG + block * 100
        monkeypatch.setattr(settings, "free_bytes", lambda room=room: state_bytes(usual) + room)
        load_config(store, "dflash", words=words)
        assert f"data.max_tokens={tokens} cuts it" in warned[-1]


MUON = ["optim.kind=muon takes a quarter less"]


@pytest.mark.parametrize(
    ("drafter", "words", "ways"),
    [
        ("eagle3", ["optim.kind=adamw"], [*MUON, "a smaller drafter.vocab_size"]),
        (
            "eagle3",
            ["drafter.num_layers=2", "optim.kind=muon"],
            ["fewer drafter.num_layers", "a smaller drafter.vocab_size"],
        ),
        ("dflash", ["drafter.mask_token_id=0", "optim.kind=adamw"], [*MUON, "fewer drafter.num_layers"]),
        ("medusa", [], [*MUON, "a smaller drafter.vocab_size"]),
        ("medusa", ["drafter.original_head=true"], MUON),
    ],
)
@pytest.mark.parametrize("checkpoint", [[], ["train.checkpoint_activations=true"]])
def test_a_drafter_that_does_not_fit_itself_is_said_and_no_sample_is_blamed(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    words: list[str],
    ways: list[str],
    checkpoint: list[str],
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(settings, "output", lambda: SimpleNamespace(warn=warned.append, note=lambda text: None))
    words = ["train.device=cpu", *words, *checkpoint]
    monkeypatch.setattr(settings, "free_bytes", lambda: 1 << 50)
    usual = load_config(store, drafter, words=words)
    assert warned == []
    own = state_bytes(usual)
    monkeypatch.setattr(settings, "free_bytes", lambda: own * 2 // 5)
    assert load_config(store, drafter, words=words).data == usual.data
    (said,) = warned
    assert said.startswith("the drafter's weights, gradients and moments take about ")
    assert "train.parallel=fsdp shares them among 3 ranks" in said
    assert all(way in said for way in ways)
    assert said.count("; ") == len(ways)
    # As many ranks as it says are enough, and one fewer is not.
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    load_config(store, drafter, words=[*words, "train.parallel=fsdp"])
    assert not any("moments" in text for text in warned[1:])
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_config(store, drafter, words=[*words, "train.parallel=fsdp"])
    assert "shares them among 3 ranks" in warned[-1]


def state_of(store: Store, run: Path, words: list[str], group: ProcessGroup) -> TrainState:
    with FolderLock(run) as lock:
        return build_state(TrainOptions(store.path, run, None, None, tuple(words)), group, lock)


def test_the_largest_pack_is_walked_before_the_first_step_and_changes_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS[2:], "data.batch_tokens=150", "train.max_steps=6", "train.validate_every=0"]
    straight = [metrics.loss for _, metrics in steps(state_of(store, tmp_path / "one", words, ProcessGroup(Rank())))]
    walked = []
    walk = loop._walk
    monkeypatch.setattr(loop, "_walk", lambda state, pack: (walked.append(pack.tokens), walk(state, pack)))
    state = state_of(store, tmp_path / "two", words, ProcessGroup(Rank()))
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    walk_largest(state)
    assert walked == [LONG]
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.model.state_dict().items())
    assert state.optimizer.tensors() == {}
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert [metrics.loss for _, metrics in steps(state)] == straight


def test_packs_of_many_samples_are_walked_where_they_are_the_largest(tmp_path: Path) -> None:
    state = state_of(tiny_store(tmp_path), tmp_path / "run", WORDS, ProcessGroup(Rank()))
    plans = list(state.batches.plan(0))
    pack = loop._largest_pack(state.batches, plans, loop._rows)
    rows = {slot.id: slot.tokens + slot.final_rows for _, slots in plans for slot in slots}
    packs = [[slots[i - plan.start].id for i in pack] for plan, slots in plans for pack in plan.packs]
    assert sum(rows[name] for name in pack.sample_ids) == max(sum(rows[name] for name in names) for names in packs)
    assert len(pack.sample_ids) > 1


def test_final_rows_behind_a_cut_make_no_pack_larger(tmp_path: Path) -> None:
    words = [*WORDS, "data.max_tokens=12", "data.batch_tokens=60", "data.pack_tokens=30"]
    state = state_of(tiny_store(tmp_path), tmp_path / "run", words, ProcessGroup(Rank()))
    slots = [slot for _, slots in state.batches.plan(0) for slot in slots]
    assert max(slot.final_rows for slot in slots) > 12
    assert max(map(loop._rows, slots)) <= 24


def test_a_validation_walks_as_many_tokens_as_are_read_of_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS, "data.max_tokens=10", "data.batch_tokens=20", "data.pack_tokens=20", "train.validation_tokens=50"]
    state = state_of(tiny_store(tmp_path), tmp_path / "run", words, ProcessGroup(Rank()))
    walked, real = [], step.inputs_of
    monkeypatch.setattr(step, "inputs_of", lambda state, packs: (walked.extend(packs), real(state, packs))[1])
    step.validate(state)
    assert sum(pack.tokens for pack in walked) in range(50, 70)


def test_a_largest_pack_that_memory_does_not_hold_is_told_with_what_helps(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(store, tmp_path / "run", [*WORDS[2:], "data.batch_tokens=150"], ProcessGroup(Rank()))

    def full(inputs: object, denominators: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(state.objective, "losses", full)
    with pytest.raises(StorageError, match=rf"3,000 tokens, .* memory of {state.device}: CUDA") as caught:
        walk_largest(state)
    assert caught.value.kind == "out-of-memory"
    for setting in ("data.max_tokens", "data.pack_tokens", "checkpoint_activations", "context_parallel"):
        assert setting in str(caught.value.hint)


WAYS = {"ddp": [], "fsdp": ["train.parallel=fsdp"], "context": ["train.context_parallel=2"]}


def _walk_and_train(store: str, folder: str, words: list[str], ports: dict[str, int]) -> None:
    """The body of one rank: each way with and without the walk."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for name, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        way, _, walks = name.partition("-")
        with process_group(from_environment()) as group:
            state = state_of(Store.open(store), Path(folder) / name, [*words, *WAYS[way]], group)
            if walks:
                walk_largest(state)
            found = [metrics.loss for _, metrics in steps(state)]
            if group.is_first:
                (Path(folder) / f"{name}.txt").write_text(repr(found))


def test_the_walk_of_two_ranks_changes_nothing_in_any_way_of_sharing_the_work(store: Store, tmp_path: Path) -> None:
    words = [*ON_CPU[2:], "data.batch_tokens=150", "train.max_steps=4", "train.validate_every=0"]
    names = [f"{way}{walks}" for way in WAYS for walks in ("", "-walks")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    ranks = [
        Forked(_walk_and_train, store.path, str(tmp_path), words, ports, RANK=str(i), LOCAL_RANK=str(i), WORLD_SIZE="2")
        for i in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for way in WAYS:
        with_and_without = [(tmp_path / f"{way}{walks}.txt").read_text() for walks in ("", "-walks")]
        assert with_and_without[0] == with_and_without[1]
        assert len(with_and_without[0].split(",")) == 4

"""What a person is told before a run starts: every setting with its origin, the vocabulary's share, the duration."""

import json
from pathlib import Path

import pytest
import torch

from hiddenstore.cli import main
from hiddenstore.files.lock import FolderLock
from hiddenstore.process import Rank
from hiddenstore.settings import key_paths
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from tests.trainer.export_cases import KINDS, make
from tests.trainer.runs import WORDS, tiny_store
from trainer import settings as module
from trainer.parallel.group import ProcessGroup
from trainer.settings import activation_bytes, config_class, load_config, longest_sample, state_bytes
from trainer.train import loop
from trainer.train.loop import Forecast, forecast, forecast_text, seconds_per_step, train
from trainer.train.run_folder import TrainOptions
from trainer.train.state import TrainState, build_state
from trainer.train.step import inputs_of, steps


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return tiny_store(tmp_path)


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    with pytest.raises(SystemExit) as done:
        main(["train", *words, "--settings", "--json"])
    assert done.value.code == 0
    return {row["key"]: row for row in json.loads(capsys.readouterr().out)["settings"]}


def test_settings_lists_every_setting_with_its_value_origin_and_meaning(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    rows = answered(capsys, store.path, "optim.lr=0.5")
    assert {key.split(".", 1)[0] for key in rows} == {"data", "drafter", "loss", "optim", "train"}
    assert set(rows) == {".".join(key.split(".")[:2]) for key in key_paths(config_class("eagle3"))}
    assert all(row["why"] for row in rows.values())
    assert (rows["optim.lr"]["value"], rows["optim.lr"]["origin"]) == (0.5, "command line")
    assert rows["drafter.hidden_size"]["origin"] == "store"
    assert rows["optim.clip"]["origin"] == "default"
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_without_a_folder_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", store.path])
    assert done.value.code == 2
    assert "--out" in capsys.readouterr().err


def state_of(store: Store, run: Path) -> TrainState:
    words = (*WORDS, "train.max_steps=4", "train.validate_every=0")
    return build_state(TrainOptions(store.path, run, None, None, words), ProcessGroup(Rank()), FolderLock(run))


def test_a_forecast_leaves_the_run_as_it_would_have_been(store: Store, tmp_path: Path) -> None:
    plain, told = state_of(store, tmp_path / "plain"), state_of(store, tmp_path / "told")
    said = forecast(told)
    assert said.seconds is not None
    assert said.step_seconds is not None
    assert said.seconds == pytest.approx(4 * said.step_seconds)
    assert seconds_per_step(told) > 0
    losses = [[metrics.loss for _, metrics in steps(state)] for state in (plain, told)]
    assert losses[0] == losses[1]
    for one, other in zip(plain.model.parameters(), told.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_person_reads_the_duration_and_the_share_of_the_vocabulary_before_the_first_step(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", store.path, *WORDS, "train.max_steps=2", "-o", str(tmp_path / "run")])
    assert done.value.code == 0
    told = capsys.readouterr().err
    assert "of the supervised ones" in told
    assert "measured on one pack" in told
    assert "of memory, checkpoints of" in told
    assert train(store.path, tmp_path / "run", resume=True).was_finished


def test_the_checkpoints_on_disk_take_what_was_said_before_the_first_step(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "train.max_steps=2", "train.keep=1", "train.keep_best=0", "train.validate_every=0"]
    beside = []
    for name, frozen in (("run", []), ("frozen", ["drafter.train_head=false"])):
        with pytest.raises(SystemExit):
            main(["train", store.path, *words, *frozen, "-o", str(tmp_path / name), "--json"])
        said = json.loads(capsys.readouterr().out)["forecast"]
        files = list((tmp_path / name / "checkpoints").rglob("*.safetensors"))
        # A generator of torch, and the names of the tensors.
        beside.append(sum(path.stat().st_size for path in files) - said["checkpoint_bytes"])
        assert said["memory_bytes"] > 50e6
        assert said["seconds"] > 0
    assert 0 < beside[1] < beside[0] < 16_000


def test_a_run_that_goes_on_has_its_moments_in_memory_already(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "peak_bytes", lambda: 0)
    new = state_of(store, tmp_path / "new")
    assert forecast(new).memory_bytes == loop._moment_bytes(new) * (new.device.type == "cpu")
    train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=2", "train.validate_every=0"])
    options = TrainOptions(store.path, tmp_path / "run", None, None, ("train.max_steps=4",), resume=True)
    assert forecast(build_state(options, ProcessGroup(Rank()), FolderLock(tmp_path / "run"))).memory_bytes == 0


def test_of_several_processes_only_the_checkpoints_are_foretold() -> None:
    assert forecast_text(Forecast(2_000_000), 1000) == "checkpoints of 2 MB on disk"
    whole = forecast_text(Forecast(2_000_000, 60.0, 2.0, 3_000_000_000), 1000)
    assert whole.endswith("measured on one pack; 3 GB of memory, checkpoints of 2 MB on disk")


def test_every_derived_setting_says_why_and_a_default_does_not(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answered(capsys, store.path, "train.max_steps=125", "optim.kind=muon")
    assert all((row["because"] is not None) == (row["origin"] == "store") for row in rows.values())
    assert "the target's" in str(rows["drafter.num_heads"]["because"])
    assert "sqrt(500/steps)" in str(rows["optim.lr"]["because"])
    assert "2 times" in str(rows["optim.lr"]["because"])
    assert "at least" in str(rows["data.batch_tokens"]["because"])
    assert rows["drafter.vocab_size"]["because"] == "the target's whole vocabulary"


def test_reasons_stand_whole_in_a_terminal_of_80_columns(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", store.path, "--settings"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    reasons = [row["because"] for row in answered(capsys, store.path).values() if row["because"]]
    assert len(reasons) > 5
    assert all(reason in " ".join(shown.split()) for reason in reasons)


def test_packs_are_lowered_to_the_free_memory_but_never_below_the_longest_sample_nor_raised(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 1 << 50)
    usual = load_config(store)
    for free, expected in (
        (0, usual.data.pack_tokens),
        # A drafter that does not fit itself does not fit beside shorter packs.
        (state_bytes(usual), usual.data.pack_tokens),
        (state_bytes(usual) + 1, longest_sample(store)),
        (state_bytes(usual) + 2 * activation_bytes(usual) * (longest_sample(store) + 7), longest_sample(store) + 7),
    ):
        monkeypatch.setattr(module, "free_bytes", lambda free=free: free)
        found = load_config(store, words=["train.device=cpu"]).data
        assert (found.pack_tokens, found.batch_tokens) == (expected, usual.data.batch_tokens)
        assert load_config(store, words=["data.pack_tokens=1000"]).data.pack_tokens == 1000


def test_ranks_of_one_machine_share_its_free_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = longest_sample(store) + 20
    usual = load_config(store)
    own, room = state_bytes(usual), 2 * activation_bytes(usual) * alone
    monkeypatch.setattr(module, "free_bytes", lambda: own + room)
    assert load_config(store, words=["train.device=cpu"]).data.pack_tokens == alone
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    # Each has a drafter of its own beside its half of the rest.
    monkeypatch.setattr(module, "free_bytes", lambda: 2 * own + room)
    shared = max(alone // 2, longest_sample(store))
    assert load_config(store, words=["train.device=cpu"]).data.pack_tokens == shared < alone


SMALL = ["train.device=cpu", *(word for word in WORDS[2:] if not word.startswith(("drafter.vocab_size", "loss.steps")))]
BLOCKS = [*SMALL, "drafter.mask_token_id=0"]


def block_state(store: Store, run: Path, drafter: str, words: list[str]) -> TrainState:
    options = TrainOptions(store.path, run, drafter, None, tuple(words))
    return build_state(options, ProcessGroup(Rank()), FolderLock(run))


@pytest.mark.parametrize("num_anchors", [4, 512])
def test_memory_counts_the_blocks_that_every_sample_of_a_pack_opens(
    store: Store, tmp_path: Path, num_anchors: int
) -> None:
    words = [*BLOCKS, f"loss.num_anchors={num_anchors}", "data.batch_tokens=400", "data.pack_tokens=400"]
    state = block_state(store, tmp_path / "run", "dflash", words)
    packs = next(iter(state.batches)).packs
    opened = sum(len(inputs.block_map.anchors) for inputs in inputs_of(state, packs))
    true = activation_bytes(state.config, opened / sum(pack.tokens for pack in packs))
    # No block opens at the last token of a sample; the samples of a pack are not those of the store.
    assert module._bytes_a_token(store, state.config) == pytest.approx(true, rel=0.2)
    assert true > 2 * activation_bytes(state.config)


def test_a_derived_pack_of_blocks_takes_half_of_the_free_memory_whatever_its_length(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*BLOCKS, "drafter.block_size=16"]
    monkeypatch.setattr(module, "free_bytes", lambda: 1 << 50)
    usual = load_config(store, "dflash", words=words)
    a_token, own = module._bytes_a_token(store, usual), state_bytes(usual)
    for tokens in (50, 100, 200):
        monkeypatch.setattr(module, "free_bytes", lambda tokens=tokens: own + 2 * a_token * tokens)
        assert load_config(store, "dflash", words=words).data.pack_tokens == tokens
    # Where nobody may tell yet what teaches, every token may.
    monkeypatch.setattr(module, "free_bytes", lambda: own + 2 * a_token * 200)
    every = load_config(store, "dflash", words=[*words, "data.loss_on=all"])
    assert longest_sample(store) < every.data.pack_tokens < 200


@pytest.fixture(scope="module")
def wide_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("wide"), samples=30, layers=(1, 3, 4), width=256, final="all")


@pytest.mark.parametrize(
    ("drafter", "more"),
    [
        ("eagle1", []),
        ("eagle3", []),
        ("eagle3", ["drafter.train_head=false"]),
        ("medusa", []),
        ("medusa", ["drafter.original_head=true", "drafter.medusa_layers=2"]),
        *((name, ["drafter.mask_token_id=0"]) for name in ("peagle", "dflash", "dflash2", "domino", "dspark")),
        ("xpress", ["drafter.mask_token_id=0"]),
        ("xpress", ["drafter.mask_token_id=0", "drafter.xpress_mlp_ratio=4", "drafter.train_head=true"]),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_drafter_s_own_memory_is_that_of_its_weights_gradients_and_moments(
    wide_store: Store, tmp_path: Path, drafter: str, more: list[str], optimizer: str
) -> None:
    words = ["train.device=cpu", f"optim.kind={optimizer}", *more]
    state = block_state(wide_store, tmp_path / "run", drafter, words)
    true = 8 * sum(p.numel() for p in state.model.parameters()) + loop._moment_bytes(state)
    # Norms are left out, and that the first layer of EAGLE-3 reads two widths.
    assert 0.85 * true < state_bytes(state.config) < 1.01 * true


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "narrower" not in kind])
def test_the_weights_of_a_drafter_are_those_of_its_matrices_whatever_its_settings(kind: str) -> None:
    name, known, flags = KINDS[kind]
    model = make(name, known, **flags).model
    true = sum(p.numel() for p in model.parameters() if p.ndim > 1 and p.requires_grad)
    assert 0.8 * true < model.config.weights < 1.05 * true


def test_ranks_that_share_the_parameters_have_a_part_of_them_each(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = state_bytes(load_config(store, words=["train.parallel=fsdp"]))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert state_bytes(load_config(store, words=["train.parallel=fsdp"])) == whole // 4
    assert state_bytes(load_config(store)) == whole

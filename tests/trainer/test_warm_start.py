"""Starting a run from the weights of another one."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from tests.trainer.runs import WORDS, tiny_store
from trainer.train import checkpoint
from trainer.train.loop import train
from trainer.train.run_folder import load_drafter
from trainer.vocab import DraftVocab

SHAPE = [word for word in WORDS if word.startswith(("drafter.", "data.", "loss."))]
REST = ["data.batch_tokens=160", "data.pack_tokens=80", "loss.steps=3", "train.validate_every=0"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tiny_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def first(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "first"
    train(store.path, run, words=[*SHAPE, "train.max_steps=3", "train.checkpoint_every=1", "train.keep=9"])
    return run


def test_shape_vocabulary_and_weights_follow_from_the_start_and_run_json_records_it(
    store: Store, first: Path, tmp_path: Path
) -> None:
    start = first / "checkpoints/step-2"
    report = train(
        store.path,
        tmp_path / "run",
        words=[*REST, f"train.init_from={start}", "train.max_steps=1", "optim.lr=1e-30"],
    )
    before, after = load_drafter(start), load_drafter(tmp_path / "run")
    assert after.config == before.config
    assert torch.equal(after.vocab.d2t, before.vocab.d2t)
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(tensor, after.model.state_dict()[name]), name
    recorded = json.loads((tmp_path / "run/run.json").read_text())["init_from"]
    state = checkpoint.read_state(start)
    assert recorded == {"path": str(start), "step": 2, "sha256": state.files[checkpoint.DRAFTER]}
    moments = checkpoint.load(report.checkpoint).optimizer
    assert all(float(value) == 1 for name, value in moments.items() if name.startswith("step."))


def test_untrained_means_the_start(store: Store, first: Path, tmp_path: Path) -> None:
    train(store.path, tmp_path / "run", words=[*REST, f"train.init_from={first}", "train.max_steps=1"])
    began, start = load_drafter(tmp_path / "run", untrained=True), load_drafter(first)
    for name, tensor in start.model.state_dict().items():
        assert torch.equal(tensor, began.model.state_dict()[name]), name
    text = (tmp_path / "run/run.json").read_text()
    from hiddenstore.files.documents import seal
    from trainer.train.run_folder import read_facts

    facts = read_facts(tmp_path / "run")
    assert facts.init_from is not None
    changed = facts.model_copy(update={"init_from": facts.init_from.model_copy(update={"sha256": "0" * 64})})
    (tmp_path / "run/run.json").write_bytes(seal(changed))
    with pytest.raises(ConflictError, match=r"is not what .* was started from any more") as caught:
        load_drafter(tmp_path / "run", untrained=True)
    assert caught.value.kind == "init-changed"
    (tmp_path / "run/run.json").write_text(text)


def test_a_resume_before_the_first_checkpoint_starts_from_it_again(store: Store, first: Path, tmp_path: Path) -> None:
    words = [*REST, f"train.init_from={first}", "train.max_steps=2"]
    train(store.path, tmp_path / "straight", words=words)
    train(store.path, tmp_path / "killed", words=words)
    shutil.rmtree(tmp_path / "killed" / checkpoint.FOLDER)
    train(store.path, tmp_path / "killed", resume=True)
    straight, killed = (load_drafter(tmp_path / name).model.state_dict() for name in ("straight", "killed"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in straight.items())
    with pytest.raises(ConfigError, match=r"train\.init_from=elsewhere") as caught:
        train(store.path, tmp_path / "killed", words=["train.init_from=elsewhere"], resume=True)
    assert caught.value.kind == "resume-settings"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["drafter.intermediate_size=48"], r"midlayer\.mlp\.up_proj\.weight: \[48, 32\] expected, \[32, 32\] found"),
        (["drafter.aux_layers=1,3"], r"drafter\.aux_layers: 1,3 asked for, 1,3,4 found"),
        (["drafter.vocab_size=30"], r"drafter\.vocab_size: 30 asked for, 40 found"),
        (["drafter.name=medusa"], r"drafter\.name \(command line\) says medusa, train\.init_from says eagle3"),
    ],
)
def test_another_shape_is_refused_naming_both(
    words: list[str], said: str, store: Store, first: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(store.path, tmp_path / "run", words=[*REST, f"train.init_from={first}", "train.max_steps=1", *words])
    assert not (tmp_path / "run").exists()


def test_another_target_and_no_run_at_all_are_refused(store: Store, first: Path, tmp_path: Path) -> None:
    wide = make_store(tmp_path, samples=6, layers=(1, 3, 4), width=48)
    with pytest.raises(ConfigError, match=r"target\.hidden_size") as caught:
        train(wide.path, tmp_path / "run", words=[*REST, f"train.init_from={first}", "train.max_steps=1"])
    assert caught.value.kind == "init-differs"
    with pytest.raises(NotFoundError, match="no run with a checkpoint"):
        train(store.path, tmp_path / "run", words=[f"train.init_from={tmp_path}"])


def test_a_vocabulary_of_the_same_size_from_another_run_is_refused_by_whoever_reads_it(
    store: Store, first: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(first, run)
    vocab = load_drafter(run).vocab
    unknown = (~vocab.t2d).nonzero()[:1, 0]
    other = DraftVocab.of_ids(torch.cat([vocab.target_ids[1:], unknown]), len(vocab.t2d))
    (run / checkpoint.VOCAB).write_bytes(other.save_bytes())
    words = [*REST, f"train.init_from={run / 'checkpoints/step-2'}", "train.max_steps=1"]
    for read in (
        lambda: load_drafter(run),
        lambda: train(store.path, run, resume=True, words=["train.max_steps=5"]),
        lambda: train(store.path, tmp_path / "new", words=words),
    ):
        with pytest.raises(CorruptionError, match="not the draft vocabulary of this run") as error:
            read()
        assert error.value.kind == "vocab-corrupt"
    (run / checkpoint.VOCAB).write_bytes(vocab.save_bytes())
    train(store.path, run, resume=True, words=["train.max_steps=5"])
    assert load_drafter(run).step == 5

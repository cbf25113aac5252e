"""Finding A5: stores of targets that differ in their decoder blocks alone are told apart by their layer profiles."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.errors import ConfigError
from hiddenstore.store import Store
from hiddenstore.verify.profile import make_profile, target_differences, write_profile
from tests.trainer.runs import WORDS, tiny_store
from trainer.train.loop import train


def store_of(folder: Path, moved: float = 0.0, opening: int = 6) -> Store:
    """A store whose profile has states moved by a share of their length from layer 2 on; the profiled samples of all
    stores share their first ``opening`` tokens."""
    store = tiny_store(folder)
    width, layers = store.capture.target.hidden_size, store.capture.target.num_layers
    dice = torch.Generator().manual_seed(0)
    states = torch.randn(layers + 1, 40, width, generator=dice)
    update = torch.randn(layers + 1, 40, width, generator=dice) * moved
    states[3:] += update[3:]
    ids = torch.arange(40)
    ids[opening:] += round(100 * moved)
    sample_id = store.sample_ids[0]
    assert write_profile(store.fs, make_profile(sample_id, ids.numpy(), states))
    return Store.open(store.path)


def test_a5_layers_that_look_otherwise_on_the_same_first_tokens_are_another_target(tmp_path: Path) -> None:
    ours, same, other = (store_of(tmp_path / name, moved) for name, moved in (("a", 0), ("b", 0.02), ("c", 0.25)))
    identity = ours.capture.target
    assert target_differences(identity, same, ours) == []
    (line,) = target_differences(identity, other, ours)
    assert line.startswith("states of layer 2: 0.0")
    assert target_differences(identity, store_of(tmp_path / "d", 0.25, opening=0), ours) == []
    assert target_differences(identity, tiny_store(tmp_path / "e"), ours) == []


@pytest.mark.parametrize("moved", [0.0, 0.25])
def test_a5_eval_and_a_warm_start_refuse_such_a_store(tmp_path: Path, moved: float) -> None:
    first, second = store_of(tmp_path / "first"), store_of(tmp_path / "second", moved)
    train(first.path, tmp_path / "run", words=[*WORDS, "train.max_steps=1"])
    result = CliRunner().invoke(main, ["eval", str(tmp_path / "run"), second.path, "--json"])
    words = ["data.batch_tokens=160", "data.pack_tokens=80", f"train.init_from={tmp_path / 'run'}", "train.max_steps=1"]
    if not moved:
        assert result.exit_code == 0, result.output
        train(second.path, tmp_path / "tuned", words=words)
        return
    assert result.exit_code == 4
    assert "states of layer 2" in result.stderr
    with pytest.raises(ConfigError, match=r"target\.states of layer 2") as caught:
        train(second.path, tmp_path / "tuned", words=words)
    assert caught.value.kind == "init-differs"

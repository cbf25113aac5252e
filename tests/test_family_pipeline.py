"""Every larger family through the commands: collected, a drafter trained on the store, decoded with the live target."""

import json
from pathlib import Path

import pytest

from tests.collectors.tiny import CONFIGS, save_target
from tests.collectors.tiny_families import MORE, RUNNING_STATE
from tests.tiny_world import LAYERS, TRAIN, World, error_of, run

# One of each kind: experts, latent attention, a running state, text inside a vision model.
QUICK = ("gpt-oss", "deepseek-v3", "granitemoe-hybrid", "qwen2.5-vl")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*CONFIGS, *MORE)]
)
def test_a_drafter_is_trained_for_the_family_and_decoded_where_tokens_can_be_taken_back(
    family: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, store, trained = str(save_target(tmp_path / family, family)), str(tmp_path / "store"), str(tmp_path / "run")
    data = world / "data"
    if family in ("qwen2", "qwen3.5-moe"):
        # transformers gives these model types a tokenizer class of their own.
        data = str(tmp_path / "data")
        assert run("prepare", world / "chats.jsonl", "-o", data, "--target", target, "--val", "20%") == 0
    assert run("collect", data, "-o", store, "--target", target, "--layers", LAYERS, "--check", "hf") == 0
    assert run("verify", store, "--full") == 0
    assert run("train", store, "-o", trained, *TRAIN) == 0
    losses = [json.loads(line)["loss"] for line in (Path(trained) / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    capsys.readouterr()
    words = ("decode", trained, "--target", target, "--prompts", store, "-n", "2", "--max-new-tokens", "4")
    if family in RUNNING_STATE:
        assert run(*words) == 2
        message, fix = error_of(capsys.readouterr().err)
        assert "cannot take rejected tokens back" in message
        assert "hiddenstore eval --engine" in fix
    else:
        assert run(*words, "--json") == 0
        assert json.loads(capsys.readouterr().out)["identical_to_greedy"]

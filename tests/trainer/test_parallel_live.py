"""P-EAGLE, JetSpec and DSpark beside a live target and through the training command: greedy as ever, equal after a
resume."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenstore.errors import InterruptError
from schemas import HeadSpec
from tests.trainer.live import assert_live_equals_eval, identity_in_memory
from tests.trainer.runs import WORDS, tiny_store
from tests.trainer.tiny_target import make_model, make_tokenizer
from trainer.drafters import drafter_kind
from trainer.drafters.base import DrafterInUse
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.speculate import DecodeLimits, plain
from trainer.evaluate.target import LiveTarget, bundle_of
from trainer.losses.teacher import TargetInterface
from trainer.train import step as step_module
from trainer.train.loop import train
from trainer.vocab import DraftVocab

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "peagle": ("peagle", {"num_layers": 2}),
    "jetspec": ("dflash", {"causal": True, "block_size": 4, "num_layers": 2}),
    "dflash with causal windows": ("dflash", {"sliding_window": 6, "sliding_causal": True, "block_size": 4}),
    "dspark": ("dspark", {"block_size": 3, "num_layers": 2, "markov_rank": 8}),
    "xpress": ("xpress", {"block_size": 4, "num_layers": 2, "xpress_rank": 8, "train_head": True}),
    "domino": ("domino", {"block_size": 4, "num_layers": 2, "gru_hidden_dim": 8, "emb_dim": 8}),
}


@pytest.mark.parametrize(
    "name",
    [
        "peagle",
        "jetspec",
        "dspark",
        "domino",
        "xpress",
        pytest.param("dflash with causal windows", marks=pytest.mark.slow),
    ],
)
def test_live_decoding_is_greedy_and_eval_counts_the_same(name: str) -> None:
    model, tokenizer = make_model(), make_tokenizer()
    target = LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), (0, 1, 2))
    prompts = [[random.Random(seed).randrange(5, 99) for _ in range(12)] for seed in range(3)]
    said = torch.tensor([token for prompt in prompts for token in plain(target, prompt, 24).tokens])
    word, options = KINDS[name]
    kind = drafter_kind(word)
    # Few tokens to choose from, so that a random drafter is sometimes right.
    few = DraftVocab.of_counts(torch.bincount(said, minlength=99).numpy(), 4)
    vocab = DraftVocab.full(99) if name == "xpress" else few
    config = kind.config.model_validate({
        "aux_layers": (0, 1, 2), "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 32, "vocab_size": vocab.size, "mask_token_id": 0, **options,
    })  # fmt: skip
    interface = TargetInterface(bundle_of(model, HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)), vocab)
    drafter = kind.build(config, interface, 4).eval()
    if name == "xpress":
        # It has the whole vocabulary: the others' rows say nothing.
        for rows in (drafter.lm_head.weight, drafter.xpress_head.w2.weight):
            rows.data[~few.t2d] = 0
    use = DrafterInUse(kind, drafter, interface)
    live = assert_live_equals_eval(target, use, prompts, (DraftShape(1), DraftShape(3)), DecodeLimits(2, 20))
    assert any(run.tally.accepted_at[0] for run in live.by_shape)


@pytest.mark.parametrize("name", ["peagle", "xpress", pytest.param("dspark", marks=pytest.mark.slow)])
def test_an_interrupted_run_repeats_the_uninterrupted_one_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (drafter, options) = tiny_store(tmp_path), KINDS[name]
    words = [word for word in WORDS if not word.startswith(("loss.", "drafter.vocab_size"))]
    words += [f"drafter.{key}={value}" for key, value in {"mask_token_id": 0, **options}.items()]
    words += ["train.max_steps=6", "train.checkpoint_every=2", "train.validate_every=0"]
    train(store.path, tmp_path / "straight", drafter=drafter, words=words)
    real, calls = step_module.train_step, [0]

    def step(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(step_module, "train_step", step)
    with pytest.raises(InterruptError):
        train(store.path, tmp_path / "stopped", drafter=drafter, words=words)
    train(store.path, tmp_path / "stopped", resume=True)
    runs = [tmp_path / name for name in ("straight", "stopped")]
    weights = [(run / "checkpoints/step-6/drafter.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]

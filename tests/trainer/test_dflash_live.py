"""DFlash beside a live target, through the training command, and what it takes from the tokenizer."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenstore.errors import ConfigError, InterruptError
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from schemas import HeadSpec
from tests.trainer.live import assert_live_equals_eval, identity_in_memory
from tests.trainer.runs import WORDS, tiny_store
from tests.trainer.tiny_target import make_model, make_tokenizer
from trainer.drafters.base import DrafterInUse
from trainer.drafters.dflash import DFLASH, DFlashConfig, mask_token
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.speculate import DecodeLimits, plain
from trainer.evaluate.target import LiveTarget, bundle_of
from trainer.losses.teacher import TargetInterface
from trainer.train import step as step_module
from trainer.train.loop import train
from trainer.vocab import DraftVocab

SETTINGS = [
    *(word for word in WORDS if not word.startswith(("loss.", "drafter.vocab_size"))),
    "drafter.mask_token_id=0", "drafter.block_size=4", "drafter.num_layers=2", "loss.num_anchors=3",
]  # fmt: skip


@pytest.fixture(scope="module", name="store")
def _store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tiny_store(tmp_path_factory.mktemp("dflash"))


@pytest.mark.parametrize("window", [None, 6])
def test_live_decoding_is_greedy_and_eval_counts_the_same(window: int | None) -> None:
    model, tokenizer = make_model(), make_tokenizer()
    target = LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), (0, 1, 2))
    prompts = [[random.Random(seed).randrange(5, 99) for _ in range(12)] for seed in range(4)]
    said = torch.tensor([token for prompt in prompts for token in plain(target, prompt, 24).tokens])
    # Few tokens to choose from, so that a random drafter is sometimes right.
    vocab = DraftVocab.of_counts(torch.bincount(said, minlength=99).numpy(), 4)
    config = DFlashConfig(
        aux_layers=(0, 1, 2), hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32,
        vocab_size=4, num_layers=2, block_size=4, mask_token_id=0, sliding_window=window,
    )  # fmt: skip
    interface = TargetInterface(bundle_of(model, HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)), vocab)
    drafter = DrafterInUse(DFLASH, DFLASH.build(config, interface, 0).eval(), interface)
    live = assert_live_equals_eval(target, drafter, prompts, (DraftShape(1), DraftShape(3)), DecodeLimits(3, 24))
    assert any(run.tally.accepted_at[0] for run in live.by_shape)


def test_an_interrupted_run_repeats_the_uninterrupted_one_bit_for_bit(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store.path, tmp_path / "straight", drafter="dflash", words=SETTINGS)
    real, calls = step_module.train_step, [0]

    def step(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(step_module, "train_step", step)
    with pytest.raises(InterruptError):
        train(store.path, tmp_path / "stopped", drafter="dflash", words=SETTINGS)
    train(store.path, tmp_path / "stopped", resume=True)
    runs = [tmp_path / name for name in ("straight", "stopped")]
    weights = [(run / "checkpoints/step-12/drafter.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    losses = [
        [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs
    ]
    assert losses[0] == losses[1]
    assert len({loss for loss in losses[0] if loss is not None}) == 12


def test_a_store_without_the_final_hidden_serves_hard_labels_and_is_refused_for_distillation(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=12, layers=(1, 3, 4), final="none")
    words = [*SETTINGS, "train.max_steps=2", "train.validate_every=0"]
    assert train(store.path, tmp_path / "hard", drafter="dflash", words=words).steps == 2
    with pytest.raises(ConfigError, match="lacks the final hidden") as caught:
        train(store.path, tmp_path / "soft", drafter="dflash", words=[*words, "loss.distil=0.5"])
    assert "--layers dflash --final supervised" in str(caught.value.hint)


PAD, END = {"id": 0, "content": "<pad>"}, {"id": 1, "content": "</s>"}
SPARE, USER, MASK = {"id": 2, "content": "<spare>"}, {"id": 3, "content": "<|user|>"}, {"id": 4, "content": "<mask>"}


@pytest.mark.parametrize(
    ("added", "settings", "template", "expected"),
    [
        ([PAD, END, SPARE, MASK], {"mask_token": "<mask>"}, "", 4),
        ([PAD, END, SPARE, MASK], {"mask_token": {"content": "<mask>"}}, "", 4),
        ([PAD, END, USER, SPARE], {"pad_token": "<pad>", "eos_token": "</s>"}, "", 2),
        ([PAD, END, SPARE, MASK], {"pad_token": "<pad>", "eos_token": "</s>"}, "{{ '<spare>' }}", 4),
        ([PAD, END, USER], {"pad_token": "<pad>", "eos_token": "</s>"}, "", 0),
        ([PAD, END, MASK], {"mask_token": "<mask>", "pad_token": "<pad>", "eos_token": "</s>"}, "x", 4),
        ([END], {"eos_token": "</s>"}, "", None),
        ([PAD, {"id": 99, "content": "<mask>"}], {"mask_token": "<mask>", "pad_token": "<pad>"}, "", 0),
    ],
)
def test_the_mask_token_is_the_tokenizers_else_an_unused_one_else_the_pad(
    added: list[dict[str, object]], settings: dict[str, object], template: str, expected: int | None
) -> None:
    files = {
        "tokenizer.json": json.dumps({"added_tokens": added}).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "chat_template.jinja": template.encode(),
    }
    assert mask_token(files.get, 50) == expected


def test_a_store_without_a_tokenizer_names_no_mask_token() -> None:
    assert mask_token(lambda name: None, 50) is None

"""Thirty steps straight against half of them, SIGKILL, and the rest: the same losses, bit for bit."""

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch

from hiddenstore.testing.builders import make_store, memory_input
from tests.forked import Forked, command
from tests.trainer.runs import ON_CPU, WORDS, store_of, tiny_store
from trainer.train.checkpoint import read_state
from trainer.train.loop import train
from trainer.train.run_folder import load_drafter

SETTINGS = [*WORDS, "train.max_steps=30", "train.checkpoint_every=5", "train.validate_every=12"]


def start(store: str, run: Path, *words: str) -> Forked:
    return Forked(command, "train", store, "-o", str(run), "-q", *words)


def records(run: Path) -> list[tuple[int, str]]:
    """Everything but the times, as text, so that equality is equality of bits."""
    timed = {"tokens_per_s", "data_wait_fraction"}
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], json.dumps({k: v for k, v in r.items() if k not in timed})) for r in found]


def test_a_killed_and_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert start(store, straight, *SETTINGS).wait(120) == 0
    process = start(store, killed, *SETTINGS)
    metrics, deadline = killed / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 17):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert start(store, killed, "--resume").wait(120) == 0
    assert records(killed) == records(straight)
    weights = [(run / "checkpoints/step-30/drafter.safetensors").read_bytes() for run in (straight, killed)]
    assert weights[0] == weights[1]


def test_a_resume_in_a_later_epoch_packs_as_before_where_samples_of_validation_are_longer(tmp_path: Path) -> None:
    *shorter, longest = sorted(memory_input(samples=17).samples(), key=lambda sample: sample.tokens)
    assert longest.tokens > shorter[-1].tokens
    samples = [*(replace(sample, split="train") for sample in shorter), replace(longest, split="validation")]
    store, straight, resumed = store_of(tmp_path, samples).path, tmp_path / "straight", tmp_path / "resumed"
    words = [
        *WORDS, f"data.pack_tokens={shorter[-1].tokens}", "train.max_steps=none", "train.epochs=3",
        "train.checkpoint_every=1", "train.keep=99", "train.validate_every=0",
    ]  # fmt: skip
    steps = train(store, straight, words=words).steps
    shutil.copytree(straight, resumed)
    for step in range(steps // 2 + 1, steps + 1):
        shutil.rmtree(resumed / f"checkpoints/step-{step}")
    assert read_state(resumed / f"checkpoints/step-{steps // 2}").cursor["epoch"] == 1
    train(store, resumed, resume=True)
    weights = [(run / f"checkpoints/step-{steps}/drafter.safetensors").read_bytes() for run in (straight, resumed)]
    assert weights[0] == weights[1]


def test_a_run_in_bf16_on_states_that_threads_decode_by_products_is_repeated_by_its_resumes(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=30, layers=(1, 3, 6), codec="rebuilt-klt").path
    straight = tmp_path / "straight"
    train(store, straight, words=[*ON_CPU, "train.precision=bf16", "train.checkpoint_every=2", "train.keep=9"])
    for times in range(2):
        shutil.copytree(straight, resumed := tmp_path / f"resumed-{times}")
        for step in range(4, 13, 2):
            shutil.rmtree(resumed / f"checkpoints/step-{step}")
        train(store, resumed, resume=True)
        weights = [(run / "checkpoints/step-12/drafter.safetensors").read_bytes() for run in (straight, resumed)]
        assert weights[0] == weights[1]


def test_a_resume_with_another_seed_leaves_untrained_what_the_run_began_with(tmp_path: Path) -> None:
    store, run = tiny_store(tmp_path).path, tmp_path / "run"
    train(store, run, words=[*WORDS, "train.max_steps=1"])
    first = load_drafter(run, untrained=True).model.state_dict()["fc.weight"]
    train(store, run, resume=True, words=["train.max_steps=2", "train.seed=7"])
    assert torch.equal(load_drafter(run, untrained=True).model.state_dict()["fc.weight"], first)

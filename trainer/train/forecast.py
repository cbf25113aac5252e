"""How long a run will take, measured before it starts on one pack of its own.

An estimate: packs differ in length and supervised share, and other processes in what they leave of the machine.
"""

import time

import torch

from hiddenstore.console.text import amount
from hiddenstore.console.text import seconds as duration_text
from hiddenstore.data import PackedBatch
from trainer.train.optim import orthogonal
from trainer.train.state import TrainState, token_batches
from trainer.train.step import autocast


def seconds_per_step(state: TrainState) -> float:
    """Forward and backward of the first pack, scaled to a whole batch, and Muon's iterations. Weights, order and random
    draws of the run stay as they are. For a single process."""
    pack = next(iter(token_batches(state.store, state.config, state.group))).packs[0].to(state.device)
    rounds = 1 if state.device.type == "cpu" else 2
    for _ in range(rounds):
        # What a device does first it does slowly.
        began = time.perf_counter()
        _walk(state, pack)
        _synchronize(state.device)
    of_pack = time.perf_counter() - began
    share = min(state.config.data.batch_tokens, state.batches.tokens) / max(1, pack.tokens)
    began = time.perf_counter()
    for matrix in state.optimizer.matrices:
        orthogonal(matrix.detach(), bf16=state.config.train.precision == "bf16" or None)
    _synchronize(state.device)
    return of_pack * share + time.perf_counter() - began


def forecast(state: TrainState) -> str:
    """One line: ``about 12 min: 2.1 s a step of 4,608 tokens, measured on one pack``."""
    seconds = seconds_per_step(state)
    left = state.total_steps - state.step
    tokens = amount(state.config.data.batch_tokens)
    return f"about {duration_text(seconds * left)}: {seconds:.2g} s a step of {tokens} tokens, measured on one pack"


def _walk(state: TrainState, pack: PackedBatch) -> None:
    state.model.rng_key = (state.config.train.seed, state.step)
    inputs = state.objective.prepare(pack)
    with autocast(state):
        losses = state.objective.losses(inputs, state.objective.denominators(inputs))
    if losses.total.requires_grad:
        losses.total.backward()
    state.model.zero_grad(set_to_none=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

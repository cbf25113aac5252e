"""A fresh drafter says little: behind a head whose logits are loud it starts near the loss of equal probabilities."""

import math
from dataclasses import replace

import pytest
import torch

from hiddenstore.targets.head import HeadBundle
from schemas import HeadSpec
from tests.trainer.conftest import VOCAB, WIDTH, drafter_config, make_batch
from trainer.drafters.base import START_NATS, quiet_scale
from trainer.drafters.dflash import BlockLoss, BlockObjective, DFlash, DFlashConfig
from trainer.drafters.eagle3 import FC_START, Eagle3, TttLoss, TttObjective
from trainer.losses.teacher import TargetInterface, Teacher
from trainer.vocab import DraftVocab

SHAPE: dict[str, object] = {
    "aux_layers": (1, 2, 4), "hidden_size": WIDTH, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "vocab_size": VOCAB, "num_layers": 2, "mask_token_id": 3,
}  # fmt: skip


@pytest.fixture
def target() -> TargetInterface:
    """Logits of a random state spread by 12 behind its head."""
    rows = torch.randn(VOCAB, WIDTH) * 3
    head = HeadBundle(HeadSpec(norm_flavour="rms", norm_eps=1e-5, tied=False), rows, rows, torch.ones(WIDTH))
    return TargetInterface(head, DraftVocab.full(VOCAB))


@pytest.mark.parametrize("version", [{}, {"fc_norm": True, "norm_output": True}, {"train_head": False}])
def test_a_fresh_eagle3_starts_near_equal_probabilities(target: TargetInterface, version: dict[str, bool]) -> None:
    model = Eagle3.build(drafter_config(**version), target.head, target.vocab)
    objective = TttObjective(model, Teacher(target), TttLoss(steps=3))
    inputs = objective.prepare(make_batch([60, 40]))
    losses = objective.losses(inputs, objective.denominators(inputs))
    assert float((losses.sums / losses.counts).max()) < math.log(VOCAB) + 0.5


@pytest.mark.parametrize(("train_head", "nats"), [(True, 0.5), (False, 4.0)])
def test_a_fresh_dflash_starts_nearer_to_equal_probabilities_than_its_target_would(
    target: TargetInterface, train_head: bool, nats: float
) -> None:
    # Blocks begin as embeddings, which behind a tied head are no random states.
    target = replace(target, head=replace(target.head, embed_tokens=torch.randn(VOCAB, WIDTH)))
    config = DFlashConfig.model_validate({**SHAPE, "train_head": train_head})
    model = DFlash.build(config, target.head, target.vocab)
    objective = BlockObjective(model, Teacher(target), BlockLoss())
    inputs = objective.prepare(make_batch([60, 40]))
    start = objective.losses(inputs, objective.denominators(inputs))
    assert float((start.sums / start.counts).mean()) < math.log(VOCAB) + nats
    with torch.no_grad():
        model.norm.weight.copy_(target.head.norm_weight)
    loud = objective.losses(inputs, objective.denominators(inputs))
    assert float((loud.sums / loud.counts).mean()) > math.log(VOCAB) + 10


def test_a_quiet_head_stays_as_it_is_and_a_loud_one_is_looked_at_in_part() -> None:
    norm = torch.ones(WIDTH)
    assert quiet_scale(norm, torch.randn(VOCAB, WIDTH) * 1e-3) == 1
    assert quiet_scale(norm, torch.zeros(VOCAB, WIDTH)) == 1
    rows = torch.randn(20_000, WIDTH) * 3
    scale = quiet_scale(norm, rows)
    logits = torch.randn(4000, WIDTH) @ (rows * scale).T
    assert float(logits.var()) == pytest.approx(2 * START_NATS, rel=0.1)


def test_a_fresh_drafter_is_a_function_of_its_seed_and_leaves_every_generator_as_it_was(
    target: TargetInterface, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    built = [Eagle3.build(drafter_config(), target.head, target.vocab, seed=seed) for seed in (7, 7, 8)]
    assert torch.equal(torch.get_rng_state(), before)
    assert seeds == []
    one, again, other = (model.state_dict() for model in built)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        usual = Eagle3(drafter_config(), WIDTH, VOCAB, VOCAB)
    assert torch.equal(one["fc.weight"], usual.fc.weight * FC_START)

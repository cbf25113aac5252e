"""Mixed hidden states, as Model Optimizer mixes them: losses, gradients, and which rows are replaced."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.trainer.conftest import Setting, make_batch, make_setting
from tests.trainer.eagle3_plain import MixedEagle3, plain_losses
from tests.trainer.runs import WORDS, tiny_store
from trainer.drafters.eagle3 import EAGLE3, Eagle3Loss, Mixing, draw_shares, replaced_rows
from trainer.losses.fused_head import StepLosses
from trainer.losses.teacher import TargetInterface
from trainer.train import step as step_module
from trainer.train.loop import train

STEPS = 4
LENGTHS = [9, 1, 5, 2]
DEEP = {"num_layers": 2, "norm_output": True}
MODES = [how for how in get_args(Mixing) if how != "none"]


def ours(setting: Setting, loss: Eagle3Loss) -> StepLosses:
    objective = EAGLE3.objective(setting.model, TargetInterface(setting.head, setting.vocab), loss)
    work = objective.prepare(setting.batch)
    return objective.losses(work, objective.denominators(work))


def choices(how: Mixing, shares: Tensor) -> list[list[int | None]]:
    """What row t of a document reads after each step, from its shares [K, n], in the words of `MixedEagle3`."""
    count, steps = shares.shape[1], []
    for i, row in enumerate(shares.tolist()):
        if how == "uniform_layer_sample":
            picks: list[int | None] = [0, *(int(share * (i + 2)) for share in row[1:])]
        else:
            replaced = sorted(range(1, count), key=lambda t: row[t])
            if how == "sparse_replace":
                replaced = replaced[: max(1, count // (2**i + 1))]
            picks = [i + 1 if t in replaced else None for t in range(count)]
        steps.append(picks)
    return steps


def plain(setting: Setting, how: Mixing) -> tuple[list[Tensor], list[int]]:
    config, batch = setting.model.config, setting.batch
    weights = dict(setting.model.named_parameters()) | {"embed_tokens.weight": setting.head.embed_tokens}
    model = MixedEagle3(weights, heads=config.num_heads, kv_heads=config.num_kv_heads, eps=config.rms_norm_eps)
    model.norm_output = config.norm_output
    logits = setting.head.logits(batch.final).to(batch.final.dtype)
    shares = draw_shares(batch, STEPS, setting.model.rng_key)
    rows = [torch.nonzero(batch.document == index)[:, 0] for index in range(len(batch.sample_ids))]
    model.choices = iter([choices(how, shares[:, at]) for at in rows])
    documents = [
        (batch.input_ids[at].tolist(), batch.aux[:, at], logits[at], batch.loss_mask[at].tolist()) for at in rows
    ]
    known = setting.vocab.target_ids.tolist()
    return plain_losses(model, documents, known, steps=STEPS, mask_offset=0, drop=True)


@pytest.mark.parametrize(("how", "changes"), [*((how, {}) for how in MODES), ("sparse_replace", DEEP)])
def test_losses_and_gradients_agree_with_the_plain_restatement(how: Mixing, changes: dict[str, object]) -> None:
    setting = make_setting(LENGTHS, known=30, dtype=torch.float64, **changes)
    setting.model.rng_key = (3, 5)
    result = ours(setting, Eagle3Loss(steps=STEPS, mask_offset=0, mix_hidden_states=how))
    expected, counts = plain(setting, how)
    assert result.counts.tolist() == counts
    assert torch.allclose(result.sums / result.counts, torch.stack(expected).detach(), atol=1e-5, rtol=0)
    parameters = dict(setting.model.named_parameters())
    gradients = torch.autograd.grad(result.total, list(parameters.values()))
    total = sum(0.8**i * value for i, value in enumerate(expected))
    again = torch.autograd.grad(total, list(parameters.values()))  # type: ignore[arg-type]
    for name, one, other in zip(parameters, gradients, again, strict=True):
        assert torch.allclose(one, other, atol=2e-6), name


def test_a_half_then_a_third_then_a_fifth_of_a_sample_is_replaced_and_never_its_first_row() -> None:
    batch = make_batch([30, 1, 4])
    shares = draw_shares(batch, 3, (0, 0))
    for step, counts in enumerate([[15, 0, 2], [10, 0, 1], [6, 0, 1]]):
        taken = replaced_rows(step, shares[step], batch.document)
        assert torch.bincount(batch.document[taken], minlength=3).tolist() == counts
        assert not taken[batch.positions == 0].any()


def test_what_is_drawn_follows_from_the_sample_and_the_step_alone() -> None:
    batch, alone = make_batch([9, 5]), make_batch([5])
    alone.sample_ids = batch.sample_ids[1:]
    drawn = draw_shares(batch, 3, (7, 2))
    assert torch.equal(draw_shares(alone, 3, (7, 2)), drawn[:, 9:])
    assert not torch.equal(draw_shares(batch, 3, (7, 3)), drawn)


def test_without_gradients_steps_are_those_of_a_drafter_in_use() -> None:
    setting = make_setting([14, 9])
    mixing = Eagle3Loss(steps=STEPS, mix_hidden_states="sparse_replace")
    trained = float(ours(setting, mixing).value)
    with torch.no_grad():
        validated = float(ours(setting, mixing).value)
        assert validated == float(ours(setting, Eagle3Loss(steps=STEPS)).value)
    assert abs(trained - validated) > 1e-3


def test_recomputed_passes_give_the_same_loss_and_gradients() -> None:
    setting = make_setting([12, 7], num_layers=2)
    results = []
    for recompute in (False, True):
        setting.model.recompute = recompute
        total = ours(setting, Eagle3Loss(steps=STEPS, mix_hidden_states="uniform_layer_sample")).total
        results.append([total, *torch.autograd.grad(total, [p for p in setting.model.parameters() if p.requires_grad])])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)


def test_a_run_cut_off_and_resumed_repeats_the_uninterrupted_one_with_its_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = tiny_store(tmp_path).path, step_module.train_step
    few = ["train.max_steps=3", "train.checkpoint_every=2", "train.validate_every=0"]
    words = [*WORDS, *few, "loss.mix_hidden_states=sparse_replace"]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    train(store, straight, words=words)

    def dying(state, *rest):  # type: ignore[no-untyped-def]
        if state.step == 2:
            raise RuntimeError("killed")
        return real(state, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(step_module, "train_step", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(store, cut, words=words)
    torch.manual_seed(12345)
    train(store, cut, resume=True)
    weights = [(run / "checkpoints/step-3/drafter.safetensors").read_bytes() for run in (straight, cut)]
    assert weights[0] == weights[1]

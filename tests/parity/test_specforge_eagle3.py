"""EAGLE-3 of the installed SpecForge 0.2 and ours: equal weights and tensors give equal losses and gradients.

SpecForge gates on mask[p-1] (our offset -1), drops slots whose token is off the draft vocabulary, and divides its
cross-entropy by every slot (our ``reduction=slots``) but its LK losses by the taught ones (``kept``). It does not pack:
its rows of a batch are our samples of a pack. Its ``lambda`` loss blends by the mean overlap of a step and holds the
cross-entropy where ours holds KL, which differs by the teacher's entropy and has the same gradient.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.conftest import LAYERS, VOCAB, WIDTH, Setting, make_batch, make_setting
from trainer.drafters.eagle3 import TttInputs, TttLoss, TttObjective
from trainer.losses.fused_head import StepLosses
from trainer.losses.teacher import TargetInterface, Teacher

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

STEPS, ROWS, TOKENS = 4, 2, 24


@pytest.fixture(scope="module", name="core")
def _core() -> Iterator[ModuleType]:
    """Its training model, with its Triton kernels interpreted and nothing compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("specforge")
        patch.setattr(torch, "compile", lambda *args, **kwargs: args[0] if args else lambda function: function)
        import specforge.algorithms.eagle3.model as model

        yield model


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def peer_model(core: ModuleType, setting: Setting, **loss: object) -> Any:
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    ours = setting.model.config
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=ours.intermediate_size, num_hidden_layers=1,
        num_attention_heads=ours.num_heads, num_key_value_heads=ours.num_kv_heads, head_dim=ours.head_dim,
        rms_norm_eps=ours.rms_norm_eps, max_position_embeddings=256, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
    )  # fmt: skip
    config.draft_vocab_size, config.fc_norm = setting.vocab.size, ours.fc_norm
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    weights = dict(setting.model.state_dict())
    weights |= {"embed_tokens.weight": setting.head.embed_tokens, "t2d": setting.vocab.t2d, "d2t": setting.vocab.d2t}
    draft.load_state_dict(weights)
    return core.OnlineEagle3Model(draft, length=STEPS, attention_backend="sdpa", **loss)


def peer_batch(setting: Setting) -> dict[str, Tensor]:
    """The pack as rows of a batch: tokens and targets one to the left of the hidden states and the mask."""
    batch = setting.batch

    def left(x: Tensor) -> Tensor:
        return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)

    mask = batch.loss_mask.view(ROWS, TOKENS, 1).int().clone()
    mask[:, -1] = 0
    return {
        "input_ids": left(batch.input_ids.view(ROWS, TOKENS)),
        "attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.bool),
        "target": left(setting.head.logits(batch.final).view(ROWS, TOKENS, VOCAB)),
        "loss_mask": mask,
        "hidden_states": batch.aux.permute(1, 0, 2).reshape(ROWS, TOKENS, LAYERS * WIDTH),
    }


def peer_losses(model: Any, setting: Setting) -> tuple[Tensor, Tensor]:
    """Per-step losses, with gradient, and mean overlaps: [K] each."""
    losses, overlaps, *_ = model(**peer_batch(setting))
    return torch.stack(losses), torch.stack(overlaps)


def ours(setting: Setting, **options: object) -> tuple[StepLosses, TttInputs, Teacher]:
    loss = TttLoss.model_validate({"steps": STEPS, "step_decay": 0.8, "mask_offset": -1, **options})
    teacher = Teacher(TargetInterface(setting.head, setting.vocab))
    objective = TttObjective(setting.model, teacher, loss)
    work = objective.prepare(setting.batch)
    return objective.losses(work, objective.denominators(work)), work, teacher


def packed(known: int, **options: object) -> Setting:
    setting = make_setting([TOKENS] * ROWS, known=known, **options)
    mask = (torch.arange(TOKENS) >= 3).repeat(ROWS) & (torch.rand(TOKENS * ROWS) < 0.8)
    setting.batch = make_batch([TOKENS] * ROWS, mask)
    return setting


def assert_gradients_equal(setting: Setting, model: Any, total: Tensor, theirs: Tensor) -> None:
    (theirs * 0.8 ** torch.arange(STEPS)).sum().backward()  # type: ignore[no-untyped-call]
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.draft_model.named_parameters()}
    for name, parameter in setting.model.named_parameters():
        expected = gradients[name]
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4), name


@pytest.mark.parametrize("known", [VOCAB, 17])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_cross_entropy_and_gradients_are_equal(core: ModuleType, known: int, fc_norm: bool) -> None:
    setting = packed(known, fc_norm=fc_norm)
    model = peer_model(core, setting)
    theirs, _ = peer_losses(model, setting)
    found, _, _ = ours(setting, reduction="slots")
    assert torch.allclose(found.sums.float() / (ROWS * TOKENS), theirs.detach(), rtol=1e-4)
    assert_gradients_equal(setting, model, found.total, theirs)


@pytest.mark.parametrize("known", [VOCAB, 17])
def test_the_alpha_loss_and_the_overlap_are_equal(core: ModuleType, known: int) -> None:
    setting = packed(known)
    model = peer_model(core, setting, lk_loss_type="alpha")
    theirs, overlaps = peer_losses(model, setting)
    found, _, _ = ours(setting, kind="lk_alpha")
    assert torch.allclose((found.sums / found.counts).float(), theirs.detach(), rtol=1e-4)
    apart, _, _ = ours(setting, kind="tv")
    assert torch.allclose(1 - (apart.sums / apart.counts).float(), overlaps.detach(), rtol=1e-4)
    assert_gradients_equal(setting, model, found.total, theirs)


@pytest.mark.parametrize("known", [VOCAB, 17])
def test_the_lambda_loss_is_equal_once_its_cross_entropy_is_taken_over_the_taught_slots(
    core: ModuleType, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = packed(known)
    model = peer_model(core, setting, lk_loss_type="lambda", kl_decay=3.0)

    class OverTaught(core.SdpaLikeAdapter):  # type: ignore[misc,name-defined]
        def step_view(self, **given: Any) -> Any:
            state = super().step_view(**given)
            self.factor = state.position_mask.numel() / state.position_mask.sum()
            return state

        def reduce_loss(self, loss: Tensor) -> Tensor:
            return loss * self.factor

    monkeypatch.setattr(model, "_make_adapter", lambda: OverTaught(model))
    theirs, overlaps = peer_losses(model, setting)
    found, work, teacher = ours(setting, kind="lk_lambda", lk_blend="step")
    q = teacher.distribution(work.teacher).double()
    entropy = -(q * q.log()).sum(-1)
    entropies = torch.stack([entropy[work.slot_map.slots[:, i] >= 0].mean() for i in range(STEPS)])
    blend = torch.exp(-3 * overlaps.detach())
    assert torch.allclose((found.sums / found.counts).float(), theirs.detach() - blend * entropies.float(), rtol=1e-4)
    assert_gradients_equal(setting, model, found.total, theirs)

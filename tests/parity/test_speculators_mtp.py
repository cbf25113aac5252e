"""Qwen3.5's MTP layer in the installed speculators 0.9 and ours: equal weights, equal losses and gradients.

Compared at one step. From the second on it lets a slot see the later steps of other tokens, which no engine computes
(docs/design/018). It teaches the text's tokens, drops the last two rows of a pack, and does not tell samples of a pack
apart, so there is one. Needs the environment of `make test-parity`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import speculators_models
from tests.trainer.conftest import VOCAB, WIDTH, make_batch, make_head
from trainer.drafters.mtp import MTP, MtpConfig, MtpLoss
from trainer.formats.base import Target
from trainer.losses.teacher import TargetInterface
from trainer.vocab import DraftVocab

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

PUBLISHED = {
    "hidden_layernorm.": "mtp.pre_fc_norm_hidden.", "token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "input_proj.": "mtp.fc.", "final_layernorm.": "mtp.norm.",
}  # fmt: skip


def published(name: str) -> str:
    """The name in Qwen3.5's checkpoint of a parameter of theirs."""
    inner = name.removeprefix("mtp_layers.0.")
    start = inner.partition(".")[0] + "."
    return PUBLISHED[start] + inner.removeprefix(start) if start in PUBLISHED else f"mtp.layers.0.{inner}"


def peer_model(attention: str) -> Any:
    from speculators.models.mtp import MTPSpeculatorConfig
    from speculators.models.mtp.core import MTPDraftModel
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    layer = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["full_attention"], pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    layer._attn_implementation = attention
    config = MTPSpeculatorConfig(transformer_layer_config=layer, **speculators_models.members("mtp", 1))
    return MTPDraftModel(config)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_losses_and_gradients_of_one_step_are_equal(attention: str) -> None:
    pytest.importorskip("speculators.models.mtp.core")
    torch.manual_seed(0)
    head, batch, theirs = make_head(), make_batch([40]), peer_model(attention)
    with torch.no_grad():
        for parameter in theirs.mtp_layers.parameters():
            parameter.normal_(std=0.3)
        theirs.embed_tokens.weight.copy_(head.embed_tokens)
        theirs.lm_head.weight.copy_(head.output_weight)
    document = {
        **theirs.config.transformer_layer_config.to_dict(),
        "architectures": ["Qwen3_5ForCausalLM"],
        "mtp_num_hidden_layers": 1,
    }
    target = TargetInterface(head, DraftVocab.full(VOCAB))

    def as_ours(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
        return MTP.export.read(document, tensors, Target(target.head, target.vocab, 1, None))

    layer = {published(f"mtp_layers.{name}"): weight for name, weight in theirs.mtp_layers.named_parameters()}
    settings, weights = as_ours({name: weight.detach() for name, weight in layer.items()})
    model = MTP.build(MtpConfig.model_validate({**settings, "vocab_size": VOCAB}), target, 0)
    model.load_state_dict(weights)
    _, loss, _ = theirs(
        input_ids=batch.input_ids[None], hidden_states=head.norm(batch.final)[None], loss_mask=batch.loss_mask[None]
    )
    loss.backward()
    objective = MTP.objective(model, target, MtpLoss(steps=1, kind="text_ce"))
    work = objective.prepare(batch)
    ours = objective.losses(work, objective.denominators(work))
    assert float(ours.value) == pytest.approx(float(loss.detach()), rel=1e-5)
    ours.total.backward()  # type: ignore[no-untyped-call]
    _, gradients = as_ours({name: weight.grad for name, weight in layer.items()})
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-4 * float(gradients[name].abs().max()), name

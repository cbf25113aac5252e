"""Medusa of the installed ModelOpt 0.47 and ours: equal weights and text give equal losses and gradients.

ModelOpt teaches every row whose label is supervised, ours only rows a draft starts from; over text that is supervised
as a whole both are the same. Its labels are the next tokens, as its own collator makes them, and head k looks k+1
further. Needs the environment of `make test-parity` (tests/parity/requirements.txt).
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.targets.head import HeadBundle
from schemas import HeadSpec
from trainer.drafters.medusa import MEDUSA, Medusa, MedusaConfig, MedusaLoss, MedusaObjective
from trainer.losses.teacher import TargetInterface
from trainer.vocab import DraftVocab

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

VOCAB, WIDTH, HEADS, LAYERS, SAMPLES, TOKENS = 40, 16, 3, 2, 2, 20


@pytest.fixture(scope="module", name="speculative")
def _speculative() -> ModuleType:
    return pytest.importorskip("modelopt.torch.speculative")


def peer_model(speculative: ModuleType) -> Any:
    """A tiny Llama that ModelOpt gave Medusa heads, every weight of which is random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    speculative.convert(model, [("medusa", {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS})])
    with torch.no_grad():
        for parameter in model.medusa_heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return model


def our_name(name: str) -> str:
    """``0.1.linear.bias`` of ModelOpt's heads is ``blocks.0.layers.1.bias``; their last layer is the LM head."""
    head, layer, *rest = name.split(".")
    return f"lm_heads.{head}.weight" if int(layer) == LAYERS else f"blocks.{head}.layers.{layer}.{rest[-1]}"


def our_target(model: Any) -> TargetInterface:
    head = HeadBundle(
        HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False),
        model.model.embed_tokens.weight.detach(),
        model.lm_head.weight.detach(),
        model.model.norm.weight.detach(),
    )
    return TargetInterface(head, DraftVocab.full(VOCAB), "post_norm")


def our_model(model: Any, target: TargetInterface) -> Medusa:
    config = MedusaConfig(
        hidden_size=WIDTH, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=VOCAB,
        medusa_heads=HEADS, medusa_layers=LAYERS,
    )  # fmt: skip
    ours = MEDUSA.build(config, target, 0)
    ours.load_state_dict({our_name(name): p.detach() for name, p in model.medusa_heads.named_parameters()})
    return ours


def pack_of(input_ids: Tensor, final: Tensor) -> PackedBatch:
    total = SAMPLES * TOKENS
    return PackedBatch(
        input_ids=input_ids.flatten(),
        loss_mask=torch.ones(total, dtype=torch.bool),
        positions=torch.arange(TOKENS).repeat(SAMPLES),
        document=torch.arange(SAMPLES).repeat_interleave(TOKENS),
        aux=torch.empty(0, total, WIDTH),
        final=final.reshape(total, WIDTH),
        final_rows=torch.arange(total),
        sample_ids=[str(index) for index in range(SAMPLES)],
    )


def test_losses_and_gradients_are_equal(speculative: ModuleType) -> None:
    model = peer_model(speculative)
    ids = torch.randint(0, VOCAB, (SAMPLES, TOKENS))
    labels = torch.cat([ids[:, 1:], ids.new_full((SAMPLES, 1), -100)], 1)
    theirs = model(input_ids=ids, labels=labels).loss
    theirs.backward()
    with torch.no_grad():
        final = model.model(input_ids=ids).last_hidden_state
    target = our_target(model)
    ours = our_model(model, target)
    objective = MedusaObjective(ours, target, MedusaLoss())
    work = objective.prepare(pack_of(ids, final))
    result = objective.losses(work, objective.denominators(work))
    assert float(result.value) == pytest.approx(float(theirs.detach()), rel=1e-6)
    result.total.backward()  # type: ignore[no-untyped-call]
    found = dict(ours.named_parameters())
    for name, parameter in model.medusa_heads.named_parameters():
        gradient = found[our_name(name)].grad
        assert gradient is not None
        assert float((gradient - parameter.grad).abs().max()) <= 1e-5 * float(parameter.grad.abs().max()), name

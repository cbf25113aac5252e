"""speculators' default EAGLE-3, which has a norm before fc that ours has not, drafts the same once it is imported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenstore.errors import ConfigError
from tests.trainer.conftest import LAYERS, VOCAB, WIDTH, make_setting
from trainer.attention.ttt import KVCache
from trainer.export.published import read_published

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

STEPS = 3


def their_default(**flags: bool) -> Any:
    """Their model with the flags their trainer sets by default and random weights, norms far from one."""
    core = pytest.importorskip("speculators.models.eagle3.core")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, pad_token_id=None,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=VOCAB,
        norm_before_fc=True,
        **{"norm_before_residual": True, "norm_output": True, **flags},
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    torch.manual_seed(0)
    model = core.Eagle3DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model


@pytest.mark.parametrize(("scale", "norm_output"), [(0.1, True), (30.0, True), (30.0, False)])
def test_what_is_imported_drafts_what_theirs_drafts(tmp_path: Path, scale: float, norm_output: bool) -> None:
    setting = make_setting([24])
    model = their_default(norm_output=norm_output)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(setting.head.embed_tokens)
    model.save_pretrained(tmp_path / "theirs")
    published = read_published(tmp_path / "theirs", setting.head, num_layers=8)
    assert published.config.aux_layers == (1, 3, 4)
    ours = setting.model.build(published.config, setting.head, published.vocab)
    ours.load_state_dict(published.weights)
    aux, ids = torch.randn(LAYERS, 24, WIDTH) * scale, torch.randint(VOCAB, (24,))
    theirs = their_logits(model, aux, ids)
    _, logits = ours.step(ours.start(aux)[:-1], ids[1:], torch.arange(23), KVCache())
    assert torch.allclose(logits, theirs, atol=1e-4 * float(theirs.abs().max()))


def their_logits(model: Any, aux: Tensor, ids: Tensor) -> Tensor:
    """Of their first step: [T - 1, V]."""
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, read, out: seen.append(out[0]))
    states = aux.permute(1, 0, 2).flatten(1)[None, :-1]
    model(
        hidden_states=states, input_ids=ids[None, 1:], document_ids=torch.zeros(1, len(ids) - 1, dtype=torch.long),
        position_ids=torch.arange(1, len(ids))[None], ttt_steps=1,
    )  # fmt: skip
    return seen[0]


def test_a_norm_before_fc_that_matters_is_refused(tmp_path: Path) -> None:
    their_default(norm_before_residual=False).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="norm_before_fc without norm_before_residual"):
        read_published(tmp_path / "theirs", make_setting([24]).head, num_layers=8)

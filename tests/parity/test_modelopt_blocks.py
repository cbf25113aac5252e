"""DFlash, JetSpec and DSpark of the installed ModelOpt 0.47 and ours: equal weights, states and anchors give equal
losses and gradients, and a DSpark that it exports drafts the same tokens here.

It draws its anchors at random, so ours are put in their place, and it does not pack: its rows of a batch are our
samples of a pack. It has one aux layer for each of the drafter's. DSpark's overlap is half of its L1 distance, hence
half its weight; its labels are the text's. D-PACE is not compared: it divides by weights that follow from the losses.
Needs the environment of `make test-parity`.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.test_dflash_peers import GAMMA, assert_equal
from tests.trainer.conftest import LAYERS, VOCAB, WIDTH
from tests.trainer.test_dflash import BLOCK, MASK_ID, Case, make_case
from tests.trainer.test_dflash import our_loss as our_dflash_loss
from tests.trainer.test_dspark import RANK, dspark_case
from tests.trainer.test_dspark import our_loss as our_dspark_loss
from trainer.drafters.base import DrafterInUse, Verified
from trainer.drafters.dflash import BlockLoss
from trainer.drafters.dspark import DSPARK, DSparkLoss
from trainer.export.published import read_published
from trainer.slots import candidate_anchors
from trainer.train.run_folder import load_weights

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TOKENS, ROWS, EACH = 24, 2, 5
HEADS = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}


@pytest.fixture(scope="module", name="speculative")
def _speculative() -> ModuleType:
    return pytest.importorskip("modelopt.torch.speculative")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def their_name(name: str) -> str:
    for ours, theirs in HEADS.items():
        name = name.replace(ours, theirs)
    return name


def peer_model(speculative: ModuleType, case: Case, architecture: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A Llama of the target's tables, its layers gone, with our drafter's weights in ModelOpt's module."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours, head = case.model.config, case.target.head
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=head.spec.norm_eps, pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.num_orig_hidden_layers = 6
    model = LlamaForCausalLM(config)
    shape = {
        "num_hidden_layers": ours.num_layers, "num_attention_heads": ours.num_heads, "head_dim": ours.head_dim,
        "num_key_value_heads": ours.num_kv_heads, "intermediate_size": ours.intermediate_size,
        "rms_norm_eps": ours.rms_norm_eps, "target_layer_ids": list(ours.aux_layers),
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_theta}, **architecture,
    }  # fmt: skip
    how = {
        "dflash_offline": True, "dflash_block_size": ours.block_size, "dflash_mask_token_id": MASK_ID,
        "dflash_loss_objective": "decay", "dflash_loss_decay_factor": GAMMA, "dflash_use_torch_compile": False,
    }  # fmt: skip
    speculative.convert(model, [("dflash", {**how, **settings, "dflash_architecture_config": shape})])
    model.dflash_module.load_state_dict({their_name(name): w for name, w in case.model.state_dict().items()})
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(head.embed_tokens)
        model.model.norm.weight.copy_(head.norm_weight)
        model.lm_head.weight.copy_(head.output_weight)
    return model.train()


def drawn(case: Case, rule: str, room: int) -> Tensor:
    """As many anchors in either row."""
    anchors = candidate_anchors(case.batch, room, rule)  # type: ignore[arg-type]
    return torch.cat([rows[:EACH] for rows in (anchors[anchors < TOKENS], anchors[anchors >= TOKENS])])


def their_loss(model: Any, case: Case, anchors: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    batch = case.batch
    placed = (anchors.view(ROWS, -1) - torch.tensor([[0], [TOKENS]]), torch.ones(ROWS, EACH, dtype=torch.bool))
    monkeypatch.setattr(model, "_sample_anchor_positions", lambda *_: placed)
    states = {
        "aux_hidden_states": batch.aux.transpose(0, 1).reshape(ROWS, TOKENS, LAYERS * WIDTH),
        "base_model_hidden_states": batch.final.view(ROWS, TOKENS, WIDTH),
        "base_hidden_prenorm": True,
    }
    mask = batch.loss_mask.view(ROWS, TOKENS).float()
    loss: Tensor = model(input_ids=batch.input_ids.view(ROWS, TOKENS), loss_mask=mask, base_model_outputs=states).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("distil", [0.0, 1.0])
@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_dflash_s_and_jetspec_s_losses_and_gradients_are_equal(
    speculative: ModuleType, monkeypatch: pytest.MonkeyPatch, attention: str, distil: float
) -> None:
    case = make_case([TOKENS] * ROWS, dtype=torch.float32, num_layers=LAYERS, causal=attention == "causal")
    settings = {"dflash_draft_attention": attention, "dflash_self_logit_distillation": distil == 1}
    model, anchors = peer_model(speculative, case, {}, settings), drawn(case, "next", BLOCK)
    loss = their_loss(model, case, anchors, monkeypatch)
    ours = our_dflash_loss(case, BlockLoss(gamma=GAMMA, distil=distil), anchors.tolist())
    assert_equal(ours.total, case, model.dflash_module, loss)


def test_a_causal_block_and_one_that_sees_all_differ_here_as_there(
    speculative: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: their causal mask against our block without one."""
    case = make_case([TOKENS] * ROWS, dtype=torch.float32, num_layers=LAYERS)
    model, anchors = peer_model(speculative, case, {}, {"dflash_draft_attention": "causal"}), drawn(case, "next", BLOCK)
    loss = their_loss(model, case, anchors, monkeypatch)
    ours = our_dflash_loss(case, BlockLoss(gamma=GAMMA, distil=1.0), anchors.tolist())
    assert float(ours.total.detach()) != pytest.approx(float(loss.detach()), rel=1e-3)


@pytest.mark.parametrize(("overlap", "confidence"), [(0.9, 0.0), (0.9, 1.0), (0.0, 0.5)])
def test_dspark_s_losses_and_gradients_are_equal(
    speculative: ModuleType, monkeypatch: pytest.MonkeyPatch, overlap: float, confidence: float
) -> None:
    case = dspark_case([TOKENS] * ROWS, dtype=torch.float32, num_layers=LAYERS, confidence_head=confidence > 0)
    architecture = {"projector_type": "dspark", "markov_rank": RANK, "use_confidence_head": confidence > 0}
    weights = {
        "dflash_ce_loss_alpha": 0.1, "dflash_l1_loss_alpha": overlap / 2, "dflash_confidence_head_alpha": confidence,
    }  # fmt: skip
    model, anchors = peer_model(speculative, case, architecture, weights), drawn(case, "next", BLOCK + 1)
    loss = their_loss(model, case, anchors, monkeypatch)
    how = {"labels": "text", "reduction": "weights", "gamma": GAMMA, "overlap": overlap, "confidence": confidence}
    ours = our_dspark_loss(case, DSparkLoss.model_validate(how), anchors.tolist())
    assert_equal(ours.total, case, model.dflash_module, loss, their_name)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (BLOCK + 1, False), (None, True)])
def test_an_exported_dspark_drafts_here_what_it_drafts_beside_the_target_there(
    speculative: ModuleType, tmp_path: Path, window: int | None, causal: bool
) -> None:
    """Layers, mask token, slots, window and heads as its own exporter writes them. It teaches under a rope of the
    drafter's and exports the target's: here one rope is both."""
    shape: dict[str, Any] = {"num_layers": LAYERS, "rope_theta": 10_000.0, "max_position": 2048}
    shape |= {"sliding_window": window, "causal": causal}
    case = dspark_case([TOKENS], dtype=torch.float32, **shape)
    architecture = {"projector_type": "dspark", "markov_rank": RANK, "use_confidence_head": True}
    sees = "causal" if causal else "bidirectional"
    settings = {"dflash_offline": False, "dflash_swa_window_size": window, "dflash_draft_attention": sees}
    model = peer_model(speculative, case, architecture, settings).eval()
    ids = torch.randint(0, VOCAB, (1, TOKENS))
    with torch.no_grad():
        model.dflash_module.markov_w2.weight.mul_(4)
        newest, theirs = model.pseudo_speculative_generate(ids, steps=BLOCK)
        states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
    model.get_exporter().export(tmp_path)
    found = read_published(tmp_path, case.target.head, 6)
    assert found.config.model_dump() == {**case.model.config.model_dump(), "sliding_causal": False}
    ours = DSPARK.build(found.config, case.target, 0)
    load_weights(ours, found.weights, "the export")
    aux = torch.stack([states[layer + 1][0] for layer in found.config.aux_layers])
    read = Verified(aux, states[-1][0], [*ids[0, 1:].tolist(), int(newest)])
    assert DrafterInUse(DSPARK, ours, case.target).live().propose(read, BLOCK) == theirs[0].tolist()

"""EAGLE-3 of the installed ModelOpt 0.47 and ours: equal weights and states give equal losses and gradients.

Its stock layer norms the hidden path a second time, by ``input_layernorm``, where engines norm once: with unit weights
there and a small epsilon both are one function. Its first row may read what the last one said (its shift of states goes
round), ours never does, so its draws are made such that the first row is not drawn. Needs the environment of
`make test-parity` (tests/parity/requirements.txt).
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.targets.head import HeadBundle
from schemas import HeadSpec
from trainer.drafters.eagle3 import EAGLE3, Eagle3, Eagle3Config, Eagle3Loss, draw_shares
from trainer.losses.teacher import TargetInterface
from trainer.vocab import DraftVocab

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

VOCAB, DRAFT, WIDTH, SAMPLES, TOKENS, STEPS, EPS = 40, 24, 16, 2, 18, 3, 1e-12
TWICE = "layers.0.input_layernorm.weight"
SHAPE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24}


@pytest.fixture(scope="module", name="speculative")
def _speculative() -> ModuleType:
    return pytest.importorskip("modelopt.torch.speculative")


@pytest.fixture(scope="module", name="vocab")
def _vocab() -> DraftVocab:
    torch.manual_seed(1)
    return DraftVocab.of_ids(torch.randperm(VOCAB)[:DRAFT], VOCAB)


def peer_model(speculative: ModuleType, vocab: DraftVocab, **settings: Any) -> Any:
    """A tiny Llama that ModelOpt gave an EAGLE-3 drafter, every weight of which is random."""
    from modelopt.torch.speculative.config import eagle3_default_config
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=8, **SHAPE, initializer_range=0.3, pad_token_id=None,
        tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    shape = {**eagle3_default_config, **SHAPE, "draft_vocab_size": DRAFT, "rms_norm_eps": EPS, "torch_dtype": "float32"}
    eagle = {"eagle_offline": True, "eagle_use_torch_compile": False, "eagle_ttt_steps": STEPS, **settings}
    speculative.convert(model, [("eagle", {**eagle, "eagle_architecture_config": shape})])
    drafter = model.eagle_module
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.3 + around if name != TWICE else parameter)
        drafter.d2t.copy_(vocab.target_ids - torch.arange(DRAFT))
    return model.train()


def our_model(model: Any, target: TargetInterface) -> Eagle3:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = Eagle3Config(
        aux_layers=(1, 3, 4), hidden_size=WIDTH, intermediate_size=24, vocab_size=DRAFT, rms_norm_eps=EPS, **heads
    )
    ours = EAGLE3.build(config, target, 0)
    ours.load_state_dict({our_name(name): weight.detach() for name, weight in model.eagle_module.named_parameters()})
    ours.tie_weights(target.head)
    return ours


def our_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def states(seed: int = 5) -> dict[str, Tensor]:
    """What an offline dump holds: tokens and loss mask [B, T], final [B, T, D] after the norm and aux [B, T, 3D]."""
    torch.manual_seed(seed)
    return {
        "input_ids": torch.randint(0, VOCAB, (SAMPLES, TOKENS)),
        "loss_mask": torch.rand(SAMPLES, TOKENS) < 0.7,
        "final": torch.randn(SAMPLES, TOKENS, WIDTH),
        "aux": torch.randn(SAMPLES, TOKENS, 3 * WIDTH),
    }


def their_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    outputs = {"base_model_hidden_states": given["final"], "aux_hidden_states": given["aux"]}
    loss: Tensor = model(
        input_ids=given["input_ids"], loss_mask=given["loss_mask"].long(), base_model_outputs=outputs
    ).loss
    return loss


def pack_of(given: dict[str, Tensor]) -> PackedBatch:
    total = SAMPLES * TOKENS
    return PackedBatch(
        input_ids=given["input_ids"].flatten(),
        loss_mask=given["loss_mask"].flatten(),
        positions=torch.arange(TOKENS).repeat(SAMPLES),
        document=torch.arange(SAMPLES).repeat_interleave(TOKENS),
        aux=given["aux"].reshape(total, 3, WIDTH).transpose(0, 1).contiguous(),
        final=given["final"].reshape(total, WIDTH),
        final_rows=torch.arange(total),
        sample_ids=[str(index) for index in range(SAMPLES)],
    )


@pytest.mark.parametrize("mixes", [False, True])
def test_losses_and_gradients_are_equal(
    speculative: ModuleType, vocab: DraftVocab, mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = peer_model(speculative, vocab, eagle_mix_hidden_states=mixes), states()
    head = HeadBundle(
        HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False),
        model.get_input_embeddings().weight.detach(),
        model.lm_head.weight.detach(),
        torch.ones(WIDTH),
    )
    target, pack = TargetInterface(head, vocab, "post_norm"), pack_of(given)
    ours = our_model(model, target)
    how = {"steps": STEPS, "step_decay": 0.9, "mask_offset": 0, "drop_off_vocab": False}
    loss = Eagle3Loss.model_validate({**how, "mix_hidden_states": "sparse_replace" if mixes else "none"})
    objective = EAGLE3.objective(ours, target, loss)
    work = objective.prepare(pack)
    result = objective.losses(work, objective.denominators(work))
    result.total.backward()  # type: ignore[no-untyped-call]
    shares = draw_shares(pack, STEPS, ours.rng_key).view(STEPS, SAMPLES, TOKENS)
    shares[:, :, 0] = 2
    draws = iter(shares)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: next(draws))
    theirs = their_loss(model, given)
    assert (next(draws, None) is None) == mixes
    assert float(result.value) == pytest.approx(float(theirs.detach()), rel=1e-5)
    theirs.backward()  # type: ignore[no-untyped-call]
    found = dict(ours.named_parameters())
    for name, parameter in model.eagle_module.named_parameters():
        if name == TWICE:
            continue
        gradient = found[our_name(name)].grad
        assert gradient is not None
        assert float((gradient - parameter.grad).abs().max()) <= 1e-4 * float(parameter.grad.abs().max()), name


@pytest.mark.parametrize("flag", ["eagle_hidden_state_distillation", "eagle_reuse_base_decoder"])
def test_what_peers_yaml_calls_unread_changes_no_number_there(
    speculative: ModuleType, vocab: DraftVocab, flag: str
) -> None:
    losses = [their_loss(peer_model(speculative, vocab, **{flag: on}), states()) for on in (False, True)]
    assert torch.equal(*losses)

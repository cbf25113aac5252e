"""P-EAGLE of the installed SpecForge 0.2 and ours: equal weights, states and chains give equal losses and gradients.

It knows flexible attention alone, whose kernels have no backward on a CPU, so its own mask is read out whole and
torch's dense attention is put in place of the kernel. It draws its chains at random, so ours are put in their place; it
gates on mask[p-1] (our offset -1), drops slots whose token is off the draft vocabulary, and divides by the taught slots
of all depths. Needs the environment of `make test-parity`.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parity.speculators_models import dimensions
from tests.parity.test_speculators_eagle3 import peer_name
from tests.trainer.conftest import LAYERS, VOCAB, WIDTH, Setting, make_batch
from tests.trainer.test_peagle import MASK_ID, objective_of, peagle_setting
from trainer.drafters.peagle import PEagleLoss
from trainer.slots import chain_lengths, teacher_rows

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

DEPTHS = 5


@pytest.fixture(name="core")
def _core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its training model over dense attention, with nothing compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *args, **kwargs: args[0] if args else lambda function: function)
        core = pytest.importorskip("specforge.algorithms.peagle.model")

    def whole(mask: Any, *, Q_LEN: int, KV_LEN: int, **_: Any) -> Tensor:
        return mask(0, 0, torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None])

    def dense(query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=block_mask, enable_gqa=True)

    monkeypatch.setattr(core, "create_block_mask", whole)
    monkeypatch.setattr("specforge.modeling.draft.peagle.compile_friendly_flex_attention", dense)
    torch.manual_seed(0)
    return core


def peer_model(core: ModuleType, setting: Setting) -> Any:
    from transformers import LlamaConfig

    ours = setting.model.config
    config = LlamaConfig(**{**dimensions(ours), "pad_token_id": 0})
    config.draft_vocab_size, config.norm_before_residual = setting.vocab.size, ours.norm_before_residual
    draft = core.PEagleDraftModel(config)
    weights = {peer_name(name): tensor for name, tensor in setting.model.state_dict().items()}
    weights |= {"t2d": setting.vocab.t2d, "d2t": setting.vocab.d2t}
    draft.load_state_dict({"embed_tokens.weight": setting.head.embed_tokens, **weights})
    return core.OnlinePEagleModel(draft, MASK_ID, num_depths=DEPTHS)


def as_they_sample(chains: Tensor) -> tuple[Tensor, Tensor]:
    """Our chains as their anchors and depths."""
    rows = [torch.arange(len(chains)), *(torch.nonzero(chains >= d)[:, 0] for d in range(1, DEPTHS))]
    return torch.cat(rows), torch.repeat_interleave(torch.arange(DEPTHS), torch.tensor([len(r) for r in rows]))


def peer_batch(setting: Setting, lengths: list[int]) -> dict[str, Tensor]:
    """Tokens and teachers one to the left of states and mask, sample by sample."""
    batch = setting.batch
    left = torch.cat([torch.arange(1, n + 1).clamp(max=n - 1) + batch_start for n, batch_start in starts(lengths)])
    last = torch.tensor([start + n - 1 for n, start in starts(lengths)])
    mask = batch.loss_mask.clone()
    mask[last] = False
    return {
        "input_ids": batch.input_ids[left][None],
        "attention_mask": torch.ones(1, batch.tokens),
        "target": setting.head.logits(batch.final[left])[None],
        "loss_mask": mask[None].int(),
        "hidden_states": batch.aux.permute(1, 0, 2).reshape(1, batch.tokens, LAYERS * WIDTH),
        "lengths": torch.tensor(lengths),
    }


def starts(lengths: list[int]) -> list[tuple[int, int]]:
    return [(n, sum(lengths[:i])) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"norm_before_residual": True}])
@pytest.mark.parametrize(("lengths", "known"), [([40], VOCAB), ([23, 12, 30], 17)])
def test_losses_and_gradients_are_equal(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], lengths: list[int], known: int
) -> None:
    setting = peagle_setting(lengths, known, **options)
    mask = torch.cat([torch.arange(n) >= 3 for n in lengths]) & (torch.rand(sum(lengths)) < 0.9)
    setting.batch = make_batch(lengths, mask)
    rows = teacher_rows(mask, setting.batch.document, -1)
    chains = chain_lengths(setting.batch, rows, DEPTHS, (0.8, 0.2, None), (0, 0))
    assert int(chains.max()) >= 3
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: as_they_sample(chains))
    theirs = peer_model(core, setting)
    total, _ = theirs(**peer_batch(setting, lengths))
    objective = objective_of(setting, PEagleLoss(steps=DEPTHS, mask_offset=-1))
    inputs = objective.prepare_at(setting.batch, chains)
    ours = objective.losses(inputs, objective.denominators(inputs))
    assert float(ours.value) == pytest.approx(float(total.detach()), rel=1e-5)
    total.backward()
    ours.total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in theirs.draft_model.named_parameters()}
    for name, parameter in setting.model.named_parameters():
        reference = gradients[peer_name(name)]
        assert parameter.grad is not None, name
        assert torch.allclose(parameter.grad, reference, atol=1e-4 * float(reference.abs().max())), name

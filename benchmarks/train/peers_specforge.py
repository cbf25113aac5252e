"""SpecForge's training behind the calls of `benchmarks.train.ours`, on the same weights and tensors.

A peer takes its tensors as its own collator makes them, in fp32 and in memory, before the clock runs. What a frozen
table of ours is, is frozen there; the LM head that ours trains, trains. Triton kernels, which no CPU runs, give way to
the torch formula the peer itself has beside them; torch.compile is off, which was the faster on a CPU.
"""

from typing import Any, ClassVar

import specforge.algorithms.eagle3.model as core
import torch
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.core import loss as kernels
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from torch import Tensor, nn
from transformers import LlamaConfig

from benchmarks.train.case import Peer


class _Formula:
    apply = staticmethod(kernels._compute_loss)


core.LogSoftmaxLoss = _Formula


class Eagle3(Peer):
    """``OnlineEagle3Model``. The teacher is its compact one where the draft vocabulary is smaller, else the whole
    logits, made in the step."""

    equal: ClassVar[dict[str, Any]] = {"kind": "soft_ce", "mask_offset": -1, "reduction": "slots"}

    def build(self) -> None:
        case, tensors = self.case, self.tensors
        config = LlamaConfig(num_hidden_layers=1, pad_token_id=0, **self.shape())
        config.draft_vocab_size = case.draft
        draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
        tables = {"embed_tokens.weight": tensors.embed_tokens, "t2d": tensors.t2d, "d2t": tensors.d2t}
        draft.load_state_dict(tensors.weights | tables)
        draft.embed_tokens.weight.requires_grad_(False)
        self.model = core.OnlineEagle3Model(draft, length=case.steps, attention_backend="sdpa")
        mask = tensors.loss_mask.view(1, -1, 1).int().clone()
        mask[:, -1] = 0
        self._final = _shifted_left(tensors.normed)
        self._batch = {
            "input_ids": _shifted_left(tensors.input_ids[None]),
            "attention_mask": torch.ones(1, case.tokens, dtype=torch.bool),
            "loss_mask": mask,
            "hidden_states": tensors.states,
        }

    def _teacher(self) -> dict[str, Any]:
        if self.case.draft < self.case.vocab:
            head = self.tensors.lm_head
            return {"target": None, "target_hidden_for_compact": self._final, "target_head_weight": head}
        with torch.no_grad():
            return {"target": nn.functional.linear(self._final, self.tensors.lm_head)}

    def total(self) -> Tensor:
        losses = self.model(**self._batch, **self._teacher())[0]
        return torch.stack([loss * 0.8**i for i, loss in enumerate(losses)]).sum()


class DFlash(Peer):
    """``OnlineDFlashModel``: hard labels of the text."""

    equal: ClassVar[dict[str, Any]] = {"gamma": 4.0}
    attention = "sdpa"

    def build(self) -> None:
        case, tensors = self.case, self.tensors
        names = {"mask_token_id": 0, "target_layer_ids": list(case.aux_layers)}
        blocks = {"block_size": case.block, "num_target_layers": 8, "dflash_config": names}
        draft = DFlashDraftModel(self.qwen3(self.attention, **blocks))
        draft.load_state_dict(tensors.weights)
        embed, head = nn.Embedding(case.vocab, case.width), nn.Linear(case.width, case.vocab, bias=False)
        embed.weight.data, head.weight.data = tensors.embed_tokens, tensors.lm_head
        for table in (embed, head):
            table.requires_grad_(False)
        options = {"block_size": case.block, "num_anchors": case.anchors, "loss_decay_gamma": 4.0}
        self.model = OnlineDFlashModel(draft, head, embed, 0, attention_backend=self.attention, **options)
        self._batch = tensors.input_ids[None], tensors.states, tensors.loss_mask[None].float()

    def total(self) -> Tensor:
        loss: Tensor = self.model(*self._batch)[0]
        return loss

    def loss(self, anchors: list[int]) -> float:
        rows = torch.tensor([anchors]), torch.ones(1, len(anchors), dtype=torch.bool)
        self.model._sample_anchor_positions = lambda *_: rows
        loss = super().loss(anchors)
        del self.model._sample_anchor_positions
        return loss


class DFlashEager(DFlash):
    attention = "eager"


def _shifted_left(x: Tensor) -> Tensor:
    """Rows one earlier along axis 1, a zero row at the end."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)

"""The installed peers' DFlash training behind the calls of `benchmarks.train.ours`; see `benchmarks.train.peers`."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.train.case import Case, llama_shape
from benchmarks.train.peers import Peer, check_loaded, speculators_facts, speculators_frozen


class SpecForgeDFlash(Peer):
    """SpecForge's ``OnlineDFlashModel``: hard labels of the text."""

    equal: ClassVar[dict[str, Any]] = {"gamma": 4.0}
    attention = "sdpa"

    def build(self) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        case, tensors = self.case, self.tensors
        names = {"mask_token_id": 0, "target_layer_ids": list(case.aux_layers)}
        draft = DFlashDraftModel(
            qwen3_shape(case, self.attention, block_size=case.block, num_target_layers=8, dflash_config=names)
        )
        draft.load_state_dict(tensors.weights)
        embed, head = nn.Embedding(case.vocab, case.width), nn.Linear(case.width, case.vocab, bias=False)
        embed.weight.data, head.weight.data = tensors.embed_tokens, tensors.lm_head
        for table in (embed, head):
            table.requires_grad_(False)
        self.model = OnlineDFlashModel(
            draft, head, embed, 0, block_size=case.block, attention_backend=self.attention,
            num_anchors=case.anchors, loss_decay_gamma=4.0,
        )  # fmt: skip
        self._batch = tensors.input_ids[None], tensors.states, tensors.loss_mask[None].float()

    def total(self) -> Tensor:
        found: Tensor = self.model(*self._batch)[0]
        return found

    @torch.no_grad()
    def losses(self, anchors: Sequence[int] = ()) -> list[float]:
        placed = torch.tensor([anchors]), torch.ones(1, len(anchors), dtype=torch.bool)
        self.model._sample_anchor_positions = lambda *_: placed
        found = float(self.total())
        del self.model._sample_anchor_positions
        return [found]


class SpecForgeDFlashEager(SpecForgeDFlash):
    attention = "eager"


class SpeculatorsDFlash(Peer):
    """speculators' ``DFlashDraftModel``: hard labels are the target's most probable tokens, so that its step has the
    target's head over the block rows besides."""

    equal: ClassVar[dict[str, Any]] = {"labels": "target", "gamma": 4.0, "reduction": "kept"}
    attention = "eager"

    def build(self) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashSpeculatorConfig, core

        case, tensors = self.case, self.tensors
        config = DFlashSpeculatorConfig(
            transformer_layer_config=qwen3_shape(case, self.attention),
            draft_vocab_size=case.draft,
            block_size=case.block,
            aux_hidden_state_layer_ids=[layer + 1 for layer in case.aux_layers],
            mask_token_id=0,
            sample_from_anchor=False,
            speculators_config=speculators_facts("dflash", case.block - 1),
        )
        self._core, self.model = core, core.DFlashDraftModel(config)
        rows = {"lm_head.weight": tensors.lm_head[tensors.target_ids]}
        check_loaded(self.model.load_state_dict(tensors.weights | speculators_frozen(tensors) | rows, strict=False))
        self._batch = {
            "hidden_states": tensors.states,
            "input_ids": tensors.input_ids[None],
            "loss_mask": tensors.loss_mask[None],
            "verifier_last_hidden_states": tensors.final.float()[None],
            "document_ids": torch.zeros(1, case.tokens, dtype=torch.int64),
            "position_ids": torch.arange(case.tokens)[None],
            "loss_config": resolve_loss_config("ce", "eager"),
            "gamma": 4.0,
            "max_anchors": case.anchors,
            "per_position_loss_weight": "fixed-exp-decay",
        }

    def total(self) -> Tensor:
        found: Tensor = self.model(**self._batch)[1]
        return found

    @torch.no_grad()
    def losses(self, anchors: Sequence[int] = ()) -> list[float]:
        theirs = self._core.select_anchors
        placed = torch.tensor(anchors), torch.ones(len(anchors), dtype=torch.bool)
        self._core.select_anchors = lambda *_: placed
        found = float(self.total())
        self._core.select_anchors = theirs
        return [found]


class SpeculatorsDFlashSdpa(SpeculatorsDFlash):
    attention = "sdpa"


def qwen3_shape(case: Case, attention: str, **more: Any) -> Any:
    """DFlash's dimensions as a Qwen3 config."""
    from transformers import Qwen3Config

    layer_types = ["full_attention"] * case.layers
    shape = Qwen3Config(
        num_hidden_layers=case.layers, layer_types=layer_types, pad_token_id=None, **llama_shape(case), **more
    )
    shape._attn_implementation = attention
    return shape

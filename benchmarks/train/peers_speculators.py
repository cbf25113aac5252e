"""speculators' training behind the calls of `benchmarks.train.ours`; see `benchmarks.train.peers_specforge`."""

from typing import Any, ClassVar

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.train.case import Peer, Tensors, check_loaded


class Eagle3(Peer):
    """``Eagle3DraftModel``, its LM head trained as the others' are."""

    equal: ClassVar[dict[str, Any]] = {"kind": "kl", "mask_offset": 0, "drop_off_vocab": False, "overlap_mass": "draft"}
    attention = "sdpa"

    def build(self) -> None:
        case, tensors = self.case, self.tensors
        layer = LlamaConfig(num_hidden_layers=1, pad_token_id=None, **self.shape())
        layer._attn_implementation = self.attention
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=case.draft,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[layer + 1 for layer in case.aux_layers],
            speculators_config=_facts("eagle3", case.steps),
        )
        model = Eagle3DraftModel(config)
        if case.draft < case.vocab:
            model.load_vocab_mappings(tensors.t2d, tensors.d2t)
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.weights.items()}
        check_loaded(model.load_state_dict(weights | _frozen(tensors), strict=False))
        model.lm_head.weight.requires_grad_(True)
        self.model = model
        positions = torch.arange(1, case.tokens)[None]
        self._batch = {
            "hidden_states": tensors.states[:, :-1],
            "input_ids": tensors.input_ids[None, 1:],
            "document_ids": torch.zeros_like(positions),
            "loss_mask": tensors.loss_mask[None, 1:],
            "position_ids": positions,
            "verifier_last_hidden_states": tensors.final.float()[None, 1:],
            "ttt_steps": case.steps,
            "ttt_step_loss_decay": 0.8,
            "loss_config": resolve_loss_config("kl_div", "eager"),
        }

    def total(self) -> Tensor:
        loss: Tensor = self.model(**self._batch)[1]
        return loss


class Eagle3Eager(Eagle3):
    attention = "eager"


class DFlash(Peer):
    """``DFlashDraftModel``: hard labels are the target's most probable tokens, so that its step has the target's head
    over the block rows besides."""

    equal: ClassVar[dict[str, Any]] = {"labels": "target", "gamma": 4.0, "reduction": "kept"}
    attention = "eager"

    def build(self) -> None:
        case, tensors = self.case, self.tensors
        config = DFlashSpeculatorConfig(
            transformer_layer_config=self.qwen3(self.attention),
            draft_vocab_size=case.draft,
            block_size=case.block,
            aux_hidden_state_layer_ids=[layer + 1 for layer in case.aux_layers],
            mask_token_id=0,
            sample_from_anchor=False,
            speculators_config=_facts("dflash", case.block - 1),
        )
        self.model = dflash.DFlashDraftModel(config)
        rows = {"lm_head.weight": tensors.lm_head[tensors.target_ids]}
        check_loaded(self.model.load_state_dict(tensors.weights | _frozen(tensors) | rows, strict=False))
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
        loss: Tensor = self.model(**self._batch)[1]
        return loss

    def loss(self, anchors: list[int]) -> float:
        theirs = dflash.select_anchors
        rows = torch.tensor(anchors), torch.ones(len(anchors), dtype=torch.bool)
        dflash.select_anchors = lambda *_: rows
        loss = super().loss(anchors)
        dflash.select_anchors = theirs
        return loss


class DFlashSdpa(DFlash):
    attention = "sdpa"


def _facts(algorithm: str, proposals: int) -> Any:
    """The part of a config that names no dimension."""
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=proposals)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )


def _frozen(tensors: Tensors) -> dict[str, Tensor]:
    """The target's tables under their names."""
    return {
        "embed_tokens.weight": tensors.embed_tokens,
        "verifier_norm.weight": tensors.norm_weight,
        "verifier_lm_head.weight": tensors.lm_head[tensors.target_ids],
    }

"""The installed peers' EAGLE-3 training behind the calls of `benchmarks.train.ours`, on the same weights and tensors.

Each takes its tensors as its own collator makes them, in fp32 and in memory, before the clock runs. What a frozen table
of ours is, is frozen there; the LM head that ours trains, trains. Triton kernels, which no CPU runs, give way to the
torch formula the peer itself keeps beside them; torch.compile is off, which was the faster for all of them on a CPU.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.train.case import (
    BETAS,
    CLIP,
    HEAD_DIM,
    LR,
    NORM_EPS,
    ROPE_THETA,
    Case,
    Tensors,
    llama_shape,
    shifted_left,
)


class Peer:
    """Forward, backward, clip and AdamW (torch's fused kernel) of one engine. ``equal``: our settings under which the
    two losses are one function."""

    equal: ClassVar[dict[str, Any]]
    model: Any

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self.case, self.tensors = case, tensors
        self.build()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(self.parameters, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def build(self) -> None:
        """Make ``model`` and its inputs."""
        raise NotImplementedError

    def total(self) -> Tensor:
        """The loss that is trained."""
        raise NotImplementedError

    def losses(self, anchors: Sequence[int] = ()) -> list[float]:
        """Loss of every TTT step, or of DFlash with blocks at these anchors, before any update."""
        raise NotImplementedError

    def step(self) -> float:
        """One update; the loss."""
        loss = self.total()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(loss.detach())


class SpecForge(Peer):
    """SpecForge's ``OnlineEagle3Model``. The teacher is its compact one where the draft vocabulary is smaller, else the
    whole logits, made in the step."""

    equal: ClassVar[dict[str, Any]] = {"kind": "soft_ce", "mask_offset": -1, "reduction": "slots"}

    def build(self) -> None:
        import specforge.algorithms.eagle3.model as core
        from specforge.core import loss
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from transformers import LlamaConfig

        case, tensors = self.case, self.tensors

        class Formula:
            apply = staticmethod(loss._compute_loss)

        core.LogSoftmaxLoss = Formula
        config = LlamaConfig(num_hidden_layers=1, pad_token_id=0, **llama_shape(case))
        config.draft_vocab_size = case.draft
        draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
        more = {"embed_tokens.weight": tensors.embed_tokens, "t2d": tensors.t2d, "d2t": tensors.d2t}
        draft.load_state_dict(tensors.weights | more)
        draft.embed_tokens.weight.requires_grad_(False)
        self.model = core.OnlineEagle3Model(draft, length=case.steps, attention_backend="sdpa")
        mask = tensors.loss_mask.view(1, -1, 1).int().clone()
        mask[:, -1] = 0
        self._final = shifted_left(tensors.normed)
        self._batch = {
            "input_ids": shifted_left(tensors.input_ids[None]),
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

    def _depths(self) -> list[Tensor]:
        found: list[Tensor] = self.model(**self._batch, **self._teacher())[0]
        return found

    def total(self) -> Tensor:
        return torch.stack([loss * 0.8**i for i, loss in enumerate(self._depths())]).sum()

    @torch.no_grad()
    def losses(self, anchors: Sequence[int] = ()) -> list[float]:
        return [float(loss) for loss in self._depths()]


class Speculators(Peer):
    """speculators' ``Eagle3DraftModel``, its LM head trained as the others' are."""

    equal: ClassVar[dict[str, Any]] = {"kind": "kl", "mask_offset": 0, "drop_off_vocab": False, "overlap_mass": "draft"}
    attention = "sdpa"

    def build(self) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from transformers import LlamaConfig

        case, tensors = self.case, self.tensors
        layer = LlamaConfig(num_hidden_layers=1, pad_token_id=None, **llama_shape(case))
        layer._attn_implementation = self.attention
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=case.draft,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=[layer + 1 for layer in case.aux_layers],
            speculators_config=speculators_facts("eagle3", case.steps),
        )
        model = Eagle3DraftModel(config)
        if case.draft < case.vocab:
            model.load_vocab_mappings(tensors.t2d, tensors.d2t)
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.weights.items()}
        weights |= speculators_frozen(tensors)
        check_loaded(model.load_state_dict(weights, strict=False))
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
        found: Tensor = self.model(**self._batch)[1]
        return found

    @torch.no_grad()
    def losses(self, anchors: Sequence[int] = ()) -> list[float]:
        metrics = self.model(**self._batch | {"ttt_step_loss_decay": 1.0})[2]
        return [float(metrics[f"loss_{i}_sum"]) for i in range(self.case.steps)]


class SpeculatorsEager(Speculators):
    attention = "eager"


class ModelOpt(Peer):
    """ModelOpt's offline EAGLE conversion of a Llama without layers. It normalises the hidden twice, which the unit
    norms of a fresh drafter hide."""

    equal: ClassVar[dict[str, Any]] = {"kind": "soft_ce", "mask_offset": 0, "drop_off_vocab": False}

    def build(self) -> None:
        import modelopt.torch.speculative as speculative
        from transformers import LlamaConfig, LlamaForCausalLM

        case, tensors = self.case, self.tensors
        base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, pad_token_id=None, **llama_shape(case)))
        drafter = {
            "num_hidden_layers": 1,
            "intermediate_size": case.wider,
            "num_attention_heads": case.heads,
            "num_key_value_heads": case.kv_heads,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": NORM_EPS,
            "rope_scaling": {"rope_type": "default", "rope_theta": ROPE_THETA},
            "has_lm_head": True,
            "use_last_layernorm": True,
            "draft_vocab_size": case.draft,
            "eagle_aux_hidden_state_layer_ids": list(case.aux_layers),
            "_attn_implementation": "sdpa",
        }
        options = {
            "eagle_offline": True,
            "eagle_ttt_steps": case.steps,
            "eagle_loss_decay_factor": 0.8,
            "eagle_use_torch_compile": False,
            "eagle_architecture_config": drafter,
        }
        speculative.convert(base, [("eagle", options)])
        with torch.no_grad():
            base.model.embed_tokens.weight.copy_(tensors.embed_tokens)
            base.lm_head.weight.copy_(tensors.lm_head)
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.weights.items()}
        if case.draft < case.vocab:
            weights["d2t"] = tensors.d2t
        check_loaded(base.eagle_module.load_state_dict(weights, strict=False))
        base.train()
        self.model = base.float()
        self._batch = {
            "input_ids": tensors.input_ids[None],
            "loss_mask": tensors.loss_mask[None].float(),
            "base_model_outputs": {"base_model_hidden_states": tensors.normed, "aux_hidden_states": tensors.states},
        }

    def total(self) -> Tensor:
        found: Tensor = self.model(**self._batch).loss
        return found

    @torch.no_grad()
    def losses(self, anchors: Sequence[int] = ()) -> list[float]:
        inner, found = self.model._eagle_loss, []

        def noted(*given: Any) -> Any:
            loss, accuracy = inner(*given)
            found.append(float(loss))
            return loss, accuracy

        self.model._eagle_loss = noted
        self.total()
        del self.model._eagle_loss
        return found


def speculators_facts(algorithm: str, proposals: int) -> Any:
    """The part of a speculators config that names no dimension."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=proposals)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )


def speculators_frozen(tensors: Tensors) -> dict[str, Tensor]:
    """The target's tables under speculators' names."""
    return {
        "embed_tokens.weight": tensors.embed_tokens,
        "verifier_norm.weight": tensors.norm_weight,
        "verifier_lm_head.weight": tensors.lm_head[tensors.target_ids],
    }


def check_loaded(result: Any) -> None:
    """Every weight found its place."""
    missing, unexpected = result
    if unexpected or not set(missing) <= {"t2d", "d2t"}:
        raise ValueError(f"weights without a place {unexpected}, places without a weight {missing}")

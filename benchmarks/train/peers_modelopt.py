"""ModelOpt's training behind the calls of `benchmarks.train.ours`; see `benchmarks.train.peers_specforge`."""

from typing import Any, ClassVar

import modelopt.torch.speculative as speculative
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.train.case import HEAD_DIM, NORM_EPS, ROPE_THETA, Peer, check_loaded


class Eagle3(Peer):
    """Its offline EAGLE conversion of a Llama without layers. It normalises the hidden twice, which the unit norms of a
    fresh drafter hide."""

    equal: ClassVar[dict[str, Any]] = {"kind": "soft_ce", "mask_offset": 0, "drop_off_vocab": False}

    def build(self) -> None:
        case, tensors = self.case, self.tensors
        base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, pad_token_id=None, **self.shape()))
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
        loss: Tensor = self.model(**self._batch).loss
        return loss

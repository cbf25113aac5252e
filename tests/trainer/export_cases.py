"""One small drafter of every kind, ready to be exported: weights moved off their start, so that none is trivial."""

from functools import cache
from typing import Any

import torch

from hiddenstore.targets.head import HeadBundle
from schemas.capture import HeadSpec, TargetIdentity
from trainer.drafters import drafter_kind
from trainer.formats.base import Checkpoint
from trainer.losses.teacher import TargetInterface
from trainer.vocab import DraftVocab

V, U, D, N, G, E, F, LAYERS = 50, 20, 32, 2, 1, 16, 48, 8
"""Target vocabulary, small draft vocabulary, width, query heads, key heads, head width, MLP width, target layers."""

IDENTITY = TargetIdentity(
    name="maker/target",
    model_type="llama",
    hidden_size=D,
    num_layers=LAYERS,
    vocab_size=V,
    dtype="bfloat16",
    config_sha256="1" * 64,
    tokenizer_sha256="2" * 64,
    chat_template_sha256="3" * 64,
    weights_sha256="4" * 64,
)

MIMO = {
    "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    "hidden_size": D, "intermediate_size": F, "max_position_embeddings": 777, "model_type": "mimo",
    "num_attention_heads": N, "head_dim": E, "num_hidden_layers": LAYERS, "num_key_value_heads": G,
    "num_nextn_predict_layers": 3, "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "vocab_size": V,
}  # fmt: skip
"""``config.json`` of a target with MTP layers."""
QWEN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {},
    "text_config": {
        "hidden_size": D, "intermediate_size": F, "max_position_embeddings": 777, "model_type": "qwen3_5_text",
        "num_attention_heads": N, "head_dim": E, "num_hidden_layers": LAYERS, "num_key_value_heads": G,
        "mtp_num_hidden_layers": 2, "rms_norm_eps": 1e-6, "vocab_size": V,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
"""Another, with a tower for images around it."""


def make_head(seed: int = 0, bias: bool = False) -> HeadBundle:
    generator = torch.Generator().manual_seed(seed)
    embed, lm_head = (torch.randn(V, D, generator=generator).bfloat16() for _ in range(2))
    norm = torch.rand(D, generator=generator).bfloat16()
    spec = HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)
    return HeadBundle(
        spec, embed, lm_head, norm, lm_head_bias=torch.randn(V, generator=generator).bfloat16() if bias else None
    )


def make(
    drafter: str, known: int | None = None, head: HeadBundle | None = None, draft_len: int | None = None, **flags: Any
) -> Checkpoint:
    """A drafter of a kind; ``known`` tokens in its draft vocabulary (None: all), ``flags`` of its settings."""
    head = head or make_head()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(V, generator=generator)[:known]
    vocab = DraftVocab.full(V) if known is None else DraftVocab.of_ids(ids, V)
    settings: dict[str, Any] = {
        "name": drafter, "aux_layers": () if drafter in ("eagle1", "medusa", "mtp") else (1, 3, 4), "hidden_size": D,
        "intermediate_size": F, "num_heads": N, "num_kv_heads": G, "head_dim": E, "rope_theta": 5000.0,
        "rms_norm_eps": 1e-6, "max_position": 777, "vocab_size": vocab.size,
    }  # fmt: skip
    if drafter in ("dflash", "dspark", "dflash2", "domino", "xpress"):
        settings |= {"mask_token_id": 7, "block_size": 4, "num_layers": 2}
    if drafter == "dspark":
        settings |= {"markov_rank": 8}
    if drafter == "dflash2":
        settings |= {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    if drafter == "domino":
        settings |= {"gru_hidden_dim": 12, "emb_dim": 6}
    if drafter == "xpress":
        settings |= {"xpress_rank": 32, "num_jacobi_passes": 3}
    if drafter == "peagle":
        settings |= {"mask_token_id": 7, "num_layers": 1}
    if drafter == "medusa":
        settings |= {"medusa_heads": 3}
    kind = drafter_kind(drafter)
    model = kind.build(kind.config.model_validate({**settings, **flags}), TargetInterface(head, vocab), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "embed_tokens.weight":
                continue
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    target_config = {} if drafter != "mtp" else QWEN if flags else MIMO
    return Checkpoint(model.eval(), vocab, head, IDENTITY, draft_len=draft_len, target_config=target_config)


KINDS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "eagle1": ("eagle1", None, {}),
    "eagle1 of two layers": ("eagle1", None, {"num_layers": 2}),
    "eagle3": ("eagle3", U, {}),
    "eagle3, whole vocabulary": ("eagle3", None, {}),
    "eagle3 of two layers": ("eagle3", U, {"num_layers": 2}),
    "eagle3, narrower": ("eagle3", U, {"hidden_size": 24, "train_embeddings": True}),
    "eagle3, norm before residual": ("eagle3", U, {"norm_before_residual": True}),
    "eagle3.1": ("eagle3", U, {"fc_norm": True, "norm_output": True}),
    "dflash": ("dflash", None, {}),
    "dflash, small vocabulary": ("dflash", U, {}),
    "dflash with its own head": ("dflash", U, {"train_head": True}),
    "jetspec": ("dflash", None, {"causal": True}),
    "dflash with causal windows": ("dflash", None, {"sliding_window": 5, "sliding_causal": True}),
    "dflash of two kinds of layers": (
        "dflash",
        None,
        {"sliding_window": 5, "sliding_causal": True, "layer_types": ("sliding_attention", "full_attention")},
    ),
    "medusa": ("medusa", None, {}),
    "dspark": ("dspark", None, {}),
    "dspark, small vocabulary, no confidence head": ("dspark", U, {"confidence_head": False}),
    "dspark of mask slots alone": ("dspark", None, {"sample_from_anchor": False}),
    "dspark, causal": ("dspark", None, {"causal": True}),
    "dspark with causal windows": ("dspark", None, {"sliding_window": 5, "sliding_causal": True}),
    "dflash2": ("dflash2", None, {}),
    "dflash2 of three taps, causal, with its own head and windows": (
        "dflash2",
        None,
        {"conv_kernel_size": 3, "causal": True, "train_head": True, "sliding_window": 5},
    ),
    "domino": ("domino", None, {}),
    "domino, not shifted": ("domino", None, {"shift_label": False}),
    "xpress": ("xpress", None, {}),
    "xpress with a wider MLP, its own head and windows": (
        "xpress",
        None,
        {"xpress_mlp_ratio": 4, "train_head": True, "sliding_window": 5, "sliding_causal": True},
    ),
    "peagle": ("peagle", U, {}),
    "peagle of two layers, whole vocabulary": ("peagle", None, {"num_layers": 2, "fc_norm": True}),
    "mtp": ("mtp", None, {}),
    "mtp of Qwen3.5": ("mtp", None, {"layout": "qwen3.5", "rotary_share": 0.5}),
    "medusa of two blocks": ("medusa", None, {"medusa_layers": 2}),
    "medusa, small vocabulary": ("medusa", U, {}),
    "medusa with the original head": ("medusa", None, {"original_head": True}),
}


@cache
def case(name: str) -> Checkpoint:
    """The drafter ``KINDS`` describes under that name; one for all who ask, so nobody may change it."""
    drafter, known, flags = KINDS[name]
    return make(drafter, known, **flags)

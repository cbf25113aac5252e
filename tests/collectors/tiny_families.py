"""Tiny configs of the larger and newer families: experts, latent attention, running states, text inside a vision model.

Each is a class of transformers, by name, for not every release has them all, and what its config says.
"""

from typing import Any

import transformers as hf

LAYERS, WIDTH, WINDOW = 4, 64, 8
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1},
    **{"n_shared_experts": 1, "n_group": 2, "topk_group": 1},
}
_LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
_GRANITE = {"embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}
_LLAMA4 = {**_HEAD, **_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"patch_size": 4, "image_size": 16},
}
_QWEN_VISION = {
    **{
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "patch_size": 4,
    }
}
_QWEN_TOKENS = {"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 92}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}

TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOssConfig", {**_HEAD, **_LOCAL, "sliding_window": WINDOW}),
    "deepseek-v2": ("DeepseekV2Config", {**_ROUTED, **_LATENT, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3Config", {**_ROUTED, **_LATENT}),
    "glm4": ("Glm4Config", _HEAD),
    "glm4-moe": ("Glm4MoeConfig", {**_HEAD, **_ROUTED}),
    "llama4": ("Llama4TextConfig", {**_LLAMA4, "attention_chunk_size": WINDOW}),
    "minimax": ("MiniMaxConfig", {**_HEAD, **_LOCAL, "layer_types": _LINEAR["layer_types"], "block_size": 8}),
    "minimax-m2": ("MiniMaxM2Config", {**_HEAD, **_LOCAL}),
    "ministral3": ("Ministral3Config", _HEAD),
    "smollm3": ("SmolLM3Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW}),
    "gemma": ("GemmaConfig", {**_HEAD, "tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "cohere2": ("Cohere2Config", {"tie_word_embeddings": True, "sliding_window": WINDOW, "logit_scale": 0.3}),
    "granitemoe": ("GraniteMoeConfig", {**_LOCAL, **_GRANITE}),
    "qwen3-next": ("Qwen3NextConfig", {**_HEAD, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48}),
    "qwen3.5": ("Qwen3_5TextConfig", {**_HEAD, **_LINEAR}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**_HEAD, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48}),
    "minimax-m3": (
        "MiniMaxM3VLTextConfig",
        {
            **{**_HEAD, **_LOCAL, "dense_intermediate_size": 96, "shared_intermediate_size": 48, "rotary_dim": 8},
            **{"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2},
        },
    ),
    "granite-swa": (
        "GraniteSWAConfig",
        {**_GRANITE, "sliding_window": WINDOW, "layer_rope_theta": [1e4, 1e3, 0.0, 1e3]},
    ),
    "granitemoe-shared": ("GraniteMoeSharedConfig", {**_LOCAL, **_GRANITE, "shared_intermediate_size": 48}),
    "granitemoe-swa": ("GraniteMoeSWAConfig", {**_LOCAL, **_GRANITE, "sliding_window": WINDOW}),
    "granitemoe-hybrid": (
        "GraniteMoeHybridConfig",
        {**_LOCAL, **_GRANITE, **_MAMBA, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"] * 2},
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "jamba": ("JambaConfig", {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16}),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **{"layers_block_type": ["mamba", "full_attention", "moe", "mamba"], "mamba_num_heads": 8},
            **{"mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "n_routed_experts": 4, "n_group": 1},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
            **_HEAD,
            "topk_group": 1,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
}
WITH_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-vision": (
        "Gemma3Config",
        {
            "text_config": {**_TEXT, **_HEAD, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            **{"image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93, "tie_word_embeddings": True},
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {"text_config": {**_TEXT, **_MROPE}, "vision_config": _QWEN_VISION, **_QWEN_TOKENS},
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**_TEXT, **_HEAD, **_MROPE},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {**_TEXT, **_HEAD, "model_type": "mistral"},
            "vision_config": {**_VISION, "model_type": "pixtral"},
            "image_token_index": 95,
        },
    ),
    "llama4-vision": (
        "Llama4Config",
        {
            "text_config": {**_TEXT, **_LLAMA4, "attention_chunk_size": WINDOW},
            "vision_config": {
                **_VISION,
                **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            },
        },
    ),
    "mllama": (
        "MllamaConfig",
        {
            "text_config": {**_TEXT, "cross_attention_layers": [1]},
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1},
                **{"attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_output_dim": 64},
                "intermediate_layers_indices": [0],
            },
        },
    ),
}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": ("NemotronConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "stablelm": ("StableLmConfig", {}),
    "gemma4": ("Gemma4TextConfig", _HEAD),
    "paligemma": (
        "PaliGemmaConfig",
        {
            "text_config": {**_TEXT, **_HEAD, "model_type": "gemma"},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            **{"image_token_index": 95, "projection_dim": WIDTH, "tie_word_embeddings": True},
        },
    ),
    "nanochat": ("NanoChatConfig", {}),
    "deepseek-v4": (
        "DeepseekV4Config",
        {
            **{**_HEAD, **_ROUTED, "q_lora_rank": 24, "qk_rope_head_dim": 8, "o_lora_rank": 16, "o_groups": 2},
            **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "num_hash_layers": 0},
        },
    ),
}


def more_config(family: str) -> Any:
    """The config of a family of ``TEXT``, ``WITH_VISION`` or ``REFUSED``."""
    name, settings = {**TEXT, **REFUSED, **WITH_VISION}[family]
    return getattr(hf, name)(**(settings if "text_config" in settings else _TEXT | settings))


# transformers 4 spells the rotary embedding of the first two otherwise; the kernels of the third are asked for by name.
_OTHERWISE_IN_4 = ("qwen2.5-vl", "qwen3-vl", "jamba", "llama4-vision", "mllama")
MORE = [
    family
    for family, (name, _) in {**TEXT, **WITH_VISION}.items()
    if hasattr(hf, name) and not (hf.__version__.startswith("4.") and family in _OTHERWISE_IN_4)
]
RUNNING_STATE = (
    *("minimax", "qwen3-next", "qwen3.5", "qwen3.5-moe", "granitemoe-hybrid", "bamba", "jamba", "nemotron-h", "lfm2"),
)
"""Families with layers that fold the text into a state, from which no token can be taken back."""

IN_VLLM = ("qwen3-moe", "gpt-oss")
"""Families that tests/engines runs in a real vLLM: norms of queries and keys; attention sinks, biases and a window in
every other layer; experts in both."""

"""What each engine's loader fills, restated from its published source: every parameter by the file's names, with shape.

vLLM 0.32: ``model_executor/models/{llama_eagle,llama_eagle3,qwen3_dflash,qwen3_dflash2,medusa,mimo_mtp,qwen3_5_mtp}``;
0.33: ``qwen3_xpress``.
SGLang 0.5.23: ``srt/models/{llama_eagle,llama_eagle3,dflash}``. TensorRT-LLM, main branch of 2026:
``_torch/models/{modeling_speculative,modeling_dflash}``. Joint projections (``qkv_proj``, ``gate_up_proj``) are named
by their parts, which is what a file holds.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = dict[str, list[int]]


@dataclass(frozen=True)
class Loader:
    """``fills``: parameters of the drafter built from config.json. ``renamed``: a file's name as the loader looks for
    it. ``shared``: parameters an engine takes from the target where the file has none. ``passed_over``: names the
    loader leaves aside on purpose; any other name it does not know would be dropped in silence."""

    fills: Callable[[Mapping[str, Any]], Shapes]
    renamed: Callable[[str], str] = str
    shared: frozenset[str] = frozenset()
    passed_over: frozenset[str] = frozenset()


def llama_layer(prefix: str, config: Mapping[str, Any], width_in: int) -> Shapes:
    width, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    e, inner = config["head_dim"], config["intermediate_size"]
    return {
        f"{prefix}.self_attn.q_proj.weight": [heads * e, width_in],
        f"{prefix}.self_attn.k_proj.weight": [kv * e, width_in],
        f"{prefix}.self_attn.v_proj.weight": [kv * e, width_in],
        f"{prefix}.self_attn.o_proj.weight": [width, heads * e],
        f"{prefix}.mlp.gate_proj.weight": [inner, width],
        f"{prefix}.mlp.up_proj.weight": [inner, width],
        f"{prefix}.mlp.down_proj.weight": [width, inner],
        f"{prefix}.post_attention_layernorm.weight": [width],
    }


def eagle1(config: Mapping[str, Any], fc_bias: bool) -> Shapes:
    width = config["hidden_size"]
    found: Shapes = {"fc.weight": [width, 2 * width], "embed_tokens.weight": [config["vocab_size"], width]}
    if fc_bias:
        found["fc.bias"] = [width]
    for i in range(config["num_hidden_layers"]):
        found |= llama_layer(f"layers.{i}", config, width)
        if i > 0:
            found[f"layers.{i}.input_layernorm.weight"] = [width]
    return found


def eagle3(config: Mapping[str, Any], later_norm: str, has_d2t: bool = True) -> Shapes:
    width, target = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    count = config.get("num_aux_hidden_states") or len(ids)
    found: Shapes = {
        "fc.weight": [width, count * target],
        "norm.weight": [width],
        "lm_head.weight": [config["draft_vocab_size"], width],
        "embed_tokens.weight": [config["vocab_size"], width],
        "layers.0.input_layernorm.weight": [width],
        "layers.0.hidden_norm.weight": [width],
    }
    if has_d2t and config["draft_vocab_size"] != config["vocab_size"]:
        found["d2t"] = [config["draft_vocab_size"]]
    if config.get("fc_norm"):
        found |= {f"fc_norm.{k}.weight": [target] for k in range(count)}
    for i in range(config["num_hidden_layers"]):
        found |= llama_layer(f"layers.{i}", config, 2 * width if i == 0 else width)
        if i > 0:
            found[f"layers.{i}.{later_norm}.weight"] = [width]
    return found


def peagle(config: Mapping[str, Any]) -> Shapes:
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert config["mask_token_id"] == config["ptd_token_id"]
    # It is viewed as one row, whatever shape the file has.
    return eagle3(config, "input_layernorm") | {"mask_hidden": [1, 1, len(ids) * config["hidden_size"]]}


def dflash(config: Mapping[str, Any]) -> Shapes:
    width, e = config["hidden_size"], config["head_dim"]
    found: Shapes = {
        "fc.weight": [width, len(config["dflash_config"]["target_layer_ids"]) * width],
        "hidden_norm.weight": [width],
        "norm.weight": [width],
    }
    for i in range(config["num_hidden_layers"]):
        found |= llama_layer(f"layers.{i}", config, width)
        found |= {f"layers.{i}.self_attn.{name}_norm.weight": [e] for name in "qk"}
        found[f"layers.{i}.input_layernorm.weight"] = [width]
    return found


def vllm_dflash(config: Mapping[str, Any]) -> Shapes:
    found = dflash(config)
    found["lm_head.weight"] = [config["draft_vocab_size"], config["hidden_size"]]
    if config["draft_vocab_size"] != config["vocab_size"]:
        found["d2t"] = [config["draft_vocab_size"]]
    return found


def dspark(config: Mapping[str, Any]) -> Shapes:
    """The heads of vLLM's and SGLang's DSpark; a vocabulary table of W1 is the target's."""
    rank, vocab = config["markov_rank"], config["draft_vocab_size"]
    assert config["sample_from_anchor"] is not config["dspark_bonus_anchor"]
    assert config["markov_head_type"] == "vanilla"
    found: Shapes = {
        "markov_head.markov_w1.weight": [config["vocab_size"], rank],
        "markov_head.markov_w2.weight": [vocab, rank],
    }
    if config["enable_confidence_head"]:
        assert config["confidence_head_with_markov"]
        found |= {
            "confidence_head.proj.weight": [1, config["hidden_size"] + rank],
            "confidence_head.proj.bias": [1],
        }
    return found


def vllm_dspark(config: Mapping[str, Any]) -> Shapes:
    assert config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"]
    assert config["mask_token_id"] == config["dflash_config"]["mask_token_id"]
    assert not config["dflash_config"].get("sample_from_anchor"), "its DFlash, which a DSpark is, raises"
    return vllm_dflash(config) | dspark(config)


def domino(config: Mapping[str, Any]) -> Shapes:
    """What SGLang's DFlash has besides where its projector is Domino's."""
    said, width = config["dflash_config"], config["hidden_size"]
    hidden, rank = said["gru_hidden_dim"], said["emb_dim"]
    assert said["projector_type"] == "domino"
    assert config["emb_dim"] == rank
    assert isinstance(said["shift_label"], bool)
    assert said["pure_draft_prefix_len"] == 1
    return {
        "prefix_gru.weight_ih_l0": [3 * hidden, width],
        "prefix_gru.weight_hh_l0": [3 * hidden, hidden],
        "embed_proj.0.weight": [rank, width + hidden],
        "embed_proj.2.weight": [config["vocab_size"], rank],
    }


def vllm_xpress(config: Mapping[str, Any]) -> Shapes:
    """Its head is under ``HYBRID_KEY_MAP``'s names, mixed slots as training has them; the class, not the method, makes
    it one."""
    rank, inner, size = (config[f"xpress_{name}"] for name in ("rank", "mlp_hidden", "block_size"))
    width, vocab = config["hidden_size"], config["vocab_size"]
    assert config["architectures"] == ["Qwen3XPressModel"]
    assert config["draft_vocab_size"] == vocab, "it would raise"
    assert "sample_from_anchor" not in config | config["dflash_config"], "it raises where that is set"
    assert isinstance(config["xpress_num_passes"], int)
    assert rank.bit_count() == 1
    assert inner % 64 == 0
    return vllm_dflash(config) | {
        "xpress_head.w1.weight": [vocab, rank],
        "xpress_head.down_h.weight": [rank, width],
        "xpress_head.down_g.weight": [rank, width],
        "xpress_head.in_proj.weight": [rank, 3 * rank],
        "xpress_head.mix.L": [rank, size, size],
        "xpress_head.mlp.gate_proj.weight": [inner, rank],
        "xpress_head.mlp.up_proj.weight": [inner, rank],
        "xpress_head.mlp.down_proj.weight": [rank, inner],
        "xpress_head.w2.weight": [vocab, rank],
    }


def dflash2(config: Mapping[str, Any]) -> Shapes:
    """What vLLM's and SGLang's DFlash2 has besides DFlash."""
    said, width, vocab = config["dflash_config"], config["hidden_size"], config["vocab_size"]
    rank, taps, groups = said["selector_rank"], said["conv_kernel_size"], width // said["conv_group_size"]
    assert said["selector_top_k"] <= vocab == config["draft_vocab_size"]
    found: Shapes = {
        "candidate_selector.predecessor_codebook": [vocab, rank],
        "candidate_selector.successor_codebook": [vocab, rank],
        "candidate_selector.hidden_projection.weight": [rank, width],
    }
    for i in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            found[f"layers.{i}.{name}.base_kernel"] = [2, taps, width]
            found[f"layers.{i}.{name}.kernel_projection.weight"] = [2 * taps * groups, width]
    return found


def vllm_medusa(config: Mapping[str, Any]) -> Shapes:
    width = config["hidden_size"]
    # Its config takes any key with "num" and "heads" in it for the number of heads, and likewise for layers.
    heads = next(value for key, value in config.items() if "num" in key and "heads" in key)
    layers = next(value for key, value in config.items() if "num" in key and "layers" in key)
    found: Shapes = {}
    for k in range(heads):
        for i in range(layers):
            found[f"blocks.{k}.layers.{i}.weight"] = [width, width]
            if config.get("medusa_fc_bias", False):
                found[f"blocks.{k}.layers.{i}.bias"] = [width]
    lm_heads = 1 if config.get("original_lm_head") else heads
    assert config["truncated_vocab_size"] == config["vocab_size"], "it would ask for a token_map"
    return found | {f"lm_heads.{k}.weight": [config["vocab_size"], width] for k in range(lm_heads)}


def vllm_mtp(config: Mapping[str, Any]) -> Shapes:
    """By the class of the target."""
    return vllm_qwen_mtp(config) if "text_config" in config else vllm_mimo_mtp(config)


def vllm_qwen_mtp(config: Mapping[str, Any]) -> Shapes:
    """A layer of full attention, the gate beside the queries of its heads."""
    assert (config["architectures"], config["model_type"]) == (["Qwen3_5ForConditionalGeneration"], "qwen3_5")
    config, layer = config["text_config"], "mtp.layers.0"
    assert config["mtp_num_hidden_layers"] == 1
    width, head = config["hidden_size"], config["head_dim"]
    found = {
        **llama_layer(layer, config, width),
        "mtp.fc.weight": [width, 2 * width],
        "model.embed_tokens.weight": [config["vocab_size"], width],
        "lm_head.weight": [config["vocab_size"], width],
    }
    found[f"{layer}.self_attn.q_proj.weight"] = [2 * config["num_attention_heads"] * head, width]
    found |= {f"{layer}.self_attn.{name}_norm.weight": [head] for name in "qk"}
    found |= {f"mtp.{name}.weight": [width] for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return found | {f"{layer}.input_layernorm.weight": [width]}


def vllm_mimo_mtp(config: Mapping[str, Any]) -> Shapes:
    """The first layer, a Qwen2 one."""
    width, layer = config["hidden_size"], "model.mtp_layers.0"
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    assert "auto_map" not in config
    found = {
        **llama_layer(layer, config, width),
        f"{layer}.input_proj.weight": [width, 2 * width],
        "model.embed_tokens.weight": [config["vocab_size"], width],
        "lm_head.weight": [config["vocab_size"], width],
    }
    for name in "qkv":
        rows = found[f"{layer}.self_attn.{name}_proj.weight"][:1]
        found[f"{layer}.self_attn.{name}_proj.bias"] = rows
    return found | {f"{layer}.{name}_layernorm.weight": [width] for name in ("token", "hidden", "final", "input")}


def midlayer_is_layer_0(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def trtllm_midlayer(name: str) -> str:
    """``midlayer`` of one layer, ``midlayer.i`` of several; restated as ``layers.i`` to be compared."""
    return (
        re.sub(r"^midlayer\.(?=\d)", "layers.", name) if re.match(r"midlayer\.\d", name) else midlayer_is_layer_0(name)
    )


LOADERS: dict[tuple[str, str], Loader] = {
    ("vllm", "eagle1"): Loader(lambda c: eagle1(c, fc_bias=False), shared=frozenset({"embed_tokens.weight"})),
    ("vllm", "eagle3"): Loader(
        lambda c: eagle3(c, "input_layernorm"),
        midlayer_is_layer_0,
        frozenset({"embed_tokens.weight"}),
        frozenset({"t2d"}),
    ),
    ("vllm", "peagle"): Loader(peagle, midlayer_is_layer_0, frozenset({"embed_tokens.weight"}), frozenset({"t2d"})),
    ("vllm", "dflash"): Loader(vllm_dflash, shared=frozenset({"lm_head.weight"}), passed_over=frozenset({"t2d"})),
    ("vllm", "mtp"): Loader(vllm_mtp),
    ("vllm", "medusa"): Loader(vllm_medusa, passed_over=frozenset({"d2t", "t2d"})),
    ("sglang", "eagle1"): Loader(lambda c: eagle1(c, fc_bias=True), shared=frozenset({"embed_tokens.weight"})),
    ("sglang", "eagle3"): Loader(
        lambda c: eagle3(c, "hidden_norm"),
        midlayer_is_layer_0,
        frozenset({"embed_tokens.weight"}),
        frozenset({"t2d"}),
    ),
    ("sglang", "dflash"): Loader(dflash),
    ("vllm", "dspark"): Loader(vllm_dspark, shared=frozenset({"lm_head.weight"}), passed_over=frozenset({"t2d"})),
    ("sglang", "dspark"): Loader(lambda c: dflash(c) | dspark(c)),
    ("vllm", "xpress"): Loader(vllm_xpress, shared=frozenset({"lm_head.weight"})),
    ("vllm", "dflash2"): Loader(lambda c: vllm_dflash(c) | dflash2(c), shared=frozenset({"lm_head.weight"})),
    ("sglang", "dflash2"): Loader(lambda c: dflash(c) | dflash2(c)),
    ("sglang", "domino"): Loader(lambda c: dflash(c) | domino(c)),
    ("trtllm", "eagle3"): Loader(
        lambda c: eagle3(c, "hidden_norm"), trtllm_midlayer, frozenset({"embed_tokens.weight"})
    ),
    ("trtllm", "dflash"): Loader(dflash),
}

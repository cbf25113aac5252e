"""A target's own MTP layer outside: under the target's names, out of its checkpoint and into a folder of that form.

Names, order of the two halves, masking and norms follow vLLM 0.32, which drafts every token with the first MTP layer
(``mimo_mtp.py``, ``qwen3_5_mtp.py``, ``v1/spec_decode/llm_base_proposer.py``), and llama.cpp b11434 (``qwen35.cpp``).

Shapes: V target vocabulary, D target width, N query heads, E head width.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.capture import NormState
from trainer.formats import base
from trainer.formats.base import Checkpoint, DrafterExport, Engine, Files, Lack, Reads, Refused, Target, Tensors

_LAYER = "layers.0."
_PUBLISHED = "model."
_QUERIES, _GATE = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.gate_proj.weight"


@dataclass(frozen=True)
class Layout:
    """How one family spells its MTP layer and what its layer computes. ``architectures``: pattern of the target's
    class; ``model_type``: one that transformers knows and that says the same, None where it knows the target's own.
    ``prefix``: of its first MTP layer. ``outside``: our names beside the decoder layer and theirs; ``inside``: prefix
    of theirs in it. ``count``: the member of ``config.json`` that says how many layers there are. ``hidden_first``:
    order of the halves of ``fc``. ``blind_first``: the first token's slot reads zeros for an embedding. ``final``: the
    final hidden that the first step reads; ``feeds_normed``: later ones read the output after the last norm.
    ``qkv_bias``: queries, keys and values have a bias. ``gated``: heads of queries and keys are normed, and a gate
    beside the queries is put on what is attended; ``one_plus``: norms are times 1 + weight. ``rotary_share``: of a
    head's channels rope turns it, where ``config.json`` does not say."""

    architectures: str
    model_type: str | None
    prefix: str
    outside: Mapping[str, str]
    inside: str
    count: str
    hidden_first: bool
    blind_first: bool
    final: NormState
    feeds_normed: bool
    qkv_bias: bool
    gated: bool = False
    one_plus: bool = False
    rotary_share: float = 1.0

    def names(self, name: str) -> str:
        """The published name of one of ours."""
        inner = self.inside + name.removeprefix(_LAYER) if name.startswith(_LAYER) else self.outside[name]
        return self.prefix + inner

    def ours(self, name: str) -> str | None:
        """Our name of a published one; None where it is not of the layer."""
        start = self.prefix.removeprefix(_PUBLISHED)
        inner = name.removeprefix(_PUBLISHED).removeprefix(start)
        if inner == name.removeprefix(_PUBLISHED):
            return None
        plain = {theirs: ours for ours, theirs in self.outside.items()}
        is_inside = inner.startswith(self.inside)
        return plain.get(inner) or (_LAYER + inner.removeprefix(self.inside) if is_inside else None)


LAYOUTS = {
    "mimo": Layout(
        architectures="MiMoForCausalLM|MiMoMTPModel",
        model_type="qwen2",
        prefix="model.mtp_layers.0.",
        outside={
            "hidden_norm.weight": "hidden_layernorm.weight",
            "token_norm.weight": "token_layernorm.weight",
            "fc.weight": "input_proj.weight",
            "norm.weight": "final_layernorm.weight",
        },
        inside="",
        count="num_nextn_predict_layers",
        hidden_first=True,
        blind_first=True,
        final="pre_norm",
        feeds_normed=True,
        qkv_bias=True,
    ),
    "qwen3.5": Layout(
        architectures="Qwen3_5ForCausalLM|Qwen3_5ForConditionalGeneration|Qwen3_5MTP",
        model_type=None,
        prefix="mtp.",
        outside={
            "hidden_norm.weight": "pre_fc_norm_hidden.weight",
            "token_norm.weight": "pre_fc_norm_embedding.weight",
            "fc.weight": "fc.weight",
            "norm.weight": "norm.weight",
        },
        inside="layers.0.",
        count="mtp_num_hidden_layers",
        hidden_first=False,
        blind_first=False,
        final="post_norm",
        feeds_normed=True,
        qkv_bias=False,
        gated=True,
        one_plus=True,
        rotary_share=0.25,
    ),
}
"""By the word that `trainer.drafters.mtp.MtpConfig` names one with."""

_UNREAD = {
    r"mlp\.(experts|gate\.|shared)": "its block is a mixture of experts; ours has one MLP",
    r"self_attn\.(q_a|kv_a|indexer)": "its attention compresses keys and values (MLA); ours does not",
}


def published_layout(config: Mapping[str, Any]) -> str:
    """The word of the layout of a target's ``config.json``; ValueError where none is known or it has no MTP layer."""
    classes = [str(name) for name in config.get("architectures") or ()]
    for word, layout in LAYOUTS.items():
        if any(re.fullmatch(layout.architectures, name) for name in classes):
            text = config.get("text_config") or config
            if not text.get(layout.count):
                raise ValueError(f"{layout.count} is {text.get(layout.count)}: this target has no MTP layer")
            return word
    known = ", ".join(layout.architectures.partition("|")[0] for layout in LAYOUTS.values())
    raise ValueError(f"architectures is {', '.join(classes) or 'not set'}; MTP layers are read of {known}")


def _is_read(config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor of a target's folder is its first MTP layer's. KeyError, ValueError: none is known of it."""
    return LAYOUTS[published_layout(config)].ours(name) is not None


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    word = published_layout(config)
    layout, text = LAYOUTS[word], config.get("text_config") or config
    named = {layout.ours(name): tensor for name, tensor in tensors.items()}
    read = {name: tensor for name, tensor in named.items() if name is not None}
    if not read:
        raise ValueError(f"its weights hold no tensor {layout.prefix.removeprefix(_PUBLISHED)}…")
    for pattern, reason in _UNREAD.items():
        if any(re.match(_LAYER + pattern, name) for name in read):
            raise ValueError(reason)
    for name, rows in (
        ("embed_tokens.weight", target.head.embed_tokens),
        ("lm_head.weight", target.head.output_weight),
    ):
        base.drop_shared(tensors, name, rows)
        if name in tensors:
            raise ValueError(f"{name} differs from the target's, which an MTP layer shares")
    settings = base.dimensions(text, rotates_partly=True) | {"aux_layers": (), "layout": word}
    if layout.gated:
        count, width, length = settings["num_heads"], settings["head_dim"], len(read[_QUERIES])
        if length != count * 2 * width:
            raise ValueError(f"q_proj has {length} rows; {count} heads of {width} with a gate have {count * 2 * width}")
        heads = read[_QUERIES].unflatten(0, (count, 2, width))
        read |= {_QUERIES: heads[:, 0].flatten(0, 1), _GATE: heads[:, 1].flatten(0, 1)}
    rope = {**text, **(text.get("rope_parameters") or {})}
    return settings | {"rotary_share": rope.get("partial_rotary_factor", layout.rotary_share)}, read


def _published(checkpoint: Checkpoint, dtype: str) -> Tensors:
    """The layer under the target's names; the gate [N E, D] beside the queries [N E, D], head by head."""
    layout, own = LAYOUTS[checkpoint.config.layout], base.weights(checkpoint, dtype)
    if layout.gated:
        import torch

        heads = [own.pop(name).unflatten(0, (checkpoint.config.num_heads, -1)) for name in (_QUERIES, _GATE)]
        own[_QUERIES] = torch.cat(heads, 1).flatten(0, 1)
    return {layout.names(name): tensor for name, tensor in own.items()}


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """The layer under the target's names, beside the target's own tables: vLLM asks for embeddings [V, D] and head
    [V, D] in the folder, and then shares those of the target. ``config.json`` is the target's, with one MTP layer.
    llama.cpp's file gets tables and fields from the target's own."""
    layout, head = LAYOUTS[checkpoint.config.layout], checkpoint.head
    tensors = _published(checkpoint, dtype)
    if engine.reads_gguf:
        return Files({"num_hidden_layers": checkpoint.identity.num_layers + 1}, tensors)
    tables = {f"{_PUBLISHED}embed_tokens.weight": head.embed_tokens, "lm_head.weight": head.output_weight}
    tensors |= {name: base.like(tensors, table) for name, table in tables.items()}
    # The class that auto_map names lies in the target's folder.
    left_out = ("auto_map", "quantization_config")
    config = {key: value for key, value in checkpoint.target_config.items() if key not in left_out}
    one = {layout.count: 1}
    config |= {"text_config": config["text_config"] | one} if config.get("text_config") else one
    config |= {"model_type": layout.model_type} if layout.model_type else {}
    return Files({**config, **base.dtype_words(dtype)}, tensors)


_GONE = Lack(
    lambda c: not c.target_config,
    "its folder holds the target's config.json, and the store that has it is not there any more",
    "hiddenstore export RUN where its store lies",
)
_VLLM = Reads("MiMoMTPModel", "mtp", "mimo_mtp.py, qwen3_5_mtp.py", ran="0.32", since="0.32", lacks=(_GONE,))
_LLAMACPP = Reads(
    "qwen35",
    "draft-mtp",
    "qwen35.cpp",
    ran="11434",
    lacks=(
        Lack(
            lambda c: c.config.layout != "qwen3.5",
            "of MTP layers with one MLP it drafts only with Qwen3.5's",
            "hiddenstore export RUN --engine vllm",
        ),
    ),
)

MTP = DrafterExport(
    drafter="mtp",
    titles={"mtp-tuned": "the target's own MTP layer, trained on"},
    word=lambda flags: "mtp-tuned",
    rows={
        ("vllm", "mtp-tuned"): _VLLM.first_known("vLLM"),
        ("llamacpp", "mtp-tuned"): (_LLAMACPP,),
        ("sglang", "mtp-tuned"): (
            Refused(
                "its NEXTN takes a folder of MTP layers (mimo_mtp.py), but was not compared with this one",
                "--engine vllm; its model.safetensors holds the layer under the target's names",
            ),
        ),
    },
    architectures="MiMoMTPModel|Qwen3_5MTP",
    signs=lambda config, tensors: any(name.startswith(("mtp_layers.0.", "mtp.fc.")) for name in tensors),
    longest=lambda config: None,
    ids_follow_engine=False,
    has_positions=False,
    files=_files,
    our_name=lambda name: name,
    read=_read,
    probe=base.probe_chain,
    is_read=_is_read,
)

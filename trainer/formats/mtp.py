"""A target's own MTP layer outside: under the target's names, out of its checkpoint and into a folder of that form.

Names, order of the two halves, masking and norms follow vLLM 0.32, which drafts every token with the first MTP layer:
``mimo_mtp.py`` and ``v1/spec_decode/llm_base_proposer.py``.

Shapes: V target vocabulary, D target width.
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


@dataclass(frozen=True)
class Layout:
    """How one family spells its MTP layer and what its layer computes. ``architectures``: pattern of the target's
    class; ``model_type``: one that transformers knows and that says the same. ``prefix``: of its first MTP layer, {n}
    the target's number of layers. ``outside``: our names beside the decoder layer and theirs; ``inside``: prefix of
    theirs in it. ``count``: the member of ``config.json`` that says how many layers there are. ``hidden_first``: order
    of the halves of ``fc``. ``blind_first``: the first token's slot reads zeros for an embedding. ``final``: the final
    hidden that the first step reads; ``feeds_normed``: later ones read the output after the last norm. ``qkv_bias``:
    queries, keys and values have a bias."""

    architectures: str
    model_type: str
    prefix: str
    outside: Mapping[str, str]
    inside: str
    count: str
    hidden_first: bool
    blind_first: bool
    final: NormState
    feeds_normed: bool
    qkv_bias: bool

    def names(self, num_layers: int, name: str) -> str:
        """The published name of one of ours."""
        inner = self.inside + name.removeprefix(_LAYER) if name.startswith(_LAYER) else self.outside[name]
        return self.prefix.format(n=num_layers) + inner

    def ours(self, num_layers: int, name: str) -> str | None:
        """Our name of a published one; None where it is not of the layer."""
        start = self.prefix.format(n=num_layers)
        if not name.startswith(start):
            return None
        inner = name.removeprefix(start)
        plain = {theirs: ours for ours, theirs in self.outside.items()}
        return plain.get(inner) or _LAYER + inner.removeprefix(self.inside)


LAYOUTS = {
    "mimo": Layout(
        architectures="MiMoForCausalLM|MiMoMTPModel",
        model_type="qwen2",
        prefix="mtp_layers.0.",
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
    )
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
    text = config.get("text_config") or config
    layout = LAYOUTS[published_layout(config)]
    name = name.removeprefix(_PUBLISHED)
    return layout.ours(int(text["num_hidden_layers"]), name) is not None


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    word = published_layout(config)
    named = {LAYOUTS[word].ours(target.num_layers, name): tensor for name, tensor in tensors.items()}
    read = {name: tensor for name, tensor in named.items() if name is not None}
    if not read:
        raise ValueError(f"its weights hold no tensor {LAYOUTS[word].prefix.format(n=target.num_layers)}…")
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
    return base.dimensions(config.get("text_config") or config) | {"aux_layers": (), "layout": word}, read


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """The layer under the target's names, beside the target's own tables: vLLM asks for embeddings [V, D] and head
    [V, D] in the folder, and then shares those of the target. ``config.json`` is the target's, with one MTP layer."""
    layout, head = LAYOUTS[checkpoint.config.layout], checkpoint.head
    own = base.weights(checkpoint, dtype)
    layers = checkpoint.identity.num_layers
    tensors = {_PUBLISHED + layout.names(layers, name): tensor for name, tensor in own.items()}
    tensors[f"{_PUBLISHED}embed_tokens.weight"] = base.like(own, head.embed_tokens)
    tensors["lm_head.weight"] = base.like(own, head.output_weight)
    # The class that auto_map names lies in the target's folder.
    left_out = ("auto_map", "quantization_config")
    config = {key: value for key, value in checkpoint.target_config.items() if key not in left_out}
    return Files({**config, "model_type": layout.model_type, layout.count: 1, **base.dtype_words(dtype)}, tensors)


_GONE = Lack(
    lambda c: not c.target_config,
    "its folder holds the target's config.json, and the store that has it is not there any more",
    "hiddenstore export RUN where its store lies",
)
_VLLM = Reads("MiMoMTPModel", "mtp", "mimo_mtp.py", ran="0.32", since="0.32", lacks=(_GONE,))

MTP = DrafterExport(
    drafter="mtp",
    titles={"mtp-tuned": "the target's own MTP layer, trained on"},
    word=lambda flags: "mtp-tuned",
    rows={
        ("vllm", "mtp-tuned"): _VLLM.preceded_by(
            "the first vLLM known to read this format is 0.32", "--engine-version 0.32"
        ),
        ("sglang", "mtp-tuned"): (
            Refused(
                "it reads MTP layers out of the target's own folder only",
                "--engine vllm; its model.safetensors holds the layer under the target's names",
            ),
        ),
    },
    architectures="MiMoMTPModel",
    signs=lambda config, tensors: any(name.startswith("mtp_layers.0.") for name in tensors),
    longest=lambda config: None,
    ids_follow_engine=False,
    has_positions=False,
    files=_files,
    our_name=lambda name: name,
    read=_read,
    probe=base.probe_chain,
    is_read=_is_read,
)

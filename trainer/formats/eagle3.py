"""EAGLE-3 and 3.1 outside: a Llama of as many layers with EAGLE-3's flags (docs/design/009).

Shapes: D target width, H drafter width, V target vocabulary.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.records import WITHOUT_IMAGES
from schemas.layers import default_aux_layers, from_convention, to_convention
from trainer.formats import base
from trainer.formats.base import Checkpoint, DrafterExport, Engine, Files, Lack, Quirks, Reads, Refused, Target, Tensors

_CONVENTIONS = {"vllm": "vLLM's convention", "output": "that of SGLang, TensorRT-LLM, ModelOpt and SpecForge"}

_NORM_BEFORE_RESIDUAL = Lack(
    lambda c: c.config.norm_before_residual,
    "its layer keeps the state before hidden_norm as the residual",
    "train with drafter.norm_before_residual=false",
)
_SEVERAL_LAYERS = Lack(
    lambda c: c.config.num_layers > 1,
    "it drops the residual between layers, so several are another function",
    "train with drafter.num_layers=1",
)
_MORE_THAN_ITS_ONE_LAYER = Lack(
    lambda c: c.config.num_layers > 1, "its EAGLE-3 has one layer", "train with drafter.num_layers=1"
)
_OWN_EMBEDDINGS = Lack(
    lambda c: not base.shares_embeddings(c) and c.config.hidden_size == c.identity.hidden_size,
    "it replaces embeddings of the target's width by the target's",
    "train with drafter.train_embeddings=false",
)
_NOT_THREE_LAYERS = Lack(
    lambda c: len(c.config.aux_layers) != 3, "its fc reads three aux layers", "train with three drafter.aux_layers"
)
_AS_VLLM_AT_IMAGES = Lack(
    lambda c: c.config.image_token_id is not None,
    "it is not known to give a drafter at images what this one was taught, the embedding of their token and places in "
    "time (SGLang gives other ones)",
    f"--engine vllm; or {WITHOUT_IMAGES}, and train on that",
)
_AS_WIDE_AS_ITS_STATES = Lack(
    lambda c: len(c.config.aux_layers) * c.identity.hidden_size == c.config.hidden_size,
    "it tells states that fc has fused from those it has not by their width, which are equal here",
    "train with more than one of drafter.aux_layers",
)
_ONE_LAYER = Lack(
    lambda c: len(c.config.aux_layers) < 2, "it has no fc over a single aux layer", "train with several aux_layers"
)
_NARROWER = Lack(
    lambda c: c.config.hidden_size != c.identity.hidden_size,
    "its drafter is as wide as the target",
    "train with drafter.hidden_size= the target's",
)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """Layer ids are always explicit, because an engine that guesses them drafts from the wrong layers; ascending, as
    states are stored and captured. ``embed_tokens`` [V, H] is left out where it equals the target's, which most engines
    share; ``d2t`` and ``t2d`` where the vocabulary is whole, because vLLM 0.32 has no place for them then."""
    drafter, quirks = checkpoint.config, reads.quirks
    ids = to_convention(sorted(drafter.aux_layers), engine.convention)
    tensors = base.weights(checkpoint, dtype)
    if quirks.embeddings:
        tensors.setdefault("embed_tokens.weight", base.like(tensors, checkpoint.head.embed_tokens))
    elif base.shares_embeddings(checkpoint):
        tensors.pop("embed_tokens.weight", None)
    tensors = {_engine_name(name, quirks, drafter.num_layers > 1): tensor for name, tensor in tensors.items()}
    if not checkpoint.vocab.is_full:
        tensors |= base.draft_vocabulary(checkpoint)
        if not quirks.t2d:
            del tensors["t2d"]
    config = {
        "architectures": [reads.architecture],
        "model_type": "llama",
        **base.llama_dimensions(checkpoint, dtype),
        "eagle_config": {"use_aux_hidden_state": True, base.LAYER_IDS: ids},
    }
    if quirks.top_level_ids:
        config[base.LAYER_IDS] = ids
    if drafter.hidden_size != checkpoint.identity.hidden_size:
        config["target_hidden_size"] = checkpoint.identity.hidden_size
    if drafter.norm_before_residual:
        config["norm_before_residual"] = True
    if drafter.fc_norm or drafter.norm_output:
        config |= {"fc_norm": drafter.fc_norm, "norm_output": drafter.norm_output}
    if drafter.fc_norm or drafter.norm_output or quirks.wrap:
        # speculators' outer config has the ids, and vLLM makes an fc of three layers where the inner says no number.
        config["num_aux_hidden_states"] = len(ids)
    return Files(config, tensors)


def _engine_name(name: str, quirks: Quirks, several: bool) -> str:
    """A weight under the engine's name for its layer, one of ``several`` or the only one."""
    first, _, rest = name.partition(".")
    is_stacked = quirks.stacked and several
    if first == "midlayer":
        return f"midlayer.0.{rest}" if is_stacked else f"{quirks.first_layer}.{rest}"
    if first == "layers":
        rest = rest.replace("input_layernorm", quirks.later_norm)
        return f"midlayer.{rest}" if is_stacked else f"layers.{rest}"
    return name


def _our_name(name: str) -> str:
    """``midlayer`` for layer 0 and ``layers`` for later ones, whose only norm SGLang and TensorRT-LLM call
    ``hidden_norm``."""
    layer = re.fullmatch(r"(?:layers|midlayer)\.(\d+)\.(.*)", name)
    if layer is None:
        return name
    if layer[1] == "0":
        return f"midlayer.{layer[2]}"
    return name.replace("midlayer", "layers").replace("hidden_norm", "input_layernorm")


def wrapped(
    config: dict[str, Any], checkpoint: Checkpoint, draft_len: int, algorithm: str = "eagle3", **more: Any
) -> dict[str, Any]:
    """The config of speculators around that of an EAGLE-3, or of what its files hold: ``algorithm`` and ``more``."""
    flags = {flag: bool(config.get(flag, False)) for flag in ("norm_before_residual", "fc_norm", "norm_output")}
    flags |= {"norm_before_fc": False, base.LAYER_IDS: config["eagle_config"][base.LAYER_IDS]}
    return base.speculators_config(config, checkpoint, draft_len, algorithm, flags | more)


def _signs(config: Mapping[str, Any], tensors: Tensors) -> bool:
    if not tensors:
        return bool(config.get("eagle_config") or config.get("draft_vocab_size"))
    return any(name.endswith("hidden_norm.weight") or name == "d2t" for name in tensors)


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("layer_types has sliding_attention, and layers of ours see the whole text")
    if (config.get("eagle_config") or {}).get("norm_before_fc", config.get("norm_before_fc")):
        _fold_norm_before_fc(config, tensors)
    base.drop_shared(tensors, "embed_tokens.weight", target.head.embed_tokens)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.head.output_weight[target.vocab.target_ids].float().cpu()
    facts = {
        "aux_layers": _published_layers(config, target),
        "num_layers": int(config.get("num_hidden_layers", 1)),
        "fc_norm": any(name.startswith("fc_norm.") for name in tensors),
        "norm_output": bool(config.get("norm_output", False)),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "train_embeddings": "embed_tokens.weight" in tensors,
    }
    return base.dimensions(config) | facts, tensors


def _fold_norm_before_fc(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Bring in the norm before fc of speculators' default (``eagle3/core.py``), which ours has not: it divides a
    token's states by one number and multiplies each by its weight. The weight goes into fc; the number goes away in
    ``hidden_norm``, where nothing else reads what fc gives. ValueError where something does."""
    if not config.get("norm_before_residual"):
        raise ValueError(
            "norm_before_fc without norm_before_residual: the residual is what fc gives, undivided in ours"
        )
    tensors["fc.weight"] = tensors["fc.weight"] * tensors.pop("input_norm.weight")


def _published_layers(config: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    """Nothing in most files says whether ids are vLLM's or SGLang's: only what is certain is taken."""
    outputs = config.get(base.OUTPUT_IDS)
    top, nested = config.get(base.LAYER_IDS), (config.get("eagle_config") or {}).get(base.LAYER_IDS)
    ids = top or nested
    if not ids:
        return tuple(from_convention(outputs, "output") if outputs else default_aux_layers("eagle3", target.num_layers))
    if target.convention is not None:
        return tuple(from_convention(ids, target.convention))
    is_vllm_beside_sglang = bool(nested) and list(ids) == [index + 1 for index in nested or ()]
    if is_vllm_beside_sglang or "speculators_config" in config or "speculators_version" in config:
        return tuple(from_convention(ids, "vllm"))
    readings = {"vllm": from_convention(ids, "vllm"), "output": from_convention(ids, "output")}
    fitting = [layers for layers in readings.values() if all(-1 <= k < target.num_layers for k in layers)]
    expected_layers = list(outputs or default_aux_layers("eagle3", target.num_layers))
    if len(fitting) == 1 or expected_layers in fitting:
        return tuple(expected_layers if expected_layers in fitting else fitting[0])
    meanings = ", ".join(f"{layers} in {_CONVENTIONS[name]}" for name, layers in readings.items())
    raise ConfigError(
        f"layer ids {list(ids)} are ambiguous: they mean layers {meanings}, and the wrong ones draft badly in silence",
        kind=Kind.DRAFTER_UNFIT,
        hint="--layer-convention vllm, or --layer-convention output",
    )


_VLLM = Reads("LlamaForCausalLMEagle3", "eagle3", "llama_eagle3.py", ran="0.32", quirks=Quirks(top_level_ids=True))
_SGLANG = Reads(
    "LlamaForCausalLMEagle3",
    "EAGLE3",
    "llama_eagle3.py",
    since="0.5.23",
    lacks=(
        _NORM_BEFORE_RESIDUAL,
        _OWN_EMBEDDINGS,
        _AS_VLLM_AT_IMAGES,
        _AS_WIDE_AS_ITS_STATES,
        base.EMBEDDINGS_AS_A_LAYER,
    ),
    quirks=Quirks(later_norm="hidden_norm"),
)
_EARLIER_SGLANG = replace(
    _SGLANG,
    source="llama_eagle3.py, an earlier copy",
    since=None,
    before="0.5.23",
    lacks=(*_SGLANG.lacks, _NOT_THREE_LAYERS, _SEVERAL_LAYERS),
    quirks=Quirks(),
)
_TRTLLM = Reads(
    "LlamaForCausalLMEagle3",
    "Eagle3",
    "modeling_speculative.py",
    since="1.3",
    lacks=(
        *(_NORM_BEFORE_RESIDUAL, _OWN_EMBEDDINGS, _AS_VLLM_AT_IMAGES),
        *(_ONE_LAYER, _AS_WIDE_AS_ITS_STATES, base.EMBEDDINGS_AS_A_LAYER, base.ATTENTION_FACTOR),
    ),
    quirks=Quirks(later_norm="hidden_norm", stacked=True, t2d=False),
)
_LLAMACPP = Reads(
    "eagle3",
    "draft-eagle3",
    "src/models/eagle3.cpp",
    ran="11434",
    lacks=(_NOT_THREE_LAYERS, _MORE_THAN_ITS_ONE_LAYER, _AS_VLLM_AT_IMAGES, *base.OF_LLAMACPP),
    quirks=Quirks(top_level_ids=True),
)
_SPECULATORS = Reads(
    "Eagle3Speculator",
    "eagle3",
    "models/eagle3",
    ran="0.9",
    lacks=(_NARROWER,),
    quirks=Quirks(first_layer="layers.0", embeddings=True, wrap=wrapped),
)


def _later(reads: Reads, since: str, reason: str) -> tuple[Reads | Refused, ...]:
    nearest = f"--engine-version {since}, or train without drafter.fc_norm and drafter.norm_output"
    return replace(reads, since=since).preceded_by(reason, nearest)


EAGLE3 = DrafterExport(
    drafter="eagle3",
    titles={"eagle3": "an EAGLE-3 drafter", "eagle3.1": "an EAGLE-3.1 drafter"},
    word=lambda flags: "eagle3.1" if flags.get("fc_norm") or flags.get("norm_output") else "eagle3",
    rows={
        ("vllm", "eagle3"): (_VLLM,),
        ("vllm", "eagle3.1"): _later(_VLLM, "0.32", "the first vLLM known to read fc_norm and norm_output is 0.32"),
        ("sglang", "eagle3"): (_EARLIER_SGLANG, _SGLANG),
        ("sglang", "eagle3.1"): _later(
            _SGLANG,
            "0.5.23",
            "an SGLang without fc_norm drops those weights in silence; 0.5.23 is the first known to have it",
        ),
        ("trtllm", "eagle3"): (replace(_TRTLLM, method="Eagle", since=None, before="1.3"), _TRTLLM),
        ("trtllm", "eagle3.1"): _later(_TRTLLM, "1.3", "fc_norm and norm_output are read since 1.3"),
        ("llamacpp", "eagle3"): (_LLAMACPP,),
        ("llamacpp", "eagle3.1"): (
            Refused(
                "its one norm before fc divides all layers by their common size where EAGLE-3.1 divides each by its "
                "own, which no weights make up for, and it feeds back the state before the last norm",
                "train without drafter.fc_norm and drafter.norm_output, or --engine vllm",
            ),
        ),
        ("speculators", "eagle3"): (_SPECULATORS,),
        ("speculators", "eagle3.1"): (_SPECULATORS,),
    },
    architectures=".*eagle3.*",
    signs=_signs,
    longest=lambda config: None,
    ids_follow_engine=True,
    has_positions=True,
    files=_files,
    our_name=_our_name,
    read=_read,
    probe=base.probe_chain,
)

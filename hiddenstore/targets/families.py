"""Where each model family keeps its decoder blocks, final norm, embeddings and LM head, and how its head computes.

Adding a family is one row of ``FAMILIES``. A model type without a row is tried as Llama-like. Whatever the row says is
verified against the model's own forward on a probe before a store exists, so a wrong row is an error and never a wrong
store.

Shapes: T tokens, D target width, V target vocabulary.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.head import HeadBundle
from schemas.capture import HeadSpec, NormFlavour

Scale = Callable[[Any], float]


@dataclass(frozen=True)
class Family:
    """Attribute paths from the CausalLM (``blocks``, ``final_norm``, ``embeddings`` from the backbone) and head rules.

    ``embed_scale`` and ``logit_scale`` read a factor from the text config; ``softcap`` names the config attribute of
    the final logit cap.
    """

    backbone: str = "model"
    blocks: str = "layers"
    final_norm: str = "norm"
    embeddings: str = "embed_tokens"
    lm_head: str = "lm_head"
    norm: NormFlavour = "rms"
    embed_scale: Scale = lambda _config: 1.0
    logit_scale: Scale = lambda _config: 1.0
    softcap: str = "final_logit_softcapping"


LLAMA_LIKE = Family()
ONE_PLUS = Family(norm="rms_plus_one")
GEMMA = Family(norm="rms_plus_one", embed_scale=lambda config: float(config.hidden_size) ** 0.5)
GRANITE = Family(
    embed_scale=lambda config: float(config.embedding_multiplier),
    logit_scale=lambda config: 1.0 / float(config.logits_scaling),
)
COHERE = Family(norm="layer", logit_scale=lambda config: float(config.logit_scale))
FINAL_LAYERNORM = Family(final_norm="final_layernorm")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "phi3", "qwen2", "qwen3", "olmo2"), LLAMA_LIKE),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4_text"), LLAMA_LIKE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax", "minimax_m2"), LLAMA_LIKE),
    **dict.fromkeys(("qwen2_5_vl_text", "qwen3_vl_text"), LLAMA_LIKE),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax_m3_vl_text"), ONE_PLUS),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GEMMA),
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoeshared"), GRANITE),
    **dict.fromkeys(("granitemoe_swa", "granitemoehybrid"), GRANITE),
    **dict.fromkeys(("cohere", "cohere2"), COHERE),
    **dict.fromkeys(("bamba", "jamba"), FINAL_LAYERNORM),
    "nemotron_h": Family(final_norm="norm_f", embeddings="embeddings"),
    "lfm2": Family(final_norm="embedding_norm"),
}


@dataclass(frozen=True, eq=False)
class Parts:
    """The modules that capture touches; ``backbone`` maps token ids to the post-norm last hidden without logits. In
    place of a block that text passes by stands the one before it, whose output is the state there."""

    backbone: nn.Module
    blocks: list[nn.Module]
    final_norm: nn.Module
    head: HeadBundle


def find_parts(model: nn.Module, config: Any) -> Parts:
    """Locate the parts of a ``…ForCausalLM``, or of a ``…ForConditionalGeneration`` that has one inside, by the row of
    its text config; ConfigError ``family-unsupported``."""
    model_type = str(config.model_type)
    family = FAMILIES.get(model_type, LLAMA_LIKE)
    backbone = _module(model, family.backbone, model_type)
    backbone = getattr(backbone, "language_model", backbone)
    embeddings = _module(backbone, family.embeddings, model_type)
    norm = _module(backbone, family.final_norm, model_type)
    lm_head = _module(model, family.lm_head, model_type)
    blocks = _module(backbone, family.blocks, model_type)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != config.num_hidden_layers:
        raise unsupported(model_type, f"{family.blocks} is no list of {config.num_hidden_layers} decoder blocks")
    if not isinstance(getattr(norm, "weight", None), Tensor):
        raise unsupported(model_type, f"{type(norm).__name__} has no weight")
    one, other = lm_head.weight, embeddings.weight
    # Tensors on the meta device all begin at address 0.
    tied = one is other or (one.device.type != "meta" and one.data_ptr() == other.data_ptr())
    cap = getattr(config, family.softcap, None)
    try:
        spec = HeadSpec(
            norm_flavour=family.norm,
            norm_eps=_norm_eps(norm, model_type),
            tied=tied,
            embed_scale=family.embed_scale(config),
            logit_scale=family.logit_scale(config),
            final_logit_softcap=None if cap is None else float(cap),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"the target's config.json gives no head: {first['loc'][0]} {first['msg']}, found {first['input']!r}",
            kind=Kind.TARGET_UNREADABLE,
        ) from error
    head = HeadBundle(
        spec,
        embeddings.weight.detach(),
        None if tied else lm_head.weight.detach(),
        norm.weight.detach(),
        _bias(norm),
        _bias(lm_head),
    )
    return Parts(backbone, _run_on_text(blocks, config), norm, head)


def _run_on_text(blocks: nn.ModuleList, config: Any) -> list[nn.Module]:
    """The block whose output is the state after each layer: text passes by those that wait for an image (Mllama's
    cross-attention), so there it is the block before."""
    running = list(blocks)
    for index in sorted(getattr(config, "cross_attention_layers", None) or ()):
        if 0 < index < len(running):
            running[index] = running[index - 1]
    return running


def on_top_of(cache: Any, model: nn.Module) -> dict[str, Any]:
    """The arguments by which a forward of ``model`` reads transformers' ``cache`` and adds to it: from 5.24 on the
    first has another name, and a warning by its old one."""
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}


def head_names(model_type: str) -> dict[str, str]:
    """What a checkpoint calls each tensor of the head bundle, by the bundle's field names."""
    family = FAMILIES.get(model_type, LLAMA_LIKE)
    return {
        "embed_tokens": f"{family.backbone}.{family.embeddings}.weight",
        "lm_head": f"{family.lm_head}.weight",
        "norm_weight": f"{family.backbone}.{family.final_norm}.weight",
        "norm_bias": f"{family.backbone}.{family.final_norm}.bias",
        "lm_head_bias": f"{family.lm_head}.bias",
    }


def _module(root: nn.Module, path: str, model_type: str) -> Any:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise unsupported(model_type, f"{type(root).__name__} has no {path}") from error


def _norm_eps(norm: nn.Module, model_type: str) -> float:
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(norm, name, None), float):
            return value
    raise unsupported(model_type, f"{type(norm).__name__} states no epsilon")


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def unsupported(model_type: str, detail: str) -> ConfigError:
    problem = f"cannot capture model type {model_type!r}: {detail}"
    return ConfigError(problem, kind=Kind.FAMILY_UNSUPPORTED, hint="add a row to hiddenstore/targets/families.py")

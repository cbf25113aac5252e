"""A drafter as one GGUF file of llama.cpp, and back: ``config.json`` becomes fields, tensors get llama.cpp's names, and
the tokenizer is the target file's own, field by field.

Source: llama.cpp b11434 (``src/models/eagle3.cpp``, ``dflash.cpp``, ``qwen35.cpp``, ``conversion/``; MIT).
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenstore.errors import ConfigError, FormatError, Kind, NotFoundError
from hiddenstore.files.documents import foreign_json
from hiddenstore.fs.seam import storage_error
from trainer.formats.dflash2 import SIZES

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from torch import Tensor

SUFFIX = ".gguf"
FILE_NAME = "drafter.gguf"
"""The file of a folder that holds a drafter for llama.cpp."""
ABOUT = "hiddenstore.export"
"""The field that holds what ``hiddenstore.json`` holds beside other exports, as JSON."""
MASK = "tokenizer.ggml.mask_token_id"
_TOKENS = "tokenizer.ggml.tokens"
_FREQUENCIES = "rope_freqs.weight"
_NEXTN = "nextn_predict_layers"
_TABLES = ("token_embd.weight", "output_norm.weight", "output.weight")
_YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}

Fields = dict[str, Any]

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_NORMED_HEADS = {"self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight"}
_OUTSIDE = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "d2t": "d2t",
}

_MARKOV = "markov_w1.weight"
_DSPARK = {
    "markov_head.markov_w1.weight": _MARKOV,
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}
_DFLASH2 = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_CONVOLUTIONS = {
    f"{ours}_conv.{name}": f"{theirs}_conv_{end}"
    for ours, theirs in {"attention": "attn", "mlp": "ffn"}.items()
    for name, end in {"base_kernel": "base", "kernel_projection.weight": "proj.weight"}.items()
}
_CHANGED = {
    "output_multiplier": "logit_scale",
    "input_embedding_scale": "embedding_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True)
class Form:
    """How one of llama.cpp's architectures spells a drafter. ``published``: its class in ``config.json``. ``layer``:
    prefix of the published names of layer i. ``in_layer`` and ``outside``: names below it and beside the layers.
    ``pairs``: it rotates neighbouring channels, so that rows of q and k are interleaved. ``fields`` and ``config``:
    what it says besides the dimensions, from and into ``config.json``. ``is_part``: it is the last block of the target,
    among the target's own fields and tables, and its norms are times the weight where published ones are times
    1 + weight."""

    published: str
    layer: Callable[[int], str]
    in_layer: Mapping[str, str]
    outside: Mapping[str, str]
    pairs: bool
    fields: Callable[[Mapping[str, Any]], Fields]
    config: Callable[[Fields], dict[str, Any]]
    is_part: bool = False

    def blocks(self, depth: int) -> range:
        """Its blocks, of so many that its file counts."""
        return range(depth - 1 if self.is_part else 0, depth)


def _eagle3_fields(config: Mapping[str, Any]) -> Fields:
    return {
        "target_layers": list(config["eagle_aux_hidden_state_layer_ids"]),
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_before_fc": False,
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["head_dim"],
    }


def _eagle3_config(fields: Fields) -> dict[str, Any]:
    if fields.get("norm_before_fc"):
        raise ValueError("norm_before_fc is set: it norms all layers as one, ours norms each")
    if fields["block_count"] != 1:
        raise ValueError(f"block_count is {fields['block_count']}, and llama.cpp's EAGLE-3 has one layer")
    turned, width = fields.get("rope.dimension_count"), fields.get("attention.key_length")
    if turned and width and turned != width:
        raise ValueError(f"rope.dimension_count is {turned} of {width}, and ours rotates every channel of a head")
    return {
        "model_type": "llama",
        "eagle_aux_hidden_state_layer_ids": fields["target_layers"],
        "target_hidden_size": fields["target_hidden_size"],
        "norm_before_residual": bool(fields.get("norm_before_residual", False)),
    }


def _dflash_fields(config: Mapping[str, Any]) -> Fields:
    dflash = config["dflash_config"]
    fields = {
        "target_layers": [layer + 1 for layer in dflash["target_layer_ids"]],
        "block_size": dflash["block_size"],
    }
    fields |= {name: dflash[name] for name in SIZES if name in dflash}
    if dflash.get("causal"):
        fields["attention.causal"] = True
    if config.get("markov_rank"):
        fields["sample_from_anchor"] = config["sample_from_anchor"]
        fields["has_confidence_head"] = config["enable_confidence_head"]
    return fields


def _dflash_config(fields: Fields) -> dict[str, Any]:
    block = fields.get("block_size", 16)
    if fields.get("attention.sliding_window"):
        raise ValueError("dflash.attention.sliding_window is set, which DFlash here has not")
    causal = {"causal": True} if fields.get("attention.causal") else {}
    dflash = {"mask_token_id": fields[MASK], "block_size": block, **causal}
    if fields.get("selector_rank"):
        names = {name: name for name in SIZES} | _CHANGED
        dflash |= {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}
    config = {
        "model_type": "qwen3",
        "block_size": block,
        "dflash_config": dflash,
        "aux_hidden_state_layer_ids": fields["target_layers"],
    }
    # It is of DSpark alone.
    if (anchor := fields.get("sample_from_anchor")) is not None:
        config |= {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": anchor}
    return config


def _qwen35_config(fields: Fields) -> dict[str, Any]:
    if fields.get(_NEXTN) != 1:
        raise ValueError(f"{_NEXTN} is {fields.get(_NEXTN)}, and llama.cpp drafts with one MTP layer of Qwen3.5")
    return {
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "partial_rotary_factor": fields["rope.dimension_count"] / fields["attention.key_length"],
    }


FORMS: dict[str, Form] = {
    "eagle3": Form(
        "LlamaForCausalLMEagle3",
        lambda i: "midlayer.",
        {**_LAYER, "hidden_norm.weight": "attn_norm_2.weight"},
        _OUTSIDE,
        True,
        _eagle3_fields,
        _eagle3_config,
    ),
    "dflash": Form(
        "DFlashDraftModel",
        lambda i: f"layers.{i}.",
        {**_LAYER, **_NORMED_HEADS, **_CONVOLUTIONS},
        {**_OUTSIDE, "hidden_norm.weight": "enc.output_norm.weight", **_DSPARK, **_DFLASH2},
        False,
        _dflash_fields,
        _dflash_config,
    ),
    "qwen35": Form(
        "Qwen3_5MTP",
        lambda i: "mtp.",
        {
            **{f"layers.0.{name}": theirs for name, theirs in (_LAYER | _NORMED_HEADS).items()},
            "layers.0.post_attention_layernorm.weight": "post_attention_norm.weight",
            "fc.weight": "nextn.eh_proj.weight",
            "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
            "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
            "norm.weight": "nextn.shared_head_norm.weight",
        },
        {},
        False,
        lambda config: {},
        _qwen35_config,
        is_part=True,
    ),
}
"""By ``general.architecture``."""

_DIMENSIONS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def fields_of(architecture: str, config: Mapping[str, Any]) -> Fields:
    """What the file says of a drafter, by its full names: of ``config.json`` as vLLM reads it; nothing of a part of the
    target, whose file says it."""
    if FORMS[architecture].is_part:
        return {}
    own = {theirs: config[ours] for ours, theirs in _DIMENSIONS.items()}
    own |= {"attention.value_length": config["head_dim"], **FORMS[architecture].fields(config)}
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        own |= {theirs: float(rope[ours]) for ours, theirs in _YARN.items() if ours in rope}
    mask = (config.get("dflash_config") or {}).get("mask_token_id")
    return {f"{architecture}.{name}": value for name, value in own.items()} | ({} if mask is None else {MASK: mask})


def tensors_of(architecture: str, config: Mapping[str, Any], tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Published tensors under llama.cpp's names; ``d2t`` becomes ids of the target, ``t2d`` is left out, as it is not
    read. KeyError: a tensor that the architecture does not know."""
    import torch

    form, renamed = FORMS[architecture], {}
    names = {name: ours for ours, name in _names(form, config["num_hidden_layers"])}
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            tensor = tensor + torch.arange(len(tensor))
        elif (heads := _heads(form, name, config)) is not None:
            tensor = _swapped(tensor, (heads, 2, -1))
        elif form.is_part and tensor.ndim == 1:
            tensor = 1 + tensor.float()
        renamed[names[name]] = tensor.contiguous()
    if (factors := _stretched(config)) is not None:
        renamed[_FREQUENCIES] = factors
    return renamed


def _names(form: Form, layers: int) -> Iterable[tuple[str, str]]:
    """llama.cpp's name and the published one of every tensor there may be."""
    for ours, theirs in form.outside.items():
        yield theirs, ours
    for i in form.blocks(layers):
        for ours, theirs in form.in_layer.items():
            yield f"blk.{i}.{theirs}", form.layer(i) + ours


def _heads(form: Form, name: str, config: Mapping[str, Any]) -> int | None:
    """How many heads the rows of a published tensor are, where llama.cpp wants them interleaved."""
    of = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    count: int | None = config[of[name[-13:]]] if form.pairs and name[-13:] in of else None
    return count


def _swapped(tensor: "Tensor", split: tuple[int, int, int]) -> "Tensor":
    """Rows [heads, a, b] as [heads, b, a]: a = 2 interleaves the halves of every head, b = 2 puts them apart again."""
    heads, a, b = split
    return tensor.reshape(heads, a, b, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _stretched(config: Mapping[str, Any]) -> "Tensor | None":
    """What llama.cpp divides every frequency by, fp32 [head_dim / 2], where a rule of Llama 3 says it."""
    if (config.get("rope_scaling") or {}).get("rope_type") != "llama3":
        return None
    from trainer.attention.rope import frequencies, published_rope

    theta, scaling = published_rope(config)
    width, window = config["head_dim"], config["max_position_embeddings"]
    return frequencies(width, theta, None, window)[0] / frequencies(width, theta, scaling, window)[0]


def open_gguf(path: Path) -> "GGUFReader":
    """A GGUF file. Raises NotFoundError: there is none; ConfigError ``drafter-unfit``: not whole; StorageError."""
    from hiddenstore.targets.gguf import bounded_reader

    try:
        return bounded_reader(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", kind=Kind.PATH_MISSING) from error
    except OSError as error:
        raise storage_error(error, str(path)) from error
    except Exception as error:  # numpy slices of a damaged file raise anything
        raise ConfigError(f"{path} is no whole GGUF file: {error}", kind=Kind.DRAFTER_UNFIT) from error


def drafter_file(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or that it holds instead of a ``config.json``; None where there is none."""
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    files = [] if (path / "config.json").exists() else sorted(path.glob(f"*{SUFFIX}"))
    return next((file for file in files if file.name == FILE_NAME or len(files) == 1), None)


def target_differences(target: Path, expected: Mapping[str, Any]) -> list[str]:
    """What tells the target of a GGUF file from the one ``expected``, a `schemas.capture.TargetIdentity` as JSON.
    Raises what `open_gguf` raises."""
    reader = open_gguf(target)
    prefix = f"{_architecture(reader)}."
    own = {name.removeprefix(prefix): value for name, value in read_fields(reader, prefix).items()}
    found = {
        "hidden_size": own.get("embedding_length"),
        "num_layers": own.get("block_count", 0) - own.get(_NEXTN, 0),
        "vocab_size": len(read_fields(reader, _TOKENS).get(_TOKENS) or ()),
    }
    return [
        f"{name}: {expected[name]} expected, {value} found"
        for name, value in found.items()
        if name in expected and expected[name] != value
    ]


def read_fields(reader: "GGUFReader", *names: str) -> Fields:
    """The fields whose full names start with one of ``names``."""
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith(names)}


def write(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, "Tensor"],
    *,
    target: Path,
    about: Mapping[str, Any],
) -> dict[str, "Tensor"]:
    """Write the file and give back its tensors by its names. Vectors, norms and kernels of convolutions are fp32, as
    llama.cpp needs them, the others as they are. ``target``: its GGUF file, whose vocabulary is copied, and with a part
    of the target its fields and tables as well. Raises FormatError ``target-mismatch``: it is none that the part is of;
    ConfigError ``option-invalid``: it is one file of several."""
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter

    forms = {torch.bfloat16: GGMLQuantizationType.BF16, torch.int64: GGMLQuantizationType.I64}
    renamed = tensors_of(architecture, config, tensors)
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    reader = open_gguf(target)
    for name in (name for name in reader.fields if name.startswith("tokenizer.") and name != MASK):
        _copy(writer, reader, name)
    for name, value in fields_of(architecture, config).items():
        _add(writer, name, value)
    if FORMS[architecture].is_part:
        _add_target(writer, reader, target, architecture)
    writer.add_string(ABOUT, json.dumps({**about, "rope_scaling": config.get("rope_scaling")}))
    for name, tensor in renamed.items():
        if (tensor.ndim == 1 or not name.endswith(".weight")) and tensor.is_floating_point():
            tensor = renamed[name] = tensor.float()
        raw = forms.get(tensor.dtype)
        array = tensor.view(torch.uint8).numpy() if raw == GGMLQuantizationType.BF16 else tensor.numpy()
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return renamed


def _add(writer: Any, name: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](name, value)


def _copy(writer: Any, target: "GGUFReader", name: str) -> None:
    from gguf import GGUFValueType

    field = target.fields[name]
    is_list = field.types[0] == GGUFValueType.ARRAY
    writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_list else None)


def _add_target(writer: Any, target: "GGUFReader", path: Path, architecture: str) -> None:
    """What the target's file says of the target and its tables, as it has them, with one MTP layer."""
    if _architecture(target) != architecture:
        raise FormatError(
            f"{path} is {_architecture(target)}, and the MTP layer is one of {architecture}", kind=Kind.TARGET_MISMATCH
        )
    fields = read_fields(target, f"{architecture}.")
    count, nextn = f"{architecture}.block_count", f"{architecture}.{_NEXTN}"
    depth = fields[count] - fields.get(nextn, 0)
    _add(writer, count, depth + 1)
    _add(writer, nextn, 1)
    for name in (name for name in fields if name not in (count, nextn)):
        value, kinds = fields[name], target.fields[name].types
        if name.endswith(".recurrent_layers") and isinstance(value, list):
            # Which layers keep a running state, those of MTP with them where the file has some; this one does not.
            writer.add_key_value(name, [*value[:depth], False], kinds[0], kinds[-1])
        else:
            _copy(writer, target, name)
    tables = {entry.name: entry for entry in target.tensors if entry.name in _TABLES}
    if lacking := sorted({"token_embd.weight", "output_norm.weight"} - tables.keys()):
        raise ConfigError(
            f"{path} has no {' and no '.join(lacking)}, which an MTP layer's file holds: is it one file of several?",
            kind=Kind.OPTION_INVALID,
            hint=f"llama-gguf-split --merge {shlex.quote(str(path))} whole.gguf",
        )
    for name, entry in tables.items():
        writer.add_tensor(name, entry.data, raw_dtype=entry.tensor_type)


def about_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``hiddenstore.json`` that a drafter's file stands for; the latter empty where it is none of
    ours. Raises what `open_gguf` raises; ConfigError ``drafter-unfit``: no drafter that is known here."""
    return _read_config(path, open_gguf(path))


def read(path: Path) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """``config.json`` and fp32 tensors, under their published names, of a drafter's file, however it is quantised.
    Raises what `about_file` raises."""
    import torch
    from gguf import dequantize

    reader = open_gguf(path)
    config, _ = _read_config(path, reader)
    form, layers = FORMS[_architecture(reader)], config["num_hidden_layers"]
    # Before names are made: a number out of somebody's file must not decide how many.
    if type(layers) is not int or len(form.blocks(layers)) > len(reader.tensors):
        raise _unfit(path, f"names {layers} layers, and holds {len(reader.tensors)} tensors")
    names, tensors = dict(_names(form, layers)), {}
    for entry in reader.tensors:
        if entry.name == _FREQUENCIES:
            _require_rule(path, config, torch.from_numpy(entry.data.copy()))
            continue
        if form.is_part and entry.name in _TABLES:
            continue
        name = names.get(entry.name)
        if name is None:
            raise _unfit(path, f"has a tensor {entry.name}, which a drafter here has not")
        if name == "d2t":
            ids = torch.from_numpy(entry.data.copy())
            tensors[name] = ids - torch.arange(len(ids))
            continue
        tensor = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        heads = _heads(form, name, config)
        try:
            tensors[name] = tensor if heads is None else _swapped(tensor, (heads, -1, 2))
        except (RuntimeError, TypeError) as error:
            raise _unfit(path, f"has {len(tensor)} rows in {entry.name}, which are no {heads!r} heads") from error
        if form.is_part and tensor.ndim == 1:
            tensors[name] -= 1
    config["draft_vocab_size"] = len(tensors["d2t"]) if "d2t" in tensors else config["vocab_size"]
    return config, tensors


def _architecture(reader: "GGUFReader") -> str:
    return str(read_fields(reader, "general.architecture").get("general.architecture"))


def _read_config(path: Path, reader: "GGUFReader") -> tuple[dict[str, Any], dict[str, Any]]:
    architecture = _architecture(reader)
    form = FORMS.get(architecture)
    if form is None:
        raise _unfit(path, f"is {architecture}; drafters are {', '.join(FORMS)}")
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in read_fields(reader, prefix, MASK).items()}
    # llama.cpp tells DSpark by this tensor, and lets every slot propose where the file does not say.
    if any(entry.name == _MARKOV for entry in reader.tensors):
        own.setdefault("sample_from_anchor", True)
    try:
        tokens = read_fields(reader, _TOKENS).get(_TOKENS) or ()
        about = foreign_json(str(read_fields(reader, ABOUT).get(ABOUT) or "{}"))
        config = {ours: _shortest(own[theirs]) for ours, theirs in _DIMENSIONS.items()}
        config |= {"architectures": [form.published], "vocab_size": len(tokens), **form.config(own)}
    except KeyError as error:
        lacking = error.args[0]
        raise _unfit(path, f"lacks the field {lacking if lacking == MASK else prefix + lacking}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise _unfit(path, f"cannot be had here: {error}") from error
    if not isinstance(about, dict):
        raise _unfit(path, f"has a field {ABOUT} that is no JSON object")
    return config | {"rope_scaling": _read_rope(own) or about.pop("rope_scaling", None)}, about


def _shortest(value: Any) -> Any:
    """A number of the file, which has fp32 only, as the shortest one that rounds to it."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_rope(own: Fields) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": _shortest(own["rope.scaling.factor"])}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
        scaling |= {ours: _shortest(own[theirs]) for ours, theirs in _YARN.items() if theirs in own}
    return scaling


def _require_rule(path: Path, config: Mapping[str, Any], factors: "torch.Tensor") -> None:
    """Refuse stretched frequencies whose rule the file does not name, or another than it names."""
    named = _stretched(config)
    if named is None or not named.equal(factors):
        raise _unfit(path, f"stretches its rotary frequencies by {_FREQUENCIES} and does not name the rule")


def _unfit(path: Path, message: str) -> ConfigError:
    return ConfigError(f"{path} {message}", kind=Kind.DRAFTER_UNFIT)

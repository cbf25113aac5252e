"""A trained drafter as the checkpoint an engine loads: ``config.json`` and ``model.safetensors``.

An engine is one row of ``ENGINES``. Whatever is written is read back and must give the same logits, bit for bit, before
the folder appears under its name.

Shapes: V target vocabulary, U draft vocabulary, D target width, H drafter width, L aux layers.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError
from hiddenstore.fs import storage_error
from hiddenstore.head import HeadBundle
from schemas.capture import TargetIdentity
from schemas.layers import LayerConvention, from_convention, to_convention
from trainer.drafters.blocks import KVCache
from trainer.drafters.eagle3 import Eagle3, Eagle3Config
from trainer.drafters.rope import RopeScaling, published_rope
from trainer.vocab import DraftVocab

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_PROBE_TOKENS = 16
_PROBE_STEPS = 3


@dataclass(frozen=True)
class EngineFormat:
    """How one engine wants an EAGLE-3 drafter.

    ``convention`` of its layer ids; ``architecture`` in config.json; ``serve(folder, target, draft_len)`` the command
    that loads it.
    """

    convention: LayerConvention
    architecture: str
    serve: Callable[[str, str, int], list[str]]


def _serve_vllm(folder: str, target: str, draft_len: int) -> list[str]:
    settings = {"method": "eagle3", "model": folder, "num_speculative_tokens": draft_len}
    return ["vllm", "serve", target, "--speculative-config", json.dumps(settings)]


ENGINES: dict[str, EngineFormat] = {
    "vllm": EngineFormat(convention="vllm", architecture="LlamaForCausalLMEagle3", serve=_serve_vllm),
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is exported: a drafter, its draft vocabulary, and the target it drafts for."""

    model: Eagle3
    vocab: DraftVocab
    head: HeadBundle
    identity: TargetIdentity


@dataclass(frozen=True)
class ExportedDrafter:
    """What was written; ``tensors`` maps names to (dtype, shape)."""

    path: Path
    engine: str
    dtype: str
    bytes: int
    layer_ids: list[int]
    tensors: dict[str, tuple[str, list[int]]]


def engine_format(name: str) -> EngineFormat:
    """The row of an engine; ConfigError ``engine-unknown`` says which exist."""
    if name not in ENGINES:
        raise ConfigError(f"no export for engine {name!r}; there is: {', '.join(ENGINES)}", kind="engine-unknown")
    return ENGINES[name]


def export(checkpoint: Checkpoint, engine: str, out: Path, dtype: str | None = None) -> ExportedDrafter:
    """Write the checkpoint for ``engine``, in ``dtype`` (default: the target's own).

    Raises:
        ConfigError: unknown engine or dtype.
        ConflictError: ``out`` exists and is not empty.
        CorruptionError: what was written does not read back as the same drafter.
        StorageError: the disk refused.
    """
    layout = engine_format(engine)
    name = dtype or checkpoint.identity.dtype
    if name not in DTYPES:
        raise ConfigError(f"cannot export as {name!r}; choose one of {', '.join(DTYPES)}", kind="dtype-unknown")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out} exists and is not empty", kind="out-exists", hint="give another -o folder")
    tensors = engine_tensors(checkpoint, DTYPES[name])
    config = engine_config(checkpoint, layout, name)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        prove_equal(checkpoint, layout, partial, DTYPES[name])
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise storage_error(error, str(out)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ExportedDrafter(
        path=out,
        engine=engine,
        dtype=name,
        bytes=sum(file.stat().st_size for file in out.iterdir()),
        layer_ids=config["eagle_aux_hidden_state_layer_ids"],
        tensors={key: (str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in sorted(tensors.items())},
    )


def stretched(checkpoint: Checkpoint, factor: float, original: int) -> Checkpoint:
    """The same weights under YaRN: positions up to ``factor`` times the ``original`` window, as ModelOpt exports.

    Raises:
        ConfigError: the drafter was trained with another scaling.
    """
    config = checkpoint.model.config
    if config.rope_scaling is not None:
        raise ConfigError(
            f"the drafter was trained with rope_scaling {config.rope_scaling.rope_type}; YaRN is for one without",
            kind="rope-scaling",
            hint="train with drafter.rope_scaling=none",
        )
    scaling = RopeScaling(rope_type="yarn", factor=factor, original_max_position_embeddings=original)
    window = max(config.max_position, int(factor * original))
    config = config.model_copy(update={"rope_scaling": scaling, "max_position": window})
    model = Eagle3(config, checkpoint.identity.hidden_size, checkpoint.vocab.target_size, checkpoint.vocab.size)
    model.load_state_dict(checkpoint.model.state_dict())
    model.borrow(checkpoint.head)
    return replace(checkpoint, model=model.eval())


def engine_tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Named tensors of ``model.safetensors``.

    ``d2t`` int64 [U] are offsets (target id = draft id + d2t), ``t2d`` bool [V]. ``embed_tokens`` [V, H] is left out
    where it equals the target's, which engines share.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in checkpoint.model.state_dict().items()
    }
    if _shares_embeddings(checkpoint):
        tensors.pop("embed_tokens.weight", None)
    tensors["d2t"] = checkpoint.vocab.d2t.cpu().to(torch.int64).contiguous()
    tensors["t2d"] = checkpoint.vocab.t2d.cpu().to(torch.bool).contiguous()
    return tensors


def engine_config(checkpoint: Checkpoint, layout: EngineFormat, dtype: str) -> dict[str, Any]:
    """``config.json``: a Llama of as many layers with EAGLE-3's flags (drafters.md sections 1.2 and 1.3).

    Layer ids are always explicit, because an engine that guesses them drafts from the wrong layers; rope is written in
    the old and the new form, because engines read either.
    """
    drafter, identity = checkpoint.model.config, checkpoint.identity
    ids = to_convention(drafter.aux_layers, layout.convention)
    scaling = drafter.rope_scaling.written() if drafter.rope_scaling else None
    config: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": "llama",
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "num_hidden_layers": drafter.num_layers,
        "rms_norm_eps": drafter.rms_norm_eps,
        "hidden_act": "silu",
        "vocab_size": checkpoint.vocab.target_size,
        "draft_vocab_size": checkpoint.vocab.size,
        "max_position_embeddings": drafter.max_position,
        "rope_theta": drafter.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta, **(scaling or {})},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
    }
    if drafter.hidden_size != identity.hidden_size:
        config["target_hidden_size"] = identity.hidden_size
    if drafter.norm_before_residual:
        config["norm_before_residual"] = True
    if drafter.fc_norm or drafter.norm_output:
        config |= {"fc_norm": drafter.fc_norm, "norm_output": drafter.norm_output, "num_aux_hidden_states": len(ids)}
    return config


def read_exported(folder: Path, layout: EngineFormat, head: HeadBundle) -> tuple[Eagle3, DraftVocab]:
    """The drafter that an exported folder describes, from its two files alone plus the target's embeddings.

    Raises:
        CorruptionError: a file is damaged or lacks something.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        tensors = load_file(folder / WEIGHTS_FILE)
        drafter = _drafter_config(config, layout, own_embeddings="embed_tokens.weight" in tensors)
        vocab = DraftVocab(tensors.pop("t2d"), tensors.pop("d2t"))
        model = Eagle3(drafter, config.get("target_hidden_size", drafter.hidden_size), vocab.target_size, vocab.size)
        model = model.to(tensors["fc.weight"].dtype)
        model.load_state_dict(tensors)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CorruptionError(f"{folder} is no drafter: {error}", kind="export-unreadable", path=str(folder)) from error
    model.borrow(head)
    return model.eval(), vocab


def prove_equal(checkpoint: Checkpoint, layout: EngineFormat, folder: Path, dtype: torch.dtype) -> None:
    """Raise CorruptionError unless the files give the drafter's own logits and tokens, bit for bit.

    Both run the same chain of draft steps over random states, weights in ``dtype``, arithmetic in float32.
    """
    reloaded, vocab = read_exported(folder, layout, checkpoint.head)
    own = Eagle3(
        checkpoint.model.config, checkpoint.identity.hidden_size, checkpoint.vocab.target_size, checkpoint.vocab.size
    )
    state = {name: tensor.detach().cpu().to(dtype).float() for name, tensor in checkpoint.model.state_dict().items()}
    if "embed_tokens.weight" in state and _shares_embeddings(checkpoint):
        state["embed_tokens.weight"] = checkpoint.head.embed_tokens.cpu().float()
    own.load_state_dict(state)
    own.borrow(checkpoint.head)
    expected, found = _probe(own.eval(), checkpoint), _probe(reloaded.float(), checkpoint)
    same_tokens = torch.equal(vocab.target_ids, checkpoint.vocab.target_ids.cpu())
    if not torch.equal(expected, found) or not same_tokens:
        worst = float((expected - found).abs().max()) if expected.shape == found.shape else float("nan")
        raise CorruptionError(
            f"{folder}: the exported files do not give the drafter's logits (largest difference {worst:g})",
            kind="export-differs",
            path=str(folder),
        )


def _shares_embeddings(checkpoint: Checkpoint) -> bool:
    """Whether the drafter's embeddings are the target's, so that an engine's shared copy is exact."""
    table = getattr(checkpoint.model, "embed_tokens", None)
    target = checkpoint.head.embed_tokens
    if table is None:
        return True
    own = table.weight.detach()
    return own.shape == target.shape and bool(torch.equal(own.cpu().float(), target.cpu().float()))


@torch.no_grad()
def _probe(model: Eagle3, checkpoint: Checkpoint) -> Tensor:
    """Logits [tokens + steps - 1, U] of a chain over fixed random states."""
    generator = torch.Generator().manual_seed(0)
    layers, width = len(model.config.aux_layers), checkpoint.identity.hidden_size
    aux = torch.randn(layers, _PROBE_TOKENS, width, generator=generator)
    ids = torch.randint(checkpoint.head.embed_tokens.shape[0], (_PROBE_TOKENS + _PROBE_STEPS,), generator=generator)
    cache, positions = KVCache(), torch.arange(_PROBE_TOKENS + _PROBE_STEPS)
    g, logits = model.step(model.start(aux), ids[:_PROBE_TOKENS], positions[:_PROBE_TOKENS], cache)
    found = [logits]
    for i in range(_PROBE_TOKENS, _PROBE_TOKENS + _PROBE_STEPS - 1):
        g, logits = model.step(g[-1:], ids[i : i + 1], positions[i : i + 1], cache)
        found.append(logits)
    return torch.cat(found)


def _drafter_config(config: Mapping[str, Any], layout: EngineFormat, own_embeddings: bool) -> Eagle3Config:
    theta, scaling = published_rope(config)
    return Eagle3Config(
        aux_layers=tuple(from_convention(config["eagle_aux_hidden_state_layer_ids"], layout.convention)),
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=config["max_position_embeddings"],
        vocab_size=config["draft_vocab_size"],
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        norm_before_residual=config.get("norm_before_residual", False),
        train_embeddings=own_embeddings,
    )

"""What the files of every drafter share, out and in: dimensions and rope, weights in a dtype, the draft vocabulary.

Shapes: V target vocabulary, U draft vocabulary, D target width, H drafter width, T tokens, L aux layers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.formats.base import Checkpoint, Lack, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hiddenstore.targets.head import HeadBundle

PROBE_TOKENS = 16
PROBE_STEPS = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDINGS_AS_A_LAYER = Lack(
    lambda c: -1 in c.config.aux_layers,
    "its layer ids name layer outputs, and the embedding output is none",
    "train with drafter.aux_layers from 0 on",
)


def weights(checkpoint: Checkpoint, dtype: "str | torch.dtype") -> Tensors:
    """The drafter's own weights under its own names, on the CPU, in a dtype or the one of that name."""
    import torch

    as_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    state = checkpoint.model.state_dict()
    return {name: tensor.detach().to("cpu", as_dtype).contiguous() for name, tensor in state.items()}


def like(tensors: Tensors, table: "Tensor") -> "Tensor":
    """A copy of a table on the CPU in the dtype of the tensors that are written."""
    dtype = next(iter(tensors.values())).dtype
    return table.detach().to("cpu", dtype).clone().contiguous()


def llama_dimensions(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """Dimensions of a Llama-like drafter; rope in the old and the new form, because engines read either."""
    drafter = checkpoint.config
    scaling = drafter.rope_scaling.written() if drafter.rope_scaling else None
    return {
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "num_hidden_layers": drafter.num_layers,
        "rms_norm_eps": drafter.rms_norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": drafter.max_position,
        "rope_theta": drafter.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta, **(scaling or {})},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **vocabulary(checkpoint),
        **dtype_words(dtype),
    }


def dimensions(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a Llama-like ``config.json`` gives; KeyError where it lacks one."""
    from trainer.attention.rope import published_rope

    heads = config["num_attention_heads"]
    theta, scaling = published_rope(config)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position": config["max_position_embeddings"],
    }


def vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Both sizes, always: an engine that lacks the second takes it for the first, or takes the file for no drafter."""
    return {"vocab_size": checkpoint.vocab.target_size, "draft_vocab_size": checkpoint.vocab.size}


def dtype_words(dtype: str) -> dict[str, str]:
    """Under the older name and the newer one."""
    return {"torch_dtype": dtype, "dtype": dtype}


def draft_vocabulary(checkpoint: Checkpoint) -> Tensors:
    """``d2t`` int64 [U], target id minus draft id, and ``t2d`` bool [V], which target tokens the drafter knows."""
    vocab = checkpoint.vocab
    return {"d2t": vocab.d2t.cpu().long().contiguous(), "t2d": vocab.t2d.cpu().bool().contiguous()}


def shares_embeddings(checkpoint: Checkpoint) -> bool:
    """Whether the drafter's embeddings are the target's, so that an engine's shared copy is exact."""
    table = checkpoint.model.state_dict().get("embed_tokens.weight")
    target = checkpoint.head.embed_tokens
    return table is None or (table.shape == target.shape and table.cpu().float().equal(target.cpu().float()))


def drop_shared(tensors: Tensors, name: str, rows: "Tensor") -> None:
    """Drop a published fp32 table that equals the target's rows, as they are or rounded to a file's dtype."""
    import torch

    table = tensors.get(name)
    if table is None or table.shape != rows.shape:
        return
    if any(table.equal(rows.cpu().to(dtype).float()) for dtype in (torch.float32, torch.bfloat16, torch.float16)):
        del tensors[name]


def require_shared_embeddings(tensors: Tensors, head: "HeadBundle", title: str) -> None:
    """Drop published embeddings that are the target's; ValueError where they differ."""
    drop_shared(tensors, "embed_tokens.weight", head.embed_tokens)
    if "embed_tokens.weight" in tensors:
        raise ValueError(f"embed_tokens.weight differs from the target's, which {title} shares")


def speculators_config(
    config: dict[str, Any], checkpoint: Checkpoint, draft_len: int, algorithm: str, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """A drafter's ``config.json`` inside that of speculators, which names the target, so that ``vllm serve`` of the
    folder alone works. ``flags`` are all written, because vLLM's defaults differ from speculators' own."""
    verifier = {
        "name_or_path": checkpoint.target_name or checkpoint.identity.name,
        "architectures": list(checkpoint.target_architectures),
    }
    outer = {
        "architectures": config["architectures"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_len}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
        **flags,
    }
    both, outside = ("dtype", "tie_word_embeddings"), ("dflash_config", "eagle_config", "num_target_layers")
    inner = {key: value for key, value in config.items() if key in both or key not in (*outside, *outer)}
    return {**outer, "transformer_layer_config": inner}


def probe_states(checkpoint: Checkpoint, layers: int) -> "Tensor":
    """The random states of a probe: fp32 [layers, T, D]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(layers, PROBE_TOKENS, checkpoint.identity.hidden_size, generator=generator)


def probe_ids(checkpoint: Checkpoint) -> "Tensor":
    """The random tokens of a probe: int64 [T + steps]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    vocabulary_size = checkpoint.head.embed_tokens.shape[0]
    return torch.randint(vocabulary_size, (PROBE_TOKENS + PROBE_STEPS,), generator=generator)


def probe_chain(model: Any, checkpoint: Checkpoint) -> "Tensor":
    """Logits [rows, U] of a chain: one forward over text, then a token at a time."""
    import torch

    from trainer.attention.cache import KVCache

    layers = len(model.config.aux_layers)
    aux, ids = probe_states(checkpoint, layers or 1), probe_ids(checkpoint)
    cache, positions = KVCache(), torch.arange(len(ids))
    start = model.start(aux) if layers else aux[0]
    g, logits = model.step(start, ids[:PROBE_TOKENS], positions[:PROBE_TOKENS], cache)
    steps = [logits]
    for i in range(PROBE_TOKENS, PROBE_TOKENS + PROBE_STEPS - 1):
        g, logits = model.step(g[-1:], ids[i : i + 1], positions[i : i + 1], cache)
        steps.append(logits)
    return torch.cat(steps)

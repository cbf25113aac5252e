"""XPress outside: DFlash's files and a head, under vLLM's names and under speculators', which vLLM does not read.

Shapes: D target width, V target vocabulary, R rank, B slots of a block, M = ratio R width of the head's MLP.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.formats.base import Checkpoint, Engine, Files, Lack, Quirks, Reads, Refused, Target, Tensors
from trainer.formats.dflash import (
    CAUSAL_BLOCK,
    DFLASH,
    OWN_HEAD_OF_ALL_TOKENS,
    SYMMETRIC_WINDOW,
    WINDOW,
    block_size,
    import_first,
    wrapped,
)

USUAL_PASSES, USUAL_BLOCK = 6, 16
"""What vLLM's ``qwen3_xpress.py`` takes where a ``config.json`` does not say."""
HEAD, THEIR_HEAD = "xpress_head.", "refiner_head."
_THEIRS = {
    "w1.weight": "token_embed.weight",
    "mix.L": "mix_l",
    "mlp.gate_proj.weight": "mlp_gate.weight",
    "mlp.up_proj.weight": "mlp_up.weight",
    "mlp.down_proj.weight": "mlp_down.weight",
    "w2.weight": "readout.weight",
}
"""Names in the head, and speculators' (``XPressRefinerHead``); others are the same."""
_OURS = {theirs: ours for ours, theirs in _THEIRS.items()}

# vLLM's kernels walk the rank by tl.arange and the MLP in tiles of 64 that are not masked.
_KERNELS = Lack(
    lambda c: (
        (rank := c.config.xpress_rank) < 16 or bool(rank & (rank - 1)) or bool(rank * c.config.xpress_mlp_ratio % 64)
    ),
    "its kernels take a head whose width is a power of two from 16 on, and an MLP of whole 64s",
    "train with drafter.xpress_rank=256 drafter.xpress_mlp_ratio=2",
)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """In the head ``w1`` and ``w2`` [V, R], ``down_h`` and ``down_g`` [R, D], ``in_proj`` [R, 3R], ``mix.L`` [R, B, B]
    without the diagonal that vLLM adds, ``mlp.gate_proj`` and ``mlp.up_proj`` [M, R], ``mlp.down_proj`` [R, M]."""
    files, drafter = DFLASH.files(checkpoint, engine, reads, dtype), checkpoint.config
    if engine.name == "speculators":
        return replace(files, tensors={their_name(name): tensor for name, tensor in files.tensors.items()})
    head = {
        "xpress_block_size": drafter.block_size,
        "xpress_rank": drafter.xpress_rank,
        "xpress_mlp_hidden": drafter.xpress_rank * drafter.xpress_mlp_ratio,
        "xpress_num_passes": drafter.num_jacobi_passes,
    }
    return replace(files, config={**files.config, **head})


def _wrapped(config: dict[str, Any], checkpoint: Checkpoint, draft_len: int) -> dict[str, Any]:
    names = ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes")
    head = {name: getattr(checkpoint.config, name) for name in names}
    return wrapped(config, checkpoint, draft_len, "xpress") | head


def their_name(name: str) -> str:
    """A tensor's name in speculators, by ours."""
    inner = name.removeprefix(HEAD)
    return name if inner == name else THEIR_HEAD + _THEIRS.get(inner, inner)


def _our_name(name: str) -> str:
    inner = name.removeprefix(THEIR_HEAD)
    return name if inner == name else HEAD + _OURS.get(inner, inner)


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    rank, inner = tensors[f"{HEAD}w1.weight"].shape[1], len(tensors[f"{HEAD}mlp.gate_proj.weight"])
    if inner % rank:
        raise ValueError(f"its MLP is {inner} wide, which is no multiple of its rank, {rank}")
    passes = config.get("xpress_num_passes", config.get("num_jacobi_passes", USUAL_PASSES))
    size = tensors[f"{HEAD}mix.L"].shape[1]
    facts, tensors = DFLASH.read({**config, "block_size": size}, tensors, target)
    sizes = {"xpress_rank": rank, "xpress_mlp_ratio": inner // rank, "num_jacobi_passes": passes}
    return facts | sizes, tensors


def _longest(config: Mapping[str, Any]) -> int:
    size = config.get("xpress_block_size") or block_size(config)
    return int(size) - 1 if size else int(config.get("num_speculative_steps") or USUAL_BLOCK - 1)


def _unread(config: Mapping[str, Any], engine: str) -> Refused | None:
    if "speculators_config" not in config:
        return None
    return Refused(
        "it reads XPress under names of its own, and this is speculators' layout",
        import_first(engine),
    )


def _candidates(config: Mapping[str, Any]) -> str:
    return (
        "vLLM runs XPress on CUDA in its V2 runner only, and chooses among the 512 most probable tokens of a slot: "
        "--set xpress_topc=0 takes all, for more memory"
    )


_VLLM = Reads(
    "Qwen3XPressModel",
    "dflash",
    "qwen3_xpress.py",
    since="0.33",
    lacks=(SYMMETRIC_WINDOW, _KERNELS),
    warn=_candidates,
    full_blocks=True,
)
_SPECULATORS = Reads(
    "XPressSpeculator",
    "xpress",
    "models/xpress",
    ran="0.9",
    lacks=(WINDOW, CAUSAL_BLOCK, OWN_HEAD_OF_ALL_TOKENS),
    quirks=Quirks(wrap=_wrapped),
)
_NO_XPRESS = Refused("it has no XPress", "--engine vllm --engine-version 0.33, or a DFlash drafter")

XPRESS = replace(
    DFLASH,
    drafter="xpress",
    titles={"xpress": "an XPress drafter"},
    word=lambda flags: "xpress",
    rows={
        ("vllm", "xpress"): _VLLM.first_known("vLLM", "a DFlash drafter"),
        ("speculators", "xpress"): (_SPECULATORS,),
        **{(engine, "xpress"): (_NO_XPRESS,) for engine in ("sglang", "trtllm", "llamacpp")},
    },
    architectures=".*xpress.*",
    signs=lambda config, tensors: (
        bool(config.get("xpress_rank")) or not tensors.keys().isdisjoint((f"{HEAD}mix.L", f"{THEIR_HEAD}mix_l"))
    ),
    longest=_longest,
    files=_files,
    our_name=_our_name,
    read=_read,
    variant_of="dflash",
    unread=_unread,
)

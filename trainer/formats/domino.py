"""Domino outside: DFlash's files, a GRU and a correction of the logits, as SpecForge, ModelOpt and SGLang have them.

Shapes: D target width, V target vocabulary, G width of the GRU, M rank of the correction.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.formats.base import Checkpoint, Engine, Files, Reads, Refused, Target, Tensors
from trainer.formats.dflash import DFLASH, SYMMETRIC_WINDOW, TARGET_HEAD_ONLY

PURE_SLOTS = 1
"""Slots that propose without the head; SGLang refuses another number."""


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """``prefix_gru.weight_ih_l0`` [3G, D], ``weight_hh_l0`` [3G, G], ``embed_proj.0`` [M, D+G], ``embed_proj.2``
    [V, M]."""
    files, drafter = DFLASH.files(checkpoint, engine, reads, dtype), checkpoint.config
    head = {
        "projector_type": "domino",
        "shift_label": drafter.shift_label,
        "pure_draft_prefix_len": PURE_SLOTS,
        "gru_hidden_dim": drafter.gru_hidden_dim,
        "emb_dim": drafter.emb_dim,
    }
    nested = files.config["dflash_config"] | head
    return replace(files, config={**files.config, "emb_dim": drafter.emb_dim, "dflash_config": nested})


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    nested = config.get("dflash_config") or {}
    if (pure := nested.get("pure_draft_prefix_len")) != PURE_SLOTS:
        raise ValueError(f"pure_draft_prefix_len is {pure!r}: ours proposes one token without the head")
    if not isinstance(shifted := nested.get("shift_label"), bool):
        raise ValueError(f"shift_label is {shifted!r}: whether slots propose the token after their own is not said")
    sizes = {
        "gru_hidden_dim": tensors["prefix_gru.weight_hh_l0"].shape[1],
        "emb_dim": tensors["embed_proj.0.weight"].shape[0],
    }
    plain = {**config, "dflash_config": {**nested, "projector_type": None}}
    facts, tensors = DFLASH.read(plain, tensors, target)
    return facts | sizes | {"shift_label": shifted}, tensors


def _pool(config: Mapping[str, Any]) -> str:
    return (
        "SGLang runs Domino on CUDA in bf16, and chooses among the 2,048 most probable tokens of a block: "
        "--set domino-candidate-pool-size=0 takes all"
    )


_SGLANG = Reads(
    "DFlashDraftModel",
    "DFLASH",
    "dflash.py",
    since="0.5.23",
    lacks=(SYMMETRIC_WINDOW, *TARGET_HEAD_ONLY),
    warn=_pool,
)
_NO_DOMINO = Refused("it has no Domino", "--engine sglang, or a DSpark drafter")

DOMINO = replace(
    DFLASH,
    drafter="domino",
    titles={"domino": "a Domino drafter"},
    word=lambda flags: "domino",
    rows={
        ("sglang", "domino"): _SGLANG.first_known("SGLang"),
        **{(engine, "domino"): (_NO_DOMINO,) for engine in ("vllm", "trtllm", "llamacpp", "speculators")},
    },
    architectures=".*domino.*",
    signs=lambda config, tensors: (
        (config.get("dflash_config") or {}).get("projector_type") == "domino" or "prefix_gru.weight_ih_l0" in tensors
    ),
    files=_files,
    read=_read,
    variant_of="dflash",
    unread=lambda config, engine: None,
)

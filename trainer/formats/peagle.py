"""P-EAGLE outside: EAGLE-3's files, what stands for the aux states of a mask slot, and its token.

Shapes: L aux layers, D target width.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.formats import base
from trainer.formats.base import Checkpoint, Engine, Files, Lack, Quirks, Reads, Target, Tensors
from trainer.formats.eagle3 import EAGLE3, wrapped

if TYPE_CHECKING:
    from torch import Tensor

_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Those of speculators, of published P-EAGLE checkpoints and of vLLM's PARD, each of which vLLM 0.32 reads."""

_FC_NORM = Lack(
    lambda c: c.config.fc_norm,
    "vLLM does not read fc_norm of a P-EAGLE in this format",
    "--engine vllm, or train with drafter.fc_norm=false",
)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    made = EAGLE3.files(checkpoint, engine, reads, dtype)
    return replace(made, config={**made.config, **dict.fromkeys(_MASK_KEYS[:2], checkpoint.config.mask_token_id)})


def _wrapped(config: dict[str, Any], checkpoint: Checkpoint, draft_len: int) -> dict[str, Any]:
    flags = {"embed_requires_grad": checkpoint.config.train_embeddings, "mask_token_id": config["mask_token_id"]}
    return wrapped(config, checkpoint, draft_len, "peagle", **flags)


def _signs(config: Mapping[str, Any], tensors: Tensors) -> bool:
    return "mask_hidden" in tensors or (not tensors and any(config.get(key) is not None for key in _MASK_KEYS[1:]))


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    mask = next((config[key] for key in _MASK_KEYS if config.get(key) is not None), None)
    if mask is None:
        raise KeyError(_MASK_KEYS[0])
    facts, tensors = EAGLE3.read(config, tensors, target)
    # It is said of what is fed back, and nothing is.
    facts["norm_output"] = False
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    return facts | {"mask_token_id": int(mask)}, tensors


def _probe(model: Any, checkpoint: Checkpoint) -> "Tensor":
    """The logits of a text's slots and of the mask slots behind it."""
    import torch

    from trainer.attention.ttt import KVCache

    aux, ids = base.probe_states(checkpoint, len(model.config.aux_layers)), base.probe_ids(checkpoint)
    ids = torch.cat([ids[: base.PROBE_TOKENS], model.mask_ids(base.PROBE_STEPS)])
    g = torch.cat([model.start(aux), model.mask_start().expand(base.PROBE_STEPS, -1)])
    logits: Tensor = model.step(g, ids, torch.arange(len(ids)), KVCache())[1]
    return logits


_VLLM = Reads(
    "LlamaForCausalLMEagle3",
    "eagle3",
    "llama_eagle3.py",
    ran="0.32",
    since="0.32",
    quirks=Quirks(top_level_ids=True),
    told={"parallel_drafting": True},
)
_SPECULATORS = Reads(
    "PEagleSpeculator",
    "peagle",
    "models/peagle",
    ran="0.9",
    lacks=(*EAGLE3.rows["speculators", "eagle3"][0].lacks, _FC_NORM),  # type: ignore[union-attr]
    quirks=Quirks(first_layer="layers.0", embeddings=True, wrap=_wrapped),
)

PEAGLE = replace(
    EAGLE3,
    drafter="peagle",
    titles={"peagle": "a P-EAGLE drafter"},
    word=lambda flags: "peagle",
    rows={
        ("vllm", "peagle"): _VLLM.first_known("vLLM", "an EAGLE-3 drafter"),
        ("speculators", "peagle"): (_SPECULATORS,),
    },
    architectures=".*p-?eagle.*",
    signs=_signs,
    files=_files,
    read=_read,
    probe=_probe,
    variant_of="eagle3",
)

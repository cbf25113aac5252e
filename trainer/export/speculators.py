"""The format of the speculators library: it names the target, so that ``vllm serve`` of the folder alone works.

Sources: ``models/eagle3`` and ``models/dflash`` of speculators 0.9, which reads it back in a test, and
``transformers_utils/configs/speculators`` of vLLM 0.32 (Apache-2.0).
"""

from typing import Any

from trainer.export import lacks
from trainer.export.base import Checkpoint, Engine, Quirks, Reads, Refused

_OUTSIDE = ("architectures", "block_size", "dflash_config", "draft_vocab_size", "eagle_config", "num_target_layers")


def wrapped(config: dict[str, Any], checkpoint: Checkpoint, draft_len: int) -> dict[str, Any]:
    """A drafter's ``config.json`` inside that of speculators; every flag is written, because vLLM's defaults differ
    from speculators' own (``norm_before_residual``, ``sliding_window_non_causal``)."""
    own, is_dflash = config.get("dflash_config"), "dflash_config" in config
    algorithm = "dflash" if is_dflash else "eagle3"
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_len}
    verifier = {
        "name_or_path": checkpoint.target_name or checkpoint.identity.name,
        "architectures": list(checkpoint.target_architectures),
    }
    outer: dict[str, Any] = {
        "architectures": ["DFlashSpeculator" if is_dflash else "Eagle3Speculator"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
    }
    if own is not None:
        outer |= {
            "block_size": own["block_size"],
            "mask_token_id": own["mask_token_id"],
            "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
            "sample_from_anchor": False,
            "sliding_window_non_causal": True,
        }
    else:
        flags = ("norm_before_residual", "fc_norm", "norm_output")
        outer |= {flag: bool(config.get(flag, False)) for flag in flags}
        outer |= {
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        }
    both = ("dtype", "tie_word_embeddings")
    inner = {key: value for key, value in config.items() if key in both or key not in (*_OUTSIDE, *outer)}
    return {**outer, "transformer_layer_config": inner}


_EAGLE3 = Reads(
    architecture="Eagle3Speculator",
    source="models/eagle3",
    ran="0.9",
    lacks=(lacks.NARROWER,),
    quirks=Quirks(first_layer="layers.0", embeddings=True, wrap=wrapped),
)

SPECULATORS = Engine(
    name="speculators",
    title="speculators",
    version="0.9",
    convention="vllm",
    drafters={
        "eagle1": (Refused(reason="speculators has no EAGLE-1", nearest="--engine vllm, or an EAGLE-3 drafter"),),
        "eagle3": (_EAGLE3,),
        "eagle3.1": (_EAGLE3,),
        "dflash": (
            Reads(
                architecture="DFlashSpeculator",
                source="models/dflash",
                ran="0.9",
                lacks=(lacks.SLIDING_WINDOW, lacks.OWN_HEAD_OF_ALL_TOKENS),
                quirks=Quirks(wrap=wrapped),
            ),
        ),
        "medusa": (
            Refused(
                reason="speculators has no Medusa",
                nearest="--engine vllm --engine-version 0.32, or an EAGLE-3 drafter",
            ),
        ),
    },
)

"""The layer profile of a target, made by Hugging Face on the first sample, and the row norms that follow from it."""

import numpy as np
import torch

from collectors.check import MIN_PROFILED_TOKENS
from collectors.families import verify_parts
from collectors.target import LoadedTarget
from hiddenstore.errors import ConfigError
from hiddenstore.inputs import PreparedInput
from hiddenstore.records import final_row_positions
from hiddenstore.verify.profile import LayerProfile, make_profile
from schemas.capture import FinalMode

PROFILED_TEXT = 512


def profile_target(target: LoadedTarget, prepared: PreparedInput, final: FinalMode) -> LayerProfile:
    """Run the first tokens of the first sample, verify the target's parts on them and sketch every layer.

    Enough of them to reach an answer, so that the rows of the final hidden that the store keeps are sketched too.

    Raises:
        ConfigError: ``data-empty``, or as ``verify_parts``.
        CaptureError: as ``verify_parts``.
    """
    sample = next(iter(prepared.samples()), None)
    if sample is None:
        raise ConfigError(f"{prepared.folder} holds no samples", kind="data-empty")
    ids = sample.input_ids[:PROFILED_TEXT]
    held = final_row_positions(sample.loss_mask, final)
    held = held[held < len(ids)]
    batch = torch.from_numpy(ids.astype(np.int64))[None].to(target.device)
    probe = verify_parts(target.model, target.parts, batch, target.identity.model_type)
    return make_profile(sample.id, ids, probe.states, probe.normed, held if len(held) else None)


def typical_norms(profile: LayerProfile | None, layers: tuple[int, ...], width: int) -> tuple[float, ...]:
    """Median row norm of each layer without the first token; empty without a profile or with too few tokens in it."""
    if profile is None or len(profile.tokens) < MIN_PROFILED_TOKENS:
        return ()
    return tuple(float(np.median(profile.layers[layer + 1].rms[1:])) * width**0.5 for layer in layers)

"""What a collect will need, from the counts in data.json and the target's config; nothing is run or written.

Shapes: L aux layers, D target width.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from collectors.layers import LayerChoice
from collectors.target import TargetFolder
from hiddenstore.codecs import RECIPES, get_recipe
from hiddenstore.inputs import unit_tokens
from schemas.capture import CaptureSpec, Codecs, FinalMode, TargetIdentity
from schemas.prepared import PreparedData

# Bits per state value; q8 holds 8 plus a 16-bit scale per token. ``lossless`` was measured on trained targets.
BITS = {"bf16": 16.0, "lossless": 11.0, "q8": 8.0}
TOKEN_SCALE_BITS = {"q8": 16.0}
# Token ids, mask and row positions of one token.
BYTES_BESIDE_STATES = 5
FILES_PER_ARRAY = 2
SMALL_ARRAYS = 4
CODEC_ARRAYS = {"q8": 5}


@dataclass(frozen=True)
class Estimate:
    """One recipe: bytes in all, segments, and files in them (each array is a file of numbers and one of metadata)."""

    recipe: str
    bytes_stored: int
    bytes_per_token: float
    segments: int
    files: int


@dataclass(frozen=True)
class Plan:
    """Estimates for one input and capture; ``hours`` is None without a rate."""

    info: PreparedData
    choice: LayerChoice
    recipe: str
    estimates: tuple[Estimate, ...]
    bytes_raw: int
    bytes_free: int
    hours: float | None


def make_plan(
    info: PreparedData, folder: TargetFolder, choice: LayerChoice, recipe: str, place: str, rate: float | None
) -> Plan:
    """Estimate every recipe, the largest first.

    Args:
        place: where the store will be, for the free space.
        rate: tokens per second that collect reached before.
    """
    capture = _capture(folder, choice, get_recipe(recipe))
    rows = sorted((_estimate(info, capture, name) for name in RECIPES), key=lambda row: -row.bytes_stored)
    hours = None if rate is None else info.tokens / rate / 3600
    return Plan(info, choice, recipe, tuple(rows), raw_bytes(info, capture), free_bytes(place), hours)


def raw_bytes(info: PreparedData, capture: CaptureSpec) -> int:
    """bf16 of every aux layer and of the final hidden at every token: what a dump of states takes."""
    return info.tokens * (len(capture.aux_layers) + 1) * capture.target.hidden_size * 2


def free_bytes(location: str | Path) -> int:
    """Free space where ``location`` is or will be."""
    place = Path(location).resolve()
    while not place.exists():
        place = place.parent
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def _capture(folder: TargetFolder, choice: LayerChoice, codecs: Codecs) -> CaptureSpec:
    """A capture spec without weights; it goes nowhere."""
    identity = TargetIdentity(
        name=folder.label,
        model_type=folder.config.model_type,
        hidden_size=folder.config.hidden_size,
        num_layers=folder.num_layers,
        vocab_size=folder.config.vocab_size,
        dtype="",
        config_sha256=folder.config_sha256,
        tokenizer_sha256=folder.tokenizer_sha256,
        chat_template_sha256=folder.chat_template_sha256,
        weights_sha256="",
    )
    return CaptureSpec(
        target=identity, aux_layers=choice.aux_layers, final=choice.final, final_norm="pre_norm", codecs=codecs
    )


def _estimate(info: PreparedData, capture: CaptureSpec, recipe: str) -> Estimate:
    aux, final = RECIPES[recipe]
    layers, width = len(capture.aux_layers), capture.target.hidden_size
    rows = _final_rows(info, capture.final)
    bits = info.tokens * layers * _row_bits(aux, width) + rows * _row_bits(final, width)
    stored = int(bits / 8) + info.tokens * BYTES_BESIDE_STATES
    limit = unit_tokens(capture.model_copy(update={"codecs": Codecs(aux=aux, final=final)}))
    segments = max(1, math.ceil(info.tokens / limit))
    arrays = layers + SMALL_ARRAYS + (CODEC_ARRAYS.get(aux, 0) if layers else 0)
    arrays += 0 if capture.final == "none" else 1 + CODEC_ARRAYS.get(final, 0)
    files = segments * (arrays * FILES_PER_ARRAY + 1)
    return Estimate(recipe, stored, stored / max(1, info.tokens), segments, files)


def _row_bits(codec: str, width: int) -> float:
    return BITS[codec] * width + TOKEN_SCALE_BITS.get(codec, 0.0)


def _final_rows(info: PreparedData, final: FinalMode) -> int:
    """Rows of the final hidden; ``supervised`` holds one row more on either side of each answer."""
    if final == "none":
        return 0
    return info.tokens if final == "all" else min(info.tokens, info.supervised_tokens + 2 * info.samples)

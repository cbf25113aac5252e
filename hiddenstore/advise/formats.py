"""One form of the states on trial: encoded, decoded again, weighed and searched for rows and values it cannot hold.

Shapes: T tokens, D target width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore import blosc_chunks
from hiddenstore.codecs import CODECS, Codec, Encoded
from hiddenstore.codecs.base import RAW_INDEX, bits_to_tensor
from hiddenstore.codecs.topk import TOPK_CODEC

_E4M3_LARGEST = 448.0
# A chunk's crc32c, and its offset and length in the index.
_CHUNK_OVERHEAD = 4 + 16
# Largest |y| a row can hold, in units of its token scale; half a step beyond the last code is within the bound.
_REACH = {"q8": 127.5, "q4": 8.5 * _E4M3_LARGEST}


@dataclass(frozen=True, eq=False)
class Trial:
    """decoded bfloat16 [T, D]; bytes of a row and once per unit; rows kept verbatim, values beyond their codes."""

    decoded: Tensor
    row_bytes: float
    unit_bytes: float
    raw_rows: int = 0
    clipped: int = 0


Form = Callable[[Tensor], Trial]
"""One layer bfloat16 [T, D], as a unit of its own, put through a form."""


def through_codec(name: str, most_rows: int | None = None) -> Form:
    """The form that codec ``name`` gives a layer; a compressed chunk has at most ``most_rows``, where that is given."""
    codec = CODECS[name]

    def run(layer: Tensor) -> Trial:
        encoded = codec.encode([layer])
        row_bytes, unit_bytes = _weigh(codec, encoded, layer, most_rows or len(layer))
        raw = len(encoded.small[RAW_INDEX]) if RAW_INDEX in encoded.small else 0
        clipped = clipped_values(layer, encoded, _REACH[name]) if name in _REACH else 0
        return Trial(codec.decode(encoded)[0], row_bytes, unit_bytes, raw, clipped)

    return run


def fp8_per_token(layer: Tensor) -> Trial:
    """E4M3 with one bf16 scale per token: the form of the fp8 backend of vllm ``speculators`` (PR 1028)."""
    values = layer.float()
    peak = values.abs().amax(dim=1, keepdim=True)
    scale = torch.where(peak > 0, peak / _E4M3_LARGEST, 1.0).bfloat16().float()
    scaled = values / scale
    decoded = scaled.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn).float() * scale
    # Values up to half a step beyond the largest code round to it.
    clipped = int((scaled.abs() > _E4M3_LARGEST * (1 + 2**-5)).sum())
    return Trial(decoded.bfloat16(), layer.shape[1] + 2.0, 0.0, 0, clipped)


def top_token_bytes(final: Tensor) -> float:
    """Bytes that the top tokens of one final row take in place of a row of ``final`` [R, D]."""
    width = final.shape[1]
    return TOPK_CODEC.row_bits(width) / 8 + _CHUNK_OVERHEAD / min(TOPK_CODEC.chunk_tokens(width), len(final))


def clipped_values(layer: Tensor, encoded: Encoded, reach: float) -> int:
    """How many values of an affine code lie beyond what their row can hold: |h - mu| / c > reach * token scale."""
    scale, offset, token_scale = (
        bits_to_tensor(encoded.small[name][0], layer.device).float()
        for name in ("channel_scale", "channel_offset", "token_scale")
    )
    y = ((layer.float() - offset) / scale).abs()
    coded = torch.ones(len(layer), dtype=torch.bool, device=layer.device)
    coded[torch.from_numpy(encoded.small[RAW_INDEX][:, 1].astype(np.int64)).to(layer.device)] = False
    # y is divided here and multiplied by a reciprocal in the codec: the last bit may differ.
    return int((y > reach * (1 + 2**-20) * token_scale[:, None])[coded].sum())


def _weigh(codec: Codec, encoded: Encoded, layer: Tensor, most_rows: int) -> tuple[float, float]:
    """Bytes a row takes in a Zarr segment, chunk checksums and index included, and bytes that a unit takes once."""
    rows, width = layer.shape
    chunk = min(codec.chunk_tokens(width), rows, most_rows)
    codes = encoded.codes[0].cpu().numpy()
    if codec.compressed:
        stored = sum(len(blosc_chunks.compress(codes[start : start + chunk])) for start in range(0, rows, chunk))
    else:
        stored = codes.nbytes
    row_bytes = stored / rows + _CHUNK_OVERHEAD / chunk
    unit_bytes = 0.0
    for name, field in codec.small.items():
        size = encoded.small[name].nbytes
        if "T" in field.axes or "N" in field.axes:
            row_bytes += size / rows
        else:
            unit_bytes += size
    return row_bytes, unit_bytes

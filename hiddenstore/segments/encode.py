"""The arithmetic of writing one unit: records through the store's codecs, on the states' own device.

Samples lie end to end along the token axis. Equal records give equal bytes.

Shapes: L aux layers, T tokens of the unit, t tokens of one sample, R final rows of the unit, r of one sample, D width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.base import RAW_INDEX, EncodedLayers, MaskedCodec
from hiddenstore.codecs.topk import pack_rows
from hiddenstore.records import Record
from hiddenstore.segments.base import EncodedUnit
from schemas import FINAL, CaptureSpec, LayerStats, SampleEntry, field_name

_Encoder = Callable[[Iterable[Sequence[Tensor]]], EncodedLayers]

_STATS_ELEMENTS = 1 << 18
# Smaller samples cost more in calls than in being joined.
_JOINED_ELEMENTS = 1 << 16


def encode_records(
    unit: str, records: Sequence[Record], capture: CaptureSpec, joins: EncodedUnit | None = None
) -> EncodedUnit:
    """Run the store's codecs over the records of one unit, layer by layer.

    ``joins`` is the unit that these samples become part of: they are encoded by its channel statistics.

    The codes of ``bf16`` and ``lossless`` may be views of the records: their memory must not change before they are
    written. Raises ValueError: a record's shapes or types are not those of the capture."""
    for record in records:
        _check_record(record, capture)
    stats: dict[str, LayerStats] = {}
    width = capture.target.hidden_size
    slots = [capture.aux_layers.index(layer) for layer in capture.stored_layers]
    layers = ([record.aux[k] for record in records] for k in slots)
    shared = ({}, {}) if joins is None else (joins.aux.small, joins.final.small)
    names = [field_name(layer) for layer in capture.stored_layers]
    loss_mask = _joined([record.sample.loss_mask for record in records], "uint8", (0,))
    codec, fine = get_codec(capture.codecs.aux), None
    if isinstance(codec, MaskedCodec):
        fine = codec.fine_rows(loss_mask, [record.sample.tokens for record in records])
    aux = _encode(_encoder(capture.codecs.aux, shared[0], fine), names, layers, width, stats)
    final = EncodedLayers([])
    if capture.holds_topk:
        packed = pack_rows([record.topk for record in records if record.topk is not None], capture.topk)
        final = EncodedLayers([[codes] for codes in packed.codes])
    elif capture.stores_final:
        rows = [record.final for record in records]
        final = _encode(_encoder(capture.codecs.final, shared[1]), [FINAL], [rows], width, stats)
    return EncodedUnit(
        unit=unit,
        samples=tuple(_sample_entries(records)),
        input_ids=_joined([record.sample.input_ids for record in records], "int32", (0,)),
        loss_mask=loss_mask,
        spans=_joined([np.insert(record.sample.spans, 0, i, 1) for i, record in enumerate(records)], "int32", (0, 4)),
        final_rows=_joined([record.final_rows for record in records], "int32", (0,)),
        aux=aux,
        final=final,
        stats=stats,
    )


def row_norms(states: Tensor) -> tuple[np.ndarray, float]:
    """Root mean square of each finite row of bfloat16 [T, D], float64, and the largest |value| in those rows."""
    if not len(states):
        return np.zeros(0), 0.0
    tokens, width = states.shape
    step = max(1, _STATS_ELEMENTS // max(1, width)) if states.device.type == "cpu" else max(1, tokens)
    norms, peak = torch.empty(tokens, device=states.device), 0.0
    scratch = torch.empty((min(step, tokens), width), device=states.device)
    for rows, block in zip(norms.split(step), states.split(step), strict=True):
        torch.linalg.vector_norm(scratch[: len(block)].copy_(block), dim=1, out=rows)
        peak = max(peak, _peak(block))
    suspects = torch.nonzero(~torch.isfinite(norms)).flatten()
    is_finite = torch.isfinite(states[suspects]).all(dim=1)
    for row in suspects[is_finite].tolist():
        # The squares of float32 overflow above 1.8e19; the norm itself does too above 3.4e38.
        norms[row] = min(float(states[row].double().norm()), float(np.finfo(np.float32).max))
    finite = torch.isfinite(norms)
    if not bool(is_finite.all()):
        peak = _peak(states[finite])
    return norms[finite].cpu().numpy().astype(np.float64) / width**0.5, peak


def _peak(block: Tensor) -> float:
    """Largest |value| of bfloat16 [n, D], on a CPU by its bits: those of negative numbers are the largest uint16."""
    if not block.numel():
        return 0.0
    if block.device.type != "cpu":
        return float(torch.maximum(block.amax(), block.amin().neg_()))
    values = block.view(torch.int16).numpy()
    unsigned = int(values.view(np.uint16).max())
    bits = max(int(values.max()), unsigned & 0x7FFF if unsigned >> 15 else 0)
    return float(np.array(bits << 16, dtype=np.uint32).view(np.float32))


def layer_stats(blocks: Sequence[Tensor]) -> LayerStats:
    """Row norms of one field given as bfloat16 blocks [t, D]."""
    norms, peaks = zip(*map(row_norms, blocks), strict=True)
    rms = np.concatenate(norms)
    return LayerStats(
        rows=sum(map(len, blocks)),
        rms_mean=float(rms.mean()) if len(rms) else 0.0,
        rms_median=float(np.median(rms)) if len(rms) else 0.0,
        rms_max=float(rms.max(initial=0.0)),
        abs_max=max(peaks),
    )


def with_raw_rows(stats: Mapping[str, LayerStats], encoded: EncodedLayers) -> dict[str, LayerStats]:
    """Statistics of the fields of a group, in the order of its layers, with how many rows are stored raw."""
    layers = encoded.small[RAW_INDEX][:, 0] if RAW_INDEX in encoded.small else np.zeros(0, dtype=np.int32)
    counts = np.bincount(layers, minlength=len(stats)).tolist()
    return {
        name: field.model_copy(update={"raw_rows": rows})
        for (name, field), rows in zip(stats.items(), counts, strict=True)
    }


def _encoder(name: str, shared: Mapping[str, np.ndarray], fine: np.ndarray | None = None) -> _Encoder:
    """How layers are encoded: by their own statistics, or by those of the unit they join where the codec has any; and
    by the classes of their rows bool [T], where it has some."""
    codec = get_codec(name)
    has_shared = any(not {"T", "N"} & set(spec.axes) for spec in codec.small.values())
    options: dict[str, Any] = {"shared": shared} if shared and has_shared else {}
    return partial(codec.encode_layers, **(options if fine is None else {**options, "fine": fine}))


def _encode(
    encoder: _Encoder,
    fields: Sequence[str],
    layers: Iterable[Sequence[Tensor]],
    width: int,
    stats: dict[str, LayerStats],
) -> EncodedLayers:
    """Encode layers given as the states of their samples, and measure them."""
    measured: list[LayerStats] = []

    def measuring() -> Iterator[Sequence[Tensor]]:
        for samples in layers:
            blocks = _blocks(samples, width)
            measured.append(layer_stats(blocks))
            yield blocks

    encoded = encoder(measuring())
    stats.update(with_raw_rows(dict(zip(fields, measured, strict=True)), encoded))
    return encoded


def _check_record(record: Record, capture: CaptureSpec) -> None:
    sample, width, positions = record.sample, capture.target.hidden_size, record.final_rows
    shapes = {
        "loss_mask": (sample.loss_mask.shape, (sample.tokens,)),
        "spans": (sample.spans.shape, (len(sample.spans), 3)),
        "aux": (tuple(record.aux.shape), (len(capture.aux_layers), sample.tokens, width)),
        "final": (tuple(record.final.shape), (0 if capture.holds_topk else len(positions), width)),
    }
    if capture.holds_topk:
        topk_shape = (0, 0) if record.topk is None else tuple(record.topk.ids.shape)
        shapes["top tokens"] = (topk_shape, (len(positions), capture.topk))
    for name, (shape, expected) in shapes.items():
        if shape != expected:
            raise ValueError(f"sample {sample.id}: {name} has shape {list(shape)}, expected {list(expected)}")
    for name, states in (("aux", record.aux), ("final", record.final)):
        if states.dtype != torch.bfloat16:
            raise ValueError(f"sample {sample.id}: {name} is {states.dtype}, expected torch.bfloat16")
    if not len(positions):
        return
    inside = positions[0] >= 0 and positions[-1] < sample.tokens
    if capture.final == "none" or not inside or (np.diff(positions) <= 0).any():
        raise ValueError(f"sample {sample.id}: final_rows are not ascending positions of {sample.tokens} tokens")


def _sample_entries(records: Sequence[Record]) -> Iterator[SampleEntry]:
    start = final_start = 0
    for record in records:
        sample = record.sample
        yield SampleEntry(
            id=sample.id,
            split="validation" if sample.split == "validation" else "train",
            start=start,
            tokens=sample.tokens,
            supervised=sample.supervised,
            final_start=final_start,
            final_rows=len(record.final_rows),
            images=sample.images,
        )
        start += sample.tokens
        final_start += len(record.final_rows)


def _blocks(samples: Sequence[Tensor], width: int) -> Sequence[Tensor]:
    """[t, D] of each sample, joined where that costs less than a call for each: on a GPU, or when they are small."""
    if not samples:
        return [torch.empty((0, width), dtype=torch.bfloat16)]
    small = sum(states.numel() for states in samples) < _JOINED_ELEMENTS * len(samples)
    return [torch.cat(list(samples))] if small or samples[0].is_cuda else samples


def _joined(arrays: Sequence[np.ndarray], dtype: str, empty: tuple[int, ...]) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(empty, dtype=dtype)

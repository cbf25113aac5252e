"""A stored unit, or some of its samples, as codes ready to be written again: for repair and copies between containers.

Shapes: T tokens of a unit, t of one sample, D target width.
"""

from collections.abc import Sequence

import numpy as np

from hiddenstore.codecs import CodeLayout, Encoded, get_codec, get_layout
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, EncodedLayers
from hiddenstore.segment import EncodedUnit, open_segment
from hiddenstore.segment_write import row_norms
from hiddenstore.store import Store
from schemas.capture import FINAL, CaptureSpec
from schemas.manifest import CommitRecord, LayerStats, SampleEntry


def stored_unit(store: Store, record: CommitRecord, kept: Sequence[int] | None = None) -> EncodedUnit:
    """The stored codes of some samples (default: all) as a unit of their own: nothing is decoded, so nothing changes.

    Raises:
        CorruptionError: a sample cannot be read; names file and samples.
    """
    capture, reader = store.capture, open_segment(store, record)
    whole = kept is None
    kept = range(len(record.samples)) if kept is None else kept
    samples = [reader.sample(index) for index in kept]
    parts = [reader.read_encoded(index) for index in kept]
    aux = _joined(get_layout(capture.codecs.aux), [part[0] for part in parts], [s.tokens for s in samples])
    final = _joined(get_layout(capture.codecs.final), [part[1] for part in parts], [len(part[2]) for part in parts])
    spans = [np.insert(sample.spans, 0, place, axis=1) for place, sample in enumerate(samples)]
    return EncodedUnit(
        unit=record.unit,
        samples=tuple(_entries([record.samples[index] for index in kept])),
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        spans=np.concatenate(spans).astype(np.int32),
        final_rows=np.concatenate([part[2] for part in parts]),
        aux=aux,
        final=final,
        stats=record.stats if whole else _stats(capture, aux, final),
    )


def _joined(codec: CodeLayout, parts: Sequence[Encoded], rows: Sequence[int]) -> EncodedLayers:
    """Parts of one unit end to end; raw rows are renumbered and stay sorted by (layer, row)."""
    codes = [[part.codes[layer] for part in parts] for layer in range(len(parts[0].codes))]
    small = dict(parts[0].small)
    for name, spec in codec.small.items():
        if name in small and "T" in spec.axes:
            small[name] = np.concatenate([part.small[name] for part in parts], axis=spec.axes.index("T"))
    if RAW_INDEX in small:
        starts = np.cumsum([0, *rows[:-1]])
        moved = [part.small[RAW_INDEX] + np.array([0, start]) for part, start in zip(parts, starts, strict=True)]
        index = np.concatenate(moved).astype(np.int32)
        order = np.lexsort((index[:, 1], index[:, 0]))
        small[RAW_INDEX] = index[order]
        small[RAW_ROWS] = np.concatenate([part.small[RAW_ROWS] for part in parts])[order]
    return EncodedLayers(codes, small)


def _entries(samples: Sequence[SampleEntry]) -> list[SampleEntry]:
    entries, start, final_start = [], 0, 0
    for sample in samples:
        entries.append(sample.model_copy(update={"start": start, "final_start": final_start}))
        start += sample.tokens
        final_start += sample.final_rows
    return entries


def _stats(capture: CaptureSpec, aux: EncodedLayers, final: EncodedLayers) -> dict[str, LayerStats]:
    held = [(capture.aux_fields, aux, capture.codecs.aux)]
    if capture.holds_final_hidden:
        held.append(([FINAL], final, capture.codecs.final))
    stats = {}
    for fields, encoded, codec in held:
        raw = encoded.small[RAW_INDEX][:, 0] if RAW_INDEX in encoded.small else np.zeros(0, dtype=np.int32)
        for slot, (name, states) in enumerate(zip(fields, get_codec(codec).decode(encoded.joined()), strict=True)):
            rms, peak = row_norms(states)
            stats[name] = LayerStats(
                rows=len(states),
                rms_mean=float(rms.mean()) if len(rms) else 0.0,
                rms_median=float(np.median(rms)) if len(rms) else 0.0,
                rms_max=float(rms.max()) if len(rms) else 0.0,
                abs_max=peak,
                raw_rows=int((raw == slot).sum()),
            )
    return stats

"""A stored unit, or some of its samples, as codes ready to be written again: for repair and copies between containers.

Shapes: T tokens of a unit, t of one sample, D target width.
"""

from collections.abc import Sequence

import numpy as np

from hiddenstore.codecs import get_codec, get_layout
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, CodeLayout, Encoded, EncodedLayers
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import layer_stats, with_raw_rows
from hiddenstore.store import Store
from schemas.capture import FINAL, CaptureSpec
from schemas.manifest import CommitRecord, LayerStats, SampleEntry


def stored_unit(store: Store, record: CommitRecord, indices: Sequence[int] | None = None) -> EncodedUnit:
    """The stored codes of some samples (default: all) as a unit of their own: nothing is decoded, so nothing changes.

    Raises:
        CorruptionError: a sample cannot be read; names file and samples.
    """
    capture, reader = store.capture, store.open_unit(record)
    picked = range(len(record.samples)) if indices is None else indices
    samples = [reader.sample(index) for index in picked]
    aux_parts, final_parts, final_rows = zip(*(reader.read_encoded(index) for index in picked), strict=True)
    aux = _joined(get_layout(capture.codecs.aux), aux_parts, [sample.tokens for sample in samples])
    final = _joined(get_layout(capture.codecs.final), final_parts, [len(rows) for rows in final_rows])
    spans = [np.insert(sample.spans, 0, number, axis=1) for number, sample in enumerate(samples)]
    return EncodedUnit(
        unit=record.unit,
        samples=tuple(_entries([record.samples[index] for index in picked])),
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        spans=np.concatenate(spans).astype(np.int32),
        final_rows=np.concatenate(final_rows),
        aux=aux,
        final=final,
        stats=record.stats if indices is None else _stats(capture, aux, final),
    )


def _joined(codec: CodeLayout, samples: Sequence[Encoded], rows: Sequence[int]) -> EncodedLayers:
    """Samples of one unit end to end; raw rows are renumbered and stay sorted by (layer, row)."""
    codes = [[sample.codes[layer] for sample in samples] for layer in range(len(samples[0].codes))]
    small = dict(samples[0].small)
    for name, spec in codec.small.items():
        if name in small and "T" in spec.axes:
            small[name] = np.concatenate([sample.small[name] for sample in samples], axis=spec.axes.index("T"))
    if RAW_INDEX in small:
        starts = np.cumsum([0, *rows[:-1]])
        moved = [part.small[RAW_INDEX] + np.array([0, start]) for part, start in zip(samples, starts, strict=True)]
        index = np.concatenate(moved).astype(np.int32)
        order = np.lexsort((index[:, 1], index[:, 0]))
        small[RAW_INDEX] = index[order]
        small[RAW_ROWS] = np.concatenate([sample.small[RAW_ROWS] for sample in samples])[order]
    return EncodedLayers(codes, small)


def _entries(samples: Sequence[SampleEntry]) -> list[SampleEntry]:
    entries, start, final_start = [], 0, 0
    for sample in samples:
        entries.append(sample.model_copy(update={"start": start, "final_start": final_start}))
        start += sample.tokens
        final_start += sample.final_rows
    return entries


def _stats(capture: CaptureSpec, aux: EncodedLayers, final: EncodedLayers) -> dict[str, LayerStats]:
    groups = [(capture.aux_fields, aux, capture.codecs.aux)]
    if capture.holds_final_hidden:
        groups.append(([FINAL], final, capture.codecs.final))
    stats: dict[str, LayerStats] = {}
    for fields, encoded, codec in groups:
        states = get_codec(codec).decode(encoded.joined())
        measured = {name: layer_stats([layer]) for name, layer in zip(fields, states, strict=True)}
        stats |= with_raw_rows(measured, encoded)
    return stats

"""Stored samples as codes ready to be written again: for repair, recapture and copies between containers.

Shapes: T tokens of a unit, t of one sample, R final rows of the unit, r of one sample, D target width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hiddenstore.codecs import get_codec, get_layout
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, CodeLayout, Encoded, EncodedLayers, select_small
from hiddenstore.records import Sample
from hiddenstore.segments.base import EncodedUnit, FieldGroup, groups_of, small_of_rows
from hiddenstore.segments.encode import layer_stats, with_raw_rows
from hiddenstore.store import Store
from schemas.capture import FINAL, CaptureSpec
from schemas.layers import field_name
from schemas.manifest import CommitRecord, LayerStats, SampleEntry


@dataclass(frozen=True, eq=False)
class StoredSample:
    """One sample of a unit as codes; small arrays of the unit are in each. final_rows int32 [r]."""

    entry: SampleEntry
    sample: Sample
    aux: Encoded
    final: Encoded
    final_rows: np.ndarray


def stored_unit(store: Store, record: CommitRecord) -> EncodedUnit:
    """All samples of a unit: nothing is decoded, so nothing changes.

    Raises:
        CorruptionError: a sample cannot be read; names file and samples.
    """
    samples = list(stored_samples(store, record, range(len(record.samples))))
    return unit_of(record.unit, store.capture, samples, record.stats)


def stored_samples(store: Store, record: CommitRecord, indices: Sequence[int]) -> Iterator[StoredSample]:
    """Some samples of a stored unit; raises as ``stored_unit``."""
    reader = store.open_unit(record)
    for index in indices:
        yield StoredSample(record.samples[index], reader.sample(index), *reader.read_encoded(index))


def samples_of(unit: EncodedUnit, capture: CaptureSpec) -> Iterator[StoredSample]:
    """The samples of a unit that was just encoded."""
    aux, final = ((group, unit.encoded(group).joined()) for group in groups_of(capture))
    for number, entry in enumerate(unit.samples):
        tokens = slice(entry.start, entry.start + entry.tokens)
        sample = Sample(
            id=entry.id,
            input_ids=unit.input_ids[tokens],
            loss_mask=unit.loss_mask[tokens],
            spans=unit.spans[unit.spans[:, 0] == number, 1:],
            split=entry.split,
        )
        final_rows = unit.final_rows[entry.final_start : entry.final_start + entry.final_rows]
        yield StoredSample(entry, sample, _rows_of(*aux, entry), _rows_of(*final, entry), final_rows)


def unit_of(
    name: str, capture: CaptureSpec, parts: Sequence[StoredSample], stats: dict[str, LayerStats] | None = None
) -> EncodedUnit:
    """Samples of one unit end to end; ``stats`` None measures what they decode to."""
    aux = _joined(get_layout(capture.codecs.aux), [part.aux for part in parts], [part.sample.tokens for part in parts])
    final_rows = [len(part.final_rows) for part in parts]
    final = _joined(get_layout(capture.codecs.final), [part.final for part in parts], final_rows)
    spans = [np.insert(part.sample.spans, 0, number, axis=1) for number, part in enumerate(parts)]
    return EncodedUnit(
        unit=name,
        samples=tuple(_entries([part.entry for part in parts])),
        input_ids=np.concatenate([part.sample.input_ids for part in parts]),
        loss_mask=np.concatenate([part.sample.loss_mask for part in parts]),
        spans=np.concatenate(spans).astype(np.int32),
        final_rows=np.concatenate([part.final_rows for part in parts]),
        aux=aux,
        final=final,
        stats=_stats(capture, aux, final) if stats is None else stats,
    )


def with_layers(unit: EncodedUnit, capture: CaptureSpec, layers: Sequence[int]) -> EncodedUnit:
    """The codes of some aux layers of a unit of ``capture``; nothing is decoded."""
    places, small = [capture.stored_layers.index(layer) for layer in layers], unit.aux.small
    codec = get_layout(capture.codecs.aux)
    kept = select_small(codec.small, small, places, range(len(unit.input_ids)))
    if RAW_INDEX in small:
        rows = np.isin(small[RAW_INDEX][:, 0], places)
        index = small[RAW_INDEX][rows]
        index[:, 0] = np.searchsorted(places, index[:, 0])
        kept |= {RAW_INDEX: index, RAW_ROWS: small[RAW_ROWS][rows]}
    fields = {FINAL, *map(field_name, layers)}
    stats = {name: numbers for name, numbers in unit.stats.items() if name in fields}
    return replace(unit, aux=EncodedLayers([unit.aux.codes[place] for place in places], kept), stats=stats)


def _rows_of(group: FieldGroup, encoded: Encoded, entry: SampleEntry) -> Encoded:
    rows = group.rows_of(entry)
    codes = [layer[rows.start : rows.stop] for layer in encoded.codes]
    return Encoded(codes, small_of_rows(encoded.small, group, rows) if encoded.small else {})


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
    groups = [([field_name(layer) for layer in capture.stored_layers], aux, capture.codecs.aux)]
    if capture.stores_final:
        groups.append(([FINAL], final, capture.codecs.final))
    stats: dict[str, LayerStats] = {}
    for fields, encoded, codec in groups:
        states = get_codec(codec).decode(encoded.joined())
        measured = {name: layer_stats([layer]) for name, layer in zip(fields, states, strict=True)}
        stats |= with_raw_rows(measured, encoded)
    return stats

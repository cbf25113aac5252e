"""Stored samples as codes ready to be written again, for repair and recapture; units brought into another store: their
files, their codes in another container or of some samples, or their samples encoded again; and into which units samples
that were chosen are cut.

Shapes: T tokens of a unit, t of one sample, R final rows of the unit, r of one sample, D target width.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from hiddenstore.codecs import get_codec, get_layout
from hiddenstore.codecs.base import (
    RAW_INDEX,
    RAW_ROWS,
    CodeLayout,
    Encoded,
    EncodedLayers,
    joined_small,
    select_small,
    small_of_rows,
)
from hiddenstore.codecs.fitted import encodes
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.commit import DAMAGED, engine_of
from hiddenstore.errors import ConfigError, CorruptionError, FormatError, Kind
from hiddenstore.files import layout
from hiddenstore.files.digests import digest_for, mismatch
from hiddenstore.fs import open_filesystem
from hiddenstore.inputs import PreparedInput, input_digest
from hiddenstore.inspect.samples import Test
from hiddenstore.records import Record, Sample
from hiddenstore.segments import CONTAINERS
from hiddenstore.segments.base import EncodedUnit, FieldGroup, groups_of, unit_tokens
from hiddenstore.segments.encode import encode_records, layer_stats, with_raw_rows
from hiddenstore.segments.rows import ends_of
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.writer import (
    PendingUnit,
    pending_units,
    publish_segment,
    register_input,
    sweep,
    write_encoded_unit,
    write_unit,
)
from schemas.capture import FINAL, CaptureSpec
from schemas.layers import field_name
from schemas.manifest import CommitRecord, Engine, FileEntry, LayerStats, Recapture, Reject, SampleEntry
from schemas.prepared import PreparedData


@dataclass(frozen=True, eq=False)
class StoredSample:
    """One sample of a unit as codes; small arrays of the unit are in each. final_rows int32 [r]."""

    entry: SampleEntry
    sample: Sample
    aux: Encoded
    final: Encoded
    final_rows: np.ndarray


def stored_unit(store: Store, record: CommitRecord) -> EncodedUnit:
    """All samples of a unit: nothing is decoded, so nothing changes. Raises CorruptionError: a sample cannot be read;
    names file and samples."""
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
            images=entry.images,
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
    places = [capture.stored_layers.index(layer) for layer in layers]
    # Where no layer is left there is nothing for small arrays to stand beside, as in a capture without any.
    small, codec = unit.aux.small if places else {}, get_layout(capture.codecs.aux)
    kept = select_small(codec.small, small, places, range(len(unit.input_ids))) if small else {}
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
    small = small_of_rows(group.codec.small, encoded.small, len(codes), rows) if encoded.small else {}
    return Encoded(codes, small)


def _joined(codec: CodeLayout, samples: Sequence[Encoded], rows: Sequence[int]) -> EncodedLayers:
    """Samples of one unit end to end; raw rows are renumbered and stay sorted by (layer, row)."""
    # Stored codes lie in main memory; those of a sample that was just captured, on the engine's device.
    codes = [[sample.codes[layer].cpu() for sample in samples] for layer in range(len(samples[0].codes))]
    small = joined_small(codec.small, [sample.small for sample in samples], ends_of(rows).tolist())
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


BLOCK_BYTES = 8 << 20
_ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class CopyUnit:
    """One unit to bring over: whole from ``origin``, a store and the number of its record there, or the samples
    ``gathered``, each from a store of ``stores``; ``piece_of``: the store that has all of these in one unit, coded as
    they will be.

    ``revision`` is above 0 where the destination has the unit, without samples that were lost on disk.
    """

    name: str
    input: str
    gathered: tuple[str, ...] = ()
    origin: tuple[Store, int] | None = None
    stores: tuple[Store, ...] = ()
    piece_of: Store | None = None
    revision: int = 0

    @property
    def record(self) -> CommitRecord:
        """That of a whole unit, read anew: those of all units are an object a sample."""
        assert self.origin is not None
        source, number = self.origin
        return source.commits()[number]

    @property
    def samples(self) -> tuple[str, ...]:
        """Ids; those of a whole unit are read from its record."""
        return self.gathered if self.origin is None else tuple(entry.id for entry in self.record.samples)

    @property
    def count(self) -> int:
        """How many samples."""
        if self.origin is None:
            return len(self.gathered)
        source, number = self.origin
        return int(source.catalog.facts["samples"][number])

    @property
    def is_gathered(self) -> bool:
        """Whether its samples are decoded and encoded together."""
        return self.origin is None and self.piece_of is None


def codes_fit(source: Store, destination: Store) -> bool:
    """Whether the destination holds states as the source codes them."""
    old, new = source.capture, destination.capture
    return (old.codecs, old.states) == (new.codecs, new.states)


FEW_PIECES, LEAST_FILLED = 1000, 8
"""So many units may be cut at the borders of others, and more where they are an eighth full or better."""


def units_of_selection(sources: Sequence[Store], destination: Store, keep: Test) -> tuple[list[CopyUnit], int, int]:
    """Register the samples that pass ``keep`` and are not present; units to copy, samples present already, and units
    that cannot be filled."""
    index = {sample_id: source for source in reversed(sources) for sample_id in source.sample_ids}
    selected: dict[str, tuple[str, tuple[SampleEntry, tuple[int, str]]]] = {}
    for number, source in enumerate(sources):
        for record, entry in source.entries:
            if entry.id not in selected and keep(record, entry):
                engine = engine_of(record, entry.id).model_dump_json()
                selected[entry.id] = (engine, (entry, (number, record.unit)))
                # What passes in this source may be of another split in the first that holds it.
                index[entry.id] = source
    pending, unavailable = _pending_units(destination, index)
    covered = {sample_id for unit in pending for sample_id in unit.samples}.union(destination.sample_ids)
    # One input per engine: a unit names one for all of its samples but those that were captured again.
    groups: dict[str, list[tuple[SampleEntry, tuple[int, str]]]] = {}
    for sample_id, (engine, sample) in selected.items():
        if sample_id not in covered:
            groups.setdefault(engine, []).append(sample)
    for samples in groups.values():
        entries = [entry for entry, _ in samples]
        register_input(destination, _Selection(entries, _borders(samples, sources, destination)))
    if groups:
        pending, unavailable = _pending_units(destination, index)
    return pending, len(selected.keys() & destination.sample_ids), unavailable


def _borders(
    samples: Sequence[tuple[SampleEntry, tuple[int, str]]], sources: Sequence[Store], destination: Store
) -> list[int]:
    """Numbers of the samples that are the first of their unit, where cutting there keeps codes that would be rounded
    again: small arrays of a unit are of all its samples. None where the pieces would be many and small, unless no
    unit can be encoded anew."""
    codecs = destination.capture.codecs
    if all(get_layout(codec).exact for codec in (codecs.aux, codecs.final)):
        return []
    if not all(codes_fit(source, destination) for source in sources):
        return []
    units = [unit for _, unit in samples]
    starts = [number for number, (before, unit) in enumerate(pairwise(units), 1) if before != unit]
    full = sum(entry.tokens for entry, _ in samples) // unit_tokens(destination.capture)
    are_few = len(starts) < max(FEW_PIECES, LEAST_FILLED * full)
    return starts if are_few or not encodes(destination.capture) else []


def _pending_units(destination: Store, index: Mapping[str, Store]) -> tuple[list[CopyUnit], int]:
    """Units of the destination's inputs to be done: those the sources can fill, and how many they cannot."""
    pending = []
    for digest, registered in destination.inputs().items():
        samples = registered.unit_samples()
        for name, item in pending_units(destination, digest).items():
            pending.append(CopyUnit(name, digest, tuple(samples[name]), revision=item.revision))
    units = [unit for unit in pending if all(sample_id in index for sample_id in unit.samples)]
    filled = [replace(unit, stores=tuple(index[sample_id] for sample_id in unit.samples)) for unit in units]
    return [replace(unit, piece_of=_one_source(unit, destination)) for unit in filled], len(pending) - len(units)


def _one_source(unit: CopyUnit, destination: Store) -> Store | None:
    source = unit.stores[0]
    if not codes_fit(source, destination) or any(store is not source for store in unit.stores):
        return None
    record, _ = source.locate(unit.samples[0])
    return source if {entry.id for entry in record.samples}.issuperset(unit.samples) else None


class _Selection(PreparedInput):
    """Samples of other stores as an input: all that ``register_input`` needs, which is not their tokens."""

    def __init__(self, entries: Sequence[SampleEntry], starts: Collection[int]) -> None:
        digest = input_digest((entry.id, entry.split) for entry in entries)
        facts: dict[str, Any] = {"digest": digest, "samples": len(entries)}
        super().__init__(open_filesystem(digest), PreparedData.model_construct(**facts))
        self._entries, self.starts = entries, frozenset(starts)

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self._entries), _ROWS_PER_BATCH):
            entries = self._entries[start : start + _ROWS_PER_BATCH]
            values = {
                "sample_id": pa.array([entry.id for entry in entries]),
                "input_ids": pa.array([[0] * entry.tokens for entry in entries], pa.list_(pa.int32())),
                "split": pa.array([entry.split for entry in entries]),
            }
            yield pa.RecordBatch.from_pydict({name: values[name] for name in columns})


def copy_verbatim(source: Store, record: CommitRecord, destination: Store, revision: int = 0) -> CommitRecord | None:
    """The files of a segment byte for byte, then its record under a new attempt name."""
    segment = layout.segment_path(record.unit, layout.new_attempt(), revision)
    copied = record.model_copy(update={"segment": segment})
    try:
        for file in record.files:
            _copy_file(source, f"{record.segment}/{file.path}", destination, f"{segment}/{file.path}", file, record)
        if record.files:
            destination.fs.sync_folder(segment)
    except BaseException:
        sweep(destination.fs, segment)
        raise
    return copied if publish_segment(destination.fs, copied, revision) else None


def _copy_file(
    source: Store, path: str, destination: Store, new_path: str, entry: FileEntry, record: CommitRecord
) -> None:
    size = source.fs.size(path)
    digest, fault = digest_for(entry), f"{entry.size:,} bytes expected, {size or 0:,} found"
    if size == entry.size:
        writer = destination.fs.create(new_path)
        try:
            for start in range(0, entry.size, BLOCK_BYTES):
                block = source.fs.read_range(path, start, min(BLOCK_BYTES, entry.size - start))
                digest.update(block)
                writer.append(block)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        fault = mismatch(entry, digest) or ""
    if fault:
        raise CorruptionError(
            f"{source.path}/{path} is damaged: {fault}; {len(record.samples)} samples cannot be copied",
            kind=Kind.FILE_CORRUPT,
            path=path,
            samples=tuple(sample.id for sample in record.samples),
            hint=shlex.join(["hiddenstore", "verify", str(source.path), "--full"]),
        )


def copy_codes(source: Store, record: CommitRecord, destination: Store, revision: int = 0) -> CommitRecord | None:
    """The codes of a unit as they are, in another container, or without the layers that the destination leaves out."""
    encoded = _kept_layers(source, stored_unit(source, record), destination) if record.samples else None
    return write_encoded_unit(
        destination, record.unit, record.input, encoded, record.rejects, record.engine, revision, record.recaptured
    )


def copy_piece(source: Store, unit: CopyUnit, destination: Store) -> CommitRecord | None:
    """The codes of some samples of one unit as they are."""
    record, _ = source.locate(unit.samples[0])
    indices = {entry.id: index for index, entry in enumerate(record.samples)}
    samples = list(stored_samples(source, record, [indices[name] for name in unit.samples]))
    encoded = _kept_layers(source, unit_of(unit.name, source.capture, samples), destination)
    engine, recaptured = _engines_of({name: engine_of(record, name) for name in unit.samples})
    return write_encoded_unit(destination, unit.name, unit.input, encoded, (), engine, unit.revision, recaptured)


def _kept_layers(source: Store, encoded: EncodedUnit, destination: Store) -> EncodedUnit:
    return with_layers(encoded, source.capture, destination.capture.stored_layers)


def copy_decoded(destination: Store, unit: CopyUnit, head: HeadBundle | None) -> CommitRecord | None:
    """Decode the samples of a unit and write them as one new unit; ``head`` makes top tokens of final hiddens. Raises
    FormatError: ``array-invalid``: a source is readable and holds what no writer may write."""
    layers = destination.capture.aux_layers
    if unit.origin is not None:
        source, commit = unit.origin[0], unit.record
        # By index, not by id: another unit of the source may hold the same id, captured in another batch.
        reader = source.open_unit(commit)
        records = [source.read_unit(reader, number, layers) for number in range(len(commit.samples))]
        rejects, engine, recaptured = commit.rejects, commit.engine, commit.recaptured
    else:
        stores = dict(zip(unit.samples, unit.stores, strict=True))
        records = [source.read(name, layers) for name, source in stores.items()]
        rejects = ()
        engines = {name: engine_of(source.locate(name)[0], name) for name, source in stores.items()}
        engine, recaptured = _engines_of(engines)
    records = [with_top_tokens(record, head, destination.capture) for record in records]
    try:
        return write_unit(destination, unit.name, unit.input, records, rejects, engine, unit.revision, recaptured)
    except ConfigError as error:
        if error.kind != Kind.RECORD_INVALID:
            raise
        sources = unit.stores if unit.origin is None else unit.origin[:1]
        paths = list(dict.fromkeys(str(source.path) for source in sources))
        raise FormatError(
            f"{' or '.join(paths)} cannot be encoded again: {error.message}",
            kind=Kind.ARRAY_INVALID,
            hint="; ".join(shlex.join(["hiddenstore", "verify", path, "--meaning"]) for path in paths),
        ) from error


def _engines_of(engines: Mapping[str, Engine]) -> tuple[Engine, tuple[Recapture, ...]]:
    """The engine of the first sample, and which samples others captured."""
    samples: dict[str, list[str]] = {}
    for sample_id, engine in engines.items():
        samples.setdefault(engine.model_dump_json(), []).append(sample_id)
    first, *others = ((Engine.model_validate_json(engine), tuple(names)) for engine, names in samples.items())
    return first[0], tuple(Recapture(engine=engine, samples=names) for engine, names in others)


def recapture_unit(
    store: Store, pending: PendingUnit, records: Sequence[Record], rejects: Sequence[Reject], engine: Engine
) -> CommitRecord | None:
    """Commit a unit whose lost samples are ``records`` and ``rejects`` now; None when another attempt was first. The
    codes of the samples that stayed are copied as they are, and the new ones are encoded by the same channel
    statistics, so that the unit is read as any other. Raises CorruptionError: a sample that stayed cannot be read by
    now; StorageError: the disk refused; what was committed before stays."""
    old = pending.replaces
    assert old is not None
    refused = (*(reject for reject in old.rejects if reject.reason != DAMAGED), *rejects)
    unit = _recaptured_unit(store, pending, old, records)
    engine, recaptured = _engines(old, records, engine)
    return write_encoded_unit(store, old.unit, old.input, unit, refused, engine, pending.revision, recaptured)


def _recaptured_unit(
    store: Store, pending: PendingUnit, old: CommitRecord, records: Sequence[Record]
) -> EncodedUnit | None:
    """Stored and new samples in the order of the input; None without any."""
    stored = list(stored_samples(store, old, range(len(old.samples))))
    one_prefix = CONTAINERS[store.manifest.container].shares_rows
    if not stored:
        return encode_records(old.unit, records, store.capture, one_prefix=one_prefix) if records else None
    before = unit_of(old.unit, store.capture, stored, old.stats)
    if not records:
        return before
    new = samples_of(encode_records(old.unit, records, store.capture, before, one_prefix), store.capture)
    places = {name: number for number, name in enumerate(pending.order)}
    parts = sorted([*stored, *new], key=lambda part: places[part.entry.id])
    return unit_of(old.unit, store.capture, parts)


def _engines(old: CommitRecord, records: Sequence[Record], engine: Engine) -> tuple[Engine, tuple[Recapture, ...]]:
    """The engine of the record, and of samples that another one captured."""
    if not old.samples:
        return engine, ()
    if engine == old.engine or not records:
        return old.engine, old.recaptured
    new = Recapture(engine=engine, samples=tuple(record.sample.id for record in records))
    return old.engine, (*old.recaptured, new)


def recaptured_of(record: CommitRecord, intact: Collection[str]) -> tuple[Recapture, ...]:
    """Which of the samples that stay were captured by another engine than the rest."""
    parts = (tuple(name for name in part.samples if name in intact) for part in record.recaptured)
    named = zip(record.recaptured, parts, strict=True)
    return tuple(Recapture(engine=part.engine, samples=names) for part, names in named if names)

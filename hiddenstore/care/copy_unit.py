"""Bringing one unit into another store: its files, its codes in another container, or its samples encoded again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hiddenstore import layout
from hiddenstore.care.stored_unit import stored_unit, with_layers
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.digests import digest_for, mismatch
from hiddenstore.errors import CorruptionError, Kind
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.writer import publish_segment, sweep, write_encoded_unit, write_unit
from schemas.manifest import CommitRecord, FileEntry

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class CopyUnit:
    """One unit to bring over: from ``origin``, a store and its record there, or gathered by sample id.

    ``revision`` is above 0 where the destination has the unit, without samples that were lost on disk.
    """

    name: str
    input: str
    samples: tuple[str, ...]
    origin: tuple[Store, CommitRecord] | None = None
    revision: int = 0


def stores_by_sample(sources: Sequence[Store]) -> dict[str, Store]:
    """The first source that holds each sample id."""
    return {sample_id: source for source in reversed(sources) for sample_id in source.sample_ids}


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
                writer.write(block)
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
            hint=f"hiddenstore verify {source.path} --full",
        )


def copy_codes(source: Store, record: CommitRecord, destination: Store, revision: int = 0) -> CommitRecord | None:
    """The codes of a unit as they are, in another container, or without the layers that the destination leaves out."""
    encoded = stored_unit(source, record) if record.samples else None
    if encoded is not None and source.capture.aux_layers != destination.capture.aux_layers:
        encoded = with_layers(encoded, source.capture, destination.capture.stored_layers)
    return write_encoded_unit(destination, record.unit, record.input, encoded, record.rejects, record.engine, revision)


def copy_decoded(
    destination: Store, unit: CopyUnit, index: Mapping[str, Store], head: HeadBundle | None
) -> CommitRecord | None:
    """Decode the samples of a unit and write them as one new unit; ``head`` makes top tokens of final hiddens."""
    if unit.origin is not None:
        source, commit = unit.origin
        # By index, not by id: another unit of the source may hold the same id, captured in another batch.
        reader = source.open_unit(commit) if commit.samples else None
        layers = _kept_layers(source, destination)
        records = (
            [source.read_unit(reader, n, layers) for n in range(len(commit.samples))] if reader is not None else []
        )
        rejects = commit.rejects
    else:
        stores = ((index[sample_id], sample_id) for sample_id in unit.samples)
        records = [source.read(sample_id, _kept_layers(source, destination)) for source, sample_id in stores]
        commit, _ = index[unit.samples[0]].locate(unit.samples[0])
        rejects = ()
    records = [with_top_tokens(record, head, destination.capture) for record in records]
    return write_unit(destination, unit.name, unit.input, records, rejects, commit.engine, unit.revision)


def _kept_layers(source: Store, destination: Store) -> tuple[int, ...] | None:
    """The layers to read where the destination leaves some out."""
    layers = destination.capture.aux_layers
    return None if layers == source.capture.aux_layers else layers

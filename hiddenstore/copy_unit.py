"""Bringing one unit into another store: its files, its codes in another container, or its samples encoded again."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hiddenstore import layout
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.commit import publish_commit
from hiddenstore.errors import CorruptionError
from hiddenstore.head import HeadBundle
from hiddenstore.segment import open_segment
from hiddenstore.store import Store
from hiddenstore.stored_unit import stored_unit
from hiddenstore.writer import sweep, write_encoded_unit, write_unit
from schemas.manifest import CommitRecord, Engine, FileEntry

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class CopyUnit:
    """One unit to bring over: ``whole`` from one store with its record there, or gathered by sample id."""

    name: str
    input: str
    samples: tuple[str, ...]
    whole: tuple[Store, CommitRecord] | None = None


class SampleIndex:
    """Where each sample id lies: the first source that holds it."""

    def __init__(self, sources: Sequence[Store]) -> None:
        self._sources = sources

    @cached_property
    def _places(self) -> dict[str, Store]:
        places: dict[str, Store] = {}
        for source in self._sources:
            for sample_id in source.sample_ids:
                places.setdefault(sample_id, source)
        return places

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._places

    def source(self, sample_id: str) -> Store:
        """The store it is read from."""
        return self._places[sample_id]

    def engine(self, sample_id: str) -> Engine:
        """The engine that captured it there."""
        record, _ = self._places[sample_id].locate(sample_id)
        return record.engine


def copy_verbatim(source: Store, record: CommitRecord, destination: Store) -> CommitRecord | None:
    """The files of a segment byte for byte, then its record under a new attempt name."""
    segment = layout.segment_path(record.unit, layout.new_attempt())
    copied = record.model_copy(update={"segment": segment})
    try:
        for file in record.files:
            _copy_file(source, f"{record.segment}/{file.path}", destination, f"{segment}/{file.path}", file, record)
        if record.files:
            destination.fs.sync_folder(segment)
    except BaseException:
        sweep(destination.fs, segment)
        raise
    if publish_commit(destination.fs, copied):
        return copied
    sweep(destination.fs, segment)
    return None


def _copy_file(
    source: Store, path: str, destination: Store, new_path: str, entry: FileEntry, record: CommitRecord
) -> None:
    found = source.fs.size(path)
    digest = hashlib.sha256()
    if found == entry.size:
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
    if found != entry.size or digest.hexdigest() != entry.sha256:
        reason = f"{entry.size:,} bytes expected, {found or 0:,} found" if found != entry.size else "its sha256 differs"
        raise CorruptionError(
            f"{source.path}/{path} is damaged: {reason}; {len(record.samples)} samples cannot be copied",
            kind="file-corrupt",
            path=path,
            samples=tuple(sample.id for sample in record.samples),
            hint=f"hiddenstore verify {source.path} --full",
        )


def copy_codes(source: Store, record: CommitRecord, destination: Store) -> CommitRecord | None:
    """The codes of a unit as they are, in another container."""
    encoded = stored_unit(source, record) if record.samples else None
    return write_encoded_unit(destination, record.unit, record.input, encoded, record.rejects, record.engine)


def copy_decoded(
    destination: Store, unit: CopyUnit, index: SampleIndex, head: HeadBundle | None
) -> CommitRecord | None:
    """Decode the samples of a unit and write them as one new unit; ``head`` makes top tokens of final hiddens."""
    if unit.whole is not None:
        source, record = unit.whole
        # By place, not by id: another unit of the source may hold the same id, captured in another batch.
        reader = open_segment(source, record) if record.samples else None
        records = [reader.read(place) for place in range(len(record.samples))] if reader is not None else []
        records = [with_top_tokens(item, head, destination.capture) for item in records]
        return write_unit(destination, unit.name, unit.input, records, record.rejects, record.engine)
    records = [index.source(sample_id).read(sample_id) for sample_id in unit.samples]
    records = [with_top_tokens(item, head, destination.capture) for item in records]
    return write_unit(destination, unit.name, unit.input, records, (), index.engine(unit.samples[0]))

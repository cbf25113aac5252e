"""The samples that a repair dropped, captured again: the next revision of their unit.

The codes of the samples that stayed are copied as they are, and the new ones are encoded by the same channel
statistics, so that the unit is read as any other.
"""

from collections.abc import Collection, Sequence

from hiddenstore import layout
from hiddenstore.care.stored_unit import samples_of, stored_samples, unit_of
from hiddenstore.commit import DAMAGED
from hiddenstore.records import Record
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.segment import write_encoded
from hiddenstore.store import Store
from hiddenstore.writer import PendingUnit, publish_segment, sweep
from schemas.manifest import CommitRecord, Engine, Recapture, Reject


def recapture_unit(
    store: Store, pending: PendingUnit, records: Sequence[Record], rejects: Sequence[Reject], engine: Engine
) -> CommitRecord | None:
    """Commit a unit whose lost samples are ``records`` and ``rejects`` now; None when another attempt was first.

    Raises:
        CorruptionError: a sample that stayed cannot be read by now.
        StorageError: the disk refused; what was committed before stays.
    """
    old = pending.replaces
    assert old is not None
    path = layout.segment_path(old.unit, layout.new_attempt(), pending.revision)
    refused = (*(reject for reject in old.rejects if reject.reason != DAMAGED), *rejects)
    changes: dict[str, object] = {"segment": path, "rejects": refused, "files": (), "samples": (), "stats": {}}
    changes |= _engines(old, records, engine)
    unit = _joined(store, pending, old, records)
    if unit is not None:
        try:
            files = write_encoded(store.fs, path, unit, store.capture, store.manifest.container)
        except BaseException:
            sweep(store.fs, path)
            raise
        changes |= {"files": files, "samples": unit.samples, "stats": unit.stats}
    record = CommitRecord.model_validate({**dict(old), **changes})
    return record if publish_segment(store.fs, record, pending.revision) else None


def _joined(store: Store, pending: PendingUnit, old: CommitRecord, records: Sequence[Record]) -> EncodedUnit | None:
    """Stored and new samples in the order of the input; None without any."""
    stored = list(stored_samples(store, old, range(len(old.samples))))
    if not stored:
        return encode_records(old.unit, records, store.capture) if records else None
    before = unit_of(old.unit, store.capture, stored, old.stats)
    if not records:
        return before
    new = samples_of(encode_records(old.unit, records, store.capture, joins=before), store.capture)
    places = {name: place for place, name in enumerate(pending.order)}
    parts = sorted([*stored, *new], key=lambda part: places[part.entry.id])
    return unit_of(old.unit, store.capture, parts)


def _engines(old: CommitRecord, records: Sequence[Record], engine: Engine) -> dict[str, object]:
    """The engine of the record, and of samples that another one captured."""
    if not old.samples:
        return {"engine": engine, "recaptured": ()}
    if engine == old.engine or not records:
        return {}
    new = Recapture(engine=engine, samples=tuple(record.sample.id for record in records))
    return {"recaptured": (*old.recaptured, new)}


def recaptured_of(record: CommitRecord, intact: Collection[str]) -> tuple[Recapture, ...]:
    """Which of the samples that stay were captured by another engine than the rest."""
    parts = (tuple(name for name in part.samples if name in intact) for part in record.recaptured)
    named = zip(record.recaptured, parts, strict=True)
    return tuple(Recapture(engine=part.engine, samples=names) for part, names in named if names)

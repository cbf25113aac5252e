"""Which units a copy brings over: whole ones under their own names, or chosen samples as a new input cut anew."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from hiddenstore import layout
from hiddenstore.commit import committed_units
from hiddenstore.copy_unit import CopyUnit, SampleIndex
from hiddenstore.errors import ConfigError, ConflictError
from hiddenstore.inputs import PreparedInput
from hiddenstore.registered import RegisteredInput, input_digest
from hiddenstore.store import Store
from hiddenstore.where import Test
from hiddenstore.writer import register_input
from schemas.manifest import SampleEntry
from schemas.prepared import PreparedData

_ROWS_PER_BATCH = 1024


def whole_units(sources: Sequence[Store], destination: Store) -> tuple[list[CopyUnit], int, int]:
    """Bring the inputs over; units to copy, how many are there already, and how many no source holds.

    Raises:
        ConflictError: ``input-units-differ``, the destination cuts an input into other units.
    """
    for source in sources:
        for digest, registered in source.inputs().items():
            _bring_input(registered, destination, digest)
    done = committed_units(destination.fs)
    seen: set[str] = set()
    units: list[CopyUnit] = []
    there = 0
    for source in sources:
        for record in source.commits():
            if record.unit in done:
                there += record.unit not in seen
            elif record.unit not in seen:
                ids = tuple(entry.id for entry in record.samples)
                units.append(CopyUnit(record.unit, record.input, ids, (source, record)))
            seen.add(record.unit)
    wanted = {unit for registered in destination.inputs().values() for unit in registered.units}
    return units, there, len(wanted - done - seen)


def _bring_input(registered: RegisteredInput, destination: Store, digest: str) -> None:
    """Copy ``inputs/<digest>.parquet`` after checking it."""
    table = registered.table
    path = layout.input_path(digest)
    if destination.fs.put_if_absent(path, registered.fs.read(path)):
        return
    if not RegisteredInput(destination.fs, digest).table.equals(table):
        raise ConflictError(
            f"{destination.path}/{path} cuts this input into other units than {registered.fs.root} does",
            kind="input-units-differ",
            hint="copy with --where 'tokens>0': samples are then cut into new units",
        )


def require_choice(sources: Sequence[Store], keep: Test) -> None:
    """Refuse a filter that nothing passes, before anything is created for it.

    Raises:
        ConfigError: ``selection-empty``.
    """
    if not any(keep(record, entry) for source in sources for record, entry in source.entries):
        raise ConfigError("no sample of the sources passes the filter", kind="selection-empty")


def chosen_units(sources: Sequence[Store], destination: Store, keep: Test) -> tuple[list[CopyUnit], int, int]:
    """Register the samples that pass ``keep`` and are not there; units to copy, samples there already, and
    units that cannot be filled."""
    index = SampleIndex(sources)
    waiting, unavailable = _missing_units(destination, index)
    covered = {sample_id for unit in waiting for sample_id in unit.samples}.union(destination.sample_ids)
    groups: dict[str, list[SampleEntry]] = {}
    chosen: set[str] = set()
    there = 0
    for source in sources:
        for record, entry in source.entries:
            if entry.id in chosen or not keep(record, entry):
                continue
            chosen.add(entry.id)
            if entry.id in covered:
                there += 1
            else:
                groups.setdefault(record.engine.model_dump_json(), []).append(entry)
    # One input per engine, because a commit record names one engine.
    for entries in groups.values():
        register_input(destination, _Selection(entries))
    if groups:
        waiting, unavailable = _missing_units(destination, index)
    return waiting, there, unavailable


def _missing_units(destination: Store, index: SampleIndex) -> tuple[list[CopyUnit], int]:
    """Units of the destination's inputs without a commit: those the sources can fill, and how many they cannot."""
    done = committed_units(destination.fs)
    found: list[CopyUnit] = []
    unavailable = 0
    for digest, registered in destination.inputs().items():
        for unit, ids in registered.unit_samples().items():
            if unit in done:
                continue
            if all(sample_id in index for sample_id in ids):
                found.append(CopyUnit(unit, digest, tuple(ids)))
            else:
                unavailable += 1
    return found, unavailable


class _Selection(PreparedInput):
    """Chosen samples as an input: what ``register_input`` needs to know of them, without their tokens."""

    def __init__(self, entries: Sequence[SampleEntry]) -> None:
        digest = input_digest((entry.id, entry.split) for entry in entries)
        super().__init__(Path(digest), _as_prepared(digest, entries))
        self._entries = entries

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self._entries), _ROWS_PER_BATCH):
            part = self._entries[start : start + _ROWS_PER_BATCH]
            known = {
                "sample_id": pa.array([entry.id for entry in part]),
                "input_ids": pa.array([[0] * entry.tokens for entry in part], pa.list_(pa.int32())),
                "split": pa.array([entry.split for entry in part]),
            }
            yield pa.RecordBatch.from_pydict({name: known[name] for name in columns})


def _as_prepared(digest: str, entries: Sequence[SampleEntry]) -> PreparedData:
    """What is known of chosen samples; how they were once tokenised stands in ``target`` of the store."""
    return PreparedData(
        digest=digest,
        target="",
        tokenizer_sha256="",
        chat_template_sha256="",
        vocab_size=0,
        loss_on="assistant",
        mask_from="generation-tags",
        max_tokens=None,
        overlong="cut",
        validation_share=0.0,
        rows_read=len(entries),
        samples=len(entries),
        validation_samples=sum(entry.split == "validation" for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        supervised_tokens=sum(entry.supervised for entry in entries),
        longest=max(entry.tokens for entry in entries),
        cut=0,
        duplicates=0,
    )

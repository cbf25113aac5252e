"""``repair``: leave out what cannot be read, and say again what no record says. It plans first, acts when told to."""

import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from hiddenstore.care.rerecord import UnitFacts, damaged_text, named_samples, proven_unit, unit_facts
from hiddenstore.care.stored_unit import recaptured_of, stored_samples, unit_of
from hiddenstore.commit import DAMAGED
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, FormatError, Kind, NotFoundError
from hiddenstore.files import layout
from hiddenstore.files.damage import reading_only, twice
from hiddenstore.files.layout import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import read_replaced, saved_snapshots
from hiddenstore.index.file import live_indexes
from hiddenstore.store import Store, load_snapshot
from hiddenstore.targets.calibration import SLICE_PATH, slice_bytes, slice_document
from hiddenstore.verify.bytes import rarely_read_documents, unit_damage
from hiddenstore.verify.structure import check_indexes
from hiddenstore.writer import write_encoded_unit
from schemas.manifest import CommitRecord, Reject

ACCEPTED_LOSS = 0.01
"""Share of the samples that a repair drops without being told to by number."""


@dataclass(frozen=True)
class UnitRepair:
    """One unit: samples to drop with the reason, how many stay (``kept``), and its commit record.

    ``source`` is the segment that a record which cannot be read is made again from. ``forget`` moves a record to
    ``quarantine/`` of whose samples nothing else is known: its unit can then be collected again, and ``dropped`` are
    those that an index or what is left of the record names.
    """

    unit: str
    record: str
    dropped: dict[str, str]
    kept: int
    source: str | None = None
    forget: bool = False


@dataclass
class Repair:
    """What ``repair`` would do, or did; ``samples`` are those of the store, damaged ones counted.

    ``aside``: damaged files beside the units with the reason, moved to ``quarantine/``; the same collect writes those
    of target and inputs again. ``waiting``: units of whose record and input neither can be read; their segments may
    prove themselves once the input is back.
    """

    units: list[UnitRepair] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    done: bool = False

    @property
    def dropped(self) -> int:
        """Samples; a unit of which not even their number is known counts as one."""
        return sum(len(unit.dropped) or unit.forget for unit in self.units)

    @property
    def forgets(self) -> bool:
        """Whether samples are dropped at which no segment was looked."""
        return any(unit.forget for unit in self.units)

    @property
    def must_be_accepted(self) -> bool:
        """Whether so much is dropped, or so blindly, that ``repair`` acts only when told the number."""
        return self.forgets or self.dropped > ACCEPTED_LOSS * self.samples


@dataclass(frozen=True)
class _Rewrite:
    """A new revision of a unit: the samples of ``record`` at ``intact``, and ``rejects``."""

    record: CommitRecord
    revision: int
    intact: tuple[int, ...]
    rejects: tuple[Reject, ...]


def repair(location: "str | Path | Filesystem", dry_run: bool = True, accept_loss: int | None = None) -> Repair:
    """Make a damaged store whole again by leaving out what cannot be read.

    Each damaged unit gets a new revision of its commit record, naming a new segment with the codes of the samples that
    still read, copied as they are, and the others as rejects that the same collect brings back. A record that cannot be
    read is made again from a segment whose content proves itself. Old records and segments stay until ``gc``. Damaged
    files beside the units are moved to ``quarantine/``. Raises StorageError: the storage refused to read; nothing is
    changed; FormatError: a record is whole, but of another version; nothing is changed; ConfigError:
    ``loss-not-accepted``: more than 1 % of the samples would be dropped, or some of which nothing but a damaged record
    or an index tells, and ``accept_loss`` is not their number; nothing is changed."""
    fs = open_filesystem(location)
    if fs.size(layout.STORE_JSON) is None:
        raise missing("store", fs.root)
    with reading_only():
        store = Store.open(fs, strict=False)
        result = Repair(aside=damaged_documents(store), samples=store.totals["samples"])
        rewrites = _plan(store, result)
        for finding in check_indexes(fs, store.catalog).findings:
            if finding.kind in (Kind.INDEX_CORRUPT, Kind.INDEX_STALE):
                result.aside[finding.path] = finding.detail
    if not dry_run:
        _require_accepted(store, result, accept_loss)
        readable = {commit.name for commit in store.commit_files}
        for unit in result.units:
            if unit.forget:
                # Its unit is collected again, and no index must speak for what was there.
                for file in live_indexes(fs):
                    if unit.record in file.header.records:
                        set_aside(fs, file.path)
                        result.aside.pop(file.path, None)
            else:
                _rewrite(store, rewrites[unit.unit])
            if unit.record not in readable:
                set_aside(fs, f"{layout.COMMITS_DIR}/{unit.record}")
        _set_aside_documents(store, result.aside)
        result.done = True
    return result


def _plan(store: Store, result: Repair) -> dict[str, _Rewrite]:
    """Fill ``result.units``; what is to be written for each."""
    rewrites: dict[str, _Rewrite] = {}
    for error in store.damaged:
        if isinstance(error, FormatError):
            raise error
        name = Path(getattr(error, "path", "")).name
        parsed = layout.parse_commit(name)
        if parsed is not None:
            try:
                _plan_unreadable(store, result, rewrites, name, parsed)
            except NotFoundError as gone:
                raise _raced(parsed.unit) from gone
    for commit in store.commit_files:
        record, parsed = commit.record, layout.parse_commit(commit.name)
        damage = unit_damage(store, record)
        if parsed is not None and (damage.samples or damage.files):
            reasons = {name: error.message for name, error in damage.samples.items()}
            intact = tuple(index for index, sample in enumerate(record.samples) if sample.id not in reasons)
            lost = _lost([(sample.id, sample.tokens) for sample in record.samples], reasons)
            rewrites[record.unit] = _Rewrite(record, parsed.revision + 1, intact, (*record.rejects, *lost))
            result.units.append(UnitRepair(record.unit, commit.name, reasons, len(intact)))
    return rewrites


def _plan_unreadable(
    store: Store, result: Repair, rewrites: dict[str, _Rewrite], name: str, parsed: layout.CommitName
) -> None:
    text = damaged_text(store.fs, name)
    facts = unit_facts(store, parsed.unit, text)
    if facts is None and any(path.startswith(f"{layout.INPUTS_DIR}/") for path in result.aside):
        result.waiting.append(parsed.unit)
        return
    if facts is None:
        reasons = dict.fromkeys(
            named_samples(store.fs, name, text), "its commit record cannot be read; its input is gone"
        )
        result.samples += len(reasons) or 1
        result.units.append(UnitRepair(parsed.unit, name, reasons, 0, forget=True))
        return
    proven = proven_unit(store, facts, text)
    intact = () if proven is None else proven.intact
    stored = {proven.record.samples[index].id for index in intact} if proven else set()
    # What an older record rejects at capture stays rejected; the rest is pending again.
    rejects = tuple(reject for reject in facts.rejects if reject.id not in stored and reject.reason != DAMAGED)
    refused = {reject.id for reject in rejects}
    why = "its commit record cannot be read, and no segment proves it"
    reasons = {sample.id: why for sample in facts.samples if sample.id not in stored | refused}
    lost = _lost([(sample.id, sample.tokens) for sample in facts.samples], reasons)
    record = proven.record if proven else _empty(facts)
    rewrites[parsed.unit] = _Rewrite(record, parsed.revision + 1, intact, (*rejects, *lost))
    result.samples += len(stored) + len(reasons)
    source = proven.record.segment if proven else None
    result.units.append(UnitRepair(parsed.unit, name, reasons, len(intact), source))


def _empty(facts: UnitFacts) -> CommitRecord:
    path = layout.segment_path(facts.unit, layout.new_attempt())
    return CommitRecord(unit=facts.unit, input=facts.input, segment=path, engine=facts.engine, files=(), samples=())


def _lost(samples: list[tuple[str, int]], reasons: dict[str, str]) -> tuple[Reject, ...]:
    return tuple(
        Reject(id=name, tokens=tokens, reason=DAMAGED, detail=reasons[name])
        for name, tokens in samples
        if name in reasons
    )


def _require_accepted(store: Store, result: Repair, accept_loss: int | None) -> None:
    if not result.must_be_accepted or accept_loss == result.dropped:
        return
    accepted = "" if accept_loss is None else f"; --accept-loss says {accept_loss:,}"
    why = "of units whose record and input cannot be read" if result.forgets else f"more than {ACCEPTED_LOSS:.0%}"
    raise ConfigError(
        f"repair would drop {result.dropped:,} of {result.samples:,} samples, {why}{accepted}; nothing has changed",
        kind=Kind.LOSS_NOT_ACCEPTED,
        hint=shlex.join(["hiddenstore", "repair", store.path, "-y", "--accept-loss", str(result.dropped)]),
    )


def _rewrite(store: Store, plan: _Rewrite) -> None:
    record, unit = plan.record, None
    if plan.intact:
        unit = unit_of(record.unit, store.capture, list(stored_samples(store, record, plan.intact)))
    recaptured = recaptured_of(record, {record.samples[index].id for index in plan.intact})
    if not write_encoded_unit(
        store, record.unit, record.input, unit, plan.rejects, record.engine, plan.revision, recaptured
    ):
        raise _raced(record.unit)


def _raced(unit: str) -> ConflictError:
    problem = f"unit {unit} was repaired by somebody else at the same time"
    return ConflictError(problem, kind=Kind.REPAIR_RACED, hint="run it again")


def _set_aside_documents(store: Store, paths: Collection[str]) -> None:
    """Reading every unit takes long: another repair may have moved a file, and a collect or a person made it anew."""
    others = {path for path in paths if not path.startswith(f"{layout.INDEX_DIR}/")}
    still = damaged_documents(store, others) if others else ()
    for path in paths:
        if path not in others or path in still:
            set_aside(store.fs, path)


def damaged_documents(store: Store, paths: Collection[str] | None = None) -> dict[str, str]:
    """Files of the target, inputs, snapshots, replaced commit records, calibration and advice that cannot be read, and
    snapshots of such a record; those among ``paths`` (default: all).

    Path and reason of each. The segments and the records that count are the business of ``repair``.
    """
    damaged: dict[str, str] = {}
    for path, read in _readers(store):
        try:
            if (paths is None or path in paths) and store.fs.size(path) is not None:
                twice(store.fs, read, path)
        except CorruptionError as error:
            damaged[path] = error.message.partition(" is damaged: ")[2] or error.message
        except FormatError as error:
            # Advice is measured again; earlier releases wrote some in which a number is null.
            if error.kind != Kind.DOCUMENT_INVALID or not path.startswith(f"{layout.ADVICE_DIR}/"):
                raise
            damaged[path] = error.message
        except NotFoundError:
            if store.fs.size(path) is not None:
                raise
    return damaged


def _readers(store: Store) -> Iterator[tuple[str, Callable[[], object]]]:
    fs = store.fs
    for file in store.manifest.target_files:
        yield f"{layout.TARGET_DIR}/{file.path}", partial(store.target_file, file.path)
    for digest, registered in store.inputs().items():
        yield layout.input_path(digest), registered.unit_samples
    for name in saved_snapshots(fs):
        yield layout.snapshot_path(name), partial(_read_snapshot, store, name)
    yield from rarely_read_documents(fs)
    yield SLICE_PATH, partial(_read_slice, fs)
    with suppress(CorruptionError):
        document = slice_document(fs)
        if document is not None:
            # Damaged states go with their document: a new slice may need their name.
            yield layout.slice_path(document.file_sha256), partial(slice_bytes, fs, document)


def _read_snapshot(store: Store, name: str) -> None:
    """A snapshot of which a record is gone or damaged can be read no more: its reader is refused, and so is this."""
    snapshot = load_snapshot(store.fs, name)
    try:
        read_replaced(store.catalog, snapshot)
    except CorruptionError as error:
        path, record = layout.snapshot_path(name), Path(getattr(error, "path", "")).name
        problem = f"{path} is damaged: it names record {record}, which is gone, damaged or another one"
        raise CorruptionError(problem, kind=error.kind, path=path) from error


def _read_slice(fs: Filesystem) -> None:
    document = slice_document(fs)
    if document is not None:
        slice_bytes(fs, document)


def set_aside(fs: Filesystem, path: str) -> str | None:
    """Move a damaged file to ``quarantine/`` under its own path, or with ``.2``, ``.3`` … behind it; the new path, None
    where another repair has moved it. Nothing is ever removed that exists nowhere else. Raises StorageError: the disk
    refused; the file stays where it was."""
    with suppress(NotFoundError):
        data = fs.read(path)
        for number in count(1):
            new_path = f"{layout.QUARANTINE_DIR}/{path}{f'.{number}' if number > 1 else ''}"
            if fs.put_if_absent(new_path, data) or fs.read(new_path) == data:
                # Another repair may have moved it meanwhile, and somebody made it anew.
                if fs.read(path) == data:
                    fs.remove_tree(path)
                return new_path
    return None

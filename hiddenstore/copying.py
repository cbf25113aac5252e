"""Copies between stores: merge, subset, re-encode. The same units and commits as a capture, so a copy resumes.

Without a filter, units keep their names and inputs: where the codecs agree their codes are copied as they are (in one
container the files themselves), else they are decoded and encoded again. With a filter the samples chosen form a new
input, cut into units as ``collect`` would. Running the same copy again does only what is missing; a source that has
grown adds to the copy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from hiddenstore import layout
from hiddenstore.calibration import copy_slice
from hiddenstore.codecs import get_layout, get_recipe, recipe_name
from hiddenstore.commit import committed_units
from hiddenstore.copy_unit import CopyUnit, SampleIndex, copy_codes, copy_decoded, copy_verbatim
from hiddenstore.errors import ConfigError, ConflictError, NotFoundError
from hiddenstore.head import HeadBundle
from hiddenstore.inputs import PreparedInput, RegisteredInput, input_digest
from hiddenstore.store import Store
from hiddenstore.verify.profile import PROFILE_PATH, read_profile
from hiddenstore.where import Test
from hiddenstore.writer import (
    capture_differences,
    create_store,
    register_input,
)
from schemas.capture import TOPK, Codecs
from schemas.manifest import Container, SampleEntry
from schemas.prepared import PreparedData

_ROWS_PER_BATCH = 1024


@dataclass
class CopyPlan:
    """What a copy will do: ``units`` to bring over, ``unavailable`` ones no source holds, ``notes`` on rounding."""

    destination: Store
    sources: tuple[Store, ...]
    units: list[CopyUnit]
    there_already: int
    unavailable: int
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(len(unit.samples) for unit in self.units)

    @property
    def verbatim(self) -> int:
        """Units that will be copied byte for byte."""
        return sum(self.is_verbatim(unit) for unit in self.units)

    def is_verbatim(self, unit: CopyUnit) -> bool:
        """Whether a unit keeps its files: it keeps its codes, and its container is that of the destination."""
        container = self.destination.manifest.container
        return self.keeps_codes(unit) and unit.whole is not None and unit.whole[0].manifest.container == container

    @property
    def makes_top_tokens(self) -> bool:
        """Whether final hiddens of a source will become top tokens, which takes the target's LM head."""
        return self.destination.capture.holds_topk and not all(source.capture.holds_topk for source in self.sources)

    def keeps_codes(self, unit: CopyUnit) -> bool:
        """Whether nothing of a unit is decoded: it is whole, and its codecs are those of the destination."""
        return unit.whole is not None and unit.whole[0].capture.codecs == self.destination.capture.codecs


@dataclass
class CopyReport:
    """What a copy did."""

    units: int = 0
    samples: int = 0
    tokens: int = 0
    bytes_written: int = 0
    lost_races: int = 0


def plan_copy(
    sources: Sequence[Store],
    location: str | Path,
    recipe: str | None = None,
    keep: Test | None = None,
    container: Container | None = None,
) -> CopyPlan:
    """Create (or open) the destination, register what it will hold, and list the units it lacks.

    ``recipe`` and ``container`` None keep those of the destination when it exists, else those of the first source.

    Raises:
        ConflictError: ``capture-mismatch``, sources or destination hold another capture (codecs and container aside).
        ConfigError: ``copy-onto-itself``; ``recipe-unknown``; ``codec-unknown``; ``final-topk``: a source holds top
            tokens, and the destination is to hold the final hidden.
        CorruptionError: a target file or input of a source is damaged.
    """
    _check_sources(sources, location)
    destination = _open_destination(sources, location, recipe, container)
    _bring_calibration(sources, destination)
    if keep is None:
        units, there, unavailable = _whole_units(sources, destination)
    else:
        units, there, unavailable = _chosen_units(sources, destination, keep)
    plan = CopyPlan(destination, tuple(sources), units, there, unavailable)
    if plan.verbatim < len(units):
        plan.notes = _rounding_notes(sources, destination, recoding_equal=keep is not None)
    return plan


def run_copy(plan: CopyPlan, advance: Callable[[CopyReport], bool] | None = None) -> CopyReport:
    """Bring the planned units over, one commit each. ``advance`` is called after each; returning False stops.

    Raises:
        CorruptionError: bytes of a source disagree with their digest; what is committed stays.
    """
    report = CopyReport()
    index = SampleIndex(plan.sources)
    head = HeadBundle.load(plan.destination) if plan.makes_top_tokens else None
    for unit in plan.units:
        if unit.whole is not None and plan.is_verbatim(unit):
            commit = copy_verbatim(*unit.whole, plan.destination)
        elif unit.whole is not None and plan.keeps_codes(unit):
            commit = copy_codes(*unit.whole, plan.destination)
        else:
            commit = copy_decoded(plan.destination, unit, index, head)
        report.units += 1
        if commit is None:
            report.lost_races += 1
        else:
            report.samples += len(commit.samples)
            report.tokens += commit.tokens
            report.bytes_written += commit.bytes_stored
        if advance is not None and not advance(report):
            break
    return report


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


def _check_sources(sources: Sequence[Store], location: str | Path) -> None:
    for source in sources:
        if Path(source.path).resolve() == Path(location).resolve():
            raise ConfigError(f"{source.path} cannot be copied onto itself", kind="copy-onto-itself")
    first = sources[0]
    for other in sources[1:]:
        lines = [
            line
            for line in capture_differences(first.manifest, other.manifest)
            if not line.startswith(("capture.codecs.", "container:"))
        ]
        if lines:
            listed = "\n".join(f"  {line}" for line in lines)
            raise ConflictError(
                f"{first.path} and {other.path} hold different captures (stored: first, asked: second)\n{listed}",
                kind="capture-mismatch",
                hint=f"hiddenstore diff {first.path} {other.path}",
            )


def _open_destination(
    sources: Sequence[Store], location: str | Path, recipe: str | None, container: Container | None
) -> Store:
    first = sources[0]
    manifest = first.manifest
    with suppress(NotFoundError):
        manifest = Store.open(location, strict=False).manifest
    if recipe is None:
        recipe, codecs = manifest.recipe, manifest.capture.codecs
    else:
        codecs = get_recipe(recipe)
        recipe = recipe_name(codecs)
    _require_finals(sources, codecs)
    capture = first.capture.model_copy(update={"codecs": codecs})
    files = {entry.path: first.target_file(entry.path) for entry in first.manifest.target_files}
    return create_store(location, capture, first.manifest.head, recipe, files, container or manifest.container)


def _require_finals(sources: Sequence[Store], codecs: Codecs) -> None:
    """Top tokens are made from the final hidden, never the other way."""
    without = next((source for source in sources if source.capture.holds_topk), None)
    if without is not None and codecs.final != TOPK:
        raise ConfigError(
            f"{without.path} holds the target's top tokens in place of the final hidden, which a copy in "
            f"{recipe_name(codecs)} needs: it cannot be brought back",
            kind="final-topk",
            hint=f"copy with --recipe {recipe_name(codecs.model_copy(update={'final': TOPK}))}, or collect again",
        )
    needy = next((source for source in sources if not source.capture.aux_layers), None)
    if needy is not None and codecs.final == TOPK and not needy.capture.holds_topk:
        raise ConfigError(
            f"{needy.path} holds the final hidden alone, and top tokens in its place would leave nothing to train from",
            kind="final-topk",
            hint="copy with --recipe safe",
        )


def _bring_calibration(sources: Sequence[Store], destination: Store) -> None:
    """The first layer profile, which ``verify --meaning`` holds states against, and the first raw slice."""
    profiled = next((source for source in sources if read_profile(source.fs) is not None), None)
    if profiled is not None:
        destination.fs.put_if_absent(PROFILE_PATH, profiled.fs.read(PROFILE_PATH))
    next((source for source in sources if copy_slice(source.fs, destination.fs)), None)


def _rounding_notes(sources: Sequence[Store], destination: Store, recoding_equal: bool) -> list[str]:
    """What re-encoding does to the numbers, one line per codec; equal codecs count when units are cut anew."""
    notes: list[str] = []
    if not recoding_equal:
        sources = [source for source in sources if source.capture.codecs != destination.capture.codecs]
    for group in ("aux", "final"):
        new = get_layout(getattr(destination.capture.codecs, group))
        for source in sources:
            old = get_layout(getattr(source.capture.codecs, group))
            if TOPK in (old.name, new.name):
                if old.name == new.name:
                    continue
                note = f"{group}: {old.name} → {TOPK} keeps the target's top tokens; the hidden cannot be brought back"
            elif not old.exact and not new.exact:
                note = f"{group}: {old.name} → {new.name} rounds a second time"
            elif not old.exact:
                note = f"{group}: {old.name} → {new.name} keeps the error of {old.name}; it does not bring bf16 back"
            elif not new.exact:
                note = f"{group}: {old.name} → {new.name} rounds once"
            else:
                continue
            if note not in notes:
                notes.append(note)
    return notes


def _whole_units(sources: Sequence[Store], destination: Store) -> tuple[list[CopyUnit], int, int]:
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


def _chosen_units(sources: Sequence[Store], destination: Store, keep: Test) -> tuple[list[CopyUnit], int, int]:
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
    if not chosen:
        raise ConfigError("no sample of the sources passes the filter", kind="selection-empty")
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

"""Copies between stores: merge, subset, re-encode. The same units and commits as a capture, so a copy resumes.

Without a filter, units keep their names and inputs: where the codecs agree their codes are copied as they are (in one
container the files themselves), else they are decoded and encoded again. With a filter the samples chosen form a new
input, cut into units as ``collect`` would. Running the same copy again does only what is missing; a source that has
grown adds to the copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hiddenstore.copy_choice import chosen_units, require_choice, whole_units
from hiddenstore.copy_destination import bring_calibration, check_sources, open_destination, rounding_notes
from hiddenstore.copy_unit import CopyUnit, SampleIndex, copy_codes, copy_decoded, copy_verbatim
from hiddenstore.head import HeadBundle
from hiddenstore.store import Store
from hiddenstore.where import Test
from schemas.manifest import Container


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
        ConfigError: ``copy-onto-itself``; ``selection-empty``; ``recipe-unknown``; ``codec-unknown``; ``final-topk``:
            a source holds top tokens, and the destination is to hold the final hidden.
        CorruptionError: a target file or input of a source is damaged.
    """
    check_sources(sources, location)
    if keep is not None:
        require_choice(sources, keep)
    destination = open_destination(sources, location, recipe, container)
    bring_calibration(sources, destination)
    if keep is None:
        units, there, unavailable = whole_units(sources, destination)
    else:
        units, there, unavailable = chosen_units(sources, destination, keep)
    plan = CopyPlan(destination, tuple(sources), units, there, unavailable)
    if plan.verbatim < len(units):
        plan.notes = rounding_notes(sources, destination, recoding_equal=keep is not None)
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

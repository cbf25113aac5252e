"""Copies between stores: merge, subset, re-encode. The same units and commits as a capture, so a copy resumes.

Without a filter, units keep their names and inputs: where the codecs agree their codes are copied as they are (in one
container the files themselves), else they are decoded and encoded again. With a filter the samples chosen form a new
input, cut into units as ``collect`` would and, where that keeps their codes, at the borders of the units they come
from. Running the same copy again does only what is missing; a source that has grown adds to the copy.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hiddenstore.care.stored_unit import (
    CopyUnit,
    codes_fit,
    copy_codes,
    copy_decoded,
    copy_piece,
    copy_verbatim,
    units_of_selection,
)
from hiddenstore.codecs import get_layout, kind_of
from hiddenstore.codecs.base import CodeLayout, MaskedCodec
from hiddenstore.codecs.fitted import encodes, fit, is_unfitted, require_encodes, spread
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, get_recipe, recipe_name
from hiddenstore.commit import committed_units, lost_samples
from hiddenstore.console.text import plural
from hiddenstore.errors import ConfigError, ConflictError, FormatError, Kind, NotFoundError
from hiddenstore.files import layout
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.publish import IndexWriter, indexed_revisions
from hiddenstore.inputs import RegisteredInput
from hiddenstore.inspect.forecast import Counts, room_for, shortage
from hiddenstore.inspect.samples import Test
from hiddenstore.segments import CONTAINERS, default_container
from hiddenstore.store import Store, load_manifest
from hiddenstore.targets.blocks import BLOCKS_FILE, TargetBlocks, block_files, recoded
from hiddenstore.targets.calibration import copy_slice, read_slice
from hiddenstore.targets.checkpoint import checkpoint_sha256
from hiddenstore.targets.folder import CONFIG_FILE, open_target
from hiddenstore.targets.identity import CHECKPOINT, cast_hint, has_adapter, target_words, unstated_digests
from hiddenstore.targets.rebuild import Rebuilder
from hiddenstore.verify.profile import PROFILE_PATH, read_profile, share_profile, target_differences, unstated_warning
from hiddenstore.writer import PendingUnit, capture_differences, create_store, pending_units
from schemas.capture import REBUILT, STATED, TOPK, CaptureSpec, Codecs, TargetIdentity
from schemas.manifest import Container, SampleEntry


def check_sources(
    sources: Sequence[Store], location: str | Path | Filesystem, same_target: bool = False, any_layers: bool = False
) -> list[str]:
    """Refuse a copy onto or into a source (``output-exists``) and sources of two captures (``store-mismatch``), or of
    two captures than that which is at ``location``; warnings about digests that not all of them state.

    ``same_target`` takes another checkpoint where the layer profiles agree, ``any_layers`` sources of other layers.
    """
    address = open_filesystem(location).address
    for source in sources:
        if f"{address}/".startswith(f"{source.fs.address}/"):
            where = "onto itself" if source.fs.address == address else f"into itself, {location}"
            problem = f"{source.path} cannot be copied {where}"
            raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint="name a place outside of it")
    first, others, warnings = sources[0], [*sources[1:]], list[str]()
    with suppress(NotFoundError):
        others.append(Store.open(location, strict=False))
    may_differ = (
        "capture.codecs.",
        "capture.states.",
        "container:",
        *([f"capture.target.{CHECKPOINT}:"] if same_target else []),
        *(["capture.aux_layers:"] if any_layers else []),
    )
    for one, other in combinations([first, *others], 2):
        differences = capture_differences(one.manifest, other.manifest)
        lines = [line for line in differences if not line.startswith(may_differ)]
        lines = lines or target_differences(one.capture.target, other, one, same_target)
        if lines:
            listed = "\n".join(f"  {line}" for line in lines)
            raise ConflictError(
                f"{one.path} and {other.path} hold different captures (stored: first, asked: second)\n{listed}",
                kind=Kind.STORE_MISMATCH,
                hint=cast_hint(lines, shlex.join(["hiddenstore", "diff", str(one.path), str(other.path)])),
            )
        targets = one.capture.target, other.capture.target
        warnings.append(unstated_warning(*targets, by_profile=share_profile(one, other)) or "")
    return list(dict.fromkeys(filter(None, warnings)))


def open_destination(
    sources: Sequence[Store],
    location: str | Path | Filesystem,
    recipe: str | None,
    container: Container | None,
    target: str | None = None,
    layers: Sequence[int] | None = None,
) -> Store:
    """Create the store of a copy, or open the one there; None keeps its recipe or container, else the first source's. A
    new one on object storage gets ``default_container``. ``target`` names the checkpoint whose blocks rebuild states,
    ``layers`` the aux layers to keep. Raises ConflictError: ``store-mismatch``; ConfigError: ``name-unknown``,
    ``codec-unfit``, ``final-unfit``, ``blocks-unsupported``, ``layer-missing``; FormatError: ``target-mismatch``:
    ``target`` is another than the store's."""
    first = sources[0]
    manifest, identity, fs = first.manifest, first.capture.target, open_filesystem(location)
    is_there = False
    kept = default_container(fs) if fs.prefers_few_files else manifest.container
    # What is made says of all its states only what every source says; whether they are of one target was judged before.
    stated: Mapping[str, Any] = dict.fromkeys(unstated_digests(*(source.capture.target for source in sources)))
    with suppress(NotFoundError):
        # Opening would read every record that no index covers, once more than making the store does.
        manifest = load_manifest(fs)
        is_there = True
        kept = manifest.container
        stated = {field: getattr(manifest.capture.target, field) for field in STATED}
    if recipe is None:
        recipe, codecs = manifest.recipe, manifest.capture.codecs
    else:
        codecs = get_recipe(recipe)
        recipe = recipe_name(codecs)
    _require_finals(sources, codecs)
    _require_classes(sources, codecs)
    captures = [source.capture if layers is None else with_layers(source, layers) for source in sources]
    capture = recoded(captures[0], codecs).model_copy(update={"target": identity.model_copy(update=stated)})
    if any(source.capture.codecs != codecs for source in sources):
        capture = _encodable(capture, location if is_there else None)
    of_recipe = {BLOCKS_FILE, layout.fitted_name(first.capture.codecs.aux)}
    files = {e.path: first.target_file(e.path) for e in first.manifest.target_files if e.path not in of_recipe}
    present = [Store.open(fs, strict=False)] if is_there and (capture.blocks or is_unfitted(capture)) else []
    capture, fitted = _fitted(sources, present, capture)
    files |= fitted | bundled_blocks([*sources, *present], capture, target)
    return create_store(fs, capture, first.manifest.head, recipe, files, container or kept)


def _encodable(capture: CaptureSpec, present: str | Path | Filesystem | None) -> CaptureSpec:
    """The capture with a codec that units can be encoded by, which may have to be fitted; of a store that is
    ``present`` it has to be its own: else ConfigError ``codec-unfit``."""
    if encodes(capture):
        return capture
    if present is not None:
        require_encodes(capture, open_filesystem(present).root)
    codecs = capture.codecs.model_copy(update={"aux": kind_of(capture.codecs.aux)})
    return capture.model_copy(update={"codecs": codecs})


def _fitted(
    sources: Sequence[Store], present: Sequence[Store], capture: CaptureSpec
) -> tuple[CaptureSpec, dict[str, bytes]]:
    """A capture whose aux codec is fitted, and the file of it: as the store that is ``present`` has it, as a source of
    the same layers has it that can encode, else fitted to states of all sources."""
    if not is_unfitted(capture):
        return capture, {name: data for source in sources for name, data in _file_of(source, capture.codecs.aux)}
    for store in (*present, *sources):
        codecs = store.capture.codecs
        if kind_of(codecs.aux) != capture.codecs.aux or store.capture.stored_layers != capture.stored_layers:
            continue
        if store in present or encodes(store.capture):
            named = capture.codecs.model_copy(update={"aux": codecs.aux})
            return capture.model_copy(update={"codecs": named}), dict(_file_of(store, codecs.aux))
    # The store that is present holds another recipe: saying so needs no states.
    return (capture, {}) if present else fit(capture, _states_of(sources, capture))


def _file_of(store: Store, codec: str) -> Iterator[tuple[str, bytes]]:
    if store.capture.codecs.aux == codec and kind_of(codec) != codec:
        yield layout.fitted_name(codec), store.target_file(layout.fitted_name(codec))


def _states_of(sources: Sequence[Store], capture: CaptureSpec) -> Iterator[Tensor]:
    """The stored layers of samples that are spread evenly over all sources."""
    totals = [source.totals for source in sources]
    tokens, samples = (sum(total[name] for total in totals) for name in ("tokens", "samples"))
    step = spread(tokens, samples, capture)
    first = 0
    for source in sources:
        for sample_id in source.sample_ids[first::step]:
            yield source.read(sample_id, capture.stored_layers, final=False).aux
        first = (first - len(source.sample_ids)) % step


def with_layers(source: Store, layers: Sequence[int]) -> CaptureSpec:
    """The capture of a source with some of its aux layers. Raises ConfigError: ``layer-missing``; ``final-unfit``,
    nothing would be left; ``blocks-unsupported``, states are rebuilt from the layers that are stored."""
    capture = source.capture
    if absent := sorted(set(layers) - set(capture.aux_layers)):
        raise ConfigError(
            f"{source.path} holds no layer {', '.join(map(str, absent))}: its layers are {list(capture.aux_layers)}",
            kind=Kind.LAYER_MISSING,
        )
    if capture.codecs.final == REBUILT:
        problem = f"{source.path} rebuilds states from the layers it stores: none of them can be left out"
        stored = recipe_name(capture.codecs.model_copy(update={"final": "q8"}))
        raise ConfigError(problem, kind=Kind.BLOCKS_UNSUPPORTED, hint=f"copy it with --recipe {stored} first")
    if not layers and not capture.holds_final_hidden:
        raise ConfigError(f"nothing of {source.path} would be left to train from", kind=Kind.FINAL_UNFIT)
    return capture.model_copy(update={"aux_layers": tuple(sorted(set(layers)))})


def _require_finals(sources: Sequence[Store], codecs: Codecs) -> None:
    """Top tokens are made from the final hidden, never the other way."""
    topk_only = next((source for source in sources if source.capture.holds_topk), None)
    if topk_only is not None and codecs.final != TOPK:
        raise ConfigError(
            f"{topk_only.path} holds the target's top tokens in place of the final hidden, which a copy in "
            f"{recipe_name(codecs)} needs: it cannot be brought back",
            kind=Kind.FINAL_UNFIT,
            hint=f"copy with --recipe {recipe_name(codecs.model_copy(update={'final': TOPK}))}, or collect again",
        )
    bare = next((source for source in sources if not source.capture.aux_layers), None)
    if bare is not None and codecs.final == TOPK and not bare.capture.holds_topk:
        problem = f"{bare.path} holds the final hidden alone; top tokens in its place would leave nothing to train from"
        raise ConfigError(problem, kind=Kind.FINAL_UNFIT, hint=f"copy with --recipe {DEFAULT_RECIPE}")


def _require_classes(sources: Sequence[Store], codecs: Codecs) -> None:
    """Rows of fewer bits stay in their codec, which refuses a loss there: in another they would pass for whole ones."""
    for source in sources:
        old = source.capture.codecs.aux
        layout = get_layout(old)
        if old != codecs.aux and isinstance(layout, MaskedCodec) and layout.follows_mask:
            raise ConfigError(
                f"{source.path} holds rows in fewer bits where its loss mask leaves them out ({old}); in {codecs.aux} "
                "nothing would say so",
                kind=Kind.STORE_LACKS_STATES,
                hint=f"copy with --recipe {recipe_name(codecs.model_copy(update={'aux': old}))}, or collect again",
            )


def bring_calibration(sources: Sequence[Store], destination: Store) -> None:
    """The first layer profile, which ``verify --meaning`` holds states against, and the first raw slice of the same
    layers."""
    profiled = next((source for source in sources if read_profile(source.fs) is not None), None)
    if profiled is not None:
        destination.fs.put_if_absent(PROFILE_PATH, profiled.fs.read(PROFILE_PATH))
    alike = (source for source in sources if source.capture.aux_layers == destination.capture.aux_layers)
    next((source for source in alike if copy_slice(source.fs, destination.fs)), None)


def rounding_notes(sources: Sequence[Store], destination: Store, recoding_equal: bool) -> list[str]:
    """What re-encoding does to the numbers, one line per codec; equal codecs count when units are cut anew."""
    if not recoding_equal:
        sources = [source for source in sources if source.capture.codecs != destination.capture.codecs]
    notes = []
    for group in ("aux", "final"):
        new = get_layout(getattr(destination.capture.codecs, group))
        for source in sources:
            old = get_layout(getattr(source.capture.codecs, group))
            effect = _rounding(old, new)
            if effect is not None:
                notes.append(f"{group}: {old.name} → {new.name} {effect}")
    return list(dict.fromkeys(notes))


def _rounding(old: CodeLayout, new: CodeLayout) -> str | None:
    if TOPK in (old.name, new.name):
        return None if old.name == new.name else "keeps the target's top tokens; the hidden cannot be brought back"
    if old.name == new.name == REBUILT:
        return None
    if REBUILT in (old.name, new.name):
        way = "comes back through the target's last blocks when it is read"
        return way if new.name == REBUILT else "keeps what the target's last blocks made of the decoded top layer"
    if not old.exact:
        return f"keeps the error of {old.name}; it does not bring bf16 back" if new.exact else "rounds a second time"
    return None if new.exact else "rounds once"


def _units_as_cut(sources: Sequence[Store], destination: Store) -> tuple[list[CopyUnit], int, int, int]:
    """Bring the inputs over; units to copy, how many are present already, how many no source holds, and how many
    samples of a source no unit brings: each unit comes from one source whole."""
    for source in sources:
        for digest, registered in source.inputs().items():
            _bring_input(registered, destination, digest)
    done = committed_units(destination.fs)
    by_name: dict[str, list[CopyUnit]] = defaultdict(list)
    for source in sources:
        for number, record in enumerate(source.commits()):
            by_name[record.unit].append(CopyUnit(record.unit, record.input, origin=(source, number)))
    units = {name: max(several, key=lambda unit: unit.count) for name, several in by_name.items()}
    registered_units = {unit for registered in destination.inputs().values() for unit in registered.units}
    lossy = _lossy_units(destination)
    named = indexed_revisions(destination.fs)
    to_copy = [replace(unit, revision=named.get(name, -1) + 1) for name, unit in units.items() if name not in done]
    to_copy += [replace(units[name], revision=item.revision) for name, item in lossy.items() if _restores(units, item)]
    left = _left_behind(by_name, to_copy, destination)
    return to_copy, len(units) - len(to_copy), len(registered_units - done - units.keys()), left


def _left_behind(by_name: Mapping[str, list[CopyUnit]], to_copy: Sequence[CopyUnit], destination: Store) -> int:
    """How many samples that a record of the copy will name as rejects are stored in a source."""
    with_rejects = np.flatnonzero(destination.catalog.facts["rejects"]).tolist()
    records = {record.unit: record for record in (destination.commits()[number] for number in with_rejects)}
    for unit in to_copy:
        if unit.origin is not None and unit.origin[0].catalog.facts["rejects"][unit.origin[1]]:
            records[unit.name] = unit.record
    left: set[str] = set()
    for name, record in records.items():
        rejected = {reject.id for reject in record.rejects}
        left.update(*(rejected.intersection(unit.samples) for unit in by_name.get(name, ())))
    copied = (unit.samples for unit in to_copy) if left else ()
    return sum(name not in destination for name in left.difference(*copied))


def _lossy_units(destination: Store) -> dict[str, PendingUnit]:
    """Units of the destination of which a repair dropped samples."""
    pending = (item for digest in destination.inputs() for item in pending_units(destination, digest).values())
    return {item.name: item for item in pending if item.replaces is not None}


def _restores(units: Mapping[str, CopyUnit], lossy: PendingUnit) -> bool:
    """Whether a source has all samples of a unit that the destination holds, and some that it lost."""
    unit, record = units.get(lossy.name), lossy.replaces
    if unit is None or record is None:
        return False
    ids = set(unit.samples)
    return {entry.id for entry in record.samples} <= ids and bool(lost_samples(record) & ids)


def _bring_input(registered: RegisteredInput, destination: Store, digest: str) -> None:
    """Copy ``inputs/<digest>.parquet`` after checking it."""
    table = registered.table
    path = layout.input_path(digest)
    if destination.fs.put_if_absent(path, registered.fs.read(path)):
        return
    if not RegisteredInput(destination.fs, digest).table.equals(table):
        raise ConflictError(
            f"{destination.path}/{path} cuts this input into other units than {registered.fs.root} does",
            kind=Kind.INPUT_UNITS_DIFFER,
            hint="copy with --where 'tokens>0': samples are then cut into new units",
        )


@dataclass
class Copy:
    """A copy that is begun: ``units`` to bring over, how many units (with a filter: samples) are ``present`` already,
    ``unavailable`` units no source holds, ``notes`` on rounding and on what could not be compared."""

    destination: Store
    sources: tuple[Store, ...]
    units: list[CopyUnit]
    present: int
    unavailable: int
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(unit.count for unit in self.units)

    @property
    def verbatim(self) -> int:
        """Units that will be copied byte for byte."""
        return sum(self.is_verbatim(unit) for unit in self.units)

    def bytes_to_write(self) -> int:
        """What the units take in the destination, about: those that keep their codes what they take now, unless their
        container keeps rows once and the destination's does not."""
        kept, sums = 0, np.zeros(4, dtype=np.int64)
        for unit in self.units:
            if unit.origin is not None and self._keeps_size(unit):
                kept += int(unit.origin[0].catalog.facts["bytes_stored"][unit.origin[1]])
        for entry in self._encoded_anew():
            sums += (1, entry.tokens, entry.supervised, entry.final_rows)
        if not sums.any():
            return kept
        container = CONTAINERS[self.destination.manifest.container]
        return kept + room_for(Counts(*sums.tolist()), self.destination.capture, container).size_bytes

    def _encoded_anew(self) -> Iterator[SampleEntry]:
        """The samples whose bytes in the destination are not known before."""
        wanted = {name for unit in self.units for name in unit.gathered}
        numbers: dict[int, set[int]] = defaultdict(set)
        for unit in self.units:
            if unit.origin is not None and not self._keeps_size(unit):
                numbers[id(unit.origin[0])].add(unit.origin[1])
        # In one walk: records that are asked for one by one are each a request to object storage.
        for source in self.sources if wanted or numbers else ():
            for number, record in enumerate(source.commits()):
                is_whole = number in numbers[id(source)]
                for entry in record.samples:
                    if is_whole or entry.id in wanted:
                        wanted.discard(entry.id)
                        yield entry

    def is_verbatim(self, unit: CopyUnit) -> bool:
        """Whether a unit keeps its files: it keeps its codes and layers, and its container is the destination's."""
        container = self.destination.manifest.container
        if unit.origin is None or unit.origin[0].capture.aux_layers != self.destination.capture.aux_layers:
            return False
        return self.keeps_codes(unit) and unit.origin[0].manifest.container == container

    def _keeps_size(self, unit: CopyUnit) -> bool:
        """Whether what a unit takes now says what it will take: rows that stand once do so in one container alone."""
        if unit.origin is None or not self.keeps_codes(unit):
            return False
        return not CONTAINERS[unit.origin[0].manifest.container].shares_rows or self.is_verbatim(unit)

    def keeps_codes(self, unit: CopyUnit) -> bool:
        """Whether nothing of a unit is decoded: its samples are of one unit, coded as the destination codes."""
        if unit.origin is None:
            return unit.piece_of is not None
        return codes_fit(unit.origin[0], self.destination)


@dataclass
class CopyReport:
    """What a copy did."""

    units: int = 0
    samples: int = 0
    tokens: int = 0
    bytes_written: int = 0
    lost_races: int = 0


def open_copy(
    sources: Sequence[Store],
    location: str | Path | Filesystem,
    recipe: str | None = None,
    keep: Test | None = None,
    container: Container | None = None,
    same_target: bool = False,
    target: str | None = None,
    layers: Sequence[int] | None = None,
) -> Copy:
    """Create (or open) the destination, register what it will hold, and list the units it lacks.

    ``recipe`` and ``container`` None keep those of the destination when it exists, else those of the first source;
    ``same_target`` as in ``check_sources``, ``target`` and ``layers`` as in ``open_destination``. Raises ConflictError:
    ``output-exists``, the destination is a source; ``store-mismatch``, sources or destination hold another capture
    (codecs and container aside); ``input-units-differ``, the destination cuts an input into other units; ConfigError:
    ``selection-empty``; ``name-unknown``; ``final-unfit``: a source holds top tokens, and the destination is to hold
    the final hidden; CorruptionError: a target file or input of a source is damaged."""
    warnings = check_sources(sources, location, same_target, layers is not None)
    if keep is not None and not any(keep(record, entry) for source in sources for record, entry in source.entries):
        raise ConfigError("no sample of the sources passes the filter", kind=Kind.SELECTION_EMPTY)
    destination = open_destination(sources, location, recipe, container, target, layers)
    bring_calibration(sources, destination)
    left = 0
    if keep is None:
        units, present, unavailable, left = _units_as_cut(sources, destination)
    else:
        units, present, unavailable = units_of_selection(sources, destination, keep)
    copy = Copy(destination, tuple(sources), units, present, unavailable)
    if copy.verbatim < len(units):
        copy.notes = rounding_notes(sources, destination, recoding_equal=any(unit.is_gathered for unit in units))
    copy.notes += warnings
    if left:
        copy.notes.append(
            f"{plural(left, 'sample')} left behind: a unit comes from the source that holds most of it, others have "
            "what it lacks; the same command with --where 'tokens>0' brings them"
        )
    hint = f"`{shlex.join(['hiddenstore', 'advise', str(sources[0].path)])}` shows what other recipes take"
    if lacking := shortage(destination, copy.bytes_to_write(), "copy", hint):
        copy.notes.append(lacking)
    return copy


def run_copy(copy: Copy, advance: Callable[[CopyReport], bool] | None = None) -> CopyReport:
    """Bring the units over, one commit each. ``advance`` is called after each; returning False stops. Raises
    CorruptionError: bytes of a source disagree with their digest; FormatError: as ``copy_decoded``; what is committed
    stays."""
    report = CopyReport()
    makes_top_tokens = copy.destination.capture.holds_topk and not all(s.capture.holds_topk for s in copy.sources)
    head = copy.destination.head() if makes_top_tokens else None
    index_writer = IndexWriter(copy.destination.fs, copy.destination.catalog)
    for unit in copy.units:
        if unit.origin is not None and copy.is_verbatim(unit):
            commit = copy_verbatim(unit.origin[0], unit.record, copy.destination, unit.revision)
        elif unit.origin is not None and copy.keeps_codes(unit):
            commit = copy_codes(unit.origin[0], unit.record, copy.destination, unit.revision)
        elif unit.piece_of is not None:
            commit = copy_piece(unit.piece_of, unit, copy.destination)
        else:
            commit = copy_decoded(copy.destination, unit, head)
        report.units += 1
        if commit is None:
            report.lost_races += 1
        else:
            report.samples += len(commit.samples)
            report.tokens += commit.tokens
            report.bytes_written += commit.bytes_stored
            index_writer.add(unit.name, unit.revision)
        if advance is not None and not advance(report):
            break
    index_writer.close()
    return report


_COMPARED = ("model_type", "num_layers", "config_sha256", "checkpoint_sha256")


def bundled_blocks(stores: Sequence[Store], capture: CaptureSpec, target: str | None) -> dict[str, bytes]:
    """``blocks.safetensors`` for a copy: of the first store that keeps the same, else of the checkpoint ``target``.
    Raises ConfigError: ``blocks-unsupported``: no store keeps them and no target is named; or as ``block_files``.
    ``calibration-missing``: nothing shows that it is the store's target; FormatError: ``target-mismatch``;
    CaptureError: ``cross-check``: its blocks do not bring back what was captured."""
    if not capture.blocks:
        return {}
    for store in stores:
        if store.capture.blocks == capture.blocks:
            return {BLOCKS_FILE: store.target_file(BLOCKS_FILE)}
    identity = capture.target
    if target is None:
        problem = f"{stores[0].path} does not keep the blocks of its target that rebuild states"
        raise ConfigError(problem, kind=Kind.BLOCKS_UNSUPPORTED, hint=_way_out(identity))
    folder = open_target(target)
    found = folder.identity(identity.hidden_size, identity.vocab_size, checkpoint_sha256=checkpoint_sha256(folder))
    for member in _COMPARED:
        expected, actual = getattr(identity, member), getattr(found, member)
        if expected != actual and None not in (expected, actual):
            raise FormatError(
                f"target {folder.label} is not the one of {stores[0].path}: {member} is {actual}, expected {expected}",
                kind=Kind.TARGET_MISMATCH,
                hint=_way_out(identity),
            )
    files = block_files(folder, capture.blocks, identity.dtype)
    rebuilder = _rebuilder(stores[0], capture, files)
    for store in stores:
        states = read_slice(store.fs, store.capture)
        if states is None or any(entry.id not in store for entry in states.samples):
            continue
        if not set(capture.aux_layers) <= set(store.capture.aux_layers):
            continue
        kept = [store.capture.aux_layers.index(layer) for layer in capture.aux_layers]
        states = replace(states, aux=states.aux[kept])
        if rebuilder.require_close(states, [store.sample(entry.id) for entry in states.samples]):
            return files
    if None in (identity.checkpoint_sha256, found.checkpoint_sha256):
        raise ConfigError(
            f"nothing shows that {folder.label} is the target of {stores[0].path}: it has no digest of the checkpoint "
            "and no slice of captured states",
            kind=Kind.CALIBRATION_MISSING,
            hint="--recipe compact, which needs no blocks",
        )
    return files


def rebuilder_for(store: Store, target: str | None) -> Rebuilder | None:
    """What would rebuild the states of a copy of ``store`` in the recipe ``rebuilt``; raises as ``bundled_blocks``.

    None where neither it nor ``target`` has the blocks.
    """
    capture = store.capture
    if target is None and not capture.states:
        return None
    rebuilt = recoded(capture, get_recipe(REBUILT))
    return _rebuilder(store, rebuilt, bundled_blocks([store], rebuilt, target))


def _way_out(identity: TargetIdentity) -> str:
    checkpoint = f"{shlex.join(target_words(identity))}, the checkpoint it was captured from"
    return "--recipe compact: no checkpoint holds an adapter's blocks" if has_adapter(identity) else checkpoint


def _rebuilder(store: Store, capture: CaptureSpec, files: Mapping[str, bytes]) -> Rebuilder:
    blocks = TargetBlocks.from_bytes(store.target_file(CONFIG_FILE), files.get(BLOCKS_FILE))
    return Rebuilder(capture, store.head(), blocks)

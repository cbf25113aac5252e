"""What a collect will need, from the counts in data.json, its first tokens and the target's config; nothing is run or
written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from collectors.targets.layers import LayerChoice
from hiddenstore.codecs import FITTED, get_layout
from hiddenstore.codecs.recipes import RECIPES, get_recipe, recipe_name
from hiddenstore.console.text import plural
from hiddenstore.errors import ConfigError
from hiddenstore.files.layout import parse_commit
from hiddenstore.fs import open_filesystem
from hiddenstore.inputs import PreparedInput, RegisteredInput
from hiddenstore.inspect.forecast import Counts, room_for
from hiddenstore.inspect.forecast import shortage as room_lacking
from hiddenstore.segments import CONTAINERS, default_container
from hiddenstore.segments.base import Container, unit_tokens
from hiddenstore.segments.prefixes import PrefixTree, key_of
from hiddenstore.store import Store
from hiddenstore.targets.blocks import block_parameters, require_blocks
from hiddenstore.targets.calibration import slice_tokens
from hiddenstore.targets.folder import TargetFolder
from hiddenstore.writer import PendingUnit
from schemas.capture import REBUILT, TOPK, CaptureSpec, Codecs, FinalMode, not_rebuildable
from schemas.prepared import PreparedData

_TOKENS_READ = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """One recipe: bytes of segments, segments, and files in them; the bytes beside them, and of all together.

    ``bytes_target`` is embeddings, LM head, what the codec is fitted to and the blocks that rebuild states, which a
    trainer holds in memory; the blocks take ``rebuild_flops`` a token, 0 where every state is stored.
    """

    recipe: str
    bytes_stored: int
    bytes_per_token: float
    segments: int
    files: int
    bytes_target: int
    bytes_calibration: int
    rebuild_flops: int

    @property
    def bytes_on_disk(self) -> int:
        return self.bytes_stored + self.bytes_target + self.bytes_calibration


@dataclass(frozen=True)
class Plan:
    """Estimates for one input and capture; ``hours`` is None without a rate, ``bytes_free`` where there is no end.
    ``shared`` is the share of the tokens that lie in prefixes which samples of a unit have in common."""

    info: PreparedData
    choice: LayerChoice
    recipe: str
    estimates: tuple[Estimate, ...]
    bytes_raw: int
    bytes_free: int | None
    hours: float | None
    container: str
    shared: float

    @property
    def fitting(self) -> list[str]:
        """Recipes for which there is room."""
        return [row.recipe for row in self.estimates if self.bytes_free is None or row.bytes_on_disk < self.bytes_free]


def make_plan(
    prepared: PreparedInput,
    folder: TargetFolder,
    choice: LayerChoice,
    recipe: str,
    location: str,
    rate: float | None,
    container: str | None = None,
) -> Plan:
    """Every recipe that serves the drafters, the largest first; ``rate``: tokens per second that collect reached."""
    info, codecs, fs = prepared.info, get_recipe(recipe), open_filesystem(location)
    container = container or default_container(fs)
    capture = _capture(folder, choice, codecs)
    _require_blocks(folder, capture)
    listed = {name: get_recipe(name) for name in RECIPES} | {recipe_name(codecs): codecs}
    usable = {
        name: item
        for name, item in listed.items()
        if not (choice.reads_final and item.final == TOPK)
        and (item.final != REBUILT or item == codecs or _can_rebuild(folder, capture))
    }
    shared, lengths = read_first(prepared, capture)
    counts = _counts(info, capture, shared if CONTAINERS[container].shares_rows else 0.0, lengths)
    rows = sorted(
        (_estimate(info, counts, capture, *item, CONTAINERS[container], folder.config) for item in usable.items()),
        key=lambda row: -row.bytes_stored,
    )
    hours = None if rate is None else info.tokens / rate / 3600
    raw = raw_bytes(info, capture)
    return Plan(info, choice, recipe, tuple(rows), raw, fs.free_bytes(), hours, container, shared)


def read_first(prepared: PreparedInput, capture: CaptureSpec) -> tuple[float, list[int]]:
    """Of the first million tokens: the share in prefixes that ``zarr-shared`` stores once, and the lengths of their
    samples."""
    layout, shared, lengths = get_layout(capture.codecs.aux), 0, list[int]()
    for unit in prepared.units(unit_tokens(capture)):
        tree = PrefixTree()
        for sample in unit.samples:
            lengths.append(sample.tokens)
            shared += tree.add(key_of(sample.input_ids, sample.loss_mask, sample.images, layout))[1]
        if sum(lengths) >= _TOKENS_READ:
            break
    return shared / max(1, sum(lengths)), lengths


def _can_rebuild(folder: TargetFolder, capture: CaptureSpec) -> bool:
    if not_rebuildable(capture.aux_layers, folder.num_layers) is not None:
        return False
    try:
        _require_blocks(folder, capture.with_codecs(get_recipe(REBUILT)))
    except ConfigError:
        return False
    return True


def _require_blocks(folder: TargetFolder, capture: CaptureSpec) -> None:
    require_blocks(folder, capture.blocks, _value_bytes(folder.config))


def shortage(store: Store, prepared: PreparedInput, pending: Mapping[str, int], job: str = "collect") -> str | None:
    """A warning where the tokens of ``pending`` units take more than is free beside a local store; None if they fit."""
    container, info = CONTAINERS[store.manifest.container], prepared.info

    def lacking(shared: float = 0.0) -> str | None:
        room = room_for(_counts(info, store.capture, shared), store.capture, container)
        needed = room.size_bytes * sum(pending.values()) // max(1, info.tokens)
        return room_lacking(store, needed, job, "`hiddenstore plan` shows what fits")

    found = lacking()
    if found and container.shares_rows:
        # The samples are read only where what they have in common decides.
        found = lacking(read_first(prepared, store.capture)[0])
    return found and f"warning: {found}"


def repetition(store: Store, digest: str, pending: Mapping[str, PendingUnit]) -> str | None:
    """A warning where samples of ``pending`` units of a registered input came with another input; None without one."""
    registered = RegisteredInput(store.fs, digest)
    units = (parsed.unit for name in store.catalog.names if (parsed := parse_commit(name)))
    # Ids are read only of a store of several inputs: at ten million samples they take seconds.
    if not pending or set(units) <= set(registered.units):
        return None
    table = registered.table
    names = [name for name, unit in pending.items() if unit.replaces is None]
    left = table.filter(pc.is_in(table["unit"], pa.array(names, pa.string())))
    tokens = dict(zip(left["sample_id"].to_pylist(), left["tokens"].to_pylist(), strict=True))
    doubles = tokens.keys() & store.sample_ids
    if not doubles:
        return None
    return (
        f"warning: {store.path} holds {len(doubles):,} of these {plural(len(tokens), 'sample')} already, by another "
        f"input: their {sum(map(tokens.__getitem__, doubles)):,} tokens are captured and stored once more, and read "
        "once; of an input that has grown, prepare what is new alone"
    )


def raw_bytes(info: PreparedData, capture: CaptureSpec) -> int:
    """bf16 of every aux layer and of the final hidden at every token: what a dump of states takes."""
    return info.tokens * (len(capture.aux_layers) + 1) * capture.target.hidden_size * 2


def _capture(folder: TargetFolder, choice: LayerChoice, codecs: Codecs) -> CaptureSpec:
    """A capture spec without weights; it goes nowhere."""
    identity = folder.identity(folder.config.hidden_size, folder.config.vocab_size)
    return CaptureSpec(
        target=identity, aux_layers=choice.aux_layers, final=choice.final, final_norm="pre_norm", codecs=codecs
    )


def _estimate(
    info: PreparedData,
    counts: Counts,
    capture: CaptureSpec,
    recipe: str,
    codecs: Codecs,
    container: Container,
    config: Any,
) -> Estimate:
    capture = capture.with_codecs(codecs)
    width = capture.target.hidden_size
    room = room_for(counts, capture, container)
    blocks = block_parameters(config, capture.blocks)
    head = capture.target.vocab_size * width * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    fitted = FITTED[codecs.aux].fit_bytes(width) * len(capture.stored_layers) if codecs.aux in FITTED else 0
    slice_bytes = 2 * width * slice_tokens(capture) * (len(capture.aux_layers) + (capture.final != "none"))
    return Estimate(
        recipe,
        room.size_bytes,
        room.size_bytes / max(1, info.tokens),
        room.segments,
        room.files,
        bytes_target=_value_bytes(config) * (head + blocks) + fitted,
        bytes_calibration=min(slice_bytes, raw_bytes(info, capture)),
        rebuild_flops=2 * block_parameters(config, capture.blocks, a_token=True),
    )


def _counts(info: PreparedData, capture: CaptureSpec, shared: float = 0.0, lengths: Sequence[int] = ()) -> Counts:
    rows = final_rows(info, capture.final)
    return Counts(info.samples, info.tokens, info.supervised_tokens, rows, round(shared * info.tokens), lengths=lengths)


def _value_bytes(config: Any) -> int:
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return int(getattr(dtype, "itemsize", 2))


def final_rows(info: PreparedData, final: FinalMode) -> int:
    """Rows of the final hidden; ``supervised`` holds one row more on either side of each answer, of which older data
    does not say how many there are: one a sample is taken."""
    if final == "none":
        return 0
    if final == "all":
        return info.tokens
    return min(info.tokens, info.supervised_tokens + 2 * info.samples) if info.final_rows is None else info.final_rows

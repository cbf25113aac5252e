"""The words of export, import and serve: an engine, what it reads of a drafter by version, and what a drafter brings.

Nothing here needs torch, so that tables can be asked without loading a drafter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import InvalidVersion, Version

from hiddenstore.errors import ConfigError, Kind
from schemas.capture import TargetIdentity
from schemas.layers import LayerConvention

if TYPE_CHECKING:
    from torch import Tensor

    from hiddenstore.targets.head import HeadBundle
    from trainer.vocab import DraftVocab

Proof = Literal["ran", "names"]
Tensors = dict[str, "Tensor"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is exported: a drafter, its draft vocabulary, and the target it drafts for.

    ``model`` is a `trainer.drafters.base.Drafter`. ``draft_len``: how many tokens it was trained to draft, None for
    what its shape says. ``target_name``: hub id or path of the target for the formats that name it,
    ``target_architectures`` those of its ``config.json``.
    """

    model: Any
    vocab: "DraftVocab"
    head: "HeadBundle"
    identity: TargetIdentity
    draft_len: int | None = None
    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """The drafter's settings, a `trainer.config.DrafterConfig`."""
        return self.model.config


@dataclass(frozen=True, eq=False)
class Files:
    """Contents of ``config.json`` and ``model.safetensors``."""

    config: dict[str, Any]
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Target:
    """The target a published checkpoint is read for; ``convention`` of its layer ids where it leaves that open."""

    head: "HeadBundle"
    vocab: "DraftVocab"
    num_layers: int
    convention: LayerConvention | None


@dataclass(frozen=True)
class Lack:
    """Something a drafter may have that an engine does not read: ``of`` says whether a checkpoint has it."""

    of: Callable[[Checkpoint], bool]
    reason: str
    fix: str | None = None


@dataclass(frozen=True)
class Quirks:
    """How an engine's file of a drafter differs from the plain one.

    ``fc_bias``: its EAGLE-1 has one. Of EAGLE-3: ``top_level_ids``, layer ids are read there as well; ``first_layer``,
    its name of layer 0; ``later_norm``, its name of the input norm of layers after that; ``stacked``, several layers
    are ``midlayer.0``, ``midlayer.1`` …; ``t2d``, it knows that tensor; ``embeddings``, it needs them in the file.
    ``wrap``: puts config.json, for a checkpoint and a draft length, into another.
    """

    fc_bias: bool = False
    top_level_ids: bool = False
    first_layer: str = "midlayer"
    later_norm: str = "input_layernorm"
    stacked: bool = False
    t2d: bool = True
    embeddings: bool = False
    wrap: Callable[[dict[str, Any], Checkpoint, int], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Reads:
    """What an engine reads of one drafter from version ``since`` until before ``before``.

    ``architecture``: its name in config.json. ``method``: what the engine calls drafting with it. ``source``: what the
    names were read from. ``ran``: the version in which a real engine ran the exported file; in any other, names and
    shapes are compared with a restatement of its published loader. ``warn``: what is known to go wrong in silence with
    a published ``config.json``.
    """

    architecture: str
    method: str
    source: str
    ran: str | None = None
    since: str | None = None
    before: str | None = None
    lacks: tuple[Lack, ...] = ()
    quirks: Quirks = Quirks()
    warn: Callable[[Mapping[str, Any]], str | None] = lambda config: None

    def same_file(self, other: "Row | None") -> bool:
        """Whether a file that was written for this row is one for the other."""
        if not isinstance(other, Reads):
            return False
        return (self.architecture, self.lacks, self.quirks) == (other.architecture, other.lacks, other.quirks)

    def preceded_by(self, reason: str, nearest: str) -> "tuple[Row, ...]":
        """This row, after the one that refuses whatever version comes before it."""
        return Refused(reason, nearest, before=self.since), self


@dataclass(frozen=True)
class Refused:
    """Why an engine cannot take a drafter over a range of versions, and the nearest thing that works."""

    reason: str
    nearest: str
    since: str | None = None
    before: str | None = None


Row = Reads | Refused


@dataclass(frozen=True)
class Engine:
    """One engine: its version where none is named, and the convention of its layer ids."""

    name: str
    title: str
    version: str
    convention: LayerConvention


@dataclass(frozen=True, kw_only=True)
class DrafterExport:
    """Everything that export, import and serve know of one kind of drafter. Nothing has a default: a missing fact is an
    error.

    titles: the words it goes by and what a person calls each; several where settings make it another format. word:
    which of them, by its settings or a ``config.json``.

    rows: by engine and word, what is read, by version; an engine that is not named has no loader.

    architectures: pattern of the published names of its class. signs: whether a ``config.json`` and tensors (none where
    only the former is at hand) are surely its own, whatever its class is called. longest: most tokens of one draft, by
    ``config.json``; None for any number. ids_follow_engine: its layer ids are in each engine's own numbering, and
    nothing else in a file says whose. has_positions: it rotates by position, so that rope can be stretched.

    files: what is written for an engine's row, in a dtype. our_name: a published tensor's name here. read: settings and
    fp32 weights by published ``config.json`` and fp32 tensors under our names; KeyError where something is missing,
    ValueError where something cannot be had here. probe: logits [rows, U] of a model over fixed random states.
    """

    drafter: str
    titles: Mapping[str, str]
    word: Callable[[Mapping[str, Any]], str]
    rows: Mapping[tuple[str, str], tuple[Row, ...]]
    architectures: str
    signs: Callable[[Mapping[str, Any], Tensors], bool]
    longest: Callable[[Mapping[str, Any]], int | None]
    ids_follow_engine: bool
    has_positions: bool
    files: Callable[[Checkpoint, Engine, Reads, str], Files]
    our_name: Callable[[str], str]
    read: Callable[[Mapping[str, Any], Tensors, Target], tuple[dict[str, Any], Tensors]]
    probe: Callable[[Any, Checkpoint], "Tensor"]


@dataclass(frozen=True)
class Support:
    """Whether an engine of a version takes a drafter. ``reason`` and ``nearest`` where it does not."""

    engine: str
    version: str
    drafter: str
    ok: bool
    proof: Proof | None = None
    reason: str | None = None
    nearest: str | None = None
    source: str | None = None


def parse_version(text: str) -> Version:
    """An engine's version, as ``1.3.0rc12``.

    Raises:
        ConfigError: ``engine-version``, no version.
    """
    try:
        return Version(text)
    except InvalidVersion as error:
        raise ConfigError(
            f"{text!r} is no version", kind=Kind.ENGINE_VERSION, hint="--engine-version 1.3.0rc12"
        ) from error


def is_within(version: str, since: str | None, before: str | None) -> bool:
    """Whether ``since <= version < before``; None leaves a side open. A candidate counts to its release.

    ``1.3.0rc12`` has what came with 1.3.
    """
    release = Version(parse_version(version).base_version)
    return (since is None or release >= Version(since)) and (before is None or release < Version(before))

"""The words of the export tables: an engine, what it reads of a drafter over a range of versions, and what it lacks.

Nothing here needs torch, so that the table can be asked without loading a drafter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from schemas.capture import TargetIdentity
from schemas.layers import LayerConvention

if TYPE_CHECKING:
    from hiddenstore.head import HeadBundle
    from trainer.config import DrafterConfig
    from trainer.drafters.base import Drafter
    from trainer.vocab import DraftVocab

Proof = Literal["ran", "names"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is exported: a drafter, its draft vocabulary, and the target it drafts for.

    ``draft_len``: how many tokens it was trained to draft, None for what its shape says. ``target_name``: hub id or
    path of the target for the formats that name it, ``target_architectures`` those of its ``config.json``.
    """

    model: "Drafter"
    vocab: "DraftVocab"
    head: "HeadBundle"
    identity: TargetIdentity
    draft_len: int | None = None
    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()

    @property
    def config(self) -> "DrafterConfig":
        return self.model.config


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

    ``architecture``: its name in config.json. ``ran``: the version in which a real engine ran the exported file; in any
    other, names and shapes are compared with a restatement of its published loader. ``source``: what the names were
    read from.
    """

    architecture: str
    source: str
    ran: str | None = None
    since: str | None = None
    before: str | None = None
    lacks: tuple[Lack, ...] = ()
    quirks: Quirks = Quirks()


@dataclass(frozen=True)
class Refused:
    """Why an engine cannot take a drafter over a range of versions, and the nearest thing that works."""

    reason: str
    nearest: str
    since: str | None = None
    before: str | None = None


@dataclass(frozen=True)
class Engine:
    """One engine: its version where none is named, the convention of its layer ids, and rows by drafter."""

    name: str
    title: str
    version: str
    convention: LayerConvention
    drafters: Mapping[str, tuple[Reads | Refused, ...]]


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

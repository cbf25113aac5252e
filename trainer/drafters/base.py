"""What every drafter gives the trainer: settings, a model, an objective, and its use over recorded text and live.

Shapes: T tokens of a pack or of one forward, L aux layers, D target width, K depths (TTT steps, block slots or heads),
U draft vocabulary, n rows of logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError
from hiddenstore.head import HeadBundle
from schemas.capture import NormState
from trainer.config import DrafterConfig, LossConfig
from trainer.objectives.losses import StepLosses
from trainer.vocab import DraftVocab

if TYPE_CHECKING:
    from trainer.drafting.tree import LiveTree

FinalRows = Literal["none", "supervised", "all"]


@dataclass(frozen=True)
class Needs:
    """What is read of a store: aux layers, and at which rows the final hidden. ``hidden``: the final hidden itself, so
    that a top-k teacher does not do."""

    aux_layers: tuple[int, ...]
    final: FinalRows
    hidden: bool = False


@dataclass(frozen=True, eq=False)
class TargetSide:
    """What a drafter is trained and used beside: head bundle, draft vocabulary, norm state of the final hidden."""

    head: HeadBundle
    vocab: DraftVocab
    final_norm: NormState = "pre_norm"

    def normed(self, final: Tensor) -> Tensor:
        """Final hidden after the final norm [n, D], in fp32 or the bundle's own dtype."""
        return self.head.norm(final) if self.final_norm == "pre_norm" else final


class Drafter(nn.Module):
    """A drafter's weights. ``state_dict`` is what a checkpoint holds; what it borrows from the target is not in it.

    ``moment``: seed and number of the step in progress. Whatever a step draws at random is a function of these and the
    sample ids, hence the same after a resume and under any number of ranks. ``recompute``: layers are made again in the
    backward (`trainer.scale.recompute`).
    """

    config: DrafterConfig
    moment: tuple[int, int] = (0, 0)
    recompute: bool = False

    def borrow(self, head: HeadBundle) -> None:
        """Read frozen tables of the target from this bundle; called again whenever the drafter moves."""


class Work(Protocol):
    """One pack with its teacher read."""

    @property
    def batch(self) -> PackedBatch:
        """The pack."""

    @property
    def counts(self) -> Tensor:
        """Taught slots per depth: int64 [K]."""

    @property
    def open(self) -> Tensor:
        """Slots the mask admits per depth, before any is dropped: int64 [K]."""


W = TypeVar("W", bound=Work)


class Objective(Protocol[W]):
    """What the loop optimises."""

    @property
    def depths(self) -> int:
        """K: how many depths losses and hits are reported for."""

    def plan(self, batch: PackedBatch) -> W:
        """Read the teacher and choose the slots; nothing here depends on the weights."""

    def divisors(self, *works: W) -> Tensor:
        """What the sums are divided by, over these packs: fp32, of any one shape. Ranks add theirs."""

    def losses(self, work: W, divisors: Tensor) -> StepLosses:
        """This pack's share of the loss; over all packs and ranks the shares add up."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What the target has just verified. aux bf16 [L, T, D] and final bf16 [T, D], before the final norm, of T tokens;
    ``next_ids`` [T]: the token after each, the last of which the target has not read."""

    aux: Tensor
    final: Tensor
    next_ids: Sequence[int]


Pick = Callable[[Tensor], Tensor]
"""Draft logits [n, U] of n consecutive proposals to the proposed draft ids int64 [n]: the argmax, or a draw."""


def most_probable(logits: Tensor) -> Tensor:
    """The greedy ``Pick``."""
    return logits.argmax(-1)


class Live(Protocol):
    """A drafter in use on one text; holds its own KV cache."""

    def reset(self) -> None:
        """Forget the text."""

    def propose(self, seen: Seen, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """Up to ``draft_len`` target ids that would follow ``seen.next_ids[-1]``.

        ``pick`` is called on the logits of every proposal, in order.
        """


@dataclass(frozen=True)
class TargetFacts:
    """What defaults follow from: ``shape`` is the text part of the target's ``config.json``, ``held`` the aux layers of
    the store; ``file`` gives the bytes of a file of its ``target/``, None where it holds none."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    shape: Mapping[str, Any]
    held: tuple[int, ...]
    file: Callable[[str], bytes | None] = lambda name: None


M = TypeVar("M", bound=Drafter)
C = TypeVar("C", bound=DrafterConfig)
S = TypeVar("S", bound=LossConfig)


class DrafterKind(ABC, Generic[M, C, S]):
    """One kind of drafter. ``layers``: the ``--layers`` word that captures what it reads. ``splits_context``: its
    objective takes a rank's share of a pack (`trainer.scale.context`)."""

    name: str
    layers: str
    splits_context: bool = False
    config: type[C]
    loss: type[S]

    @abstractmethod
    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """Defaults by section that differ from the common ones (`trainer.derived`)."""

    @abstractmethod
    def needs(self, config: C, loss: S | None) -> Needs:
        """What training reads, or with ``loss`` None what proposing over recorded text reads."""

    @abstractmethod
    def build(self, config: C, side: TargetSide, seed: int) -> M:
        """A fresh drafter on the CPU, random from ``seed`` alone, that has borrowed from ``side.head``."""

    @abstractmethod
    def objective(self, model: M, side: TargetSide, loss: S) -> Objective[Any]:
        """What the loop optimises."""

    @abstractmethod
    def hits(self, model: M, side: TargetSide, pack: PackedBatch, draft_len: int) -> Tensor:
        """How many proposals drafted after each token of a pack equal the text: int64 [T], by the newest token.

        Zero where no draft may start (`trainer.drafting.acceptance.drafting_positions`).
        """

    def longest_draft(self, config: C) -> int | None:
        """Most tokens of one draft; None for any number."""
        return None

    @abstractmethod
    def live(self, model: M, side: TargetSide) -> Live:
        """The drafter beside a live target."""

    def tree(self, model: M, side: TargetSide, width: int) -> "LiveTree":
        """The drafter beside a live target, drafting trees.

        Raises:
            ConfigError: this kind drafts no trees.
        """
        raise ConfigError(f"{self.name} drafts no trees: leave --tree out", kind="no-tree")


@dataclass(frozen=True, eq=False)
class DrafterInUse:
    """A drafter with its surroundings, for proposing; all tensors on one device."""

    kind: DrafterKind[Any, Any, Any]
    model: Drafter
    side: TargetSide

    @property
    def config(self) -> DrafterConfig:
        return self.model.config

    @property
    def needs(self) -> Needs:
        return self.kind.needs(self.model.config, None)

    def require_length(self, tokens: int) -> None:
        """Refuse drafts that this drafter cannot make.

        Raises:
            ConfigError: ``draft-len``: it proposes fewer than ``tokens`` at a time.
        """
        longest = self.kind.longest_draft(self.config)
        if longest is not None and tokens > longest:
            raise ConfigError(
                f"this {self.kind.name} drafter proposes at most {longest} tokens at a time, not {tokens}",
                kind="draft-len",
                hint=f"--draft-len {longest}",
            )

    @torch.no_grad()
    def hits(self, pack: PackedBatch, draft_len: int) -> Tensor:
        """See `DrafterKind.hits`."""
        return self.kind.hits(self.model, self.side, pack, draft_len)

    def live(self) -> Live:
        """See `DrafterKind.live`."""
        return self.kind.live(self.model, self.side)

    def tree(self, width: int) -> "LiveTree":
        """See `DrafterKind.tree`."""
        return self.kind.tree(self.model, self.side, width)

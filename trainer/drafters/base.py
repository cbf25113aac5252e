"""What every drafter gives the trainer: settings, a model, an objective, and its use over recorded text and live.

Shapes: T tokens of a pack or of one forward, L aux layers, D target width, K depths (TTT steps, block slots or heads),
U draft vocabulary, n rows of logits.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets import LAYER_RULES
from hiddenstore.targets.head import HeadBundle
from schemas.capture import NormState
from trainer.config import DrafterConfig, LossConfig
from trainer.formats.base import DrafterExport
from trainer.losses.fused_head import StepLosses
from trainer.losses.teacher import TargetInterface
from trainer.vocab import DraftVocab

FinalRows = Literal["none", "supervised", "all"]


@dataclass(frozen=True)
class Needs:
    """What is read of a store: aux layers, and at which rows the final hidden. ``hidden``: the final hidden itself, so
    that a top-k teacher does not do."""

    aux_layers: tuple[int, ...]
    final: FinalRows
    hidden: bool = False


class Drafter(nn.Module):
    """A drafter's weights. ``state_dict`` is what a checkpoint stores; tables of the target are not in it. ``rng_key``:
    seed and number of the step in progress, in every validation the same pair. Whatever is drawn at random is a
    function of these and the sample ids, hence the same after a resume and under any number of ranks. ``progress``: the
    part of the run's steps that is done, 1 in every validation. ``recompute``: layers are made again in the backward
    (`trainer.drafters.blocks.recomputed`)."""

    config: DrafterConfig
    rng_key: tuple[int, int] = (0, 0)
    progress: float = 1.0
    recompute: bool = False

    def tie_weights(self, head: HeadBundle) -> None:
        """Read frozen tables of the target from this bundle; called again whenever the drafter moves to a device."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw fresh weights on the CPU from ``seed`` alone; the generators of the process stay as they were."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed those of every GPU too.
        torch.default_generator.manual_seed(seed)
        yield


def sample_generator(rng_key: tuple[int, int], sample: str, device: torch.device) -> torch.Generator:
    """A generator for one sample at one step, see `Drafter`."""
    digest = hashlib.blake2b(f"{rng_key[0]}:{rng_key[1]}:{sample}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def rms_weight(head: HeadBundle) -> Tensor:
    """Weight of the target's final norm as `trainer.drafters.blocks.RMSNorm` multiplies it: fp32 [D], on the CPU."""
    return head.norm_weight.float().cpu() + float(head.spec.norm_flavour == "rms_plus_one")


START_NATS = 0.25
"""By about how much a fresh drafter's loss may exceed that of equal probabilities. Behind the norm and the head of
SmolLM2 as they are, random states say wrong tokens with confidence, 7 nats above it."""
FROZEN_START_NATS = 3.0
"""The same where the head is not trained, and only the norm can make its logits loud again, a little a step. SmolLM2,
100 steps, one seed, started with the target's norm as it is, at 3 and at 0.25 nats: DSpark under KL 1.242, 1.268, 1.250
(benchmarks/results/rate-2026-11-24.md)."""
QUIET_ROWS = 4096
"""Rows of a head that are looked at: enough to know their variance."""


def quiet_scale(norm: Tensor, rows: Tensor, nats: float = START_NATS) -> float:
    """What the weight of a fresh drafter's final norm [H] is multiplied by, before a head of ``rows`` [U, H], to start
    at most about ``nats`` above ln U; 1 where it does so anyway."""
    # A state of random directions: logits of variance v cost v/2 nats. What all rows share moves every logit alike.
    rows = rows[:: -(-len(rows) // QUIET_ROWS)].float().cpu()
    variance = float(((rows - rows.mean(0)) * norm).square().sum(1).mean())
    return min(1.0, (2 * nats / variance) ** 0.5) if variance else 1.0


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One pack with its teacher read. Slots per depth, int64 [K]: ``open`` those the mask admits, before any is
    dropped, ``counts`` those taught."""

    batch: PackedBatch
    open: Tensor
    counts: Tensor


W = TypeVar("W", bound=LossInputs)


class Objective(Protocol[W]):
    """What the loop optimises."""

    @property
    def depths(self) -> int:
        """K: how many depths losses and hits are reported for."""

    def prepare(self, batch: PackedBatch) -> W:
        """Read the teacher and choose the slots, which does not depend on the weights."""

    def denominators(self, *packs: W) -> Tensor:
        """What sums over these packs are divided by: fp32, of any one shape. Those of all ranks are added up."""

    def losses(self, inputs: W, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch."""


@dataclass(frozen=True, eq=False)
class Verified:
    """What the target has just verified. aux bf16 [L, T, D] and final bf16 [T, D], on the side of the final norm that
    ``final_norm`` says, of T tokens; ``next_ids`` [T]: the token after each, the last of which the target has not
    read."""

    aux: Tensor
    final: Tensor
    next_ids: Sequence[int]
    final_norm: NormState = "pre_norm"


Pick = Callable[[Tensor], Tensor]
"""Draft logits [n, U] of n consecutive proposals to the proposed draft ids int64 [n]: the argmax, or a draw."""


def most_probable(logits: Tensor) -> Tensor:
    """The greedy ``Pick``."""
    return logits.argmax(-1)


class Live(Protocol):
    """A drafter in use on one text; holds its own KV cache."""

    def reset(self) -> None:
        """Forget the text."""

    def propose(self, verified: Verified, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """Up to ``draft_len`` target ids that would follow ``verified.next_ids[-1]``. ``pick`` is called on the logits
        of every proposal, in order."""


@dataclass(frozen=True)
class DraftTree:
    """Proposed target ids and the index of each one's parent, -1 for the root, which is the newest known token; parents
    come before their children."""

    tokens: list[int]
    parents: list[int]

    def depths(self) -> list[int]:
        """Distance of each node from the root, 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def visible(self) -> Tensor:
        """Which nodes each node follows, itself included: bool [nodes, nodes]."""
        verified = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                verified[node] |= verified[parent]
        return verified

    def follow(self, parent: int, token: int) -> int | None:
        """The child of ``parent`` that proposes ``token``."""
        pairs = zip(self.tokens, self.parents, strict=True)
        return next((node for node, pair in enumerate(pairs) if pair == (token, parent)), None)


def require_width(config: DrafterConfig, target: TargetInterface, why: str) -> None:
    """Refuse a drafter of another width than its target. Raises ConfigError: ``drafter-shape``."""
    width = target.head.hidden_size
    if config.hidden_size != width:
        problem = f"{why}: drafter.hidden_size is {config.hidden_size}, the target's is {width}"
        raise ConfigError(problem, kind=Kind.DRAFTER_SHAPE, hint=f"drafter.hidden_size={width}")


def require_every_token(vocab: DraftVocab, what: str) -> None:
    """Refuse a draft vocabulary that is not the target's; ``what`` a drafter does with all tokens. Raises ConfigError:
    ``option-invalid``."""
    if not vocab.is_full:
        raise ConfigError(
            f"{what} all tokens of the target, {vocab.target_size}, so drafter.vocab_size cannot be {vocab.size}: no "
            "engine reads it with fewer",
            kind=Kind.OPTION_INVALID,
            hint=f"drafter.vocab_size={vocab.target_size}",
        )


class LiveTree(Protocol):
    """A drafter in use on one text that drafts trees; holds its own KV cache."""

    def reset(self) -> None:
        """Forget the text."""

    def grow(self, verified: Verified, depth: int) -> DraftTree:
        """The tree of at most ``depth`` levels below ``verified.next_ids[-1]``."""


@dataclass(frozen=True)
class TargetFacts:
    """What defaults follow from: ``shape`` is the text part of the target's ``config.json``, ``aux_layers`` those of
    the store; ``file`` gives the bytes of a file of its ``target/``, None where it holds none."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    shape: Mapping[str, Any]
    aux_layers: tuple[int, ...]
    file: Callable[[str], bytes | None] = lambda name: None


M = TypeVar("M", bound=Drafter)
C = TypeVar("C", bound=DrafterConfig)
S = TypeVar("S", bound=LossConfig)


class DrafterKind(ABC, Generic[M, C, S]):
    """One kind of drafter. ``layers``: its rule in ``hiddenstore.targets``, which is the ``--layers`` word
    that captures what it reads. ``takes_images``: it is trained and served beside images. ``begins_as_the_target_s``: a
    part of the target itself, never trained from random weights. ``export``: what engines, imports and servers know of
    it."""

    name: str
    layers: str
    takes_images: bool = False
    begins_as_the_target_s: bool = False
    config: type[C]
    loss: type[S]
    export: DrafterExport

    def default_aux_layers(self, facts: TargetFacts) -> list[int]:
        """Those of its rule where the store holds them, else all it holds; where it holds none those of the rule, so
        that `check_store` says what is missing."""
        try:
            usual = LAYER_RULES[self.layers].layers(facts.num_layers)
        except ValueError:
            usual = []
        return usual if usual and set(usual) <= set(facts.aux_layers) else list(facts.aux_layers) or usual

    @abstractmethod
    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """Defaults by section that differ from the common ones (`trainer.settings`)."""

    @abstractmethod
    def needs(self, config: C, loss: S | None) -> Needs:
        """What training reads, or with ``loss`` None what proposing over recorded text reads."""

    @abstractmethod
    def build(self, config: C, target: TargetInterface, seed: int) -> M:
        """A fresh drafter on the CPU, random from ``seed`` alone, tied to ``target.head``."""

    @abstractmethod
    def objective(self, model: M, target: TargetInterface, loss: S) -> Objective[Any]:
        """What the loop optimises."""

    def splits_context(self, loss: S) -> bool:
        """Whether that objective takes a rank's shard of a pack (`trainer.parallel.context`)."""
        return False

    @abstractmethod
    def hits(self, model: M, target: TargetInterface, pack: PackedBatch, draft_len: int) -> Tensor:
        """How many proposals drafted after each token of a pack equal the text: int64 [T], by the newest token. Zero
        where no draft may start (`trainer.evaluate.acceptance.drafting_positions`)."""

    def longest_draft(self, config: C) -> int | None:
        """Most tokens of one draft; None for any number."""
        return None

    def depends_on_length(self, config: C) -> bool:
        """Whether the first tokens of a draft depend on how many follow."""
        return False

    @abstractmethod
    def live(self, model: M, target: TargetInterface) -> Live:
        """The drafter beside a live target."""

    def tree(self, model: M, target: TargetInterface, width: int) -> LiveTree:
        """The drafter beside a live target, drafting trees. Raises ConfigError: this kind drafts no trees."""
        raise ConfigError(f"{self.name} drafts no trees", kind=Kind.NO_TREE, hint="--draft-len 3")


@dataclass(frozen=True, eq=False)
class DrafterInUse:
    """A drafter with its surroundings, for proposing; all tensors on one device."""

    kind: DrafterKind[Any, Any, Any]
    model: Drafter
    target: TargetInterface

    @property
    def config(self) -> DrafterConfig:
        return self.model.config

    @property
    def needs(self) -> Needs:
        return self.kind.needs(self.model.config, None)

    def within(self, tokens: int) -> int:
        """``tokens``, or as many as it proposes at a time where that is fewer."""
        return min(tokens, self.kind.longest_draft(self.config) or tokens)

    def require_length(self, tokens: int) -> None:
        """Refuse drafts that this drafter cannot make. Raises ConfigError: ``draft-len``: it proposes fewer than
        ``tokens`` at a time."""
        longest = self.kind.longest_draft(self.config)
        if longest is not None and tokens > longest:
            problem = f"this {self.kind.name} drafter proposes at most {longest} tokens at a time, not {tokens}"
            raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint=f"--draft-len {longest}")

    @torch.no_grad()
    def hits(self, pack: PackedBatch, draft_len: int) -> Tensor:
        return self.kind.hits(self.model, self.target, pack, draft_len)

    def hits_by_length(self, pack: PackedBatch, lengths: Iterable[int]) -> dict[int, Tensor]:
        """``hits`` of drafts of each of these lengths."""
        lengths = set(lengths)
        if not lengths:
            return {}
        if self.kind.depends_on_length(self.config):
            return {length: self.hits(pack, length) for length in lengths}
        longest = self.hits(pack, max(lengths))
        return {length: longest.clamp(max=length) for length in lengths}

    def live(self) -> Live:
        return self.kind.live(self.model, self.target)

    def tree(self, width: int) -> LiveTree:
        return self.kind.tree(self.model, self.target, width)

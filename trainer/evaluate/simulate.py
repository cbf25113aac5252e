"""Simulated acceptance: a drafter walked over recorded text of a store, beside the n-gram floor.

Where the text is the target's own greedy answer this is what a server would measure with greedy chains of K; on other
text it is the acceptance of that text.

Shapes: T tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hiddenstore.data import PackedBatch, TokenBatches
from hiddenstore.errors import CaptureError, ConfigError, FormatError, Kind
from hiddenstore.store import Store
from hiddenstore.targets.identity import identity_differences
from schemas.capture import TargetIdentity
from schemas.manifest import Split
from trainer.evaluate.acceptance import AcceptanceTally, DraftShape, walk
from trainer.evaluate.ngram import NgramFloor, ngram_floor
from trainer.evaluate.speculate import replay

if TYPE_CHECKING:
    from trainer.drafters.base import DrafterInUse, Needs

PACK_TOKENS = 8192

Text = tuple[np.ndarray, np.ndarray]
"""input_ids [T] and loss_mask [T] of one sample."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One drafter on one split, a tally per shape of draft; ``texts``: the samples walked, for floors over the same
    text."""

    tallies: list[AcceptanceTally]
    texts: list[Text]

    @property
    def tally(self) -> AcceptanceTally:
        """The tally of the last shape of draft, the longest."""
        return self.tallies[-1]


def evaluate(
    drafters: "Sequence[DrafterInUse]",
    store: Store,
    split: Split,
    shapes: Sequence[DraftShape],
    *,
    device: str = "cpu",
    on_pack: Callable[[int], None] | None = None,
) -> list[Evaluation]:
    """Walk every sample of a split with each drafter, reading the store once. All are of one kind.

    Raises:
        ConfigError: the split is empty or has nothing to draft, or the store lacks a layer.
    """
    if min((shape.length for shape in shapes), default=0) < 1:
        raise ConfigError("a draft needs at least one token", kind=Kind.OPTION_INVALID)
    packs = _packs(store, split, drafters[0].needs)
    results = evaluate_packs(drafters, packs, shapes, device=device, on_pack=on_pack)
    if not results[0].tally.drafts:
        raise CaptureError(
            f"no answer of the {split} split of {store.path} has two supervised tokens: nothing to draft",
            kind=Kind.NOTHING_DRAFTED,
        )
    return results


def evaluate_packs(
    drafters: "Sequence[DrafterInUse]",
    packs: Iterable[PackedBatch],
    shapes: Sequence[DraftShape],
    *,
    device: str = "cpu",
    on_pack: Callable[[int], None] | None = None,
) -> list[Evaluation]:
    """Walk every sample of ``packs`` with each drafter; ``on_pack`` is called with the tokens of each pack.

    Raises:
        ConfigError: a drafter cannot draft as long as a shape asks.
    """
    for drafter in drafters:
        drafter.require_length(max(shape.length for shape in shapes))
    results = [Evaluation([AcceptanceTally(shape.length, shape.width) for shape in shapes], []) for _ in drafters]
    chain = max((shape.length for shape in shapes if shape.width == 1), default=0)
    for pack in packs:
        moved = pack.to(device)
        for drafter, result in zip(drafters, results, strict=True):
            hits = drafter.hits(moved, chain).cpu().numpy() if chain else None
            for rows in _documents(pack):
                mask = pack.loss_mask[rows].cpu().numpy()
                for tally in result.tallies:
                    if tally.width > 1:
                        replay(drafter.tree(tally.width), moved, rows, tally)
                    elif hits is not None:
                        walk(np.minimum(hits[rows], tally.draft_len), mask, tally)
                result.texts.append((pack.input_ids[rows].cpu().numpy(), mask))
        if on_pack:
            on_pack(pack.tokens)
    return results


def floor(store: Store, texts: Sequence[Text], draft_len: int) -> NgramFloor:
    """The n-gram floor over ``texts`` from the training split of ``store``; states are not read."""
    samples = (store.sample(entry.id) for _, entry in store.entries if entry.split == "train")
    return ngram_floor(((sample.input_ids, sample.loss_mask) for sample in samples), texts, draft_len)


def require_same_capture(trained_on: TargetIdentity, store: Store, hint: str | None = None) -> None:
    """Refuse a store of another target than the drafter's; FormatError ``target-mismatch`` lists what differs."""
    differences = identity_differences(trained_on, store.capture.target)
    if differences:
        raise FormatError(
            f"{store.path} was captured from {store.capture.target.name}, the drafter was trained on "
            f"{trained_on.name}:\n" + "\n".join(differences),
            kind=Kind.TARGET_MISMATCH,
            hint=hint,
        )


def _packs(store: Store, split: Split, needs: "Needs") -> Iterator[PackedBatch]:
    lengths = [entry.tokens for _, entry in store.entries if entry.split == split]
    if not lengths:
        others = sorted({entry.split for _, entry in store.entries})
        raise ConfigError(
            f"{store.path} holds no {split} samples, only: {', '.join(others) or 'none at all'}",
            kind=Kind.SPLIT_EMPTY,
            hint=f"--split {others[0]}" if others else None,
        )
    batches = TokenBatches(
        store,
        split=split,
        layers=needs.aux_layers,
        final=needs.final != "none",
        batch_tokens=max(PACK_TOKENS, *lengths),
        epochs=1,
    )
    for batch in batches:
        yield from batch.packs


def _documents(pack: PackedBatch) -> list[slice]:
    edges = np.flatnonzero(np.diff(pack.document.cpu().numpy(), prepend=-1, append=-1))
    return [slice(int(start), int(end)) for start, end in pairwise(edges)]

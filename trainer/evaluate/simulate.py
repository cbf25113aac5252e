"""Simulated acceptance: a drafter walked over recorded text of a store, beside the n-gram floor.

Where the text is the target's own greedy answer this is what a server would measure with greedy chains of K; on other
text it is the acceptance of that text. The floor is how far a table of what usually comes next would get: a drafter
that does not beat it has learned nothing from hidden states. Order m looks at the last m tokens; a context never seen
in training backs off to the shorter one, down to the most frequent token.

Shapes: T tokens of one sample, C distinct contexts of one order.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from hiddenstore.data import PackedBatch, TokenBatches
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.index.table import SPLITS
from hiddenstore.store import Store
from schemas.manifest import Split
from trainer.drafters import refuse_images
from trainer.drafters.base import DrafterInUse, Needs
from trainer.evaluate.acceptance import AcceptanceTally, DraftShape, hits_of_next_token, walk
from trainer.evaluate.speculate import replay

ORDERS = 4
MAX_TRAINING_TOKENS = 20_000_000

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Text = tuple[np.ndarray, np.ndarray]
"""input_ids [T] and loss_mask [T] of one sample."""


@dataclass(frozen=True)
class NgramFloor:
    """Accepted length of the best order, and of each order 1 … 4 in turn; ``training_tokens`` the tables saw: none give
    no length. ``per_position``: of the best order, as `AcceptanceTally.per_position`."""

    accepted_length: float | None
    order: int | None
    per_order: tuple[float | None, ...]
    training_tokens: int
    per_position: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class NgramTables:
    """Most frequent continuation per context, for every order at once. ``contexts[m]`` uint64 [C] ascending hashes of
    the contexts of order m, ``best[m]`` int64 [C] the token that follows most often (the lowest id of equals); order 0
    is the single empty context."""

    contexts: list[np.ndarray]
    best: list[np.ndarray]
    training_tokens: int

    @classmethod
    def fit(cls, texts: Iterable[Text], max_tokens: int = MAX_TRAINING_TOKENS) -> "NgramTables":
        """Count (input_ids [T], loss_mask [T]) pairs: continuations are supervised tokens, contexts any tokens. Reading
        stops after ``max_tokens`` tokens, which bounds memory; ``training_tokens`` says how many were read."""
        keys: list[list[np.ndarray]] = [[] for _ in range(ORDERS + 1)]
        following: list[list[np.ndarray]] = [[] for _ in range(ORDERS + 1)]
        total = 0
        for ids, mask in texts:
            if total >= max_tokens:
                break
            total += len(ids)
            for order, hashes in enumerate(_context_hashes(ids)):
                first = max(order - 1, 0)
                supervised = mask[first + 1 :] != 0
                keys[order].append(hashes[first:-1][supervised])
                following[order].append(ids[first + 1 :][supervised].astype(np.int64))
        tables = [_most_frequent(k, y) for k, y in zip(keys, following, strict=True)]
        return cls([context for context, _ in tables], [token for _, token in tables], total)

    def predict(self, ids: np.ndarray) -> np.ndarray:
        """Next-token prediction after every position: int64 [4, T], row m-1 by the table of order m; -1 = none."""
        predictions = np.full((ORDERS + 1, len(ids)), -1, dtype=np.int64)
        for order, hashes in enumerate(_context_hashes(ids)):
            if order:
                predictions[order] = predictions[order - 1]
            contexts = self.contexts[order]
            if not len(contexts):
                continue
            # Positions before order-1 have no context that long.
            first = max(order - 1, 0)
            index = np.minimum(np.searchsorted(contexts, hashes[first:]), len(contexts) - 1)
            is_match = contexts[index] == hashes[first:]
            predictions[order, first:][is_match] = self.best[order][index[is_match]]
        return predictions[1:]


def ngram_floor(
    training: Iterable[Text], texts: Sequence[Text], draft_len: int, max_tokens: int = MAX_TRAINING_TOKENS
) -> NgramFloor:
    """Fit on ``training`` and walk ``texts`` with chains of K."""
    return _walked([(NgramTables.fit(training, max_tokens), texts)], draft_len)


def _walked(parts: Sequence[tuple[NgramTables, Sequence[Text]]], draft_len: int) -> NgramFloor:
    """Of texts that are walked by tables of their own."""
    tallies = [AcceptanceTally(draft_len) for _ in range(ORDERS)]
    for tables, texts in parts:
        for ids, mask in texts:
            following = np.append(ids[1:].astype(np.int64), -2)
            for tally, predicted in zip(tallies, tables.predict(ids), strict=True):
                walk(hits_of_next_token(predicted == following, draft_len), mask, tally)
    trained = min(tables.training_tokens for tables, _ in parts)
    lengths = tuple(tally.accepted_length if trained else None for tally in tallies)
    best = max(((length, -order) for order, length in enumerate(lengths, 1) if length is not None), default=None)
    return NgramFloor(
        accepted_length=best[0] if best else None,
        order=-best[1] if best else None,
        per_order=lengths,
        training_tokens=trained,
        per_position=tuple(tallies[-best[1] - 1].per_position) if best else (),
    )


def _context_hashes(ids: np.ndarray) -> list[np.ndarray]:
    """Per order 0 … 4 a hash uint64 [T] of the last ``order`` tokens at each position. 64 mixed bits: among the at most
    2·10⁷ contexts a table holds, the chance of any collision is about 10⁻⁵. Entries before position order-1 are
    meaningless."""
    tokens = (ids.astype(np.int64) + 1).astype(np.uint64) * _GOLDEN
    hashes = [np.zeros(len(ids), dtype=np.uint64)]
    for order in range(1, ORDERS + 1):
        earlier = np.zeros_like(tokens)
        earlier[order - 1 :] = tokens[: max(len(tokens) - order + 1, 0)]
        hashes.append(_mix(hashes[-1] + earlier))
    return hashes


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _most_frequent(keys: list[np.ndarray], following: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct contexts uint64 [C] ascending and the most frequent token int64 [C] after each."""
    context = np.concatenate([np.zeros(0, dtype=np.uint64), *keys])
    token = np.concatenate([np.zeros(0, dtype=np.int64), *following])
    if not len(context):
        return context, token
    order = np.lexsort((token, context))
    context, token = context[order], token[order]
    starts = np.flatnonzero(np.append(True, (context[1:] != context[:-1]) | (token[1:] != token[:-1])))
    counts = np.diff(np.append(starts, len(context)))
    context, token = context[starts], token[starts]
    order = np.lexsort((token, -counts, context))
    context, token = context[order], token[order]
    first = np.append(True, context[1:] != context[:-1])
    return context[first], token[first]


PACK_TOKENS = 8192


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One drafter on one split, a tally per shape of draft; ``texts``: the samples walked, for floors over the same
    text; ``hits`` int [T]: of each of them those of the longest chain, where chains were walked."""

    tallies: list[AcceptanceTally]
    texts: list[Text]
    hits: list[np.ndarray] = field(default_factory=list)

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
    """Walk every sample of a split with each drafter, reading the store once. All are of one kind. Raises ConfigError:
    the split is empty or has nothing to draft, or the store lacks a layer."""
    if min((shape.length for shape in shapes), default=0) < 1:
        raise ConfigError("a draft needs at least one token", kind=Kind.OPTION_INVALID)
    refuse_images(drafters[0].kind.name, store.capture, store.path)
    packs = split_packs(store, split, drafters[0].needs, device)
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
    """Walk every sample of ``packs`` with each drafter; ``on_pack`` is called with the tokens of each pack. Raises
    ConfigError: a drafter cannot draft as long as a shape asks."""
    for drafter in drafters:
        drafter.require_length(max(shape.length for shape in shapes))
    results = [Evaluation([AcceptanceTally(shape.length, shape.width) for shape in shapes], []) for _ in drafters]
    lengths = {shape.length for shape in shapes if shape.width == 1}
    for pack in packs:
        moved = pack.to(device)
        for drafter, result in zip(drafters, results, strict=True):
            hits = {length: found.cpu().numpy() for length, found in drafter.hits_by_length(moved, lengths).items()}
            for rows in _documents(pack):
                mask = pack.loss_mask[rows].cpu().numpy()
                for tally in result.tallies:
                    if tally.width > 1:
                        replay(drafter, moved, rows, tally)
                    else:
                        walk(hits[tally.draft_len][rows], mask, tally)
                result.texts.append((pack.input_ids[rows].cpu().numpy(), mask))
                if hits:
                    result.hits.append(hits[max(lengths)][rows])
        if on_pack:
            on_pack(pack.tokens)
    return results


def floor(store: Store, texts: Sequence[Text], draft_len: int, split: Split = "validation") -> NgramFloor:
    """The n-gram floor over ``texts`` of a split from the training split of ``store``; states are not read. Of the
    training split itself each half is walked by the tables of the other."""

    def training() -> Iterator[Text]:
        samples = (store.sample(entry.id) for _, entry in store.entries if entry.split == "train")
        return ((sample.input_ids, sample.loss_mask) for sample in samples)

    if split != "train":
        return ngram_floor(training(), texts, draft_len)
    parts = []
    for half in (0, 1):
        tables = NgramTables.fit(text for text in training() if _half(text) != half)
        parts.append((tables, [text for text in texts if _half(text) == half]))
    return _walked(parts, draft_len)


def _half(text: Text) -> int:
    """0 or 1 by the tokens alone."""
    return zlib.crc32(np.ascontiguousarray(text[0], dtype=np.int32).tobytes()) & 1


def split_packs(store: Store, split: Split, needs: "Needs", device: str = "cpu") -> Iterator[PackedBatch]:
    """Every sample of a split once, in packs on ``device``. Raises ConfigError: ``split-empty``; the store lacks a
    layer."""
    table = store.catalog.table
    lengths = table.tokens[table.split == SPLITS.index(split)]
    if not len(lengths):
        others = sorted(SPLITS[number] for number in np.unique(table.split))
        problem = f"{store.path} holds no {split} samples, only: {', '.join(others) or 'none at all'}"
        raise ConfigError(problem, kind=Kind.SPLIT_EMPTY, hint=f"--split {others[0]}" if others else None)
    batches = TokenBatches(
        store,
        split=split,
        layers=needs.aux_layers,
        final=needs.final != "none",
        batch_tokens=PACK_TOKENS,
        pack_tokens=max(PACK_TOKENS, *lengths),
        epochs=1,
        device=device,
    )
    for batch in batches:
        yield from batch.packs


def _documents(pack: PackedBatch) -> list[slice]:
    edges = np.flatnonzero(np.diff(pack.document.cpu().numpy(), prepend=-1, append=-1))
    return [slice(int(start), int(end)) for start, end in pairwise(edges)]

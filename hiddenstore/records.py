"""Samples and records: what moves between prepare, collect, the store and the trainer; where images stand in a sample,
and the positions that the rope of Qwen2.5-VL gives its tokens.

Shapes: T tokens of one sample, L aux layers, D target width, R rows of the final hidden, k top tokens of a row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from schemas.capture import FinalMode
from schemas.manifest import ROLES, ImageEntry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHOWN_TURNS = 8
WITHOUT_IMAGES = "prepare and collect the conversations without images into a store of their own"
"""What to do where images have no place."""


def sample_id(input_ids: np.ndarray, loss_mask: np.ndarray, images: Sequence[ImageEntry] = ()) -> str:
    """blake2b-128 over int32-LE tokens, one mask byte per token and the sha256 of each image, as 32 hex digits."""
    digest = hashlib.blake2b(np.ascontiguousarray(input_ids, dtype="<i4").tobytes(), digest_size=16)
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    for image in images:
        digest.update(bytes.fromhex(image.sha256))
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Sample:
    """One tokenised conversation, unshifted.

    input_ids int32 [T]; loss_mask uint8 [T], 1 where a token is supervised; spans int32 [n, 3] of (role index into
    ``ROLES``, start, end) with end exclusive; split ``train`` or ``validation``; source ``file:line``. images:
    ascending; ``image_files`` their bytes, which DATA holds and a store does not.
    """

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    spans: np.ndarray
    split: str = "train"
    source: str = ""
    images: tuple[ImageEntry, ...] = ()
    image_files: tuple[bytes, ...] = ()

    def __repr__(self) -> str:
        return f"Sample({self.id}, {self.split}, {self.tokens:,} tokens, {self.supervised:,} supervised)"

    def _repr_html_(self) -> str:
        return facts_table(f"Sample {self.id}", self.facts())

    def facts(self) -> dict[str, object]:
        """What a person wants to know of it first."""
        turns = ", ".join(f"{ROLES[role]} {start}–{end}" for role, start, end in self.spans[:SHOWN_TURNS].tolist())
        more = f" and {len(self.spans) - SHOWN_TURNS} more" if len(self.spans) > SHOWN_TURNS else ""
        counts = {"tokens": self.tokens, "supervised": self.supervised}
        counts |= {"images": len(self.images)} if self.images else {}
        return {"split": self.split, **counts, "turns": turns + more}

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def supervised(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, eq=False)
class TopK:
    """The target's distribution after each final row, cut to its k most probable tokens.

    ids int64 [R, k], most probable first; log_probs fp32 [R, k], log softmax over the whole vocabulary (as stored,
    rounded to float16); lse fp32 [R], logsumexp of all logits: logit of a kept token = log_prob + lse.
    """

    ids: "Tensor"
    log_probs: "Tensor"
    lse: "Tensor"

    def __repr__(self) -> str:
        return f"TopK({self.rows:,} rows, k={self.k})"

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def k(self) -> int:
        return int(self.ids.shape[1])

    def at(self, rows: "Tensor") -> "TopK":
        """Some rows of it, by int64 indices or a bool mask [R]."""
        return TopK(self.ids[rows], self.log_probs[rows], self.lse[rows])

    def to(self, device: "torch.device | str") -> "TopK":
        """The same on ``device``; copies from pinned memory overlap with computation."""
        moved = (tensor.to(device, non_blocking=True) for tensor in (self.ids, self.log_probs, self.lse))
        return TopK(*moved)


@dataclass(frozen=True, eq=False)
class Record:
    """A sample with its captured states.

    aux bfloat16 [L, T, D], layers ascending; final bfloat16 [R, D]; final_rows int32 [R], ascending token positions
    the final hidden is held at. R = 0 when the store holds no final hidden. With ``topk`` the target's top tokens
    stand at ``final_rows`` in place of the hidden, and final is [0, D].
    """

    sample: Sample
    aux: "Tensor"
    final: "Tensor"
    final_rows: np.ndarray
    topk: TopK | None = None

    def __repr__(self) -> str:
        final = f"final {list(self.final.shape)}" if self.topk is None else repr(self.topk)
        return f"Record({self.sample!r}, aux {list(self.aux.shape)}, {final})"

    def _repr_html_(self) -> str:
        shapes = {"aux": list(self.aux.shape), "final": list(self.final.shape), "final rows": len(self.final_rows)}
        top = {} if self.topk is None else {"top tokens": repr(self.topk)}
        return facts_table(f"Record {self.sample.id}", {**self.sample.facts(), **shapes, **top})


def final_row_positions(loss_mask: np.ndarray, mode: FinalMode) -> np.ndarray:
    """Token positions at which the final hidden is held: int32 [R], ascending.

    ``supervised`` holds rows a-1 … e+1 of each supervised span [a, e], which serves mask offsets -1, 0 and +1
    (docs/design/005).
    """
    tokens = loss_mask.shape[0]
    if mode == "none":
        return np.zeros(0, dtype=np.int32)
    if mode == "all":
        return np.arange(tokens, dtype=np.int32)
    supervised = loss_mask.astype(bool)
    reach = supervised.copy()
    reach[:-1] |= supervised[1:]
    reach[1:] |= supervised[:-1]
    return np.flatnonzero(reach).astype(np.int32)


LOOP_SHARE = 0.3
"""An answer with a larger ``repeated_share`` loops."""


def repeated_share(token_ids: Sequence[int], order: int = 4) -> float:
    """Share of n-grams (default 4) that occurred before in the same answer; 0 for answers shorter than one n-gram.

    >>> repeated_share([1, 2, 3, 4, 1, 2, 3, 4, 1])
    0.3333333333333333
    """
    grams = [tuple(token_ids[i : i + order]) for i in range(len(token_ids) - order + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def facts_table(title: str, facts: Mapping[str, object]) -> str:
    """Names and values as an HTML table; nothing in them is markup."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


# What is wrong with a sample, in DATA as in a segment, in words, or None: a digest proves who wrote it, no more.
def tokens_fault(input_ids: np.ndarray, vocab: int) -> str | None:
    """Token ids int32 [t] lie in the vocabulary."""
    if len(input_ids) and not 0 <= input_ids.min() <= input_ids.max() < vocab:
        outside = input_ids[(input_ids < 0) | (input_ids >= vocab)][0]
        return f"token {outside} is outside the target's {vocab:,}"
    return None


def mask_fault(loss_mask: np.ndarray, supervised: int | None) -> str | None:
    """A mask uint8 [t] is 0 or 1, and has as many ones as its record says, where one does."""
    if len(loss_mask) and not 0 <= loss_mask.min() <= loss_mask.max() <= 1:
        return "it is not of zeros and ones"
    ones = int(np.count_nonzero(loss_mask))
    return None if supervised in (None, ones) else f"it supervises {ones:,} tokens, its record says {supervised:,}"


def spans_fault(spans: np.ndarray, tokens: int) -> str | None:
    """Turns int32 [n, 3] have a role that exists and lie in their sample."""
    roles, starts, ends = spans.T
    bad = (roles < 0) | (roles >= len(ROLES)) | (starts < 0) | (starts > ends) | (ends > tokens)
    return f"turn {spans[bad][0].tolist()} (role, start, end) is none of {tokens:,} tokens" if bad.any() else None


def cut_spans(spans: np.ndarray, tokens: int) -> np.ndarray:
    """Turns int32 [n, 3] of a sample that is cut behind its first ``tokens`` tokens."""
    turns = spans[spans[:, 1] < tokens]
    turns[:, 2].clip(max=tokens, out=turns[:, 2])
    return turns


def image_positions(tokens: int, images: Sequence[ImageEntry]) -> np.ndarray:
    """int64 [3, T] of (time, row, column): text counts on along all three, the tokens of an image stand at its rows and
    columns and at one time, and text goes on behind the largest. What ``get_rope_index`` of transformers gives."""
    positions = np.empty((3, tokens), dtype=np.int64)
    done = place = 0
    for image in images:
        # A view may end before it.
        start, end = min(image.start, tokens), min(image.start + image.tokens, tokens)
        positions[:, done:start] = place + np.arange(start - done)
        place += start - done
        cell = np.arange(end - start)
        positions[:, start:end] = place + np.stack([np.zeros_like(cell), cell // image.width, cell % image.width])
        place += max(image.height, image.width)
        done = end
    positions[:, done:] = place + np.arange(tokens - done)
    return positions


def drafter_positions(tokens: int, images: Sequence[ImageEntry]) -> np.ndarray:
    """What the rope of a drafter turns by, int64 [T]: places in time, as engines serve it (docs/design/020)."""
    return image_positions(tokens, images)[0] if images else np.arange(tokens)


def is_text(tokens: int, images: Sequence[ImageEntry]) -> np.ndarray:
    """Which tokens of a sample stand for no image: bool [T]."""
    text = np.ones(tokens, dtype=bool)
    for image in images:
        text[image.start : image.start + image.tokens] = False
    return text


def images_fault(input_ids: np.ndarray, images: Sequence[ImageEntry], token_id: int | None) -> str | None:
    """What is wrong with the images of a sample, or None: every one lies on tokens ``token_id``, and no such token
    elsewhere. A sample without images may hold that token as text."""
    if not images:
        return None
    places = np.concatenate([np.arange(image.start, image.start + image.tokens) for image in images])
    if np.array_equal(places, np.flatnonzero(input_ids == token_id)):
        return None
    return f"its {len(images)} images do not lie on its tokens {token_id}"

"""What is trained on of a stored sample: how many of its tokens, and which of them teach.

Shapes: T tokens of a sample, n those kept, L layers, D target width, R final rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from hiddenstore.codecs import get_layout
from hiddenstore.codecs.base import MaskedCodec
from hiddenstore.codecs.recipes import recipe_name
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.index.table import SPLITS
from hiddenstore.records import Record, Sample, cut_spans, is_text
from hiddenstore.store import Store
from schemas.capture import CaptureSpec
from schemas.manifest import ROLES
from schemas.prepared import LossChoice

_ASSISTANT = ROLES.index("assistant")


@dataclass(frozen=True)
class SampleView:
    """``max_tokens``: longer samples end there. ``loss_on``: the tokens that teach: those the stored mask says
    (``stored``), every answer, the last one, or every token of a turn with what the mask says besides, read off the
    stored turn spans. Raises ConfigError: ``option-invalid``."""

    max_tokens: int | None = None
    loss_on: LossChoice = "stored"

    def __post_init__(self) -> None:
        choices = get_args(LossChoice)
        if self.loss_on not in choices or (self.max_tokens is not None and self.max_tokens < 1):
            problem = f"{self}: max_tokens is 1 at least, or None for whole samples, and loss_on {', '.join(choices)}"
            raise ConfigError(problem, kind=Kind.OPTION_INVALID)

    def tokens(self, stored: int) -> int:
        """How many tokens of a sample of ``stored`` ones are read."""
        return stored if self.max_tokens is None else min(stored, self.max_tokens)

    def mask(self, sample: Sample) -> np.ndarray:
        """1 where a token teaches: uint8 [T]. Answers that their token limit cut have their end outside every turn."""
        if self.loss_on == "stored":
            return sample.loss_mask
        mask, turns = np.zeros_like(sample.loss_mask), sample.spans
        if self.loss_on == "all":
            mask |= sample.loss_mask
        else:
            turns = turns[turns[:, 0] == _ASSISTANT]
        for _role, start, end in turns[-1:] if self.loss_on == "last-turn" else turns:
            mask[start:end] = 1
        mask[~is_text(sample.tokens, sample.images)] = 0
        return mask

    def require_rows(self, sample: Sample, capture: CaptureSpec, layers: Sequence[int], final: bool) -> None:
        """Refuse a mask that teaches, before ``max_tokens``, where a store holds less of what is read: the stored
        ``layers`` and, with ``final``, the final rows. Raises ConfigError: ``store-lacks-states``."""
        reasons, options = self.shortfall(capture, layers, final)
        mask, stored = self.mask(sample)[: self.max_tokens], sample.loss_mask[: self.max_tokens]
        wider = np.flatnonzero(mask > stored) if reasons else np.zeros(0)
        if len(wider):
            raise ConfigError(
                f"data.loss_on={self.loss_on} teaches token {wider[0]} of sample {sample.id}, which the stored mask "
                f"leaves out, and {' and '.join(reasons)}",
                kind=Kind.STORE_LACKS_STATES,
                hint=f"hiddenstore collect DATA -o NEW_STORE --target T {' '.join(options)}, or data.loss_on=stored",
            )

    def shortfall(self, capture: CaptureSpec, layers: Sequence[int], final: bool) -> tuple[list[str], list[str]]:
        """What a store holds less of where its mask leaves a token out, and the options of a ``collect`` that does not;
        no reason where ``layers`` and, with ``final``, the final rows serve any mask of this view."""
        if self.loss_on == "stored":
            return [], []
        reasons, options, aux = list[str](), ["--final all"] if final else [], get_layout(capture.codecs.aux)
        if final and capture.final == "supervised":
            reasons.append("the final hidden is stored at supervised rows alone")
        if layers and isinstance(aux, MaskedCodec) and aux.follows_mask:
            reasons.append(f"{aux.name} stores in fewer bits what no loss is taken at")
            options.append(f"--recipe {recipe_name(capture.codecs.model_copy(update={'aux': aux.everywhere}))}")
        return reasons, options

    def cut(self, record: Record) -> Record:
        """A record without what lies past ``max_tokens``: aux [L, n, D], the final rows below n, turns that end there,
        and the images that begin before it. Its ``mask`` is read off the whole, whose last turn may lie behind."""
        sample, n = record.sample, self.tokens(record.sample.tokens)
        kept = record.final_rows < n
        count = int(kept.sum())
        return replace(
            record,
            sample=replace(
                sample,
                input_ids=sample.input_ids[:n],
                loss_mask=sample.loss_mask[:n],
                spans=cut_spans(sample.spans, n),
                images=tuple(image for image in sample.images if image.start < n),
            ),
            aux=record.aux[:, :n],
            final=record.final[:count],
            final_rows=record.final_rows[kept],
            topk=None if record.topk is None else record.topk.at(torch.arange(count)),
        )


WHOLE = SampleView()
"""Whole samples under their stored mask."""


def in_split(store: Store, split: str) -> np.ndarray:
    """Which samples of the table of a store belong to a split: bool [N]. Raises ConfigError: ``split-empty``, listing
    the splits that hold samples, where it has none or is no split."""
    numbers = store.catalog.table.split
    samples: np.ndarray = (np.array(SPLITS) == split)[numbers]
    if not samples.any():
        others = ", ".join(SPLITS[number] for number in np.unique(numbers)) or "none"
        problem = f"{store.path} holds no {split} samples; splits with samples: {others}"
        raise ConfigError(problem, kind=Kind.SPLIT_EMPTY)
    return samples

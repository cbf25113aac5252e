"""One sample as a person reads it: text cut where role or loss mask change, and norms per layer.

Shapes: T tokens of the sample, L aux layers, D target width, R rows of the final hidden.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hiddenstore.errors import NotFoundError
from schemas.capture import FINAL
from schemas.prepared import ROLES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hiddenstore.records import Record, Sample
    from hiddenstore.store import Store

PROFILE_BINS = 16
_CONTEXT_TOKENS = 4


@dataclass(frozen=True)
class TextPiece:
    """Consecutive tokens [start, end) of one role (None between turns) that are all supervised or all not."""

    start: int
    end: int
    role: str | None
    supervised: bool
    text: str


@dataclass(frozen=True)
class Norms:
    """Row rms of one field of one sample: of the first row, the median and largest, and the median per bin of rows.

    The first row is often an attention sink a hundred times louder, so ``profile`` leaves it out.
    """

    field: str
    rows: int
    rms_first: float
    rms_median: float
    rms_max: float
    profile: tuple[float, ...]


def view(store: "Store", sample_id: str) -> dict[str, Any]:
    """Everything ``show`` prints, as one document; the members of ``hiddenstore.show/1``.

    Raises:
        CorruptionError: bytes of the sample disagree with their checksum.
    """
    record = store.read(sample_id)
    commit, index = store.locate(sample_id)
    entry = commit.samples[index]
    return {
        "path": store.path,
        "id": sample_id,
        "index": store.sample_ids.index(sample_id),
        "split": entry.split,
        "unit": commit.unit,
        "engine": commit.engine.model_dump(),
        "tokens": entry.tokens,
        "supervised": entry.supervised,
        "final_rows": entry.final_rows,
        "pieces": [asdict(piece) for piece in pieces(record.sample, load_tokenizer(store))],
        "norms": [asdict(norms) for norms in layer_norms(record, store.capture.aux_fields)],
        "input_ids": record.sample.input_ids.tolist(),
        "loss_mask": record.sample.loss_mask.tolist(),
        "spans": [[ROLES[role], start, end] for role, start, end in record.sample.spans.tolist()],
    }


def load_tokenizer(store: "Store") -> "Tokenizer | None":
    """The store's own ``target/tokenizer.json``; None when the target came without one."""
    from tokenizers import Tokenizer

    try:
        data = store.target_file("tokenizer.json")
    except NotFoundError:
        return None
    tokenizer: Tokenizer = Tokenizer.from_buffer(data)
    return tokenizer


def pieces(sample: "Sample", tokenizer: "Tokenizer | None") -> list[TextPiece]:
    """The sample cut at every border of a turn span or of the loss mask; without a tokenizer the text is ids."""
    roles = np.full(sample.tokens, -1, dtype=np.int32)
    borders = {0, sample.tokens}
    for role, start, end in sample.spans.tolist():
        roles[start:end] = role
        borders |= {start, end}
    mask = sample.loss_mask.astype(bool)
    borders |= {int(token) + 1 for token in np.flatnonzero(mask[1:] != mask[:-1])}
    return [
        TextPiece(
            start=start,
            end=end,
            role=ROLES[roles[start]] if roles[start] >= 0 else None,
            supervised=bool(mask[start]),
            text=token_text(sample.input_ids, start, end, tokenizer),
        )
        for start, end in pairwise(sorted(borders))
    ]


def token_text(input_ids: np.ndarray, start: int, end: int, tokenizer: "Tokenizer | None") -> str:
    """Text of tokens [start, end) as it reads after the tokens before it: with the leading space of a word."""
    if tokenizer is None:
        return " ".join(str(token) for token in input_ids[start:end].tolist()) + " "
    before = input_ids[max(0, start - _CONTEXT_TOKENS) : start].tolist()
    context = tokenizer.decode(before, skip_special_tokens=False)
    text = tokenizer.decode(before + input_ids[start:end].tolist(), skip_special_tokens=False)
    if text.startswith(context):
        return str(text[len(context) :])
    return str(tokenizer.decode(input_ids[start:end].tolist(), skip_special_tokens=False))


def layer_norms(record: "Record", aux_fields: list[str]) -> list[Norms]:
    """Norms of every captured field of a record, the final hidden, where there is one, last."""
    named = [*zip(aux_fields, record.aux, strict=True), (FINAL, record.final)]
    return [_norms(field, states) for field, states in named if states.shape[0]]


def _norms(field: str, states: torch.Tensor) -> Norms:
    """``states`` bfloat16 [n, D]."""
    rms = states.float().square().mean(dim=-1).sqrt()
    rest = rms[1:] if rms.shape[0] > 1 else rms
    bins = np.array_split(rest.numpy(), min(PROFILE_BINS, rest.shape[0]))
    return Norms(
        field=field,
        rows=rms.shape[0],
        rms_first=float(rms[0]),
        rms_median=float(rms.median()),
        rms_max=float(rms.max()),
        profile=tuple(float(np.median(rows)) for rows in bins),
    )

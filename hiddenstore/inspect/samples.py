"""Samples as a person picks and reads them: by condition, by the start of an id, as text with norms per layer.

Conditions joined by commas, or in several options, must all be true: ``tokens>4096``, ``split=validation``.

Shapes: T tokens of the sample, L aux layers, D target width, R rows of the final hidden.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenstore.commit import engine_of
from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.registry import unknown
from schemas.capture import FINAL
from schemas.manifest import ROLES, CommitRecord, SampleEntry

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from hiddenstore.records import Record, Sample
    from hiddenstore.store import Store

Test = Callable[[CommitRecord, SampleEntry], bool]

_CONDITION = re.compile(r"\s*([A-Za-z_]+)\s*(<=|>=|==|!=|=|<|>)\s*(.+?)\s*")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NUMBERS: dict[str, Callable[[CommitRecord, SampleEntry], float]] = {
    "tokens": lambda _, entry: entry.tokens,
    "supervised": lambda _, entry: entry.supervised,
    "share": lambda _, entry: entry.supervised / entry.tokens,
    "final_rows": lambda _, entry: entry.final_rows,
}
_WORDS: dict[str, Callable[[CommitRecord, SampleEntry], str]] = {
    "split": lambda _, entry: entry.split,
    "unit": lambda record, _: record.unit,
    "id": lambda _, entry: entry.id,
}
FIELDS = (*_NUMBERS, *_WORDS)

SHORTEST_ID = 6
"""Digits alone that are fewer than these are an index, never the start of an id."""
PROFILE_BINS = 16
_CONTEXT_TOKENS = 4


def parse_where(conditions: Iterable[str], split: str | None = None) -> Test:
    """A test of one sample; with no condition every sample passes. Raises ConfigError: ``option-invalid`` naming the
    condition and the fields there are."""
    tests = [_parse(condition.strip()) for text in conditions for condition in text.split(",") if condition.strip()]
    if split is not None:
        tests.append(_parse(f"split={split}"))
    return lambda record, entry: all(test(record, entry) for test in tests)


def _parse(text: str) -> Test:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise _invalid(f"{text!r} should be FIELD OPERATOR VALUE")
    name, sign, value = match.groups()
    compare = _OPERATORS[sign]
    if name in _NUMBERS:
        try:
            read, limit = _NUMBERS[name], float(value.replace("_", ""))
        except ValueError:
            raise _invalid(f"{text!r}: {value!r} is no number") from None
        if not math.isfinite(limit):
            raise _invalid(f"{text!r}: {value!r} compares with nothing")
        return lambda record, entry: compare(read(record, entry), limit)
    if name in _WORDS:
        if sign not in ("=", "==", "!="):
            raise _invalid(f"{text!r}: {name} is text, so only = and != apply")
        word = _WORDS[name]
        return lambda record, entry: compare(word(record, entry), value)
    raise _invalid(unknown("field", name, FIELDS).message)


def _invalid(problem: str) -> ConfigError:
    hint = f"--where 'tokens>4096'; fields: {', '.join(FIELDS)}"
    return ConfigError(f"--where: {problem}", kind=Kind.OPTION_INVALID, hint=hint)


def samples(store: "Store", keep: Test | None = None, limit: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """A row per sample that passes, at most ``limit``, and how many pass; ``index`` counts all, in commit order."""
    keep = keep or parse_where(())
    rows: list[dict[str, Any]] = []
    passed = 0
    for index, (record, entry) in enumerate(store.entries):
        if not keep(record, entry):
            continue
        passed += 1
        if limit is None or len(rows) < limit:
            facts = entry.model_dump(include={"id", "split", "tokens", "supervised", "final_rows"})
            rows.append({"index": index, **facts, "unit": record.unit})
    return rows, passed


def find_sample(store: "Store", key: str) -> str:
    """The id a person meant: an index from 0 (negative from the end), a full id, or the start of one; digits alone are
    the start of an id from ``SHORTEST_ID`` on. Raises NotFoundError: ``sample-missing``; ConfigError:
    ``sample-ambiguous`` listing the candidates."""
    # No id has so many digits, nor has a store so many samples.
    if re.fullmatch(r"-?[0-9]{1,64}", key) and key not in store:
        is_index = -len(store) <= int(key) < len(store)
        if is_index or (len(store) and len(key.removeprefix("-")) < SHORTEST_ID):
            return store.id_at(int(key))
    return store.id_starting(key)


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
    """Everything ``show`` prints, as one document; the members of ``hiddenstore.show/1``. Raises CorruptionError: bytes
    of the sample disagree with their checksum."""
    record = store.read(sample_id)
    commit, index = store.locate(sample_id)
    entry = commit.samples[index]
    return {
        "path": store.path,
        "id": sample_id,
        "index": store.index_of(sample_id),
        "split": entry.split,
        "unit": commit.unit,
        "engine": engine_of(commit, sample_id).model_dump(),
        "tokens": entry.tokens,
        "supervised": entry.supervised,
        "final_rows": entry.final_rows,
        "images": [image.model_dump() for image in entry.images],
        "pieces": [asdict(piece) for piece in pieces(record.sample, load_tokenizer(store))],
        "norms": [asdict(norms) for norms in layer_norms(record, store.capture.aux_fields)],
        "input_ids": record.sample.input_ids.tolist(),
        "loss_mask": record.sample.loss_mask.tolist(),
        "spans": [[ROLES[role], start, end] for role, start, end in record.sample.spans.tolist()],
    }


def load_tokenizer(store: "Store") -> "Tokenizer | None":
    """The store's own ``target/tokenizer.json``; None when the target came without one. Raises ConfigError
    ``target-unreadable``: this release of tokenizers cannot read it."""
    from tokenizers import Tokenizer

    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(store.target_file("tokenizer.json"))
    except NotFoundError:
        return None
    except ValueError as error:
        problem = f"{store.path}/target/tokenizer.json cannot be loaded: {error}"
        raise ConfigError(problem, kind=Kind.TARGET_UNREADABLE, hint="pip install --upgrade tokenizers") from error
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


def _norms(field: str, states: "torch.Tensor") -> Norms:
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

"""Choosing samples by what their commit record says: ``tokens>4096``, ``split=validation``, ``share>=0.5``.

Conditions joined by commas, or in several options, must all be true.
"""

import operator
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from hiddenstore.errors import ConfigError, Kind
from schemas.manifest import CommitRecord, SampleEntry

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


def parse_where(conditions: Iterable[str], split: str | None = None) -> Test:
    """A test of one sample; with no condition every sample passes.

    Raises:
        ConfigError: ``option-invalid`` naming the condition and the fields there are.
    """
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
        return lambda record, entry: compare(read(record, entry), limit)
    if name in _WORDS:
        if sign not in ("=", "==", "!="):
            raise _invalid(f"{text!r}: {name} is text, so only = and != apply")
        word = _WORDS[name]
        return lambda record, entry: compare(word(record, entry), value)
    close = get_close_matches(name, FIELDS, n=1)
    raise _invalid(f"there is no field {name!r}" + (f"; did you mean {close[0]}?" if close else ""))


def _invalid(problem: str) -> ConfigError:
    hint = f"--where 'tokens>4096'; fields: {', '.join(FIELDS)}"
    return ConfigError(f"--where: {problem}", kind=Kind.OPTION_INVALID, hint=hint)

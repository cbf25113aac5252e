"""Choosing samples by what their commit record says: ``tokens>4096``, ``split=validation``, ``share>=0.5``.

Conditions joined by commas or given several times must all hold.
"""

import operator
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from hiddenstore.errors import ConfigError
from schemas.manifest import CommitRecord, SampleEntry

Test = Callable[[CommitRecord, SampleEntry], bool]

_CONDITION = re.compile(r"\s*([A-Za-z_]+)\s*(<=|>=|==|!=|=|<|>)\s*(.+?)\s*")
_OPERATORS: dict[str, Callable[[object, object], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,  # type: ignore[dict-item]
    "<=": operator.le,  # type: ignore[dict-item]
    ">": operator.gt,  # type: ignore[dict-item]
    ">=": operator.ge,  # type: ignore[dict-item]
}
_NUMBERS: dict[str, Callable[[SampleEntry], float]] = {
    "tokens": lambda entry: entry.tokens,
    "supervised": lambda entry: entry.supervised,
    "share": lambda entry: entry.supervised / entry.tokens,
    "final_rows": lambda entry: entry.final_rows,
}
_WORDS: dict[str, Callable[[CommitRecord, SampleEntry], str]] = {
    "split": lambda _record, entry: entry.split,
    "unit": lambda record, _entry: record.unit,
    "id": lambda _record, entry: entry.id,
}
FIELDS = (*_NUMBERS, *_WORDS)


def parse_where(conditions: Iterable[str], split: str | None = None) -> Test:
    """A test of one sample; with no condition every sample passes.

    Raises:
        ConfigError: ``where-invalid`` naming the condition and the fields there are.
    """
    tests = [_parse(part) for text in conditions for part in text.split(",") if part.strip()]
    if split is not None:
        tests.append(_parse(f"split={split}"))
    return lambda record, entry: all(test(record, entry) for test in tests)


def _parse(text: str) -> Test:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise _invalid(f"{text.strip()!r} should be FIELD OPERATOR VALUE")
    name, sign, value = match.groups()
    if name in _NUMBERS:
        return _number_test(text, name, sign, value)
    if name in _WORDS:
        if sign not in ("=", "==", "!="):
            raise _invalid(f"{text.strip()!r}: {name} is text, so only = and != apply")
        read, compare = _WORDS[name], _OPERATORS[sign]
        return lambda record, entry: compare(read(record, entry), value)
    close = get_close_matches(name, FIELDS, n=1)
    raise _invalid(f"there is no field {name!r}" + (f"; did you mean {close[0]}?" if close else ""))


def _number_test(text: str, name: str, sign: str, value: str) -> Test:
    try:
        limit = float(value.replace("_", ""))
    except ValueError:
        raise _invalid(f"{text.strip()!r}: {value!r} is no number") from None
    read, compare = _NUMBERS[name], _OPERATORS[sign]
    return lambda _record, entry: compare(read(entry), limit)


def _invalid(problem: str) -> ConfigError:
    hint = f"--where 'tokens>4096'; fields: {', '.join(FIELDS)}"
    return ConfigError(f"--where: {problem}", kind="where-invalid", hint=hint)

"""Tables of an engine's settings, where each one was published, and the check of values against them.

A table stands for an engine that cannot be imported here: TensorRT-LLM's YAML, SGLang's flags, vLLM's JSON. Every field
says which document names it and in which versions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import yaml

from hiddenstore.errors import ConfigError
from trainer.serve.versions import is_within

Kind = Literal["bool", "int", "float", "text", "ints", "texts", "section", "mapping", "any"]
_KIND_WORDS: dict[Kind, str] = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "text": "text",
    "ints": "a list of whole numbers",
    "texts": "a list of texts",
    "section": "a section of settings",
    "mapping": "a mapping",
    "any": "anything",
}


@dataclass(frozen=True)
class Source:
    """A published document: ``where`` it is read, and the ``version`` it was read at."""

    where: str
    version: str


@dataclass(frozen=True)
class Field:
    """One setting.

    ``source`` names a row of the engine's sources; ``since`` and ``before`` bound the versions that read it (both open
    where no change is known); ``choices`` and ``least`` bound its value; ``fields`` are those of a section; ``aliases``
    are other spellings of the same setting.
    """

    name: str
    kind: Kind
    source: str
    since: str | None = None
    before: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    fields: tuple["Field", ...] = ()
    aliases: tuple[str, ...] = ()
    may_be_null: bool = False


Table = Sequence[Field]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one setting; ``meant`` is the spelling that was likely meant."""

    path: str
    text: str
    meant: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" + (f"; did you mean {self.meant}?" if self.meant else "")


def find(table: Table, name: str) -> Field | None:
    """The field of that name or alias."""
    return next((field for field in table if name == field.name or name in field.aliases), None)


def problems_of(table: Table, values: Mapping[str, Any], version: str | None, path: str = "") -> Iterator[Problem]:
    """Everything that ``values`` says and the table does not allow; with ``version``, also what that version lacks."""
    for name, value in values.items():
        here = f"{path}{name}"
        field = find(table, str(name))
        if field is None:
            yield Problem(here, "unknown setting", _meant(table, str(name), path))
            continue
        if version is not None and not is_within(version, field.since, field.before):
            yield Problem(here, f"not a setting of version {version} ({_range(field)})")
            continue
        yield from _value_problems(field, value, version, here)


def parse_setting(table: Table, key: str, text: str) -> Any:
    """The value that ``text`` of a command line writes for the setting ``key`` (dotted where it lies in a section)."""
    field: Field | None = None
    for part in key.split("."):
        field = find(field.fields if field else table, part)
        if field is None:
            break
    if field is not None and field.kind == "text":
        return text
    if field is not None and field.kind == "ints" and not text.startswith("["):
        text = f"[{text}]"
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{key}={text}: no value: {' '.join(str(error).split())[:120]}", kind="serve-setting"
        ) from error


def refuse(problems: Sequence[Problem], where: str, kind: str) -> None:
    """Raise a ConfigError that lists every problem; none: return."""
    if not problems:
        return
    lines = [f"{where}: {problem}" for problem in problems]
    meant = next((problem.meant for problem in problems if problem.meant), None)
    text = lines[0] if len(lines) == 1 else f"{len(lines)} settings are wrong\n" + "\n".join(f"  {x}" for x in lines)
    raise ConfigError(text, kind=kind, hint=f"{meant}: …" if meant else None)


def _meant(table: Table, name: str, path: str) -> str | None:
    """The setting of this table or of a section in it whose spelling is nearest."""
    paths = {spelling: f"{path}{spelling}" for field in table for spelling in (field.name, *field.aliases)}
    for section in table:
        for field in section.fields:
            for spelling in (field.name, *field.aliases):
                paths.setdefault(spelling, f"{path}{section.name}.{spelling}")
    close = get_close_matches(name, paths, n=1, cutoff=0.6)
    return paths[close[0]] if close else None


def _value_problems(field: Field, value: Any, version: str | None, here: str) -> Iterator[Problem]:
    if value is None and (field.may_be_null or field.kind in ("section", "any")):
        return
    if not _is_of(field.kind, value):
        yield Problem(here, f"should be {_KIND_WORDS[field.kind]}, found {value!r}")
    elif field.kind == "section":
        yield from problems_of(field.fields, value, version, f"{here}.")
    elif field.choices and value not in field.choices:
        close = get_close_matches(str(value), field.choices, n=1, cutoff=0.5)
        meant = f"{here.rpartition('.')[2]}: {close[0]}" if close else None
        yield Problem(here, f"{value!r} is none of {', '.join(field.choices)}", meant)
    elif field.least is not None and value < field.least:
        yield Problem(here, f"should be at least {field.least:g}, found {value!r}")


def _is_of(kind: Kind, value: Any) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return is_int
    if kind == "float":
        return is_int or isinstance(value, float)
    if kind == "text":
        return isinstance(value, str)
    if kind in ("ints", "texts"):
        wanted: Kind = "int" if kind == "ints" else "text"
        return isinstance(value, list) and all(_is_of(wanted, item) for item in value)
    if kind in ("section", "mapping"):
        return isinstance(value, Mapping)
    return True


def _range(field: Field) -> str:
    since = f"since {field.since}" if field.since else ""
    before = f"before {field.before}" if field.before else ""
    return ", ".join(part for part in (since, before) if part)

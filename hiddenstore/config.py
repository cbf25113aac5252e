"""Settings: pydantic models + one YAML file + ``key.path=value`` words. Defaults < file < words.

Every problem is reported at once. The annotation decides the type of a value, not YAML: PyYAML reads ``1e-4`` as a
string and ``no`` as False; a ``float`` field gets 0.0001 and a ``str`` field gets "no" where it was written so.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from hiddenstore.config_keys import first_hint, inner_model, named_models, unknown_keys, unknown_message
from hiddenstore.config_yaml import first_line, parse, read_yaml
from hiddenstore.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

AUTO = "auto"
"""Written for a setting that ``defaults`` supplies, it means that default."""

_ABSENT = object()


def load(
    model: type[M],
    file: str | Path | None = None,
    dotlist: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> M:
    """The settings of ``model``: its own defaults, then ``defaults``, the YAML ``file``, and ``key.path=value`` words.

    ``auto`` keeps what ``defaults`` says of a setting.

    Raises:
        ConfigError: kind ``config-unknown-key`` when a key is unknown, else ``config-invalid``; the message lists every
            problem, one a line, with where it was written. ``config-unreadable``: the file is no YAML mapping.
        NotFoundError: the file does not exist.
    """
    said = _said(model, file, dotlist, defaults or {})
    try:
        settings = model.model_validate(_typed(model, said.values))
    except ValidationError as error:
        said.problems += [_invalid_message(item, said.origins) for item in error.errors(include_url=False)]
    else:
        if not said.problems:
            return settings
    raise said.error()


def check(
    model: type[M],
    file: str | Path | None = None,
    dotlist: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Refuse unknown settings, values that are none of their setting's and those that contradict each other, as far as
    no default has a part in it; settings may lack.

    Raises:
        ConfigError: as ``load``.
        NotFoundError: the file does not exist.
    """
    said = _said(model, file, dotlist, defaults or {})
    given = {".".join(path) for path, value in _leaves(said.values) if value != AUTO} & said.origins.keys()
    try:
        model.model_validate(_typed(model, said.values))
    except ValidationError as error:
        wrong = [item for item in error.errors(include_url=False) if _is_of(item, given)]
        said.problems += [_invalid_message(item, said.origins) for item in wrong]
    if said.problems:
        raise said.error()


@dataclass
class _Said:
    """What file and words say, over the defaults, and what is wrong with it so far."""

    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unknown: bool = False
    hint: str | None = None

    def error(self) -> ConfigError:
        kind = "config-unknown-key" if self.unknown else "config-invalid"
        return ConfigError(all_problems(self.problems), kind=kind, hint=self.hint, problems=self.problems)


def _said(model: type[M], file: str | Path | None, dotlist: Sequence[str], defaults: Mapping[str, Any]) -> _Said:
    found = _Said(_copied(defaults))
    for origin, layer in _layers(file, dotlist, found.problems):
        for path, value in _leaves(layer):
            default = _at(defaults, path)
            if value == AUTO and default is not _ABSENT:
                _put(found.values, path, default)
                continue
            found.origins[".".join(path)] = origin
            _put(found.values, path, value)
    unknown = list(unknown_keys(model, found.values))
    found.unknown = bool(unknown)
    found.hint = first_hint(model, next(_leaves_below(found.values, unknown[0]))) if unknown else None
    for path in unknown:
        found.problems += [unknown_message(model, leaf, found.origins) for leaf in _leaves_below(found.values, path)]
        _remove(found.values, path)
    return found


def dump(settings: BaseModel) -> str:
    """The resolved settings as YAML that ``load`` reads back to an equal model."""
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    assert isinstance(text, str)
    return text


def said(key: str, file: str | Path | None = None, dotlist: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """What the file and the words say of ``key`` or below it, as (origin, value), the winning one last."""
    wanted = key.split(".")
    return [
        (origin, value)
        for origin, layer in _layers(file, dotlist, [])
        for path, value in _leaves(layer)
        if list(path[: len(wanted)]) == wanted
    ]


def _layers(
    file: str | Path | None, dotlist: Sequence[str], problems: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if file is not None:
        yield str(file), read_yaml(Path(file))
    for word in dotlist:
        key, equals, text = word.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            problems.append(f"{word!r} should be key.path=value")
            continue
        try:
            value = parse(text)
        except yaml.YAMLError as error:
            problems.append(f"{word!r} is no YAML value: {first_line(error)}")
            continue
        layer: dict[str, Any] = {}
        _put(layer, path, value)
        yield "command line", layer


def _leaves(layer: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in layer.items():
        here = (*path, str(key))
        if isinstance(value, dict) and value:
            yield from _leaves(value, here)
        else:
            yield here, value


def _leaves_below(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """``path`` itself, or every setting that was written below it."""
    found: Any = values
    for key in path:
        found = found[key]
    if isinstance(found, dict) and found:
        yield from (leaf for leaf, _value in _leaves(found, path))
    else:
        yield path


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        inner = values.get(key)
        if not isinstance(inner, dict):
            inner = values[key] = {}
        values = inner
    values[path[-1]] = value


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key, _ABSENT) if isinstance(values, Mapping) else _ABSENT
    return values


def _remove(values: dict[str, Any], path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        values = values[key]
    del values[path[-1]]


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _typed(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Text where the annotation wants a list or None, turned into it; pydantic's lax mode does the scalars."""
    typed: dict[str, Any] = {}
    for key, value in values.items():
        annotation = model.model_fields[key].annotation
        inner, named = inner_model(annotation), named_models(annotation)
        if inner is not None and isinstance(value, Mapping):
            typed[key] = _typed(inner, value)
        elif named is not None and isinstance(value, Mapping):
            typed[key] = {n: _typed(named, item) if isinstance(item, Mapping) else item for n, item in value.items()}
        elif isinstance(value, Mapping):
            typed[key] = {name: _from_text(_value_type(annotation), item) for name, item in value.items()}
        elif isinstance(value, str):
            typed[key] = _from_text(annotation, value)
        else:
            typed[key] = value
    return typed


def _from_text(annotation: Any, text: Any) -> Any:
    """``none`` for an optional that is no text; ``1,15,28`` for a list or tuple; YAML's own reading for ``Any``."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not isinstance(text, str):
        return text
    if Any in members:
        return yaml.safe_load(text)
    if NoneType in members and str not in members and text.lower() == "none":
        return None
    is_sequence = any((get_origin(member) or member) in (list, tuple) for member in members)
    if is_sequence and str not in members:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _value_type(annotation: Any) -> Any:
    """The annotation of a mapping's values: ``Any`` of ``dict[str, Any]``."""
    arguments = get_args(annotation)
    return arguments[1] if get_origin(annotation) in (dict, Mapping) and len(arguments) == 2 else str


def _is_of(item: Any, given: Collection[str]) -> bool:
    """Whether a problem is one of these settings, of a part of one, or of a section that holds one."""
    section = ".".join(str(part) for part in item["loc"]) + "."
    inside = item["type"] == "value_error" and any(key.startswith(section) for key in given)
    return inside or bool(_origin(item, {key: key for key in given}))


def _origin(item: Any, origins: Mapping[str, str]) -> str:
    """Where the setting of a problem, or what it is a part of, was written."""
    key = ".".join(str(part) for part in item["loc"])
    return next((origin for name, origin in origins.items() if key == name or key.startswith(name + ".")), "")


def _invalid_message(item: Any, origins: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    where = _origin(item, origins)
    place = f" ({where})" if where else ""
    text = str(item["msg"])
    text = text.removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    given = "" if item["type"] == "missing" or isinstance(item["input"], dict) else f", found {item['input']!r}"
    return f"{key or 'settings'}{place}: {text}{given}"


def all_problems(problems: Sequence[str]) -> str:
    """One message of several: a line each where there is more than one."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings are wrong\n" + "\n".join(f"  {problem}" for problem in problems)

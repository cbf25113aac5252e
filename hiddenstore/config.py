"""Settings: pydantic models + one YAML file + ``key.path=value`` words. Defaults < file < words.

Every problem is reported at once. The annotation decides the type of a value, not YAML: PyYAML reads ``1e-4`` as a
string and ``no`` as False; a ``float`` field gets 0.0001 and a ``str`` field gets "no" where it was written so.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from hiddenstore.errors import ConfigError, NotFoundError

M = TypeVar("M", bound=BaseModel)

AUTO = "auto"
"""Written for a setting that ``defaults`` supplies, it means that default."""

_ABSENT = object()


class _WordsLoader(yaml.BaseLoader):
    """YAML whose scalars stay the text that was written; ``null``, ``~`` and nothing become None. Refuses a key twice.

    Anchors are refused: a small file could otherwise unfold into a huge one.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(f"line {mark.line + 1}: aliases (*name) are not supported")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value!r} is set twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _null_or_text(loader: _WordsLoader, node: yaml.ScalarNode) -> str | None:
    if node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
        return None
    return str(node.value)


_WordsLoader.add_constructor("tag:yaml.org,2002:str", _null_or_text)


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
    problems: list[str] = []
    values: dict[str, Any] = _copied(defaults or {})
    origins: dict[str, str] = {}
    for origin, layer in _layers(file, dotlist, problems):
        for path, value in _leaves(layer):
            default = _at(defaults or {}, path)
            if value == AUTO and default is not _ABSENT:
                _put(values, path, default)
                continue
            origins[".".join(path)] = origin
            _put(values, path, value)
    unknown = list(_unknown_keys(model, values, ()))
    hint = _first_hint(model, next(_leaves_below(values, unknown[0]))) if unknown else None
    for path in unknown:
        problems += [_unknown_message(model, leaf, origins) for leaf in _leaves_below(values, path)]
        _remove(values, path)
    try:
        settings = model.model_validate(_typed(model, values))
    except ValidationError as error:
        problems += [_invalid_message(item, origins) for item in error.errors(include_url=False)]
    else:
        if not problems:
            return settings
    kind = "config-unknown-key" if unknown else "config-invalid"
    raise ConfigError(_all_problems(problems), kind=kind, hint=hint)


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


def known_keys(model: type[BaseModel]) -> list[str]:
    """Every setting as ``key.path``, in the order declared."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        inner = _inner_model(info.annotation)
        keys += [f"{name}.{key}" for key in known_keys(inner)] if inner else [name]
    return keys


def _layers(
    file: str | Path | None, dotlist: Sequence[str], problems: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if file is not None:
        yield str(file), _read_yaml(Path(file))
    for word in dotlist:
        key, equals, text = word.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            problems.append(f"{word!r} should be key.path=value")
            continue
        try:
            value = _parsed(text)
        except yaml.YAMLError as error:
            problems.append(f"{word!r} is no YAML value: {_first_line(error)}")
            continue
        layer: dict[str, Any] = {}
        _put(layer, path, value)
        yield "command line", layer


def _parsed(text: str) -> Any:
    """One YAML document as text, None, lists and mappings; nothing else can come out of it."""
    loader = _WordsLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"the settings file {path} does not exist", kind="config-missing") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}", kind="config-unreadable") from error
    try:
        found = _parsed(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {_first_line(error)}", kind="config-unreadable") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} should hold key: value lines, found {type(found).__name__}", kind="config-unreadable"
        )
    return found


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


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


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _unknown_keys(
    model: type[BaseModel], values: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        info = model.model_fields.get(key)
        if info is None:
            yield (*path, key)
            continue
        inner = _inner_model(info.annotation)
        if inner is not None and isinstance(value, dict):
            yield from _unknown_keys(inner, value, (*path, key))


def _typed(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Text where the annotation wants a list or None, turned into it; pydantic's lax mode does the scalars."""
    typed: dict[str, Any] = {}
    for key, value in values.items():
        annotation = model.model_fields[key].annotation
        inner = _inner_model(annotation)
        if inner is not None and isinstance(value, Mapping):
            typed[key] = _typed(inner, value)
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


def _unknown_message(model: type[BaseModel], path: tuple[str, ...], origins: Mapping[str, str]) -> str:
    key = ".".join(path)
    close = _close_key(model, key)
    question = f"; did you mean {close}?" if close else _what_there_is(model, path)
    where = origins.get(key, "defaults")
    return f"unknown setting {key!r} ({where}){question}"


def _what_there_is(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """The settings of the section that was named, else the sections."""
    if path[0] not in model.model_fields:
        return f"; there are {', '.join(model.model_fields)}"
    inside = [key for key in known_keys(model) if key.startswith(f"{path[0]}.")]
    return f"; there are {', '.join(inside)}" if inside else ""


def _close_key(model: type[BaseModel], key: str) -> str | None:
    """The setting that was meant: one of the same last name in whatever section, else one spelled much the same."""
    keys = known_keys(model)
    last = key.rpartition(".")[2]
    same_name = [known for known in keys if known.rpartition(".")[2] == last]
    alike = [known for known in keys if SequenceMatcher(None, last, known.rpartition(".")[2]).ratio() >= 0.6]
    close = get_close_matches(key, same_name, n=1, cutoff=0.0) or get_close_matches(key, alike, n=1, cutoff=0.6)
    if not close:
        names = {known.rpartition(".")[2]: known for known in reversed(keys)}
        close = [names[name] for name in get_close_matches(last, names, n=1, cutoff=0.75)]
    return close[0] if close else None


def _first_hint(model: type[BaseModel], path: tuple[str, ...]) -> str | None:
    close = _close_key(model, ".".join(path))
    return f"{close}=…" if close else None


def _invalid_message(item: Any, origins: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    where = next((origin for name, origin in origins.items() if key == name or key.startswith(name + ".")), "")
    place = f" ({where})" if where else ""
    text = str(item["msg"])
    text = text.removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    given = "" if item["type"] == "missing" or isinstance(item["input"], dict) else f", found {item['input']!r}"
    return f"{key or 'settings'}{place}: {text}{given}"


def _all_problems(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings are wrong\n" + "\n".join(f"  {problem}" for problem in problems)

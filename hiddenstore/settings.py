"""Settings: pydantic models + one YAML file + ``key.path=value`` words. Defaults < file < words.

Every problem is reported at once. The annotation decides the type of a value, not YAML: PyYAML reads ``1e-4`` as a
string and ``no`` as False; a ``float`` field gets 0.0001 and a ``str`` field gets "no" where it was written so. Models
forbid extra keys, so that pydantic finds the unknown ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from hiddenstore.errors import ConfigError, Kind, NotFoundError

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str, ...]

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

    ``auto`` keeps what ``defaults`` says of a setting. Raises ConfigError: kind ``config-unknown-key`` when a key is
    unknown, else ``config-invalid``; the message lists every problem, one a line, with where it was written.
    ``config-unreadable``: the file is no YAML mapping; NotFoundError: the file does not exist."""
    merged = _merge(model, file, dotlist, defaults)
    settings, errors = _validate(model, merged)
    merged.problems += [_invalid_message(error, merged.origins) for error in errors]
    merged.require_no_problem()
    assert settings is not None
    return settings


def check(model: type[M], file: str | Path | None = None, dotlist: Sequence[str] = ()) -> None:
    """Refuse unknown settings, values that are none of their setting's and those that contradict each other, as far as
    no default has a part in it; settings may lack. Raises ConfigError: as ``load``; NotFoundError: the file does not
    exist."""
    merged = _merge(model, file, dotlist, None)
    _, errors = _validate(model, merged)
    autos = {".".join(path) for path, value in _leaves(merged.values) if value == AUTO}
    written = {key: origin for key, origin in merged.origins.items() if key not in autos}
    merged.problems += [_invalid_message(error, written) for error in errors if _concerns(error, written)]
    merged.require_no_problem()


def dump(settings: BaseModel) -> str:
    """The resolved settings as YAML that ``load`` reads back to an equal model."""
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    assert isinstance(text, str)
    return text


def assignments(key: str, file: str | Path | None = None, dotlist: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """What the file and the words set ``key``, or a setting below it, to: (origin, value), the winning one last."""
    prefix = tuple(key.split("."))
    return [
        (origin, value)
        for origin, path, value in _assignments(file, dotlist, problems=[])
        if path[: len(prefix)] == prefix
    ]


def written(file: str | Path | None, dotlist: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that a file and words say: ``key.path`` to the text, list or None written last. Raises as ``load``."""
    problems: list[str] = []
    values = {".".join(path): value for _, path, value in _assignments(file, dotlist, problems)}
    if problems:
        raise ConfigError(all_problems(problems), kind=Kind.CONFIG_INVALID, problems=problems)
    return values


def key_paths(model: type[BaseModel]) -> list[str]:
    """Every setting as ``key.path``, in the order declared; ``NAME`` where sections lie under free names."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        prefix = f"{name}.NAME." if _is_mapping(info.annotation) else f"{name}."
        keys += [prefix + key for key in key_paths(section)] if section else [name]
    return keys


def all_problems(problems: Sequence[str]) -> str:
    """One message of several: a line each where there is more than one."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings are wrong\n" + "\n".join(f"  {problem}" for problem in problems)


class _StrictYaml:
    """For a YAML loader: a key written twice is refused, of which it would silently take the last, and so are aliases,
    by which a small file could unfold into a huge one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # type: ignore[attr-defined]
            mark = self.peek_event().start_mark  # type: ignore[attr-defined]
            raise yaml.YAMLError(f"line {mark.line + 1}: aliases (*name) are not supported")
        return super().compose_node(parent, index)  # type: ignore[misc]

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line}: a key should be a word")
            if key.value in keys:
                raise yaml.YAMLError(f"line {line}: {key.value!r} is set twice")
            keys.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)  # type: ignore[misc]
        return mapping


class _TextLoader(_StrictYaml, yaml.BaseLoader):
    """YAML whose scalars stay the text that was written; ``null``, ``~`` and nothing become None."""

    def null_or_text(self, node: yaml.ScalarNode) -> str | None:
        if node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
            return None
        return str(node.value)


_TextLoader.add_constructor("tag:yaml.org,2002:str", _TextLoader.null_or_text)


class _PlainLoader(_StrictYaml, yaml.SafeLoader):
    """YAML whose scalars become the numbers, truth values and dates that they look like."""


def parse(text: str | bytes, *, plain: bool = False) -> Any:
    """One YAML document as text, None, lists and mappings; ``plain``: with numbers, truth values and dates. Raises
    yaml.YAMLError: it is none, or PyYAML stumbles over it (``"\\UFFFFFFFF"``, ``2026-02-31``, lists without end)."""
    loader = (_PlainLoader if plain else _TextLoader)(text)
    try:
        return loader.get_single_data()
    except (ValueError, OverflowError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"the settings file {path} does not exist", kind=Kind.PATH_MISSING) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}", kind=Kind.CONFIG_UNREADABLE) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {first_line(error)}", kind=Kind.CONFIG_UNREADABLE) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        problem = f"{path} should hold key: value lines, found {type(document).__name__}"
        raise ConfigError(problem, kind=Kind.CONFIG_UNREADABLE)
    return document


def first_line(error: BaseException) -> str:
    """What an error says, on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


def _assignments(
    file: str | Path | None, dotlist: Sequence[str], problems: list[str]
) -> Iterator[tuple[str, KeyPath, Any]]:
    """Every single setting that is written: where, its path, its value; words that are none become ``problems``."""
    if file is not None:
        yield from ((str(file), path, value) for path, value in _leaves(_read_file(Path(file))))
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
        yield from (("command line", leaf, inner) for leaf, inner in _leaves(value, path))


@dataclass
class _Merged:
    """File and words over the defaults, where each setting was written, and what is wrong with them so far."""

    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    kind: Kind = Kind.CONFIG_INVALID
    hint: str | None = None

    def require_no_problem(self) -> None:
        if self.problems:
            raise ConfigError(all_problems(self.problems), kind=self.kind, hint=self.hint, problems=self.problems)


def _merge(
    model: type[BaseModel], file: str | Path | None, dotlist: Sequence[str], defaults: Mapping[str, Any] | None
) -> _Merged:
    merged = _Merged(deepcopy(dict(defaults or {})))
    for origin, path, value in _assignments(file, dotlist, merged.problems):
        default = _get(defaults, path)
        if value == AUTO and default is not _ABSENT:
            _put(merged.values, path, default)
            continue
        merged.origins[".".join(path)] = origin
        _put(merged.values, path, value if value == AUTO else _from_text(_annotation(model, path), value))
    return merged


def _validate(model: type[M], merged: _Merged) -> tuple[M | None, list[Any]]:
    """The settings, or what pydantic finds wrong. Unknown keys become problems and leave the values: pydantic looks for
    contradictions only in a section without them."""
    try:
        return model.model_validate(merged.values), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # Not so inside the item of a list, which has no path of names.
    unknown = [e for e in errors if e["type"] == "extra_forbidden" and _get(merged.values, e["loc"]) is not _ABSENT]
    if not unknown:
        return None, errors
    merged.kind = Kind.CONFIG_UNKNOWN_KEY
    for extra in unknown:
        path = tuple(map(str, extra["loc"]))
        for leaf, _ in _leaves(extra["input"], path):
            close = _close_key(model, ".".join(leaf))
            merged.hint = merged.hint or (f"{close}=…" if close else None)
            merged.problems.append(_unknown_message(model, leaf, close, merged.origins))
        _get(merged.values, path[:-1]).pop(path[-1])
    return _validate(model, merged)


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """``value`` at ``path``, or of a mapping every value inside with its own path."""
    if not isinstance(value, dict) or (path and not value):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, (*path, str(key)))


def _get(values: Any, path: Sequence[int | str]) -> Any:
    for key in path:
        values = values.get(key, _ABSENT) if isinstance(values, Mapping) else _ABSENT
    return values


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[path[-1]] = value


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) in (dict, Mapping)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation: of a section, or of each section of a mapping or list."""
    candidates = (annotation, *get_args(annotation))
    return next((model for model in candidates if isinstance(model, type) and issubclass(model, BaseModel)), None)


def _annotation(model: type[BaseModel], path: KeyPath) -> Any:
    """The annotation of a setting; ``str``, which leaves text alone, where the models say nothing of it."""
    annotation: Any = model
    for key in path:
        section = _section(annotation)
        if _is_mapping(annotation):
            annotation = get_args(annotation)[1]
        elif section is not None and key in section.model_fields:
            annotation = section.model_fields[key].annotation
        else:
            return str
    return annotation


def _from_text(annotation: Any, text: Any) -> Any:
    """``none`` for an optional that is no text; ``1,15,28`` for a list or tuple; YAML's own reading for ``Any``, where
    there is one.

    Pydantic's lax mode does the scalars."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not isinstance(text, str) or str in members:
        return text
    if Any in members:
        return plain_value(text)
    if NoneType in members and text.lower() == "none":
        return None
    if any((get_origin(member) or member) in (list, tuple) for member in members):
        return [item.strip() for item in text.split(",") if item.strip()]
    return text


def plain_value(text: str) -> Any:
    """What YAML makes of a text, which stays text where that is nothing: a pattern such as ``[a-z]+``, an odd date."""
    try:
        return parse(text, plain=True)
    except yaml.YAMLError:
        return text


def _close_key(model: type[BaseModel], key: str) -> str | None:
    """The setting that was meant: of the section that is written, else of another one the one whose last name is most
    alike, of several the one that is as a whole."""

    def likeness(name: str) -> tuple[float, float]:
        pairs = ((key.rpartition(".")[2], name.rpartition(".")[2]), (key, name))
        return tuple(SequenceMatcher(None, *pair).ratio() for pair in pairs)  # type: ignore[return-value]

    section, names = key.rpartition(".")[0], key_paths(model)
    near = [name for name in names if section and name.startswith(f"{section}.") and likeness(name)[0] >= 0.7]
    closest = max(near or names, key=likeness)
    of_last_name, of_all = likeness(closest)
    is_meant = bool(near) or of_last_name >= 0.75 or min(of_last_name, of_all) >= 0.65
    return closest if is_meant else None


def _unknown_message(model: type[BaseModel], path: KeyPath, close: str | None, origins: Mapping[str, str]) -> str:
    """Where an unknown key was written, and which was meant or which there are: of its section, else the sections."""
    key = ".".join(path)
    names = [name for name in key_paths(model) if name.startswith(f"{path[0]}.")] or model.model_fields
    advice = f"did you mean {close}?" if close else f"there are {', '.join(names)}"
    return f"unknown setting {key!r} ({origins.get(key, 'defaults')}); {advice}"


def _concerns(error: Any, origins: Mapping[str, str]) -> bool:
    """Whether an error is that of one of these settings, of an item of one, or of a section that holds one."""
    section = ".".join(map(str, error["loc"])) + "."
    is_contradiction = error["type"] == "value_error" and any(key.startswith(section) for key in origins)
    return is_contradiction or any(section.startswith(f"{key}.") for key in origins)


def _invalid_message(error: Any, origins: Mapping[str, str]) -> str:
    key = ".".join(map(str, error["loc"])) or "settings"
    origin = next((origin for name, origin in origins.items() if f"{key}.".startswith(f"{name}.")), "")
    text = str(error["msg"]).removeprefix("Value error, ")
    value = "" if error["type"] == "missing" or isinstance(error["input"], dict) else f", found {error['input']!r}"
    return f"{key}{f' ({origin})' if origin else ''}: {text[:1].lower()}{text[1:]}{value}"

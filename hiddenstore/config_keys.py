"""Names of settings: which there are, which were written that are not, and which was meant."""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel


def known_keys(model: type[BaseModel]) -> list[str]:
    """Every setting as ``key.path``, in the order declared."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        inner, named = inner_model(info.annotation), named_models(info.annotation)
        if named is not None:
            keys += [f"{name}.NAME.{key}" for key in known_keys(named)]
        else:
            keys += [f"{name}.{key}" for key in known_keys(inner)] if inner else [name]
    return keys


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model of a section, or None for a single setting or a mapping."""
    if get_origin(annotation) in (dict, Mapping):
        return None
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def named_models(annotation: Any) -> type[BaseModel] | None:
    """The model of every value where the annotation is a mapping of names to sections."""
    arguments = get_args(annotation)
    if get_origin(annotation) not in (dict, Mapping) or len(arguments) != 2:
        return None
    return arguments[1] if isinstance(arguments[1], type) and issubclass(arguments[1], BaseModel) else None


def unknown_keys(
    model: type[BaseModel], values: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The path of every key of ``values`` that ``model`` does not have."""
    for key, value in values.items():
        info = model.model_fields.get(key)
        if info is None:
            yield (*path, key)
            continue
        inner, named = inner_model(info.annotation), named_models(info.annotation)
        if inner is not None and isinstance(value, dict):
            yield from unknown_keys(inner, value, (*path, key))
        elif named is not None and isinstance(value, dict):
            for name, section in value.items():
                if isinstance(section, dict):
                    yield from unknown_keys(named, section, (*path, key, name))


def unknown_message(model: type[BaseModel], path: tuple[str, ...], origins: Mapping[str, str]) -> str:
    """What to say of an unknown key: where it was written, and what was meant or what there is."""
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


def first_hint(model: type[BaseModel], path: tuple[str, ...]) -> str | None:
    """The word that was meant."""
    close = _close_key(model, ".".join(path))
    return f"{close}=…" if close else None

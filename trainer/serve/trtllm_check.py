"""TensorRT-LLM's YAML file checked without TensorRT-LLM: spelling, kinds, and what settings demand of each other."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from hiddenstore.config_yaml import KeysOnce
from hiddenstore.errors import ConfigError, NotFoundError
from trainer.serve.fields import Field, Problem, Table, find, problems_of, refuse
from trainer.serve.trtllm_fields import DECODING_TYPES, FILE, NEEDS_LENGTH, NEEDS_MODEL
from trainer.serve.versions import is_within


class _OnceLoader(KeysOnce, yaml.SafeLoader):
    """Safe YAML, each key once."""


def check_file(path: Path, version: str | None = None) -> dict[str, Any]:
    """The settings of a YAML file that has nothing wrong; with ``version``, nothing that this version lacks either.

    Raises:
        NotFoundError: no such file.
        ConfigError: ``serve-yaml``, one line a problem, with what was likely meant.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", kind="serve-missing") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is no text file: {error}", kind="serve-yaml") from error
    loader = _OnceLoader(text)
    try:
        found = loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())[:300]}", kind="serve-yaml") from error
    finally:
        loader.dispose()
    if not isinstance(found, dict):
        raise ConfigError(f"{path} should hold key: value lines", kind="serve-yaml")
    refuse(list(file_problems(found, version)), str(path), "serve-yaml")
    return found


def file_problems(values: Mapping[str, Any], version: str | None = None) -> Iterator[Problem]:
    """Everything wrong with the settings of a file."""
    speculation = values.get("speculative_config")
    yield from problems_of(file_table(speculation), values, version)
    if isinstance(speculation, Mapping):
        yield from _speculation_problems(speculation, version)
    graphs = values.get("cuda_graph_config")
    if isinstance(graphs, Mapping):
        yield from _graph_problems(graphs)


def file_table(speculation: Any) -> Table:
    """``FILE`` with the fields that ``speculation``'s decoding type has; those of every type where it says none."""
    kind = speculation.get("decoding_type") if isinstance(speculation, Mapping) else None
    return tuple(
        replace(field, fields=_fields_of(kind)) if field.name == "speculative_config" else field for field in FILE
    )


def _fields_of(kind: Any) -> tuple[Field, ...]:
    if isinstance(kind, str) and kind in DECODING_TYPES:
        return DECODING_TYPES[kind].fields
    every = {field.name: field for section in DECODING_TYPES.values() for field in section.fields}
    return tuple(every.values())


def _speculation_problems(values: Mapping[str, Any], version: str | None) -> Iterator[Problem]:
    here = "speculative_config"
    kind = values.get("decoding_type")
    if kind is None:
        yield Problem(f"{here}.decoding_type", f"is missing; there are {', '.join(DECODING_TYPES)}")
        return
    if kind in ("User_Provided", "UserProvided"):
        yield Problem(f"{here}.decoding_type", "a drafter class of your own is given in Python, not in YAML")
        return
    section = DECODING_TYPES.get(str(kind))
    if section is None:
        close = get_close_matches(str(kind), DECODING_TYPES, n=1, cutoff=0.5)
        meant = f"decoding_type: {close[0]}" if close else None
        yield Problem(f"{here}.decoding_type", f"{kind!r} is none of {', '.join(DECODING_TYPES)}", meant)
        return
    if version is not None and not is_within(version, section.since, section.before):
        yield Problem(f"{here}.decoding_type", f"{kind} is not in version {version} (since {section.since})")
    if kind in NEEDS_MODEL and not _has(section.fields, "speculative_model", values):
        yield Problem(f"{here}.speculative_model", f"is missing: {kind} needs the drafter's folder or hub id")
    if kind in NEEDS_LENGTH and not (values.get("max_draft_len") or values.get("prompt_lookup_num_tokens")):
        yield Problem(f"{here}.max_draft_len", f"is missing: {kind} needs how many tokens to draft")
    if values.get("max_concurrency") is not None and values.get("draft_len_schedule") is not None:
        yield Problem(f"{here}.draft_len_schedule", "excludes max_concurrency: give one of them")
    yield from _tree_problems(values, here)


def _tree_problems(values: Mapping[str, Any], here: str) -> Iterator[Problem]:
    if not values.get("use_dynamic_tree"):
        return
    top, depth, total = (values.get(n) for n in ("dynamic_tree_max_topK", "max_draft_len", "max_total_draft_tokens"))
    if not isinstance(top, int) or top < 1:
        yield Problem(f"{here}.dynamic_tree_max_topK", "is missing: a dynamic tree needs its branches per node")
    elif isinstance(depth, int) and isinstance(total, int) and not depth <= total <= top * depth:
        yield Problem(f"{here}.max_total_draft_tokens", f"should be from {depth} to {top * depth}, found {total}")


def _graph_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    sizes, most = values.get("batch_sizes"), values.get("max_batch_size")
    if (
        isinstance(sizes, list)
        and sizes
        and all(isinstance(n, int) for n in sizes)
        and most not in (None, 0, max(sizes))
    ):
        yield Problem("cuda_graph_config.max_batch_size", f"should be the largest of batch_sizes, found {most}")


def _has(fields: tuple[Field, ...], name: str, values: Mapping[str, Any]) -> bool:
    field = find(fields, name)
    return field is not None and any(values.get(spelling) for spelling in (field.name, *field.aliases))

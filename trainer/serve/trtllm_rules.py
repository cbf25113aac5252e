"""What settings of TensorRT-LLM's YAML file demand of each other, as its documentation states; nothing else is checked.

TensorRT-LLM refuses unknown and misspelt settings itself. Sources:
NVIDIA/TensorRT-LLM docs/source/features/speculative-decoding.md and ``tensorrt_llm/llmapi/llm_args.py`` of 1.1 to
1.4.0rc1; neither was run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.settings import KeysOnce, all_problems, first_line
from trainer.formats.base import is_within
from trainer.serve.drafter import text_config

Settings = Mapping[str, Any]
MODEL = ("speculative_model", "speculative_model_dir")
_LENGTH = ("max_draft_len", "prompt_lookup_num_tokens")
_LIMIT = "max_concurrency"
_WITH_MODEL = ("Eagle3", "Eagle", "DraftTarget", "Draft_Target", "PARD", "DFlash")
_WITH_LENGTH = (*_WITH_MODEL, "NGram", "SA")
SINCE = {"Eagle3": "1.2", "Draft_Target": "1.2", "PARD": "1.3", "DFlash": "1.3", "SA": "1.3", "SaveState": "1.1"}
"""``decoding_type`` → the first version that has it. An earlier ``from_dict`` keys a draft model ``DraftTarget``, later
it is ``Literal["Draft_Target"]``, while the page and the playbooks of 1.3 go on writing ``DraftTarget``."""


def _all(values: Settings, *names: str) -> bool:
    return all(values.get(name) for name in names)


def _without(values: Settings, kinds: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return values.get("decoding_type") in kinds and not any(values.get(name) for name in names)


def _differ(values: Settings, first: str, second: str) -> bool:
    return _all(values, first, second) and values[first] != values[second]


def _no_such_tree(values: Settings) -> bool:
    if not _all(values, "use_dynamic_tree", "dynamic_tree_max_topK", "max_draft_len", "max_total_draft_tokens"):
        return False
    depth, total = values["max_draft_len"], values["max_total_draft_tokens"]
    return not depth <= total <= depth * values["dynamic_tree_max_topK"]


Rule = tuple[str, Callable[[Settings], bool], str]
RULES: Mapping[str, tuple[Rule, ...]] = {
    "speculative_config": (
        ("decoding_type", lambda v: not v.get("decoding_type"), "is missing"),
        (
            "decoding_type",
            lambda v: v.get("decoding_type") in ("User_Provided", "UserProvided"),
            "a drafter class of your own is given in Python, not in YAML",
        ),
        (
            "speculative_model",
            lambda v: _without(v, _WITH_MODEL, MODEL),
            "is missing: {decoding_type} needs the drafter's folder or hub id",
        ),
        (
            "max_draft_len",
            lambda v: _without(v, _WITH_LENGTH, _LENGTH),
            "is missing: {decoding_type} needs how many tokens to draft",
        ),
        (
            "num_nextn_predict_layers",
            lambda v: _differ(v, "num_nextn_predict_layers", "max_draft_len"),
            "must match max_draft_len, {max_draft_len}: found {num_nextn_predict_layers}",
        ),
        (
            "dynamic_tree_max_topK",
            lambda v: _all(v, "use_dynamic_tree") and not _all(v, "dynamic_tree_max_topK"),
            "is missing: a dynamic tree needs its branches per node",
        ),
        (
            "max_total_draft_tokens",
            _no_such_tree,
            "should be from {max_draft_len} to {dynamic_tree_max_topK} times that, found {max_total_draft_tokens}",
        ),
        ("eagle_choices", lambda v: _all(v, "eagle_choices", "use_dynamic_tree"), "excludes use_dynamic_tree"),
        ("draft_len_schedule", lambda v: _all(v, "draft_len_schedule", _LIMIT), f"excludes {_LIMIT}"),
    ),
    "cuda_graph_config": (
        (
            "max_batch_size",
            lambda v: _all(v, "batch_sizes", "max_batch_size") and v["max_batch_size"] != max(v["batch_sizes"]),
            "should be the largest of batch_sizes, found {max_batch_size}",
        ),
    ),
}
"""By section: a setting, whether the section's values break what is demanded of it, and what to say then."""


def file_problems(settings: Settings, version: str | None = None) -> Iterator[str]:
    """Every contradiction in the settings of a file; with ``version``, also a decoding type that it lacks.

    Raises:
        ConfigError: ``serve-setting``: a value is of another kind than those it is compared with.
    """
    sections = {name: values for name, values in settings.items() if isinstance(values, Mapping)}
    for section, setting, is_broken, text in ((name, *rule) for name in RULES for rule in RULES[name]):
        try:
            if section in sections and is_broken(sections[section]):
                yield f"{section}.{setting}: {text.format_map(sections[section])}"
        except TypeError as error:
            raise ConfigError(f"{section}.{setting} cannot be compared: {error}", kind=Kind.SERVE_SETTING) from error
    kind = str(sections.get("speculative_config", {}).get("decoding_type"))
    if version is not None and kind in SINCE and not is_within(version, SINCE[kind], None):
        yield f"speculative_config.decoding_type: {kind} is not in version {version} (since {SINCE[kind]})"
    elif version is not None and kind == "DraftTarget" and is_within(version, "1.2", "1.3"):
        yield f"speculative_config.decoding_type: {kind} is spelt Draft_Target in version {version}"


def target_problems(target: str) -> list[str]:
    """Why the target cannot draft by MTP, where it is a local folder: its ``config.json`` counts no such layers."""
    config = text_config(target)
    if config is None or config.get("num_nextn_predict_layers"):
        return []
    return [f"speculative_config.decoding_type: MTP, but {target} has no num_nextn_predict_layers"]


def refuse(settings: Settings, version: str | None, where: str, problems: Iterable[str] = ()) -> None:
    """Raise a ConfigError that lists every contradiction of the settings, besides ``problems``; none: return."""
    lines = [f"{where}: {problem}" for problem in (*problems, *file_problems(settings, version))]
    if lines:
        raise ConfigError(all_problems(lines), kind=Kind.SERVE_SETTING)


class _OnceLoader(KeysOnce, yaml.SafeLoader):
    """Safe YAML, each key once."""


def check_file(path: Path, version: str | None = None) -> dict[str, Any]:
    """The settings of a YAML file without contradictions; with ``version``, of a decoding type that it has.

    Raises:
        NotFoundError: no such file.
        ConfigError: ``serve-setting``, one line a problem.
    """
    try:
        loader = _OnceLoader(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", kind=Kind.PATH_MISSING) from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is no text file: {error}", kind=Kind.SERVE_SETTING) from error
    try:
        settings = loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {first_line(error)}", kind=Kind.SERVE_SETTING) from error
    finally:
        loader.dispose()
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} should hold key: value lines", kind=Kind.SERVE_SETTING)
    refuse(settings, version, str(path))
    return settings

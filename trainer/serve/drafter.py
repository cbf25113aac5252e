"""A drafter's folder as ``serve`` sees it: what it is, how far it drafts, and for whom it was exported.

``hiddenstore.json`` tells of our exports; a published drafter is told by its ``config.json``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, FormatError, NotFoundError
from hiddenstore.identity import config_sha256
from trainer.export.support import engine_named, row
from trainer.serve.plan import TRAINED, ServingEngine

ABOUT_FILE = "hiddenstore.json"
CONFIG_FILE = "config.json"

ARCHITECTURES = {
    "EagleLlamaForCausalLM": "eagle1",
    "LlamaForCausalLMEagle": "eagle1",
    "EagleSpeculator": "eagle1",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "EAGLE3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlashDrafter": "dflash",
    "MedusaModel": "medusa",
}
"""``architectures`` of published drafters (vLLM, SGLang, TensorRT-LLM, speculators, z-lab) → our word."""


@dataclass(frozen=True)
class ServedDrafter:
    """``draft_len`` is how far it was trained to draft, ``longest`` how far it can at all (None: any length).

    ``engine``, ``version`` and ``target`` are those it was exported for; None where its folder does not say.
    """

    path: str
    method: str
    draft_len: int | None = None
    longest: int | None = None
    engine: str | None = None
    version: str | None = None
    target: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def read_drafter(folder: Path, method: str | None = None) -> ServedDrafter:
    """The drafter in ``folder``; ``method`` where its files do not tell what it is.

    Raises:
        NotFoundError: no config.json there.
        ConfigError: ``serve-drafter``: a file is no JSON, or nothing tells what this drafter is.
    """
    config = _json(folder / CONFIG_FILE)
    about = _json(folder / ABOUT_FILE) if (folder / ABOUT_FILE).exists() else {}
    found = about.get("drafter") or _told_by(config)
    if found is None and method is None:
        raise ConfigError(
            f"{folder} does not say which drafter it is: architectures {config.get('architectures')}",
            kind="serve-drafter",
            hint=f"--method {' | '.join((*TRAINED, 'draft-target'))}",
        )
    if found and method and not _same_kind(found, method):
        raise ConfigError(
            f"{folder} is {found}, not {method}", kind="serve-drafter", hint="leave --method out, or give another DIR"
        )
    word = str(found or method)
    return ServedDrafter(
        path=str(folder),
        method=word,
        draft_len=about.get("draft_len") or _draft_len(config, word),
        longest=_longest(config, word),
        engine=about.get("engine"),
        version=about.get("engine_version"),
        target=about.get("target"),
        config=config,
    )


def check_engine(drafter: ServedDrafter, engine: ServingEngine, version: str) -> None:
    """Raise FormatError ``serve-engine`` where the folder was written for another engine, or another way of this one.

    Two versions of one row of the export table read the same file.
    """
    if drafter.engine is None:
        return
    if drafter.engine not in engine.loads:
        raise FormatError(
            f"{drafter.path} was exported for {drafter.engine}; {engine.title} reads other layer ids and names",
            kind="serve-engine",
            hint=f"hiddenstore export RUN --engine {engine.name} -o DIR",
        )
    table = engine_named(drafter.engine)
    written = drafter.version or table.version
    if drafter.engine == engine.name and row(table, written, drafter.method) is not row(table, version, drafter.method):
        raise FormatError(
            f"{drafter.path} was exported for {engine.title} {written}, and {version} reads another layout",
            kind="serve-engine",
            hint=f"hiddenstore export RUN --engine {engine.name} --engine-version {version} -o DIR",
        )


def check_target(drafter: ServedDrafter, target: str) -> list[str]:
    """Raise FormatError ``target-mismatch`` where a local ``target`` is not the one drafted for; else remarks.

    Of a target that is a hub id only the name is compared, and a difference is only remarked: a quantised copy has
    another name and the same states.
    """
    expected = drafter.target or {}
    folder = Path(target)
    if not folder.is_dir():
        name = expected.get("name", "")
        if "/" in name and name != target:
            return [f"the drafter was trained for {name}; {target} must have the same weights, vocabulary and layers"]
        return []
    found = _json(folder / CONFIG_FILE)
    differences = _differences(expected, found) if expected else _published_differences(drafter, found)
    if differences:
        engine = drafter.engine or "ENGINE"
        raise FormatError(
            f"{target} is not the target of {drafter.path}\n" + "\n".join(f"  {line}" for line in differences),
            kind="target-mismatch",
            hint=f"--target {expected.get('name') or 'ITS_TARGET'}, or hiddenstore export RUN_OF_THIS_TARGET "
            f"--engine {engine} -o DIR",
        )
    return []


def _differences(expected: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What tells two targets apart by config.json alone; a quantised copy of the same config is the same target."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if expected.get("config_sha256") in (None, config_sha256(config), config_sha256(plain)):
        return []
    text = config.get("text_config") or config
    sizes = {"model_type": "model_type", "hidden_size": "hidden_size", "vocab_size": "vocab_size"} | {
        "num_layers": "num_hidden_layers"
    }
    lines = [
        f"{ours}: {expected[ours]} expected, {text.get(theirs)} found"
        for ours, theirs in sizes.items()
        if ours in expected and expected[ours] != text.get(theirs)
    ]
    return lines or [f"config.json differs: sha256 {str(expected['config_sha256'])[:8]}… expected"]


def _published_differences(drafter: ServedDrafter, config: Mapping[str, Any]) -> list[str]:
    text = config.get("text_config") or config
    own = drafter.config.get("transformer_layer_config") or drafter.config
    width = drafter.config.get("target_hidden_size") or own.get("hidden_size")
    lines = []
    if own.get("vocab_size") and text.get("vocab_size") and own["vocab_size"] > text["vocab_size"]:
        lines.append(f"vocab_size: {own['vocab_size']} expected, {text['vocab_size']} found")
    if drafter.method in TRAINED and width and text.get("hidden_size") and width != text["hidden_size"]:
        lines.append(f"hidden_size: {width} expected, {text['hidden_size']} found")
    return lines


def _told_by(config: Mapping[str, Any]) -> str | None:
    for name in config.get("architectures") or []:
        if name in ARCHITECTURES:
            word = ARCHITECTURES[name]
            is_later = word == "eagle3" and (config.get("fc_norm") or config.get("norm_output"))
            return "eagle3.1" if is_later else word
    if config.get("model_type") == "medusa":
        return "medusa"
    if config.get("eagle_config") or config.get("draft_vocab_size"):
        return "eagle3"
    return "dflash" if config.get("dflash_config") else None


def _draft_len(config: Mapping[str, Any], method: str) -> int | None:
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return proposals[0].get("speculative_tokens") or _longest(config, method)


def _longest(config: Mapping[str, Any], method: str) -> int | None:
    if method == "dflash":
        block = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
        return block - 1 if block else None
    if method == "medusa":
        return config.get("num_heads") or config.get("medusa_num_heads")
    return None


def _same_kind(found: str, method: str) -> bool:
    return found.removesuffix(".1") == method.removesuffix(".1")


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        hint = "hiddenstore export RUN --engine vllm|sglang|trtllm -o DIR"
        raise NotFoundError(f"{file} does not exist", kind="serve-missing", hint=hint) from error
    except (ValueError, NotADirectoryError) as error:
        raise ConfigError(f"{file} is no JSON: {error}", kind="serve-drafter") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} should hold a JSON object", kind="serve-drafter")
    return found

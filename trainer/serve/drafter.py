"""A drafter's folder as ``serve`` sees it: what it is, how far it drafts, for whom it was exported, what may go wrong.

``hiddenstore.json`` tells of our exports; a published drafter is told by its ``config.json``.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, Kind, NotFoundError
from hiddenstore.files.documents import foreign_json
from hiddenstore.fs.publish import replace_file
from hiddenstore.share.remote import SUMS
from hiddenstore.targets import LAYER_RULES
from hiddenstore.targets.checkpoint import WEIGHTS_FILE
from hiddenstore.targets.folder import CONFIG_FILE
from schemas.layers import LayerConvention, to_convention
from trainer.export.support import ENGINES, recognised, row, target_differences, words
from trainer.formats import gguf
from trainer.formats.base import ABOUT_FILE, LAYER_IDS, OUTPUT_IDS, Reads, is_within
from trainer.serve.plan import ServingEngine

_MAY_NAME_CODE = (CONFIG_FILE, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
EXPORT_AGAIN = "hiddenstore export RUN --engine vllm|sglang|trtllm|llamacpp -o DIR"


@dataclass(frozen=True)
class ServedDrafter:
    """``draft_len`` is how far it is to draft, ``longest`` how far it can at all (None: any length).
    ``engine``, ``version`` and ``target`` are those it was exported for; None where its folder does not say. ``layers``
    are an exported EAGLE-3's, in the engine's numbering."""

    path: str
    method: str
    draft_len: int | None = None
    longest: int | None = None
    engine: str | None = None
    version: str | None = None
    target: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()


def read_drafter(folder: Path, method: str | None = None) -> ServedDrafter:
    """The drafter in ``folder``; ``method`` where its files do not tell what it is. Raises NotFoundError: no
    config.json there; ConfigError: ``serve-setting``: a file is no JSON, or nothing tells what this drafter is."""
    file = gguf.drafter_file(folder)
    if file is not None and method == "draft-target":
        return ServedDrafter(path=str(folder), method=method)
    if file is not None:
        config, about = gguf.about_file(file)
        _require_about(f"{file}: {gguf.ABOUT}", about)
    else:
        config = _json(folder / CONFIG_FILE)
        about = _about(folder)
    with _of_a_drafter(folder):
        drafter = recognised(config, {})
        word = about.get("drafter") or (drafter.word(config) if drafter else None)
    if word and str(word) not in words():
        problem = f"{folder} is {word!r}; known here are {', '.join(words())}"
        raise ConfigError(problem, kind=Kind.SERVE_SETTING, hint="a newer hiddenstore, or the package that adds it")
    if word is None and method is None:
        problem = f"{folder} does not say which drafter it is: architectures {config.get('architectures')}"
        raise ConfigError(problem, kind=Kind.SERVE_SETTING, hint=f"--method {' | '.join((*words(), 'draft-target'))}")
    if word and method and words().get(word) is not words().get(method):
        raise ConfigError(
            f"{folder} is {word}, not {method}", kind=Kind.SERVE_SETTING, hint="leave --method out, or give another DIR"
        )
    word = str(word or method)
    with _of_a_drafter(folder):
        longest = words()[word].longest(config) if word in words() else None
        proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        layers = (config.get("eagle_config") or {}).get(LAYER_IDS) or () if about.get("engine") else ()
        return ServedDrafter(
            path=str(folder),
            method=word,
            draft_len=about.get("draft_len") or proposals[0].get("speculative_tokens") or longest,
            longest=longest,
            engine=about.get("engine"),
            version=about.get("engine_version"),
            target=about.get("target"),
            config=config,
            layers=tuple(map(int, layers)),
        )


@contextmanager
def _of_a_drafter(path: Path | str) -> Iterator[None]:
    """ConfigError ``serve-setting`` where somebody's config.json has something else where a drafter's has a number, a
    list or an object."""
    try:
        yield
    except HiddenstoreError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
        problem = f"{path}: config.json is of no drafter: {error}"
        raise ConfigError(problem, kind=Kind.SERVE_SETTING) from error


def keep_draft_len(folder: str | None, length: int) -> bool:
    """Have an export draft so many tokens from now on, wherever its files say how many; False where ``folder`` is none
    that `export` wrote, or was pulled, whose ``SHA256SUMS`` would then be of other files. Raises ConfigError
    ``serve-setting``: a file is no JSON; StorageError."""
    if folder is None or not (Path(folder) / ABOUT_FILE).is_file() or (Path(folder) / SUMS).exists():
        return False
    config, about = (_json(Path(folder) / file) for file in (CONFIG_FILE, ABOUT_FILE))
    for proposal in (config.get("speculators_config") or {}).get("proposal_methods") or ():
        proposal["speculative_tokens"] = length
    for file, document in ((CONFIG_FILE, config), (ABOUT_FILE, {**about, "draft_len": length})):
        replace_file(Path(folder) / file, (json.dumps(document, indent=2) + "\n").encode())
    return True


def _about(folder: Path) -> dict[str, Any]:
    """What an export of ours says of itself; nothing of a published drafter."""
    if not (folder / ABOUT_FILE).exists():
        return {}
    about = _json(folder / ABOUT_FILE)
    _require_about(folder / ABOUT_FILE, about)
    if not (folder / WEIGHTS_FILE).is_file():
        raise NotFoundError(f"{folder / WEIGHTS_FILE} does not exist", kind=Kind.PATH_MISSING, hint=EXPORT_AGAIN)
    return about


def _require_about(where: Path | str, about: Mapping[str, Any]) -> None:
    length, target = about.get("draft_len"), about.get("target")
    is_length = length is None or (type(length) is int and length > 0)
    if not is_length or not _is_identity(target):
        raise ConfigError(
            f"{where} has draft_len {length!r} and a target of {type(target).__name__}; expected a whole "
            "number above 0 and an object whose name and digests are text",
            kind=Kind.SERVE_SETTING,
        )


def _is_identity(target: Any) -> bool:
    if not isinstance(target, dict):
        return target is None
    digests = (value for key, value in target.items() if key.endswith("_sha256"))
    return isinstance(target.get("name", ""), str) and all(isinstance(digest, str | NoneType) for digest in digests)


def check_engine(drafter: ServedDrafter, engine: ServingEngine, version: str) -> None:
    """Raise FormatError ``serve-engine`` where the folder was written for another engine, or another way of this one;
    ConfigError ``serve-unsupported`` where a published one is as this engine does not read it. Two versions of one row
    of the export table read the same file."""
    if drafter.engine is None:
        _check_published(drafter, engine, version)
        return
    if drafter.engine not in engine.loads:
        problem = f"{drafter.path} was exported for {drafter.engine}; {engine.title} reads other layer ids and names"
        raise FormatError(problem, kind=Kind.SERVE_ENGINE, hint=f"hiddenstore export RUN --engine {engine.name} -o DIR")
    if drafter.engine != engine.name:
        _check_published(drafter, engine, version)
    table = ENGINES[drafter.engine]
    written = drafter.version or table.version
    ours, theirs = (row(table, at, drafter.method) for at in (written, version))
    if drafter.engine == engine.name and not (isinstance(ours, Reads) and ours.same_file(theirs)):
        raise FormatError(
            f"{drafter.path} was exported for {engine.title} {written}, and {version} reads another layout",
            kind=Kind.SERVE_ENGINE,
            hint=f"hiddenstore export RUN --engine {engine.name} --engine-version {version} -o DIR",
        )


def _check_published(drafter: ServedDrafter, engine: ServingEngine, version: str) -> None:
    if drafter.method not in words():
        return
    with _of_a_drafter(drafter.path):
        refused = words()[drafter.method].unread(drafter.config, engine.name)
    if refused is not None and is_within(version, refused.since, refused.before):
        problem = f"{engine.title} {version} does not serve {drafter.path}: {refused.reason}"
        raise ConfigError(problem, kind=Kind.SERVE_UNSUPPORTED, hint=refused.nearest)


def refuse_python(drafter: str) -> None:
    """Raise ConfigError ``code-unpinned`` where a drafter brings Python of its own, or, as a hub id, may: an engine
    that is to trust the target's own runs a drafter's too."""
    folder = Path(drafter)
    if not folder.exists():
        problem = f"--trust-remote-code runs a drafter's own Python too, and {drafter} is no folder here to look into"
        hint = f"{shlex.join(['hf', 'download', drafter, '--local-dir', 'DRAFTER'])}, then DRAFTER in its place"
        raise ConfigError(problem, kind=Kind.CODE_UNPINNED, hint=hint)
    for name in _MAY_NAME_CODE:
        if (folder / name).is_file() and "auto_map" in _json(folder / name):
            problem = f"--trust-remote-code runs a drafter's own Python too, and auto_map of {folder / name} names some"
            hint = "leave --trust-remote-code out, or take a drafter without auto_map"
            raise ConfigError(problem, kind=Kind.CODE_UNPINNED, hint=hint)


def check_target(drafter: ServedDrafter, target: str) -> list[str]:
    """Raise FormatError ``target-mismatch`` where a local ``target`` is not the one drafted for; else remarks. Of a
    target that is a hub id only the name is compared, and a difference is only remarked: a quantised copy has another
    name and the same states."""
    expected = drafter.target or {}
    folder = Path(target)
    if (file := gguf.drafter_file(folder)) is not None:
        said = drafter.config
        published = {"hidden_size": said.get("target_hidden_size"), "vocab_size": said.get("vocab_size")}
        known = expected or {name: value for name, value in published.items() if value is not None}
        _refuse_other_target(drafter, target, gguf.target_differences(file, known))
        return []
    if not folder.is_dir():
        name = expected.get("name", "")
        if "/" in name and name != target:
            return [f"the drafter was trained for {name}; {target} must have the same weights, vocabulary and layers"]
        return []
    found = _json(folder / CONFIG_FILE)
    differences = target_differences(expected, folder, found) if expected else _published_differences(drafter, found)
    _refuse_other_target(drafter, target, differences)
    return []


def _refuse_other_target(drafter: ServedDrafter, target: str, differences: list[str]) -> None:
    if differences:
        engine = drafter.engine or "ENGINE"
        raise FormatError(
            f"{target} is not the target of {drafter.path}\n" + "\n".join(f"  {line}" for line in differences),
            kind=Kind.TARGET_MISMATCH,
            hint=f"--target {shlex.quote((drafter.target or {}).get('name') or 'ITS_TARGET')}, or hiddenstore export "
            f"RUN_OF_THIS_TARGET --engine {engine} -o DIR",
        )


def _published_differences(drafter: ServedDrafter, config: Mapping[str, Any]) -> list[str]:
    text = config.get("text_config") or config
    own = drafter.config.get("transformer_layer_config") or drafter.config
    width = drafter.config.get("target_hidden_size") or own.get("hidden_size")
    lines = []
    if own.get("vocab_size") and text.get("vocab_size") and own["vocab_size"] > text["vocab_size"]:
        lines.append(f"vocab_size: {own['vocab_size']} expected, {text['vocab_size']} found")
    if drafter.method in words() and width and text.get("hidden_size") and width != text["hidden_size"]:
        lines.append(f"hidden_size: {width} expected, {text['hidden_size']} found")
    return lines


def warnings_of(drafter: ServedDrafter, engine: ServingEngine, version: str, target: str) -> list[str]:
    """What is known to go wrong in silence with a drafter: the server is healthy and nothing is accepted. ``target`` is
    looked into where it is a local folder. Layers are counted as the engine does where the export says for which it is.
    """
    if drafter.method not in words():
        return []
    reads = row(ENGINES[engine.name], version, drafter.method)
    with _of_a_drafter(drafter.path):
        warning = reads.warn(drafter.config) if isinstance(reads, Reads) else None
        numbering = _other_numbering(drafter, engine, target) if drafter.engine is None else None
    return [text for text in (numbering, warning) if text]


def _other_numbering(drafter: ServedDrafter, engine: ServingEngine, target: str) -> str | None:
    """vLLM counts aux layers one higher than SGLang; the usual ones show whose list it is. TensorRT-LLM reads none, and
    no engine AngelSlim's."""
    export = words()[drafter.method]
    ids = drafter.config.get(LAYER_IDS) or (drafter.config.get("eagle_config") or {}).get(LAYER_IDS)
    depth = (text_config(target) or {}).get("num_hidden_layers")
    if not export.ids_follow_engine or export.drafter not in LAYER_RULES:
        return None
    usual = LAYER_RULES[export.drafter].published(depth, None) if isinstance(depth, int) else None
    again = shlex.join(["hiddenstore", "import-drafter", str(drafter.path), "-o", "RUN", "--store", "STORE"])
    again = f"{again}, then hiddenstore export RUN --engine {engine.name} -o DIR"
    outputs = drafter.config.get(OUTPUT_IDS)
    if outputs and not ids and outputs != usual:
        return f"layers {outputs} under {OUTPUT_IDS} are not read; {engine.title} would take the usual ones: {again}"
    if engine.name == "trtllm" or not ids or usual is None:
        return None
    convention = ENGINES[engine.name].convention
    other: LayerConvention = "output" if convention == "vllm" else "vllm"
    if list(ids) != to_convention(usual, other) or to_convention(usual, convention) == to_convention(usual, other):
        return None
    return (
        f"layers {list(ids)} are the usual ones in another engine's numbering; {engine.title} would read each a layer "
        f"off: {again}"
    )


def text_config(target: str) -> Mapping[str, Any] | None:
    """The text part of a local target's ``config.json``; None of a hub id."""
    file = Path(target) / CONFIG_FILE
    if not file.is_file():
        return None
    config = _json(file)
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def _json(file: Path) -> dict[str, Any]:
    try:
        found = foreign_json(file.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"{file} does not exist", kind=Kind.PATH_MISSING, hint=EXPORT_AGAIN) from error
    except (ValueError, NotADirectoryError) as error:
        raise ConfigError(f"{file} is no JSON: {error}", kind=Kind.SERVE_SETTING) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} should hold a JSON object", kind=Kind.SERVE_SETTING)
    return found

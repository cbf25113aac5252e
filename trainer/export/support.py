"""Which engine of which version takes which drafter, asked for one pair or printed as a whole, and whether a folder is
the target a drafter was trained for: its config, tokenizer, weights.

Sources: vLLM 0.32 and 0.33 (``llama_eagle.py``, ``llama_eagle3.py``, ``qwen3_dflash.py``, ``qwen3_dflash2.py``,
``qwen3_xpress.py``, ``medusa.py``, ``v1/spec_decode``), speculators 0.9, whose library reads its files back in a test;
SGLang 0.5.23 (``llama_eagle.py``, ``llama_eagle3.py`` and a copy from before it, ``dflash.py``) and TensorRT-LLM 1.2 to
its main branch of 2026 (``modeling_speculative.py``, ``modeling_dflash.py``, pull requests 11010 and 14988), of which
nothing was run. All are Apache-2.0. llama.cpp b11434 (``src/models/eagle3.cpp``, ``dflash.cpp``), MIT.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.documents import foreign_json
from hiddenstore.registry import Registry, unknown
from hiddenstore.targets.checkpoint import checkpoint_sha256, read_object
from hiddenstore.targets.folder import TOKENIZER_FILES, TargetFolder, code_sha256
from hiddenstore.targets.identity import config_sha256, tokenizer_rules_sha256
from schemas.capture import TargetIdentity
from trainer.drafters import DRAFTERS, drafter_kind, refuse_target
from trainer.formats.base import (
    Checkpoint,
    DrafterExport,
    Engine,
    Reads,
    Row,
    Support,
    Tensors,
    is_within,
    parse_version,
)

ENGINES: Registry[Engine] = Registry(
    "engine",
    "hiddenstore.export_engines",
    {
        "vllm": Engine("vllm", "vLLM", "0.32", "vllm"),
        "sglang": Engine("sglang", "SGLang", "0.5.23", "output"),
        "trtllm": Engine("trtllm", "TensorRT-LLM", "1.2.1", "output"),
        "llamacpp": Engine("llamacpp", "llama.cpp", "11434", "vllm", reads_gguf=True),
        "speculators": Engine("speculators", "speculators", "0.9", "vllm"),
    },
    "trainer.formats.base:Engine",
    option="--engine",
)
# ``DrafterKind.export`` of those that bring it without torch; of any other drafter the kind is loaded.
_EXPORTS: Registry[DrafterExport] = Registry(
    "drafter",
    "hiddenstore.drafter_exports",
    {
        "eagle1": "trainer.formats.eagle1:EAGLE1",
        "eagle3": "trainer.formats.eagle3:EAGLE3",
        "dflash": "trainer.formats.dflash:DFLASH",
        "medusa": "trainer.formats.medusa:MEDUSA",
        "peagle": "trainer.formats.peagle:PEAGLE",
        "dspark": "trainer.formats.dspark:DSPARK",
        "dflash2": "trainer.formats.dflash2:DFLASH2",
        "domino": "trainer.formats.domino:DOMINO",
        "xpress": "trainer.formats.xpress:XPRESS",
        "mtp": "trainer.formats.mtp:MTP",
    },
    "trainer.formats.base:DrafterExport",
)


def drafter_export(drafter: str) -> DrafterExport:
    """What a kind of drafter brings; ConfigError ``drafter-unknown``."""
    return _EXPORTS[drafter] if drafter in _EXPORTS else drafter_kind(drafter).export


def words() -> dict[str, DrafterExport]:
    """Every word a drafter goes by, in the order of the table of drafters, and whose it is."""
    exports = [drafter_export(drafter) for drafter in DRAFTERS]
    return {word: export for export in exports for word in export.titles}


def checkpoint_word(checkpoint: Checkpoint) -> str:
    """The word of a checkpoint: EAGLE-3 with either of its later flags is ``eagle3.1``."""
    return drafter_export(checkpoint.config.name).word(checkpoint.config.model_dump())


def row(engine: Engine, version: str, word: str) -> Row | None:
    """What an engine reads of a drafter at a version; None where the drafter has no row of it. Raises ConfigError:
    ``engine-version``, no version."""
    rows = words()[word].rows.get((engine.name, word), ())
    return next((entry for entry in rows if is_within(version, entry.since, entry.before)), None)


def support(engine: str, version: str | None, word: str) -> Support:
    """Whether ``engine`` of ``version`` (None: the one its rows were made for) takes a drafter. ``word`` is a key of
    ``words``. What a drafter's own settings add is asked of `refusal`. Raises ConfigError: unknown engine, drafter or
    version."""
    table = ENGINES[engine]
    if word not in words():
        raise unknown("drafter", word, words())
    at = version or table.version
    entry = row(table, at, word)
    if isinstance(entry, Reads):
        has_run = entry.ran is not None and _minor(at) == _minor(entry.ran)
        return Support(engine, at, word, True, proof="ran" if has_run else "names", source=entry.source)
    reason = entry.reason if entry else f"{table.title} {at} has no loader for {word}"
    return Support(engine, at, word, False, reason=reason, nearest=entry.nearest if entry else _elsewhere(word))


def refusal(checkpoint: Checkpoint, engine: Engine, reads: Reads) -> ConfigError | None:
    """Why this very drafter cannot be served by an engine that reads its kind; None where it can."""
    lacks = [lack for lack in reads.lacks if lack.of(checkpoint)]
    if not lacks:
        return None
    reasons = "; ".join(lack.reason for lack in lacks)
    return ConfigError(
        f"{engine.title} cannot run this {checkpoint_word(checkpoint)} drafter: {reasons}",
        kind=Kind.EXPORT_UNSUPPORTED,
        hint="; ".join(dict.fromkeys(lack.fix for lack in lacks if lack.fix)) or None,
    )


def required(checkpoint: Checkpoint, engine: Engine, version: str) -> Reads:
    """The row a checkpoint is written by. Raises ConfigError: ``export-unsupported`` with the reason and the nearest
    that works."""
    word = checkpoint_word(checkpoint)
    entry = row(engine, version, word)
    if not isinstance(entry, Reads):
        answer = support(engine.name, version, word)
        problem = f"{engine.title} {version} cannot serve {word}: {answer.reason}"
        raise ConfigError(problem, kind=Kind.EXPORT_UNSUPPORTED, hint=answer.nearest)
    refused = refusal(checkpoint, engine, entry)
    if refused is not None:
        raise refused
    return entry


def matrix(versions: Sequence[tuple[str, str]] = ()) -> list[Support]:
    """Every engine × drafter, at the version its rows were made for, or at the (engine, version) pairs given."""
    pairs = list(versions) or [(name, ENGINES[name].version) for name in ENGINES]
    return [support(engine, version, word) for engine, version in pairs for word in words()]


def recognised(config: Mapping[str, Any], tensors: Tensors) -> DrafterExport | None:
    """The drafter that a published ``config.json`` and tensors (may be none) are of: by its class, else by signs. The
    newest kind is asked first: each marks itself more plainly than those before it."""
    exports = [drafter_export(drafter) for drafter in reversed(list(DRAFTERS))]
    names = [str(name) for name in config.get("architectures") or ()]
    by_class = (one for one in exports for name in names if re.fullmatch(one.architectures, name, re.IGNORECASE))
    drafter = next(by_class, None) or next((one for one in exports if one.signs(config, tensors)), None)
    variants = (one for one in exports if drafter and one.variant_of == drafter.drafter)
    return next((one for one in variants if one.signs(config, tensors)), drafter)


def config_differences(
    expected: Mapping[str, Any], config: Mapping[str, Any], code_sha256: str | None = None
) -> list[str]:
    """What tells two targets apart by config.json and the digest of their own code, None where they have none; a
    quantised copy of the same config is the same target."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    known = [digest for one in (config, plain) for digest in config_digests(one, code_sha256)]
    if expected.get("config_sha256") in (None, *known):
        return []
    text = config.get("text_config") or config
    sizes = {name: name for name in ("model_type", "hidden_size", "vocab_size")} | {"num_layers": "num_hidden_layers"}
    lines = [
        f"{ours}: {expected[ours]} expected, {text.get(theirs)} found"
        for ours, theirs in sizes.items()
        if ours in expected and expected[ours] != text.get(theirs)
    ]
    # The digest of a target with an adapter covers the adapter too, which no merged checkpoint names.
    if lines or "+" in str(expected.get("name", "")):
        return lines
    what = "config.json or the target's own code" if config.get("auto_map") else "config.json"
    return [f"{what} differs: sha256 {str(expected['config_sha256'])[:8]}… expected"]


def config_digests(config: Mapping[str, Any], code_sha256: str | None) -> list[str]:
    """What ``config_sha256`` may be of a target: it covers the target's own code only where that was let run."""
    with_code = [] if code_sha256 is None else [config_sha256({**config, "code_sha256": code_sha256})]
    return [config_sha256(config), *with_code]


def _elsewhere(word: str) -> str | None:
    for name in ENGINES:
        if isinstance(row(ENGINES[name], ENGINES[name].version, word), Reads):
            return f"--engine {name}"
    return None


def _minor(version: str) -> tuple[int, int]:
    found = parse_version(version)
    return found.major, found.minor


def require_named_target(folder: Path, identity: TargetIdentity, *, weights: bool = True) -> None:
    """Refuse a local folder that is another target than the one trained for; of a hub id nothing is known.
    ``weights``: they are compared too. Raises FormatError: ``target-mismatch``; ConfigError: as ``target_differences``,
    or ``config.json`` is no JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        return
    config = read_object(file)
    if config is None:
        raise ConfigError(f"{file} holds no JSON object", kind=Kind.TARGET_UNREADABLE)
    unknown = {} if weights else {"checkpoint_sha256": None}
    differences = target_differences(identity.model_dump(mode="json") | unknown, folder, config)
    refuse_target(differences, f"--target {folder} is not the target the drafter was trained for ({identity.name})")


def target_differences(expected: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> list[str]:
    """What tells ``folder``, whose config.json holds ``config``, from the identity ``expected``.

    Weights are compared where config and dtype are those of the capture: a quantised or cast copy of the same config is
    the same target. What the folder or the identity lacks is not compared. Raises ConfigError: ``target-unreadable``,
    the tokenizer is none; ``target-damaged``, a file of the weights is not whole."""
    code = _own_code(folder, config)
    lines = config_differences(expected, config, code)
    rules, tokenizer = expected.get("tokenizer_rules_sha256"), folder / TOKENIZER_FILES[0]
    if rules and tokenizer.is_file():
        try:
            lines += _difference("tokenizer_rules_sha256", rules, tokenizer_rules_sha256(tokenizer.read_bytes()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{tokenizer} is no tokenizer: {error}", kind=Kind.TARGET_UNREADABLE) from error
    text = config.get("text_config") or config
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype"))
    digest = expected.get("checkpoint_sha256")
    if digest and expected.get("dtype") == dtype and expected.get("config_sha256") in config_digests(config, code):
        files = TargetFolder(str(folder), None, None, None, "", "", "")
        lines += _difference("checkpoint_sha256", digest, checkpoint_sha256(files))
    return lines


def _own_code(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The digest of a folder's own code, as `open_target` makes it; None where it has none that can be read."""
    documents = [config]
    # What cannot be read has no digest, and so is not the code that ran.
    with suppress(FileNotFoundError, ValueError):
        documents.append(foreign_json((folder / "tokenizer_config.json").read_bytes()))
    with suppress(ConfigError, FileNotFoundError, ValueError, AttributeError):
        files = TargetFolder(str(folder), None, None, None, "", "", "")
        return code_sha256(str(folder), documents, files.file)
    return None


def _difference(name: str, expected: str, actual: str | None) -> list[str]:
    return [] if actual in (None, expected) else [f"{name}: {expected[:8]}… expected, {str(actual)[:8]}… found"]

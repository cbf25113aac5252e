"""Whether a folder that a command names is the target a drafter was trained for: its config, tokenizer, weights."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.files.documents import foreign_json
from hiddenstore.targets.checkpoint import read_object
from hiddenstore.targets.folder import TOKENIZER_FILES, TargetFolder, code_sha256
from hiddenstore.targets.identity import tokenizer_rules_sha256
from hiddenstore.targets.tensors import checkpoint_sha256
from schemas.capture import TargetIdentity
from trainer.export.support import config_differences, config_digests


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
    if differences:
        problem = f"--target {folder} is not the target the drafter was trained for ({identity.name})"
        raise FormatError(f"{problem}:\n" + "\n".join(differences), kind=Kind.TARGET_MISMATCH)


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

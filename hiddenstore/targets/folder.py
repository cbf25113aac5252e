"""What can be known of a target without its weights: config, tokenizer, chat template and their digests."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import foreign_json
from hiddenstore.targets.adapter import Adapter, open_adapter
from hiddenstore.targets.gguf import RECORD_FILE, target_folder
from hiddenstore.targets.identity import chat_template_sha256, config_sha256, tokenizer_rules_sha256, tokenizer_sha256
from hiddenstore.targets.remote_code import code_sha256, require_pinned
from schemas.capture import TargetIdentity

CONFIG_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", TEMPLATE_FILE, "generation_config.json"),
)


@dataclass(frozen=True, eq=False)
class TargetFolder:
    """A target before its weights are read.

    config is the text config, ``whole_config`` that of a model of which the text model is a part; the digests are those
    ``prepare`` wrote into its data; ``config_sha256`` covers the target's own code and the adapter too.
    ``trust_remote_code``: that code may run. ``quantisation`` is the config's own word for the form of its weights.
    ``runs_elsewhere``: nothing here loads them, so none are fetched to name them. ``adapter`` is merged into them where
    they are loaded.
    """

    name: str
    revision: str | None
    config: Any
    tokenizer: Any
    config_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    trust_remote_code: bool = False
    quantisation: Mapping[str, Any] | None = None
    runs_elsewhere: bool = False
    whole_config: Any = None
    adapter: Adapter | None = None

    @property
    def whole(self) -> Any:
        """The config as transformers read it."""
        return self.config if self.whole_config is None else self.whole_config

    @property
    def quantised(self) -> bool:
        """Whether the checkpoint holds weights that only a loader of their form reads."""
        return self.quantisation is not None

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def dtype(self) -> str | None:
        """The dtype that the config names for the weights; None where it names none."""
        named = (getattr(config, "dtype", None) for config in (self.config, self.whole))
        return next((str(dtype).removeprefix("torch.") for dtype in named if dtype is not None), None)

    @property
    def label(self) -> str:
        """The name for people: the last part of a folder, the id of a hub model; never a path of this machine. A plus
        begins the adapter, so that a folder's own is written as a minus."""
        path = Path(self.name)
        own = path.resolve().name.replace("+", "-") if path.exists() else self.name
        return own if self.adapter is None else f"{own}+{self.adapter.label}"

    def identity(self, width: int, vocab_size: int, **weights: str | None) -> TargetIdentity:
        """Who it is; ``weights``: ``dtype``, ``weights_sha256``, ``checkpoint_sha256``; none where none are read."""
        return TargetIdentity(
            name=self.label,
            revision=self.revision,
            model_type=self.config.model_type,
            hidden_size=width,
            num_layers=self.num_layers,
            vocab_size=vocab_size,
            config_sha256=self.config_sha256,
            tokenizer_sha256=self.tokenizer_sha256,
            chat_template_sha256=self.chat_template_sha256,
            tokenizer_rules_sha256=self.tokenizer_rules_sha256,
            **{"dtype": "", "weights_sha256": ""} | weights,
        )

    def file(self, name: str, fetch: bool = True) -> Path | None:
        """A file of the target on this machine, if need be ``fetch``ed from the hub; None where it has none."""
        return _file(self.name, self.revision, name, fetch)

    @cached_property
    def tokenizer_rules_sha256(self) -> str | None:
        """Of ``tokenizer.json``, else of what the library made of other files; None where neither has that form."""
        path, backend = self.file(TOKENIZER_FILES[0]), getattr(self.tokenizer, "backend_tokenizer", None)
        serialised = path.read_bytes() if path is not None else backend and backend.to_str()
        return tokenizer_rules_sha256(serialised) if serialised else None

    def text_files(self) -> dict[str, bytes]:
        """The bytes of config, tokenizer and chat template, as a store keeps them under ``target/``, and what a
        conversion says of its GGUF file."""
        paths = {name: self.file(name) for name in (CONFIG_FILE, *TOKENIZER_FILES)}
        converted = Path(self.name, RECORD_FILE)
        paths[RECORD_FILE] = converted if converted.is_file() else None
        files = {name: path.read_bytes() for name, path in paths.items() if path is not None}
        template = self.tokenizer.chat_template
        if isinstance(template, str):
            # transformers prefers this file to the template inside tokenizer_config.json.
            files[TEMPLATE_FILE] = template.encode()
        return files


def _is_offline(name: str, revision: str | None) -> bool:
    """Whether the hub is out of reach; transformers would find that out in six tries and half a minute. Raises
    ConfigError: ``target-unreadable``, and its cache on this machine does not hold the target either."""
    from huggingface_hub import constants, try_to_load_from_cache

    from hiddenstore.servers.hub_session import bound_hub_requests

    host = urlsplit(constants.ENDPOINT).hostname
    try:
        is_cached = isinstance(try_to_load_from_cache(name, CONFIG_FILE, revision=revision), str)
        if not constants.HF_HUB_OFFLINE:
            if not getproxies():
                socket.getaddrinfo(host, 443)
            bound_hub_requests()
            return False
    except ValueError:  # no name that the hub can have: transformers says what is wrong with it
        return False
    except socket.gaierror:
        pass
    if not is_cached:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub ({host}) cannot be reached"
        raise ConfigError(
            f"target {name} is no folder here nor in the hub's cache, and {reason}",
            kind=Kind.TARGET_UNREADABLE,
            hint=f"hf download {name} --local-dir FOLDER   where there is a network, then --target FOLDER",
        )
    return True


def open_target(
    name: str,
    revision: str | None = None,
    template: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | None = None,
) -> TargetFolder:
    """Read config and tokenizer of a local folder, a GGUF file or a hub id; no weights.

    ``template`` is the text of a chat template that stands in for the target's own; ``adapter`` a folder of peft's.
    Raises NotFoundError: ``target-missing``: a path that does not exist; ConfigError: ``target-incomplete``,
    ``target-unreadable``, ``code-unpinned``, ``adapter-unfit``."""
    path = Path(name := target_folder(name))
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"target folder {name} has no {CONFIG_FILE}",
            kind=Kind.TARGET_INCOMPLETE,
            hint="point --target at a folder that save_pretrained wrote, or at a hub id",
        )
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise NotFoundError(
            f"target {name} does not exist",
            kind=Kind.TARGET_MISSING,
            hint="--target FOLDER, FILE.gguf or ORG/NAME",
        )
    if trust_remote_code:
        require_pinned(name, revision)
    where: dict[str, Any] = {"revision": revision}
    where["local_files_only"] = not path.exists() and _is_offline(name, revision)
    from transformers import AutoConfig, PretrainedConfig

    try:
        raw, _ = PretrainedConfig.get_config_dict(name, **where)
        code = _code_sha256(name, revision, raw) if trust_remote_code else None
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    except ConfigError:
        raise
    except Exception as error:  # a config may hold anything, and transformers computes with it
        raise_refusal(error, name)
        what = name if path.exists() else f"{name}, which is no folder here"
        reason = _foreign(path, CONFIG_FILE) or first_line(error)
        raise ConfigError(f"cannot read the config of target {what}: {reason}", kind=Kind.TARGET_UNREADABLE) from error
    tokenizer = _tokenizer(name, trust_remote_code, where)
    if template is not None:
        tokenizer.chat_template = template
    merged = None if adapter is None else open_adapter(adapter, raw.get("quantization_config") is not None)
    beside = {"code_sha256": code, "adapter_sha256": merged and merged.sha256}
    return TargetFolder(
        name=name,
        revision=revision if path.exists() else _commit(name, revision),
        config=config.get_text_config(decoder=True),
        tokenizer=tokenizer,
        config_sha256=config_sha256(raw | {member: digest for member, digest in beside.items() if digest}),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        chat_template_sha256=chat_template_sha256(tokenizer.chat_template),
        trust_remote_code=trust_remote_code,
        quantisation=raw.get("quantization_config"),
        whole_config=config,
        adapter=merged,
    )


def _tokenizer(name: str, trust_remote_code: bool, where: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    except Exception as error:  # its files may hold anything
        raise_refusal(error, name)
        # transformers 4 stumbles over what transformers 5 saved, and over a folder without any tokenizer.
        newer = "TokenizersBackend" in str(error)
        reason = _foreign(Path(name), *TOKENIZER_FILES) or first_line(error)
        raise ConfigError(
            f"cannot read the tokenizer of target {name}: {reason}",
            kind=Kind.TARGET_INCOMPLETE,
            hint=f'"tokenizer_class": "PreTrainedTokenizerFast" in {name}/tokenizer_config.json' if newer else None,
        ) from error


def beginning_of_another(start: bytes) -> str | None:
    """What a file is instead that begins like this: empty, a pointer of Git LFS, or a page about an error."""
    text = start[:64].lower()
    names = {
        b"version https://git-lfs": "a Git LFS pointer, not the file",
        b"<!doctype": "a web page",
        b"<html": "a web page",
    }
    return "empty" if not text else next((name for word, name in names.items() if text.startswith(word)), None)


def _foreign(folder: Path, *names: str) -> str | None:
    for path in (folder / name for name in names):
        if path.is_file() and (other := beginning_of_another(path.read_bytes()[:64])):
            return f"{path.name} is {other}"
    return None


def first_line(error: Exception) -> str:
    """The first line of an error's message, its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _file(target: str, revision: str | None, name: str, fetch: bool = True) -> Path | None:
    from transformers.utils import cached_file

    path = cached_file(
        target,
        name,
        revision=revision,
        local_files_only=not fetch,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


def _commit(name: str, revision: str | None) -> str | None:
    """The commit at which the cache holds what was read of a hub id; ``revision`` where that cannot be told."""
    from transformers.utils.hub import extract_commit_hash

    path = _file(name, revision, CONFIG_FILE, fetch=False)
    return extract_commit_hash(path and str(path), None) or revision


def _code_sha256(name: str, revision: str | None, config: Mapping[str, Any]) -> str | None:
    documents, path = [config], _file(name, revision, "tokenizer_config.json")
    if path is not None:
        # What is no JSON is refused where the tokenizer is read.
        with suppress(ValueError):
            documents.append(foreign_json(path.read_bytes()))
    return code_sha256(name, documents, lambda file: _file(name, revision, file))

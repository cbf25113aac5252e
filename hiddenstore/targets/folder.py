"""What can be known of a target without its weights: config, tokenizer, chat template and their digests, its own Python
and a LoRA adapter in the form that peft writes, merged into the weights as they are loaded.

Merged: ``W + s B A`` in fp32, rounded to the dtype of W; ``s = alpha / r``, or ``alpha / √r`` with ``use_rslora``.
Shapes: W [out, in], A [r, in], B [out, r].
"""

import hashlib
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import foreign_json
from hiddenstore.servers import flag_value
from hiddenstore.targets.gguf import RECORD_FILE, target_folder
from hiddenstore.targets.identity import chat_template_sha256, config_sha256, tokenizer_rules_sha256, tokenizer_sha256
from hiddenstore.targets.rope import require_rope_read
from schemas.capture import TargetIdentity

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", TEMPLATE_FILE, GENERATION_FILE),
)
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# With any of these the adapter was not trained as the formula above.
_OTHERWISE = (
    *("use_dora", "use_qalora", "modules_to_save", "fan_in_fan_out", "lora_bias", "target_parameters"),
    *("layer_replication", "trainable_token_indices", "alora_invocation_tokens"),
)
_MERGE = "merge it where it was trained (merge_and_unload, save_pretrained), then --target MERGED without --adapter"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, eq=False)
class Adapter:
    """Pairs (B, A) and their scale by module; ``sha256`` covers every tensor and scale."""

    label: str
    sha256: str
    pairs: Mapping[str, "tuple[Tensor, Tensor, float]"]

    def merge_into(self, model: Any) -> None:
        """Change the weights of a loaded model; ConfigError ``adapter-unfit``: it is not one of this target."""
        import torch
        from torch import nn

        tied = model.get_input_embeddings().weight
        for name, (up, down, scale) in self.pairs.items():
            try:
                module = model.get_submodule(name)
            except AttributeError:
                module = None
            expected = [up.shape[0], down.shape[1]]
            if not isinstance(module, nn.Linear) or list(module.weight.shape) != expected:
                found = "nothing" if module is None else f"{type(module).__name__} {list(module.weight.shape)}"
                raise _unfit(self.label, f"changes {name} {expected}, where the target has {found}")
            if module.weight is tied or module.weight.device.type == "meta":
                where = "is also the embedding" if module.weight is tied else "is not in memory"
                raise _unfit(self.label, f"changes {name}, whose weight {where}")
            weight, device = module.weight, module.weight.device
            with torch.no_grad():
                delta = up.to(device).float() @ down.to(device).float()
                weight.copy_(weight.float() + scale * delta)


def open_adapter(folder: str, packed: bool = False) -> Adapter:
    """Read the two files of an adapter; ``packed``: the weights it is for are quantised. Raises ConfigError:
    ``adapter-unfit``: a file is missing or damaged, or the adapter is more than such pairs."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    label = Path(folder).resolve().name
    if packed:
        raise _unfit(label, "would change quantised weights")
    try:
        settings = foreign_json((Path(folder) / _ADAPTER_CONFIG).read_bytes())
        tensors = load_file(Path(folder) / _ADAPTER_WEIGHTS)
        alpha, patterns = float(settings["lora_alpha"]), settings.get("alpha_pattern") or {}
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, SafetensorError) as error:
        raise_refusal(error, folder)
        reason = f"has no {_ADAPTER_CONFIG} and {_ADAPTER_WEIGHTS} that can be read: {error!r}"
        raise _unfit(label, reason) from error
    if (formula := _other_formula(settings)) is not None:
        raise _unfit(label, formula)
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _ADAPTER_NAME.fullmatch(name)
        if match is None or tensor.ndim != 2 or not tensor.is_floating_point():
            raise _unfit(label, f"holds {name}, which is no A or B of a linear layer")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    pairs = {}
    for module, side in sorted(sides.items()):
        if len(side) < 2 or not 0 < (rank := side["A"].shape[0]) == side["B"].shape[1]:
            raise _unfit(label, f"has no fitting A and B for {module}")
        try:
            own = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), alpha)
            scale = float(own) / (rank**0.5 if settings.get("use_rslora") else rank)
        except (re.error, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise _unfit(label, f"has an alpha_pattern that cannot be used: {error}") from error
        pairs[module] = side["B"], side["A"], scale
    if not pairs:
        raise _unfit(label, "holds no tensors")
    return Adapter(label, _pairs_sha256(pairs), pairs)


def _other_formula(settings: Mapping[str, Any]) -> str | None:
    kind, start = settings.get("peft_type"), settings.get("init_lora_weights", True)
    if kind != "LORA":
        return f"is of type {kind}, not LORA"
    if others := [name for name in _OTHERWISE if settings.get(name)]:
        return f"was trained with {', '.join(others)}"
    if settings.get("bias", "none") != "none":
        return f"was trained with bias={settings['bias']}"
    # Such a start (PiSSA, OLoRA, CorDA, LoftQ) changes the weights that the pairs are added to.
    if isinstance(start, str) and start not in ("gaussian", "orthogonal", "eva"):
        return f"was started with {start}, which changes the target's own weights"
    return None


def _pairs_sha256(pairs: Mapping[str, "tuple[Tensor, Tensor, float]"]) -> str:
    import torch

    digest = hashlib.sha256()
    for module, (up, down, scale) in pairs.items():
        digest.update(f"{module}\t{scale!r}\n".encode())
        for tensor in (up, down):
            digest.update(f"{tensor.dtype}\t{list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _unfit(label: str, reason: str) -> ConfigError:
    return ConfigError(f"adapter {label} cannot be merged: it {reason}", kind=Kind.ADAPTER_UNFIT, hint=_MERGE)


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
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the generation config and the config name them, ascending."""
        named: list[Any] = [getattr(config, "eos_token_id", None) for config in (self.config, self.whole)]
        if (path := self.file(GENERATION_FILE)) is not None:
            # transformers too loads a target beside one that cannot be read.
            with suppress(ValueError, AttributeError):
                named.append(foreign_json(path.read_bytes()).get("eos_token_id"))
        lists = (value if isinstance(value, list) else [value] for value in named)
        return tuple(sorted({value for values in lists for value in values if isinstance(value, int)}))

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
            hint=f"hf download {shlex.quote(name)} --local-dir FOLDER   where there is a network, then --target FOLDER",
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
            f"target {name} does not exist", kind=Kind.TARGET_MISSING, hint="--target FOLDER, FILE.gguf or ORG/NAME"
        )
    if trust_remote_code:
        require_pinned(name, revision)
    where: dict[str, Any] = {"revision": revision}
    where["local_files_only"] = not path.exists() and _is_offline(name, revision)
    from transformers import AutoConfig, PretrainedConfig

    try:
        raw, _ = PretrainedConfig.get_config_dict(name, **where)
        code = _own_code_sha256(name, revision, raw) if trust_remote_code else None
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    except ConfigError:
        raise
    except Exception as error:  # a config may hold anything, and transformers computes with it
        raise_refusal(error, name)
        what = name if path.exists() else f"{name}, which is no folder here"
        reason = _foreign(path, CONFIG_FILE) or first_line(error)
        raise ConfigError(f"cannot read the config of target {what}: {reason}", kind=Kind.TARGET_UNREADABLE) from error
    require_rope_read(name, raw, config.get_text_config(decoder=True))
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
        chat_template_sha256=_template_sha256(name, tokenizer.chat_template),
        trust_remote_code=trust_remote_code,
        quantisation=raw.get("quantization_config"),
        whole_config=config,
        adapter=merged,
    )


def _template_sha256(name: str, template: str | Mapping[str, str] | None) -> str:
    try:
        return chat_template_sha256(template)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the chat template of target {name} is no text: {error.object[error.start]!a} is half a character",
            kind=Kind.TARGET_UNREADABLE,
        ) from error


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


def _own_code_sha256(name: str, revision: str | None, config: Mapping[str, Any]) -> str | None:
    documents, path = [config], _file(name, revision, "tokenizer_config.json")
    if path is not None:
        # What is no JSON is refused where the tokenizer is read.
        with suppress(ValueError):
            documents.append(foreign_json(path.read_bytes()))
    return code_sha256(name, documents, lambda file: _file(name, revision, file))


def require_pinned(name: str, revision: str | None) -> None:
    """Refuse a hub id without a commit, ConfigError ``code-unpinned``; a folder's code is known by its digest."""
    if not Path(name).exists() and (revision is None or not _COMMIT.fullmatch(revision)):
        raise ConfigError(
            f"--trust-remote-code runs the repository's own Python: revision {revision or 'none'} of {name} may be "
            f"other code tomorrow",
            kind=Kind.CODE_UNPINNED,
            hint="--target ORG/NAME --revision COMMIT, the 40 hex digits of a commit whose code was read; serve takes "
            "--revision behind --",
        )


def trusts_pinned_code(name: str, flags: Sequence[str]) -> bool:
    """Whether an engine that is started for a target with ``flags`` runs the target's own Python. Raises ConfigError
    ``code-unpinned``: as `require_pinned`, of the ``--revision`` among them."""
    trusts = any(flag.partition("=")[0].replace("_", "-") == "--trust-remote-code" for flag in flags)
    if trusts:
        require_pinned(name, flag_value(flags, "--revision"))
    return trusts


def code_sha256(name: str, documents: list[Mapping[str, Any]], find: Callable[[str], Path | None]) -> str | None:
    """Digest of every Python file that the ``auto_map`` of ``documents`` names, and those that they import from beside
    themselves; None where none names any. ``find`` gives a file of the target by its name. Raises ConfigError:
    ``code-unpinned``: it is code of another repository; ``target-incomplete``: a file is not there."""
    lines: dict[str, str] = {}
    waiting = [module for document in documents for module in _modules(name, document)]
    while waiting:
        module = waiting.pop()
        if module in lines:
            continue
        path = find(module)
        if path is None:
            raise ConfigError(
                f"target {name} names its own code in {module}, which it lacks", kind=Kind.TARGET_INCOMPLETE
            )
        lines[module] = hashlib.sha256(path.read_bytes()).hexdigest()
        waiting += _beside(path, module)
    listed = "".join(f"{module}\t{digest}\n" for module, digest in sorted(lines.items()))
    return hashlib.sha256(listed.encode()).hexdigest() if lines else None


def _modules(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    for value in (document.get("auto_map") or {}).values():
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, str):
                continue
            if "--" in entry:
                raise ConfigError(
                    f"the config of {name} runs code of another repository ({entry}), which nothing pins",
                    kind=Kind.CODE_UNPINNED,
                    hint="use a copy of the target that holds its own code",
                )
            yield f"{entry.partition('.')[0]}.py"


def _beside(path: Path, module: str) -> Iterator[str]:
    from transformers.dynamic_module_utils import get_relative_imports

    for name in get_relative_imports(path):
        yield str(Path(module).parent / f"{name}.py")

"""A target on this machine: its config and tokenizer first (cheap), then its weights, parts and identity.

Shapes: D target width, V target vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collectors.families import Parts, find_parts
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.head import HEAD_FILE, HeadBundle
from hiddenstore.identity import chat_template_sha256, config_sha256, tokenizer_sha256, weights_sha256
from schemas.capture import TargetIdentity

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

CONFIG_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE_FILE,
    "generation_config.json",
)


@dataclass(frozen=True, eq=False)
class TargetFolder:
    """What can be known of a target without its weights.

    config is the text config; the two digests are those ``prepare`` wrote into its data.
    """

    name: str
    revision: str | None
    config: Any
    tokenizer: Any
    config_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def label(self) -> str:
        """The name for people: the last part of a folder, the id of a hub model; never a path of this machine."""
        path = Path(self.name)
        return path.resolve().name if path.exists() else self.name


@dataclass(frozen=True, eq=False)
class LoadedTarget:
    """A target ready to run: frozen, in evaluation mode, on ``device``."""

    folder: TargetFolder
    model: Any
    parts: Parts
    identity: TargetIdentity
    device: torch.device

    @property
    def tokenizer(self) -> Any:
        return self.folder.tokenizer

    @property
    def config(self) -> Any:
        return self.folder.config

    @property
    def head(self) -> HeadBundle:
        return self.parts.head

    @property
    def blocks(self) -> list[nn.Module]:
        return self.parts.blocks

    @property
    def final_norm(self) -> nn.Module:
        return self.parts.final_norm

    @property
    def lm_head(self) -> nn.Module:
        """The model's own LM head module: final hidden after the norm [..., D] to raw logits [..., V]."""
        module: nn.Module = self.model.get_output_embeddings()
        return module

    def eos_token_ids(self) -> list[int]:
        """Every token that ends an answer: of the generation config, the config and the tokenizer."""
        found: set[int] = set()
        for value in (self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id):
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        return sorted(found)

    def target_files(self) -> dict[str, bytes]:
        """The bytes a store keeps under ``target/``: config, tokenizer, chat template, head bundle."""
        files = {CONFIG_FILE: _file_bytes(self.folder, CONFIG_FILE)}
        files |= {name: _file_bytes(self.folder, name) for name in TOKENIZER_FILES}
        template = self.tokenizer.chat_template
        if isinstance(template, str):
            # transformers prefers this file to the template inside tokenizer_config.json.
            files[TEMPLATE_FILE] = template.encode()
        return {name: data for name, data in files.items() if data is not None} | {HEAD_FILE: self.head.save_bytes()}


def open_target(name: str, revision: str | None = None, template: str | None = None) -> TargetFolder:
    """Read config and tokenizer of a local folder or a hub id; no weights.

    ``template`` is the text of a chat template that stands in for the target's own.

    Raises:
        NotFoundError: ``target-missing``: a path that does not exist.
        ConfigError: ``target-without-config``, ``target-unreadable``, ``target-without-tokenizer``.
    """
    from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

    path = Path(name)
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"target folder {name} has no {CONFIG_FILE}",
            kind="target-without-config",
            hint="point --target at a folder that save_pretrained wrote, or at a hub id",
        )
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise NotFoundError(f"target {name} does not exist", kind="target-missing")
    try:
        raw, _ = PretrainedConfig.get_config_dict(name, revision=revision)
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        where = name if path.exists() else f"{name}, which is no folder here"
        raise ConfigError(
            f"cannot read the config of target {where}: {_first_line(error)}", kind="target-unreadable"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the tokenizer of target {name}: {_first_line(error)}", kind="target-without-tokenizer"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    return TargetFolder(
        name=name,
        revision=getattr(config, "_commit_hash", None) or revision,
        config=config.get_text_config(decoder=True),
        tokenizer=tokenizer,
        config_sha256=config_sha256(raw),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        chat_template_sha256=chat_template_sha256(tokenizer.chat_template),
    )


def load_target(
    target: str | TargetFolder, dtype: str | None = None, device: str = "auto", revision: str | None = None
) -> LoadedTarget:
    """Load the weights and find the parts.

    Args:
        dtype: ``bfloat16``, ``float16``, ``float32``; None or ``auto`` keeps the checkpoint's own.
        device: a torch device, or ``auto``: the GPU where there is one.

    Raises:
        ConfigError: ``dtype-unknown``, ``device-unavailable``, ``target-unreadable`` or ``family-unsupported``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    wanted = parse_dtype(dtype)
    where = parse_device(device)
    folder = target if isinstance(target, TargetFolder) else open_target(target, revision)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder.name, revision=folder.revision, dtype=wanted, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot load the weights of target {folder.name}: {_first_line(error)}", kind="target-unreadable"
        ) from error
    return wrap_model(folder, model.to(where))


def wrap_model(folder: TargetFolder, model: Any) -> LoadedTarget:
    """A LoadedTarget around a model that is in memory already."""
    model.eval().requires_grad_(False)
    parts = find_parts(model, folder.config)
    head = parts.head
    identity = TargetIdentity(
        name=folder.label,
        revision=folder.revision,
        model_type=folder.config.model_type,
        hidden_size=head.hidden_size,
        num_layers=folder.num_layers,
        vocab_size=head.vocab_size,
        dtype=str(head.norm_weight.dtype).removeprefix("torch."),
        config_sha256=folder.config_sha256,
        tokenizer_sha256=folder.tokenizer_sha256,
        chat_template_sha256=folder.chat_template_sha256,
        weights_sha256=weights_sha256(head.embed_tokens, head.norm_weight, head.lm_head),
    )
    return LoadedTarget(folder, model, parts, identity, head.norm_weight.device)


def parse_dtype(dtype: str | None) -> torch.dtype | str:
    """A torch dtype, or ``"auto"`` for the checkpoint's own."""
    if dtype in (None, "auto"):
        return "auto"
    name = DTYPE_ALIASES.get(str(dtype), str(dtype))
    if name not in DTYPES:
        raise ConfigError(
            f"unknown dtype {dtype!r}, expected auto, {', '.join(DTYPES)} or {', '.join(DTYPE_ALIASES)}",
            kind="dtype-unknown",
        )
    return DTYPES[name]


def parse_device(device: str) -> torch.device:
    """A torch device that exists here; ``auto`` is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"unknown device {device!r}, expected auto, cpu, cuda or cuda:1", kind="device-unavailable"
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} asked for, but there is no GPU here", kind="device-unavailable")
    return found


def _file_bytes(folder: TargetFolder, name: str) -> bytes | None:
    from transformers.utils import cached_file

    found = cached_file(
        folder.name,
        name,
        revision=folder.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found).read_bytes()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

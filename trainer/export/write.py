"""A trained drafter as the folder an engine loads: ``config.json``, ``model.safetensors``, ``hiddenstore.json``.

Whatever is written is read back and must give the same logits, bit for bit, before the folder appears under its name.
"""

import json
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hiddenstore.errors import ConfigError, ConflictError
from hiddenstore.fs import storage_error
from trainer.drafters import drafter_kind
from trainer.drafters.base import TargetSide
from trainer.drafters.rope import RopeScaling
from trainer.export.base import Checkpoint, Engine
from trainer.export.parts import Files
from trainer.export.proof import prove_equal
from trainer.export.support import drafter_word, engine_named, required, writer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
ABOUT_FILE = "hiddenstore.json"
ABOUT_SCHEMA = "hiddenstore.export/1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHAIN = 3
"""Tokens a chain drafts where nobody says how far it was trained."""


@dataclass(frozen=True)
class ExportedDrafter:
    """What was written; ``tensors`` maps names to (dtype, shape), ``layer_ids`` are in the engine's own numbering."""

    path: Path
    engine: str
    version: str
    drafter: str
    dtype: str
    bytes: int
    draft_len: int
    layer_ids: list[int]
    tensors: dict[str, tuple[str, list[int]]]


def export(
    checkpoint: Checkpoint, engine: str, out: Path, dtype: str | None = None, version: str | None = None
) -> ExportedDrafter:
    """Write the checkpoint for ``engine``, in ``dtype`` (default: the target's own).

    ``version`` of the engine; None for the one its table was made for.

    Raises:
        ConfigError: unknown engine, version or dtype, or a drafter the engine cannot serve.
        ConflictError: ``out`` exists and is not empty.
        CorruptionError: what was written does not read back as the same drafter.
        StorageError: the disk refused.
    """
    table = engine_named(engine)
    at = version or table.version
    required(checkpoint, table, at)
    name = dtype or checkpoint.identity.dtype
    if name not in DTYPES:
        raise ConfigError(f"cannot export as {name!r}; choose one of {', '.join(DTYPES)}", kind="dtype-unknown")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out} exists and is not empty", kind="out-exists", hint="give another -o folder")
    made = engine_files(checkpoint, table, at, name)
    about = about_export(checkpoint, table, at)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        save_file(made.tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        for file, document in ((CONFIG_FILE, made.config), (ABOUT_FILE, about)):
            (partial / file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        prove_equal(checkpoint, partial, DTYPES[name])
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise storage_error(error, str(out)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ExportedDrafter(
        path=out,
        engine=engine,
        version=at,
        drafter=about["drafter"],
        dtype=name,
        bytes=sum(file.stat().st_size for file in out.iterdir()),
        draft_len=about["draft_len"],
        layer_ids=layer_ids(made.config),
        tensors={key: (str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in sorted(made.tensors.items())},
    )


def engine_files(checkpoint: Checkpoint, engine: Engine, version: str, dtype: str) -> Files:
    """What ``config.json`` and ``model.safetensors`` hold for an engine of a version; ``dtype`` is one of `DTYPES`.

    Raises:
        ConfigError: the engine cannot serve this drafter.
    """
    reads = required(checkpoint, engine, version)
    made: Files = writer(drafter_word(checkpoint.config)).files(checkpoint, engine, reads, dtype)
    wrap = reads.quirks.wrap
    return made if wrap is None else replace(made, config=wrap(made.config, checkpoint, draft_len(checkpoint)))


def about_export(checkpoint: Checkpoint, engine: Engine, version: str) -> dict[str, Any]:
    """``hiddenstore.json``: which drafter this is, how many tokens it drafts, and the target it drafts for."""
    word = drafter_word(checkpoint.config)
    # DFlash's ids mean the same everywhere; nothing else in a file says whose EAGLE-3's are.
    ids = {"layer_convention": engine.convention} if word.startswith("eagle3") else {}
    return {
        "schema": ABOUT_SCHEMA,
        "drafter": word,
        "engine": engine.name,
        "engine_version": version,
        **ids,
        "draft_len": draft_len(checkpoint),
        "target": checkpoint.identity.model_dump(mode="json"),
    }


def draft_len(checkpoint: Checkpoint) -> int:
    """How many tokens a draft has: what its shape allows, else how far it was trained, else ``CHAIN``."""
    config = checkpoint.config
    longest = drafter_kind(config.name).longest_draft(config)
    return longest or checkpoint.draft_len or CHAIN


def layer_ids(config: dict[str, Any]) -> list[int]:
    """Aux layers as ``config.json`` names them; none where the drafter reads the final hidden only."""
    for place in (config, config.get("eagle_config") or {}, config.get("dflash_config") or {}):
        for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"):
            if place.get(key):
                return list(place[key])
    return []


def stretched(checkpoint: Checkpoint, factor: float, original: int) -> Checkpoint:
    """The same weights under YaRN: positions up to ``factor`` times the ``original`` window, as ModelOpt exports.

    Raises:
        ConfigError: the drafter was trained with another scaling, or has no positions.
    """
    config = checkpoint.config
    kind = drafter_kind(config.name)
    if config.name == "medusa":
        raise ConfigError("medusa heads have no positions to stretch", kind="rope-scaling", hint="leave --yarn out")
    if config.rope_scaling is not None:
        raise ConfigError(
            f"the drafter was trained with rope_scaling {config.rope_scaling.rope_type}; YaRN is for one without",
            kind="rope-scaling",
            hint="train with drafter.rope_scaling=none",
        )
    scaling = RopeScaling(rope_type="yarn", factor=factor, original_max_position_embeddings=original)
    window = max(config.max_position, int(factor * original))
    config = config.model_copy(update={"rope_scaling": scaling, "max_position": window})
    model = kind.build(config, TargetSide(checkpoint.head, checkpoint.vocab), 0)
    model.load_state_dict(checkpoint.model.state_dict())
    return replace(checkpoint, model=model.eval())

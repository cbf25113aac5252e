"""Published checkpoints of every drafter, read into ours: files, draft vocabulary, and what its reader makes of them.

safetensors only, nothing of a checkpoint is executed.

Shapes: V target vocabulary, U draft vocabulary.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.targets.head import HeadBundle
from schemas.layers import LayerConvention
from trainer.config import DrafterConfig
from trainer.drafters import DRAFTERS, drafter_kind
from trainer.export.support import recognised
from trainer.formats.base import Target, Tensors
from trainer.vocab import DraftVocab

_NOT_OURS = ("d2t", "t2d", "token_map", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, eq=False)
class Published:
    """A checkpoint in our terms: settings, weights fp32 under our names, draft vocabulary."""

    config: DrafterConfig
    weights: Tensors
    vocab: DraftVocab


def read_published(
    folder: Path, head: HeadBundle, num_layers: int, convention: LayerConvention | None = None
) -> Published:
    """The drafter that config.json and the safetensors files of ``folder`` describe, for a target of ``num_layers``.

    ``convention`` says what the layer ids mean where the checkpoint leaves it open.

    Raises:
        NotFoundError: a file is missing.
        ConfigError: ``import-*``: not a drafter that can be read, or not one of this target.
    """
    config, tensors = _config(folder), _tensors(folder)
    drafter = recognised(config, tensors)
    if drafter is None:
        names = ", ".join(map(str, config.get("architectures") or ())) or "not set"
        raise ConfigError(
            f"{folder} is no checkpoint of {', '.join(DRAFTERS)}: architectures is {names}",
            kind=Kind.NAME_UNKNOWN,
        )
    tensors = {drafter.our_name(name): tensor for name, tensor in tensors.items()}
    vocab, order = _vocabulary(tensors, config, head)
    if order is not None:
        heads = [name for name in tensors if name.startswith("lm_head")]
        tensors |= {name: tensors[name][order] for name in heads if len(tensors[name]) == len(order)}
    tensors = {key: value.float() for key, value in tensors.items() if key not in _NOT_OURS}
    try:
        target = Target(head, vocab, num_layers, convention or _export_convention(folder))
        facts, tensors = drafter.read(config, tensors, target)
        settings = drafter_kind(drafter.drafter).config.model_validate({"vocab_size": vocab.size, **facts})
    except KeyError as error:
        raise ConfigError(f"{folder}: config.json or weights lack {error}", kind=Kind.DRAFTER_UNFIT) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{folder}: {where} {first['msg']}, found {first['input']!r}", kind=Kind.DRAFTER_UNFIT
        ) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}", kind=Kind.DRAFTER_UNFIT) from error
    return Published(settings, tensors, vocab)


def _vocabulary(tensors: Tensors, config: Mapping[str, Any], head: HeadBundle) -> tuple[DraftVocab, Tensor | None]:
    """The draft vocabulary, and how the rows of its head are put in ascending order of target ids."""
    if "d2t" not in tensors and "token_map" in tensors:
        tensors["d2t"] = tensors["token_map"].long() - torch.arange(len(tensors["token_map"]))
    if "d2t" not in tensors:
        rows = next((len(table) for name, table in tensors.items() if name.startswith("lm_head")), head.vocab_size)
        if rows != head.vocab_size:
            raise ConfigError(
                f"the drafter says {rows} tokens and has no d2t, but the target has {head.vocab_size}",
                kind=Kind.DRAFTER_UNFIT,
            )
        return DraftVocab.full(head.vocab_size), None
    offsets = tensors["d2t"].long()
    ids = torch.arange(len(offsets)) + offsets
    known = config.get("draft_vocab_size", len(ids))
    if known != len(ids):
        raise ConfigError(f"draft_vocab_size is {known}, but d2t names {len(ids)} tokens", kind=Kind.DRAFTER_UNFIT)
    order = ids.argsort()
    return DraftVocab.of_ids(ids, head.vocab_size), None if torch.equal(ids[order], ids) else order


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"{folder} holds no config.json", kind=Kind.PATH_MISSING) from error
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is no JSON: {error}", kind=Kind.DRAFTER_UNFIT) from error
    inner = found.get("transformer_layer_config")
    return {**inner, **found} if isinstance(inner, dict) else dict(found)


def _export_convention(folder: Path) -> LayerConvention | None:
    """That of the engine a folder of ours was exported for."""
    try:
        found = json.loads((folder / "hiddenstore.json").read_bytes()).get("layer_convention")
    except (OSError, ValueError, AttributeError):
        return None
    known: dict[str, LayerConvention] = {"vllm": "vllm", "hf": "hf", "output": "output"}
    return known.get(found) if isinstance(found, str) else None


def _tensors(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if not files and pickled:
        code = (
            "import sys, torch, safetensors.torch as s; found = torch.load(sys.argv[1], weights_only=True); "
            "s.save_file({k: v.contiguous() for k, v in found.items()}, sys.argv[2])"
        )
        raise ConfigError(
            f"{folder} holds {pickled[0].name}, a pickle, which may run code when read; only safetensors is taken",
            kind=Kind.PICKLE_REFUSED,
            hint=shlex.join(["python", "-c", code, str(pickled[0]), str(folder / "model.safetensors")]),
        )
    if not files:
        raise NotFoundError(f"{folder} holds no .safetensors file", kind=Kind.PATH_MISSING)
    found: Tensors = {}
    for file in files:
        try:
            found |= {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is no safetensors file: {error}", kind=Kind.DRAFTER_UNFIT) from error
    return found

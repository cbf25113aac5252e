"""A trained drafter as the folder an engine loads: ``config.json``, ``model.safetensors``, ``hiddenstore.json``; for
llama.cpp one GGUF file that holds all three.

Whatever is written is read back and must give the same logits, bit for bit, before the folder appears under its name.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors.torch import save

from hiddenstore.errors import ConfigError, CorruptionError, HiddenstoreError, Kind, NotFoundError, StorageError
from hiddenstore.fs.publish import new_folder, place_file, refuse_existing_file, refuse_existing_folder, room_beside
from hiddenstore.fs.seam import storage_error, storage_errors
from hiddenstore.settings import parse
from hiddenstore.store import Store
from hiddenstore.targets.checkpoint import WEIGHTS_FILE
from hiddenstore.targets.folder import CONFIG_FILE
from hiddenstore.targets.identity import has_adapter, target_argument
from trainer.attention.rope import RopeScaling
from trainer.drafters import drafter_kind, refuse_target
from trainer.drafters.base import Drafter
from trainer.evaluate.cost import kept
from trainer.export.published import read_published
from trainer.export.support import ENGINES, checkpoint_word, drafter_export, require_named_target, required
from trainer.formats import gguf
from trainer.formats.base import ABOUT_FILE, LAYER_IDS, Checkpoint, Engine, Files, Reads, shares_embeddings, weights
from trainer.losses.teacher import TargetInterface
from trainer.settings import target_config
from trainer.train.run_folder import CONFIG, LoadedDrafter, RunInfo, describe, load_weights, settings_bytes
from trainer.vocab import DraftVocab

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHAIN, LONGEST_CHAIN = 3, 256
"""Tokens a chain drafts where nobody measured what pays: as `eval` and `decode` judge it; and far beyond any use."""


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


def checkpoint_of(
    loaded: LoadedDrafter,
    run: str | Path,
    target: str | None = None,
    draft_len: int | None = None,
    dtype: str | None = None,
) -> Checkpoint:
    """The drafter that was loaded of ``run``, with how far it is to draft and its target's architecture. ``draft_len``
    None: the length that pays where `eval --costs` measured it in ``dtype`` (default: the target's own), else
    ``CHAIN``, as far as it was trained. ``target`` names the target where a format does; the default is its hub id,
    where it has one."""
    info = describe(run)
    length = draft_len or kept(info.run, loaded.step, dtype or loaded.identity.dtype)
    word = target_argument(loaded.identity)
    if target is not None:
        require_named_target(Path(target), loaded.identity)
    return Checkpoint(
        loaded.model,
        loaded.vocab,
        loaded.head,
        loaded.identity,
        draft_len=length or _usual_length(info),
        target_name=target or (None if word == "TARGET" else word),
        target_config=_target_config(info),
        origin={"run": Path(os.path.abspath(info.run)).name, "step": loaded.step},
    )


def export(
    checkpoint: Checkpoint, engine: str, out: Path, dtype: str | None = None, version: str | None = None
) -> ExportedDrafter:
    """Write the checkpoint for ``engine``, in ``dtype`` (default: the target's own). ``version`` of the engine; None
    for the one its table was made for. Raises ConfigError: unknown engine, version or dtype, or a drafter the engine
    cannot serve; ConflictError: ``out`` exists and is not empty; CorruptionError: what was written does not read back
    as the same drafter; StorageError: the disk refused."""
    table = ENGINES[engine]
    at = version or table.version
    required(checkpoint, table, at)
    if engine == "speculators" and checkpoint.target_name is None and has_adapter(checkpoint.identity):
        raise ConfigError(
            f"speculators names the target, and nothing on the hub is {checkpoint.identity.name}",
            kind=Kind.OPTION_INVALID,
            hint="merge the adapter where it was trained (merge_and_unload, save_pretrained), then --target MERGED",
        )
    name = dtype or checkpoint.identity.dtype
    if name not in DTYPES:
        raise ConfigError(f"cannot export as {name!r}; choose one of {', '.join(DTYPES)}", kind=Kind.OPTION_INVALID)
    made, about = engine_files(checkpoint, table, at, name), about_export(checkpoint, table, at)
    with _appearing(out, is_file=table.reads_gguf and out.suffix == gguf.SUFFIX) as folder:
        if table.reads_gguf:
            made = _write_gguf(folder / gguf.FILE_NAME, checkpoint, required(checkpoint, table, at), made, about)
        else:
            # safetensors' own writer hides what the disk said.
            (folder / WEIGHTS_FILE).write_bytes(save(made.tensors, metadata={"format": "pt"}))
            for file, document in ((CONFIG_FILE, made.config), (ABOUT_FILE, about)):
                (folder / file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        prove_equal(checkpoint, folder, DTYPES[name])
    return ExportedDrafter(
        path=out,
        engine=engine,
        version=at,
        drafter=about["drafter"],
        dtype=name,
        bytes=sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out])),
        draft_len=about["draft_len"],
        layer_ids=layer_ids(made.config),
        tensors={key: (str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in sorted(made.tensors.items())},
    )


@contextmanager
def _appearing(out: Path, is_file: bool) -> Iterator[Path]:
    """The folder that becomes ``out`` whole; where ``out`` is a file, one whose GGUF file becomes it. Raises
    ConflictError ``output-exists``; StorageError."""
    if not is_file:
        refuse_existing_folder(out)
        with new_folder(out) as folder:
            yield folder
        return
    refuse_existing_file(out)
    with storage_errors(out), room_beside(out) as room:
        yield room
        place_file(room / gguf.FILE_NAME, out)


def _write_gguf(file: Path, checkpoint: Checkpoint, reads: Reads, made: Files, about: dict[str, Any]) -> Files:
    """Write the files as one, and give back what it says and holds. Raises ConfigError ``option-invalid``: no GGUF file
    of the target is named; FormatError ``target-mismatch``: it is of another target."""
    named = checkpoint.target_name
    target = gguf.drafter_file(Path(named)) if named else None
    if target is None:
        raise ConfigError(
            "a drafter for llama.cpp holds the vocabulary of its target's GGUF file, and --target names none",
            kind=Kind.OPTION_INVALID,
            hint="--target TARGET.gguf; llama.cpp makes it: python convert_hf_to_gguf.py TARGET --outfile TARGET.gguf",
        )
    problem = f"--target {target} is not the target the drafter was trained for ({checkpoint.identity.name})"
    refuse_target(gguf.target_differences(target, about["target"]), problem)
    tensors = gguf.write(file, reads.architecture, made.config, made.tensors, target=target, about=about)
    fields = gguf.fields_of(reads.architecture, made.config)
    return Files({"target_layer_ids": fields.get(f"{reads.architecture}.target_layers")}, tensors)


def engine_files(checkpoint: Checkpoint, engine: Engine, version: str, dtype: str) -> Files:
    """What ``config.json`` and ``model.safetensors`` hold for an engine of a version; ``dtype`` is one of `DTYPES`.
    Raises ConfigError: the engine cannot serve this drafter."""
    reads = required(checkpoint, engine, version)
    made = drafter_export(checkpoint.config.name).files(checkpoint, engine, reads, dtype)
    wrap = reads.quirks.wrap
    return made if wrap is None else replace(made, config=wrap(made.config, checkpoint, draft_len(checkpoint)))


def about_export(checkpoint: Checkpoint, engine: Engine, version: str) -> dict[str, Any]:
    """``hiddenstore.json``: which drafter this is and of which step of which run, how many tokens it drafts, and the
    target it drafts for."""
    ids_follow_engine = drafter_export(checkpoint.config.name).ids_follow_engine
    ids = {"layer_convention": engine.convention} if ids_follow_engine else {}
    return {
        "schema": "hiddenstore.export/1",
        "drafter": checkpoint_word(checkpoint),
        **checkpoint.origin,
        "engine": engine.name,
        "engine_version": version,
        **ids,
        "draft_len": draft_len(checkpoint),
        "target": checkpoint.identity.model_dump(mode="json"),
    }


def draft_len(checkpoint: Checkpoint) -> int:
    """How many tokens a draft has: what was chosen, as far as its shape allows, else all it allows, else ``CHAIN``."""
    config = checkpoint.config
    longest = drafter_kind(config.name).longest_draft(config)
    return min(checkpoint.draft_len or longest or CHAIN, longest or LONGEST_CHAIN)


def layer_ids(config: dict[str, Any]) -> list[int]:
    """Aux layers as ``config.json`` names them; none where the drafter reads the final hidden only."""
    for place in (config, config.get("eagle_config") or {}, config.get("dflash_config") or {}):
        for key in (LAYER_IDS, "aux_hidden_state_layer_ids", "target_layer_ids"):
            if place.get(key):
                return list(place[key])
    return []


def stretched(checkpoint: Checkpoint, factor: float, original: int) -> Checkpoint:
    """The same weights under YaRN: positions up to ``factor`` times the ``original`` window, as ModelOpt exports.
    Raises ConfigError: the drafter was trained with another scaling, or has no positions."""
    config = checkpoint.config
    kind = drafter_kind(config.name)
    if not drafter_export(config.name).has_positions:
        raise ConfigError(f"{config.name} has no positions to stretch", kind=Kind.ROPE_SCALING, hint="leave --yarn out")
    if config.rope_scaling is not None:
        problem = f"the drafter was trained with rope_scaling {config.rope_scaling.rope_type}; YaRN is for one without"
        raise ConfigError(problem, kind=Kind.ROPE_SCALING, hint="train with drafter.rope_scaling=none")
    if not math.isfinite(factor) or factor < 1 or original < 1:
        raise ConfigError(f"YaRN cannot stretch a window of {original} {factor} times", kind=Kind.OPTION_INVALID)
    scaling = RopeScaling(rope_type="yarn", factor=factor, original_max_position_embeddings=original)
    window = max(config.max_position, int(factor * original))
    config = config.model_copy(update={"rope_scaling": scaling, "max_position": window})
    model = kind.build(config, TargetInterface(checkpoint.head, checkpoint.vocab), 0)
    model.load_state_dict(checkpoint.model.state_dict())
    return replace(checkpoint, model=model.eval())


def prove_equal(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Raise CorruptionError unless the files give the drafter's own logits and tokens, bit for bit. Both run the same
    steps over random states, weights in ``dtype``, arithmetic in float32."""
    try:
        reloaded, vocab = read_back(folder, checkpoint)
    except StorageError:
        raise
    except HiddenstoreError as error:
        raise CorruptionError(
            f"{folder} is no drafter: {error}", kind=Kind.EXPORT_UNREADABLE, path=str(folder)
        ) from error
    probe = drafter_export(checkpoint.config.name).probe
    with torch.no_grad():
        expected, found = (probe(model, checkpoint) for model in (_rounded(checkpoint, dtype), reloaded))
    same_tokens = torch.equal(vocab.target_ids, checkpoint.vocab.target_ids.cpu())
    same_layers = list(reloaded.config.aux_layers) == sorted(checkpoint.config.aux_layers)
    if not torch.equal(expected, found) or not same_tokens or not same_layers:
        worst = float((expected - found).abs().max()) if expected.shape == found.shape else float("nan")
        problem = f"{folder}: the exported files do not give the drafter's logits (largest difference {worst:g})"
        raise CorruptionError(problem, kind=Kind.EXPORT_DIFFERS, path=str(folder))


def read_back(folder: Path, checkpoint: Checkpoint) -> tuple[Drafter, DraftVocab]:
    """The drafter that an exported folder describes, from its files alone plus what engines share of the target. Raises
    HiddenstoreError: a file is damaged or lacks something."""
    own = drafter_export(checkpoint.config.name)
    part = own if own.is_read else None
    found = read_published(folder, checkpoint.head, checkpoint.identity.num_layers, part=part)
    kind = drafter_kind(found.config.name)
    model = kind.build(found.config, TargetInterface(checkpoint.head, found.vocab), 0)
    load_weights(model, found.weights, str(folder))
    return cast(Drafter, model.eval()), found.vocab


def _rounded(checkpoint: Checkpoint, dtype: torch.dtype) -> Drafter:
    """A copy on the CPU with weights that were rounded to ``dtype``, as the file holds them."""
    head, config = checkpoint.head.to("cpu"), checkpoint.config
    model: Drafter = drafter_kind(config.name).build(config, TargetInterface(head, checkpoint.vocab.to("cpu")), 0)
    state = {name: tensor.float() for name, tensor in weights(checkpoint, dtype).items()}
    if "embed_tokens.weight" in state and shares_embeddings(checkpoint):
        state["embed_tokens.weight"] = head.embed_tokens.float()
    model.load_state_dict(state)
    return model.eval()


def _usual_length(info: RunInfo) -> int | None:
    """``CHAIN``, or the TTT steps of the run where they are fewer; None where its objective has none, or a checkpoint
    lies outside its run."""
    file = info.run / CONFIG
    try:
        config = parse(settings_bytes(info.run))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, str(file)) from error
    except yaml.YAMLError as error:
        raise CorruptionError(f"{file} is no YAML: {error}", kind=Kind.RUN_CORRUPT, path=str(file)) from error
    loss = config.get("loss") or {} if isinstance(config, dict) else None
    if not isinstance(loss, dict):
        raise CorruptionError(f"{file} holds no settings", kind=Kind.RUN_CORRUPT, path=str(file))
    steps = loss.get("steps")
    return min(int(steps), CHAIN) if isinstance(steps, str) and steps.isdecimal() else None


def _target_config(info: RunInfo) -> dict[str, Any]:
    """``config.json`` of the target as the store keeps it; empty where the store is gone."""
    try:
        return target_config(Store.open(info.spec.store))
    except NotFoundError:
        return {}

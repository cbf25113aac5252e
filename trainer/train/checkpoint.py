"""Checkpoints: safetensors and JSON, published by one rename, so that a kill leaves the old state or the new one.

RUN/checkpoints/step-N/ holds ``drafter.safetensors`` (engine weight names), ``drafter.json``, ``optimizer.safetensors``
(moments, RNG) and ``state.json`` (step, cursor, digests). LATEST names the newest; the folder is written under a
temporary name, fsynced and renamed, then LATEST is replaced, then old ones go.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from hiddenstore.errors import CorruptionError, Kind, NotFoundError
from hiddenstore.files.documents import seal, sha256_hex, unseal
from hiddenstore.files.layout import missing
from hiddenstore.fs.disk import read_whole, require_whole_links
from hiddenstore.fs.publish import make_folder, new_folder, replace_file, sweep_killed
from hiddenstore.fs.seam import storage_error
from hiddenstore.store import Store
from schemas.base import Document
from schemas.capture import HeadSpec, TargetIdentity
from trainer.config import DrafterConfig
from trainer.drafters import drafter_kind
from trainer.train.guard import BestState, SpikeState

FOLDER = "checkpoints"
LATEST = "LATEST"
DRAFTER, OPTIMIZER = "drafter.safetensors", "optimizer.safetensors"
DRAFTER_JSON, STATE_JSON = "drafter.json", "state.json"
VOCAB = "vocab.safetensors"
_TEMPORARY = ".tmp-"


class DrafterSpec(Document):
    """``drafter.json``: everything needed to use the drafter. ``store`` is where its head bundle was read from."""

    config: dict[str, Any]
    target: TargetIdentity
    head: HeadSpec
    store: str
    seed: int
    step: int = Field(ge=0)

    @classmethod
    def of(cls, config: DrafterConfig, store: Store, seed: int, step: int) -> Self:
        """Of a drafter for the target of a store."""
        return cls(
            config=config.model_dump(mode="json"),
            target=store.capture.target,
            head=store.manifest.head,
            store=store.fs.address,
            seed=seed,
            step=step,
        )

    @property
    def drafter(self) -> DrafterConfig:
        """Its settings, as its kind of drafter declares them."""
        return drafter_kind(str(self.config.get("name"))).config.model_validate(self.config)


class CheckpointState(Document):
    """``state.json``: where the run stood after ``step`` steps. ``files`` gives the sha256 of its neighbours.
    ``standing``: the best checkpoints so far."""

    step: int = Field(ge=0)
    cursor: dict[str, Any]
    total_steps: int
    spikes: SpikeState = SpikeState()
    standing: BestState = BestState()
    files: dict[str, str]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint read back and checked."""

    path: Path
    state: CheckpointState
    drafter: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save(
    run: Path, spec: DrafterSpec, state: CheckpointState, tensors: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> Path:
    """Publish checkpoint ``step-N``; ``tensors`` are drafter weights and optimizer state. ``state.files`` is filled in.
    A step that was saved before is not replaced."""
    folder = run / FOLDER
    make_folder(folder)
    sweep(run)
    final = folder / f"step-{state.step}"
    if not final.exists():
        drafter, optimizer = (save_tensors({k: v.contiguous().cpu() for k, v in named.items()}) for named in tensors)
        files = {DRAFTER: drafter, OPTIMIZER: optimizer, DRAFTER_JSON: seal(spec)}
        state = state.model_copy(update={"files": {name: sha256_hex(data) for name, data in files.items()}})
        with new_folder(final) as new:
            for name, data in {**files, STATE_JSON: seal(state)}.items():
                (new / name).write_bytes(data)
    replace_file(folder / LATEST, f"{final.name}\n".encode())
    return final


def remove_old(run: Path, newest: int, best: Sequence[str] = ()) -> None:
    """Remove all but the ``newest`` (at least one) checkpoints and those whose names are among the ``best``."""
    for path in checkpoints(run)[:-newest]:
        if path.name not in best:
            doomed = path.with_name(f"{_TEMPORARY}old-{path.name}")
            path.rename(doomed)
            shutil.rmtree(doomed)


def sweep(run: Path) -> None:
    """Remove what a killed save left behind."""
    sweep_killed(run / FOLDER)
    for path in (run / FOLDER).glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, by step. Raises StorageError: the folder is there and cannot be listed, or not known to be
    gone."""
    folder = run / FOLDER
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        require_whole_links(str(folder))
        return []
    except OSError as error:
        raise storage_error(error, str(folder)) from error
    numbered = [(int(match[1]), folder / name) for name in names if (match := re.fullmatch(r"step-(\d+)", name))]
    return [path for _, path in sorted(numbered)]


def latest(run: Path) -> Path | None:
    """The newest checkpoint: the one LATEST names, or a newer one that was renamed just before a kill. Raises
    CorruptionError: LATEST names one and there is none."""
    newest = next(reversed(checkpoints(run)), None)
    if newest is None and (run / FOLDER / LATEST).exists():
        raise CorruptionError(
            f"{run / FOLDER} holds no checkpoint, but {LATEST} names one", kind=Kind.CHECKPOINT_CORRUPT, path=str(run)
        )
    return newest


def best(run: Path) -> Path:
    """The checkpoint that validated best, as the newest one records it. Raises NotFoundError: nothing was validated, or
    what was best lies elsewhere: in the run this one goes on from, or nowhere, where ``train.keep_best`` is 0."""
    newest = latest(run)
    ranked = read_state(newest).standing.ranked() if newest is not None else []
    if ranked and (folder := run / FOLDER / ranked[0]).is_dir():
        return folder
    elsewhere = "not kept (train.keep_best=0), or of the run that this one goes on from"
    why = f"{ranked[0]} is {elsewhere}" if ranked else "none of its steps was validated"
    raise NotFoundError(
        f"{run} has no best checkpoint: {why}",
        kind=Kind.CHECKPOINT_MISSING,
        hint=f"{newest or run}",
    )


def read_state(path: Path) -> CheckpointState:
    """``state.json`` of a checkpoint folder."""
    return unseal(_read(path / STATE_JSON), CheckpointState, str(path / STATE_JSON))


def state_digest(path: Path) -> str:
    """sha256 of ``state.json`` of a checkpoint folder, which names those of its neighbours; empty where there is
    none."""
    try:
        return sha256_hex(read_whole(path / STATE_JSON))
    except FileNotFoundError:
        return ""


def read_spec(path: Path) -> DrafterSpec:
    """``drafter.json`` of a checkpoint folder."""
    return unseal(_read(path / DRAFTER_JSON), DrafterSpec, str(path / DRAFTER_JSON))


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and check every digest. Raises CorruptionError: a file is missing or was changed."""
    state = read_state(path)
    if re.fullmatch(r"step-\d+", path.name) and path.name != f"step-{state.step}":
        raise CorruptionError(
            f"{path} holds the checkpoint of step {state.step}", kind=Kind.CHECKPOINT_CORRUPT, path=str(path)
        )
    _whole(path, DRAFTER_JSON, state)
    return Checkpoint(path, state, _tensors(path, DRAFTER, state), _tensors(path, OPTIMIZER, state))


def _whole(path: Path, name: str, state: CheckpointState) -> bytes:
    """A file of a checkpoint, after a check of its digest."""
    data, digest = _read(path / name), state.files.get(name, "")
    if sha256_hex(data) != digest:
        problem = f"{path / name}: sha256 {sha256_hex(data)[:12]}…, {STATE_JSON} expects {digest[:12]}…"
        raise CorruptionError(problem, kind=Kind.CHECKPOINT_CORRUPT, path=str(path / name))
    return data


def _tensors(path: Path, name: str, state: CheckpointState) -> dict[str, Tensor]:
    """Those of a file; its bytes are gone before another is read, for every rank of a machine reads them."""
    try:
        return load_tensors(_whole(path, name, state))
    except SafetensorError as error:
        problem = f"{path / name} is no safetensors file: {error}"
        raise CorruptionError(problem, kind=Kind.CHECKPOINT_CORRUPT, path=str(path)) from error


def misfits(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What is wrong with weights for a drafter, by tensor: missing, of another shape, no numbers."""
    fresh, wrong = model.state_dict(), {}
    for name in sorted(fresh.keys() | weights.keys()):
        here, there = fresh.get(name), weights.get(name)
        if here is None or there is None:
            wrong[name] = "not a tensor of this drafter" if here is None else "missing"
        elif here.shape != there.shape:
            wrong[name] = f"{list(here.shape)} expected, {list(there.shape)} found"
        elif here.is_floating_point() != there.is_floating_point():
            wrong[name] = f"{here.dtype} expected, {there.dtype} found"
        elif not bool(there.isfinite().all()):
            wrong[name] = "NaN or infinity"
    return wrong


def fill(model: nn.Module, saved: Checkpoint) -> None:
    """Load the saved weights into a fresh drafter. Raises CorruptionError: they are not those of its settings, or no
    numbers."""
    if wrong := misfits(model, saved.drafter):
        raise CorruptionError(
            f"{saved.path} does not hold the drafter of its run's settings:\n"
            + "\n".join(f"  {name}: {what}" for name, what in wrong.items()),
            kind=Kind.CHECKPOINT_CORRUPT,
            path=str(saved.path),
        )
    model.load_state_dict(saved.drafter)


def rng_tensors() -> dict[str, Tensor]:
    """State of torch's generators, to be stored beside the optimizer."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(tensors: dict[str, Tensor]) -> None:
    """The inverse of ``rng_tensors``. Raises CorruptionError: ``checkpoint-corrupt``, they hold no such states."""
    try:
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["rng.cuda"])
    except (KeyError, TypeError, RuntimeError) as error:
        problem = f"{OPTIMIZER} holds no state of the random numbers: {error}"
        raise CorruptionError(problem, kind=Kind.CHECKPOINT_CORRUPT, path=OPTIMIZER) from error


def resolve(path: Path) -> Path:
    """The checkpoint a path means: itself, that which a LATEST file names, or the newest of a run."""
    if path.name == LATEST and path.is_file():
        path = path.with_name(path.read_text(encoding="utf-8").strip())
    if (path / STATE_JSON).is_file():
        return path
    newest = latest(path)
    if newest is None:
        raise missing("run", path)
    return newest


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except FileNotFoundError as error:
        raise CorruptionError(
            f"checkpoint {path.parent} lacks {path.name}", kind=Kind.CHECKPOINT_CORRUPT, path=str(path)
        ) from error

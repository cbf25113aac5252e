"""Published checkpoints of every drafter, read into ours, and made a run: one checkpoint at step 0.

safetensors, llama.cpp's GGUF, or tensors of a torch file; nothing of a checkpoint is executed.

Shapes: V target vocabulary, U draft vocabulary.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiddenstore.data.batches import Cursor
from hiddenstore.data.order import Order
from hiddenstore.errors import ConfigError, ConflictError, HiddenstoreError, Kind, NotFoundError, StorageError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import foreign_json
from hiddenstore.files.lock import FolderLock
from hiddenstore.files.pickles import SAFE_TORCH
from hiddenstore.fs import require_local
from hiddenstore.fs.seam import storage_error, storage_errors
from hiddenstore.store import Store
from hiddenstore.targets.checkpoint import INDEX_FILE
from hiddenstore.targets.head import HeadBundle
from schemas.layers import LayerConvention
from trainer.config import DrafterConfig
from trainer.drafters import DRAFTERS, check_store, drafter_kind
from trainer.export.support import drafter_export, recognised, require_named_target
from trainer.formats import gguf
from trainer.formats.base import ABOUT_FILE, DrafterExport, Target, Tensors
from trainer.losses.teacher import TargetInterface
from trainer.settings import config_class, derived
from trainer.train import checkpoint
from trainer.train.run_folder import RUN_JSON, create, load_weights, read_facts, refuse_existing
from trainer.vocab import DraftVocab, count_store, coverage

MASK_FILE = "mask_embedding.pt"
"""Beside a published DFlash's weights; vLLM's ``qwen3_dflash.py`` puts it in place of the target's."""
_TRAINER_S = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""How files begin that the Hugging Face Trainer saves beside weights."""
START = "start"
"""The run inside a run that holds the target's own part as it was."""
_NOT_OURS = ("d2t", "t2d", "token_map", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, eq=False)
class Published:
    """A checkpoint in our terms: settings, weights fp32 under our names, draft vocabulary."""

    config: DrafterConfig
    weights: Tensors
    vocab: DraftVocab


def read_published(
    folder: Path,
    head: HeadBundle,
    num_layers: int,
    convention: LayerConvention | None = None,
    part: DrafterExport | None = None,
) -> Published:
    """The drafter that config.json and the weights of ``folder`` describe, for a target of ``num_layers``.
    ``convention`` says what the layer ids mean where the checkpoint leaves it open; ``part``: it is this one, a
    part of the target in ``folder``. Raises NotFoundError: a file is missing; ConfigError: ``import-*``: not a drafter
    that can be read, or not one of this target."""
    if (file := gguf.drafter_file(folder)) is not None:
        convention = "vllm"
        config, tensors = gguf.read(file)
    else:
        config, tensors = _checkpoint(folder, part)
    try:
        drafter = part or recognised(config, tensors)
        if drafter is None:
            names = ", ".join(map(str, config.get("architectures") or ())) or "not set"
            problem = f"{folder} is no checkpoint of {', '.join(DRAFTERS)}: architectures is {names}"
            raise ConfigError(problem, kind=Kind.NAME_UNKNOWN)
        tensors = {drafter.our_name(name): tensor for name, tensor in tensors.items()}
        vocab, order = _vocabulary(tensors, config, head)
        if order is not None:
            heads = [name for name in tensors if name.startswith(("lm_head", "markov_head.markov_w2"))]
            tensors |= {name: tensors[name][order] for name in heads if len(tensors[name]) == len(order)}
        tensors = {key: value.float() for key, value in tensors.items() if key not in _NOT_OURS}
        target = Target(head, vocab, num_layers, convention or _export_convention(folder))
        facts, tensors = drafter.read(config, tensors, target)
        _require_ascending(folder, facts["aux_layers"])
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
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise _unfit(folder, error) from error
    _require_size(folder, settings, tensors)
    return Published(settings, tensors, vocab)


def _require_ascending(folder: Path, layers: Sequence[int]) -> None:
    """Refuse layers in another order: vLLM's ``interfaces.py`` sorts them, DFlash's own loop takes them as listed, and
    nothing says which part of ``fc`` is whose."""
    if list(layers) != sorted(set(layers)):
        raise ConfigError(
            f"{folder}: it reads the layers {list(layers)} in this order: engines give them ascending and once, and "
            "which part of fc.weight is of which layer is not known",
            kind=Kind.DRAFTER_UNFIT,
            hint="config.json with ascending ids where its trainer read them so; else with fc.weight in that order too",
        )


_WIDTHS = ("hidden_size", "intermediate_size", "num_heads", "head_dim", "selector_rank", "conv_kernel_size")


def _require_size(folder: Path, settings: DrafterConfig, tensors: Tensors) -> None:
    """Refuse settings larger than the weights. A drafter is built before its weights are compared: a number out of
    somebody's file must not decide how much."""
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for name, most in {"num_layers": len(tensors), **dict.fromkeys(_WIDTHS, largest)}.items():
        if (value := getattr(settings, name, 1)) > most:
            problem = f"{folder}: config.json says {name} {value:,}, for which its weights are too small"
            raise ConfigError(problem, kind=Kind.DRAFTER_UNFIT)


def _checkpoint(folder: Path, part: DrafterExport | None) -> tuple[dict[str, Any], Tensors]:
    """``config.json`` and the tensors beside it, of ``part`` those that it reads."""
    config = _config(folder)
    if (folder / MASK_FILE).is_file():
        raise ConfigError(
            f"{folder}: {MASK_FILE} holds an embedding of its mask token, and ours takes the target's",
            kind=Kind.DRAFTER_UNFIT,
        )
    try:
        return config, _tensors(folder, partial(part.is_read, config) if part and part.is_read else None)
    except HiddenstoreError:
        raise
    except (KeyError, ValueError) as error:
        raise _unfit(folder, error) from error


def _unfit(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder}: config.json is of no drafter: {error}", kind=Kind.DRAFTER_UNFIT)


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
    order, vocab = ids.argsort(), DraftVocab.of_ids(ids, head.vocab_size)
    if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero().flatten(), ids[order]):
        raise ConfigError("t2d marks other tokens than d2t names", kind=Kind.DRAFTER_UNFIT)
    return vocab, None if torch.equal(ids[order], ids) else order


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = foreign_json((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"{folder} holds no config.json", kind=Kind.PATH_MISSING) from error
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is no JSON: {error}", kind=Kind.DRAFTER_UNFIT) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{folder / 'config.json'} holds no JSON object", kind=Kind.DRAFTER_UNFIT)
    inner = found.get("transformer_layer_config")
    return {**inner, **found} if isinstance(inner, dict) else dict(found)


def _export_convention(folder: Path) -> LayerConvention | None:
    """That of the engine a folder of ours was exported for; what cannot be read is not guessed."""
    about = folder / ABOUT_FILE
    try:
        named = foreign_json(about.read_bytes()).get("layer_convention")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, str(about)) from error
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{about} is no JSON object: {error}", kind=Kind.DRAFTER_UNFIT) from error
    known: dict[str, LayerConvention] = {"vllm": "vllm", "hf": "hf", "output": "output"}
    return known.get(named) if isinstance(named, str) else None


def _tensors(folder: Path, is_read: Callable[[str], bool] | None = None) -> Tensors:
    found: Tensors = {}
    files = _weights(folder)
    if not files:
        raise NotFoundError(f"{folder} holds no .safetensors, .bin, .pt or .pth file", kind=Kind.PATH_MISSING)
    for file in files:
        try:
            tensors = _safetensors(file, is_read) if file.suffix == ".safetensors" else _unpickled(file)
            found |= {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        except OSError as error:
            raise storage_error(error, str(file)) from error
        except SafetensorError as error:
            raise ConfigError(f"{file} is no safetensors file: {error}", kind=Kind.DRAFTER_UNFIT) from error
    return found


def _weights(folder: Path) -> list[Path]:
    """The files of its weights, of the first kind that it has."""
    with storage_errors(folder):
        # A glob would find nothing in a folder that cannot be listed.
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith(_TRAINER_S))
    kinds = ((".safetensors",), (".bin",), (".pt", ".pth"))
    return next(filter(None, ([path for path in paths if path.suffix in kind] for kind in kinds)), [])


def _safetensors(file: Path, is_read: Callable[[str], bool] | None) -> Tensors:
    """Those of a file, or the few of a target's shard that are read."""
    with safe_open(file, framework="pt") as handle:
        names = [name for name in handle.keys() if is_read is None or is_read(name)]  # noqa: SIM118
        return {name: handle.get_tensor(name) for name in names}


def _unpickled(file: Path) -> Tensors:
    """The tensors of a torch file, by the reader that runs no code of its."""
    # weights_only refuses everything but tensors; its error type is exported nowhere else.
    from torch._weights_only_unpickler import UnpicklingError

    reason = f"torch {torch.__version__} cannot read it safely (CVE-2026-24747), {SAFE_TORCH} can"
    try:
        tensors = None if Version(torch.__version__) < SAFE_TORCH else torch.load(file, "cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        tensors, reason = None, str(error).partition(". ")[0].partition("\n")[0]
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(
            f"{file} is a pickle that holds more than tensors, or none: {reason}",
            kind=Kind.PICKLE_REFUSED,
            hint="take the safetensors file that its publisher offers, or make one where you trust it",
        )
    return tensors


def _folder(source: str | Path, part: DrafterExport | None = None) -> Path:
    """The folder that ``source`` names, or its hub id's, downloaded into the cache of the hub where it is not there;
    of a target only the files that ``part`` lies in."""
    if Path(source).is_dir() or Path(source).suffix == gguf.SUFFIX:
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        raise NotFoundError(f"{source} is no folder and no hub id", kind=Kind.PATH_MISSING)
    from huggingface_hub import snapshot_download

    from hiddenstore.servers.hub_session import bound_hub_requests, http_errors

    bound_hub_requests()
    try:
        if part is None or part.is_read is None:
            usual = ["*.json", "*.safetensors", "*.bin", MASK_FILE]
            folder = Path(snapshot_download(str(source), allow_patterns=usual))
            if (folder / "config.json").is_file() and not _weights(folder):
                others = [f"{name}*" for name in _TRAINER_S]
                snapshot_download(str(source), allow_patterns=["*.pt", "*.pth"], ignore_patterns=others)
            return folder
        folder = Path(snapshot_download(str(source), allow_patterns=["*.json"]))
        index = folder / INDEX_FILE
        files = foreign_json(index.read_bytes())["weight_map"] if index.is_file() else {}
        shards = {file for name, file in files.items() if part.is_read(_config(folder), name)} or {"*.safetensors"}
        return Path(snapshot_download(str(source), allow_patterns=["*.json", *sorted(shards)]))
    except http_errors(name="TimeoutException") as error:
        hint = "the same command goes on where it stopped"
        raise StorageError(f"{source}: the hub gave {error}", kind=Kind.SERVER_TIMEOUT, hint=hint) from error
    except http_errors(OSError, KeyError, ValueError) as error:
        raise_refusal(error, str(source))
        raise NotFoundError(
            f"{source} is no folder, and no hub id that can be reached: {str(error).partition(chr(10))[0]}",
            kind=Kind.PATH_MISSING,
            hint=f"hf download {shlex.quote(str(source))} --local-dir DRAFTER",
        ) from error


@dataclass(frozen=True)
class Imported:
    """What was made of it."""

    checkpoint: Path
    drafter: str
    aux_layers: tuple[int, ...]
    parameters: int
    vocab_size: int
    vocab_coverage: float


def import_drafter(
    folder: str | Path,
    run: str | Path,
    store_location: str | Path,
    convention: LayerConvention | None = None,
    part: str | None = None,
) -> Imported:
    """Read ``folder``, or a hub id, for the target of a store and write it as the run folder ``run``. ``part``: the
    kind of drafter that is a part of the target itself, whose folder it is. Raises
    NotFoundError: no such folder or store; ConflictError: ``run`` holds a run already; ConfigError: not a drafter of
    this target, or the store lacks what it reads."""
    path = require_local(run, "RUN")
    if (path / RUN_JSON).exists() or checkpoint.latest(path) is not None:
        raise ConflictError(f"{path} holds a run already", kind=Kind.OUTPUT_EXISTS, hint="give another -o folder")
    export = None if part is None else drafter_export(part)
    source, store = _folder(folder, export), Store.open(store_location)
    head, target = store.head(), store.capture.target
    if export is not None:
        # Of a hub id only the files of that part were fetched.
        require_named_target(source, target, weights=Path(folder).is_dir())
    found = read_published(source, head, target.num_layers, convention, export)
    name = found.config.name
    kind = drafter_kind(name)
    check_store(name, kind.needs(found.config, None), store.capture, store.path)
    interface = TargetInterface(head, found.vocab, store.capture.final_norm)
    model = kind.build(found.config, interface, 0)
    load_weights(model, found.weights, f"{source} is no {name} drafter of {target.name}")
    values = derived(store, name) | {"drafter": found.config.model_dump(mode="json")}
    config = config_class(name).model_validate(values)
    covered = coverage(found.vocab, count_store(store, head.vocab_size))
    train_ids = [entry.id for _, entry in store.entries if entry.split == "train"]
    spec = checkpoint.DrafterSpec.of(found.config, store, config.train.seed, 0)
    cursor = Cursor(config.data.seed, 0, 0, Order(train_ids).digest)
    state = checkpoint.CheckpointState(step=0, cursor=cursor.to_json(), total_steps=0, files={})
    torch.manual_seed(config.train.seed)
    with FolderLock(path) as lock:
        create(path, store, config, found.vocab, covered, lock=lock, imported_from=str(source.resolve()))
        at = checkpoint.save(path, spec, state, (dict(model.state_dict()), checkpoint.rng_tensors()))
    parameters = sum(tensor.numel() for tensor in model.state_dict().values())
    return Imported(at, name, found.config.aux_layers, parameters, found.vocab.size, covered)


def begin_at_target(target: str | Path, run: str | Path, store_location: str | Path, kind: str) -> Path:
    """The part of ``target`` that a new ``run`` of this ``kind`` begins as: the run inside it that holds no more, taken
    unless it lies there already. Raises ConflictError: ``run`` has begun, or its start is another's; FormatError
    ``target-mismatch``: not the target of the store; ConfigError: it has no such part; as ``import_drafter``."""
    path = require_local(run, "RUN")
    train = ["hiddenstore", "train", str(store_location), "-o", str(path)]
    if not drafter_kind(kind).begins_as_the_target_s:
        able = [name for name in DRAFTERS if drafter_kind(name).begins_as_the_target_s]
        raise ConfigError(
            f"--target is where a drafter starts that is a part of it ({', '.join(able)}), and {kind} is none",
            kind=Kind.OPTION_INVALID,
            hint=shlex.join([*train, "--drafter", kind]),
        )
    refuse_existing(path, shlex.join([*train, "--resume"]))
    start = path / START
    source = str(_folder(target, drafter_export(kind)).resolve())
    if (start / RUN_JSON).exists() and not checkpoint.checkpoints(start):
        with FolderLock(start) as lock:
            # A kill came between its settings and its weights; a living process that writes them has the lock.
            lock.take()
            shutil.rmtree(start)
    if not (start / RUN_JSON).exists() or read_facts(start).imported_from != source:
        import_drafter(target, start, store_location, part=kind)
    return start

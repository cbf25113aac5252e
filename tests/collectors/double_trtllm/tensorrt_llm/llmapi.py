"""``tensorrt_llm.llmapi``: the arguments, and an ``LLM`` that hands requests to the worker process."""

import atexit
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["LLM", "KvCacheConfig", "SamplingParams", "SaveHiddenStatesDecodingConfig", "TorchLlmArgs"]


class RequestError(RuntimeError):
    pass


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(default=0.9, ge=0, le=1)
    host_cache_size: int | None = None
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    dtype: str = "auto"
    tokens_per_block: int = 32


class SaveHiddenStatesDecodingConfig(StrictBaseModel):
    max_draft_len: int | None = Field(default=None, ge=0)
    max_total_draft_tokens: int | None = 1
    speculative_model_dir: str | Path | None = None
    max_concurrency: int | None = Field(default=None, gt=0)
    load_format: str | None = None
    decoding_type: Literal["SaveState"] = "SaveState"
    output_directory: str
    write_interval: int = 20
    file_prefix: str = "data"
    eagle3_layers_to_capture: set[int] | None = None
    eagle_choices: list[list[int]] | None = None


class TorchLlmArgs(StrictBaseModel):
    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    speculative_config: SaveHiddenStatesDecodingConfig | None = None
    max_batch_size: int | None = 2048
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    attn_backend: str = "TRTLLM"
    disable_overlap_scheduler: bool = False
    cuda_graph_config: dict[str, Any] | None = None
    moe_config: dict[str, Any] = Field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    detokenize: bool = True


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int] = field(default_factory=list)


class RequestOutput:
    """One request under way: ``result`` waits for the worker's answer."""

    def __init__(self, request_id: int, prompt_token_ids: list[int]) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(0)]
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def result(self, timeout: float | None = None) -> "RequestOutput":
        answer = self.answers.get(timeout=timeout)
        if "error" in answer:
            raise RequestError(answer["error"])
        self.outputs[0].token_ids.append(answer["token"])
        return self

    def abort(self) -> None:
        self.answers.put({"error": "aborted"})


class _Worker:
    """The one worker process of this process, started on first use: importing torch takes seconds."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.stop)
        self._ids = itertools.count(1)
        self._open: dict[int, queue.Queue[dict[str, Any]]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, document: dict[str, Any], answers: "queue.Queue[dict[str, Any]]") -> int:
        number = next(self._ids)
        self._open[number] = answers
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**document, "number": number}) + "\n")
        self._process.stdin.flush()
        return number

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._open.pop(answer["number"]).put(answer)


_workers: list[_Worker] = []


class LLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.args = TorchLlmArgs(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        inferred = config["max_position_embeddings"]
        self.max_seq_len = self.args.max_seq_len or inferred
        if self.max_seq_len > inferred and os.environ.get("TLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
            raise ValueError(f"max_seq_len {self.max_seq_len} is larger than the inferred {inferred}")
        if not _workers:
            _workers.append(_Worker())
        traps = json.loads(os.environ.get("DOUBLE_TRAPS", "{}"))
        self._call({"do": "open", "args": json.loads(self.args.model_dump_json()), "traps": traps})

    def generate_async(
        self, inputs: list[int], sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> RequestOutput:
        asked = sampling_params.max_tokens if sampling_params else 32
        if len(inputs) + asked > self.max_seq_len:
            raise ValueError(
                f"The sum of prompt length ({len(inputs)}) and max_tokens ({asked}) should not exceed max_seq_len "
                f"({self.max_seq_len})"
            )
        if len(inputs) > (self.args.max_num_tokens or 0):
            raise ValueError(f"The prompt length ({len(inputs)}) should not exceed max_num_tokens")
        request = RequestOutput(0, list(inputs))
        request.request_id = _workers[0].call({"do": "run", "input_ids": list(inputs)}, request.answers)
        return request

    def shutdown(self) -> None:
        self._call({"do": "close"})

    def _call(self, document: dict[str, Any]) -> None:
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        _workers[0].call(document, answers)
        answer = answers.get(timeout=120)
        if "error" in answer:
            raise RuntimeError(answer["error"])

"""A real vLLM in this process: a target with or without a drafter answers prompts, and its counters are read."""

import contextlib
import gc
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

Settings = dict[str, Any]
"""What ``--speculative-config`` takes."""

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Served:
    """Answers as token ids, and what the engine counted while it gave them. ``accepted_at[i]``: drafts of which the
    first i+1 tokens were accepted."""

    answers: list[list[int]]
    drafts: int
    drafted: int
    accepted: int
    accepted_at: list[int]

    @property
    def accepted_length(self) -> float:
        """Tokens per draft, the target's own included, as vLLM's dashboards compute it."""
        return 1 + self.accepted / self.drafts


def serve(
    target: str, prompts: Sequence[list[int]], max_new_tokens: int, speculative: Settings | None = None
) -> Served:
    """Greedy answers of ``target`` in fp32; counters are those of these prompts alone."""
    with loaded(target, speculative) as llm:
        return answer(llm, prompts, max_new_tokens)


def serve_apart(target: str, prompts: Sequence[list[int]], max_new_tokens: int, speculative: Settings) -> Served:
    """``serve`` in a process of its own: n-gram lookup loads numba, and every drafter with attention that a process
    without AVX-512 loads after it answers wrongly."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(serve, target, prompts, max_new_tokens, speculative).result()


@contextlib.contextmanager
def loaded(target: str, speculative: Settings | None = None, **settings: Any) -> Any:
    """A ``vllm.LLM``, gone with its memory afterwards, so that one process may load several in turn."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with_a_norm_for_every_layer()
    llm = LLM(
        model=target,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        seed=0,
        disable_log_stats=False,
        speculative_config=speculative,
        **settings,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def with_a_norm_for_every_layer() -> None:
    """Let DFlash's context keys be normed by their own layer's weights.

    vLLM 0.32 hands all layers' weights to one kernel, whose build for CPUs reads only the first row: 0.5 % of accepted
    length, for this target. GPUs have a kernel that reads them all.
    """
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(self: Any, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, keys, strict=True)])

    DFlashQwen3Model._normalize_context_k = normed


def answer(llm: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> Served:
    """Greedy answers, and how far the counters moved meanwhile."""
    from vllm import SamplingParams

    before = _counters(llm)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = llm.generate(asked, SamplingParams(temperature=0, max_tokens=max_new_tokens), use_tqdm=False)
    after = _counters(llm)
    moved = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after}
    return Served(
        answers=[list(one.outputs[0].token_ids) for one in found],
        drafts=moved.get("drafts", [0])[0],
        drafted=moved.get("draft_tokens", [0])[0],
        accepted=moved.get("accepted_tokens", [0])[0],
        accepted_at=moved.get("accepted_tokens_per_pos", []),
    )


def _counters(llm: Any) -> dict[str, list[int]]:
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            values = metric.values if hasattr(metric, "values") else [metric.value]
            found[metric.name.removeprefix(PREFIX)] = [int(value) for value in values]
    return found

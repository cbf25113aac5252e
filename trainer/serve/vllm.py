"""vLLM: ``vllm serve TARGET --speculative-config '<json>'``.

Sources: vLLM's ``SpeculativeConfig`` (docs.vllm.ai, api/vllm/config/speculative, 0.12 to 0.33) and its pages
features/speculative_decoding; field and method names compared with an installed 0.32.0. Run on CPU: eagle, eagle3,
dflash, medusa, draft_model, ngram and suffix of 0.32.
"""

import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from hiddenstore.servers import flag_value
from hiddenstore.targets.rope import rope_boundary, rope_kind
from trainer.config import Section
from trainer.serve.drafter import text_config
from trainer.serve.plan import ServePlan, ServeRequest, ServingEngine, checked_settings, port_of

VERSION = "0.32.0"
_SUFFIX = "vLLM drafts by suffixes only beside arctic-inference: pip install arctic-inference==0.1.1"
# vLLM looks up n-grams of 5 tokens unless told; shorter ones find more, and lookup costs next to nothing.
NGRAM_DEFAULTS = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}


class Speculation(Section):
    """What ``--speculative-config`` may hold besides the method, model and length that are written."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: PositiveInt | None = None
    draft_tensor_parallel_size: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    quantization: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    draft_sample_method: str | None = None
    rejection_sample_method: str | None = None
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = Field(None, ge=1)
    enable_adaptive_verification: bool | None = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    parallel_drafting: bool | None = None
    use_heterogeneous_vocab: bool | None = None
    enforce_eager: bool | None = None
    disable_padded_drafter_batch: bool | None = None
    disable_eagle_block_drop: bool | None = None
    disable_lookahead_block_hashes: bool | None = None
    use_local_argmax_reduction: bool | None = None
    index_share_for_mtp_iteration: bool | None = None
    draft_lm_head_quantization: str | None = None
    dspark_draft_topk: PositiveInt | None = None
    xpress_topc: NonNegativeInt | None = None
    fly_window_size: PositiveInt | None = None
    fly_entropy_threshold: float | None = Field(None, ge=0)
    fly_entropy_top_k: PositiveInt | None = None
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None
    suffix_decoding_max_tree_depth: PositiveInt | None = None
    suffix_decoding_max_cached_requests: NonNegativeInt | None = None
    suffix_decoding_max_spec_factor: float | None = Field(None, ge=0)
    suffix_decoding_min_token_prob: float | None = Field(None, ge=0, le=1)


def speculative_config(
    method: str,
    model: str | None = None,
    draft_len: int = 3,
    version: str = VERSION,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The value of ``--speculative-config`` (and of ``LLM(speculative_config=…)``); empty for method ``none``.
    ``method`` is our word (eagle1, eagle3, dflash, draft-target, ngram, suffix, mtp, none …), ``model`` the drafter's
    folder or hub id, ``draft_len`` the tokens drafted per step, ``settings`` further fields by vLLM's names. Raises
    ConfigError: ``serve-unsupported``: this version lacks the method; ``serve-setting``: the method needs a model and
    none was given."""
    name, reads = VLLM.method(method, version, model), VLLM.reads(method, version)
    if method == "none":
        return {}
    config: dict[str, Any] = {"method": name}
    if model is not None:
        config["model"] = model
    config["num_speculative_tokens"] = draft_len
    config |= reads.told if reads else {}
    config |= NGRAM_DEFAULTS if method == "ngram" else {}
    return config | dict(settings or {})


def plan(request: ServeRequest) -> ServePlan:
    """The command that serves ``request``. Raises ConfigError: see ``speculative_config``; ``serve-setting``."""
    settings = checked_settings(Speculation, request.settings)
    config = speculative_config(request.method, request.drafter, request.draft_len, request.version, settings)
    served_as = flag_value(request.flags, "--served-model-name") or request.target
    if request.form == "python":
        keyword = f",\n    speculative_config={config!r}" if config else ""
        program = (
            "from vllm import LLM, SamplingParams\n\n"
            f"llm = LLM(\n    model={request.target!r}{keyword},\n)\n"
            'outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=32))\n'
            "print(outputs[0].outputs[0].text)\n"
        )
        return ServePlan(program=program, served_as=served_as)
    speculation = ["--speculative-config", json.dumps(config)] if config else []
    return ServePlan(
        command=("vllm", "serve", request.target, *speculation, *request.flags),
        served_as=served_as,
        port=port_of(request.flags, VLLM.port),
        notes=tuple(_notes(request)),
    )


def _notes(request: ServeRequest) -> Iterator[str]:
    if request.method == "suffix":
        yield _SUFFIX
    config = SimpleNamespace(**(text_config(request.target) or {}))
    boundary = rope_boundary(config) if rope_kind(config) == "longrope" else None
    room = flag_value(request.flags, "--max-model-len", "--max_model_len")
    if boundary is not None and not (room and room.isdecimal() and int(room) <= boundary):
        yield (
            f"vLLM turns every text by this target's long rotary factors, which a drafter has met in texts of more "
            f"than {boundary} tokens alone; -- --max-model-len {boundary} where no text is longer"
        )


VLLM = ServingEngine(
    name="vllm",
    version=VERSION,
    untrained={"draft-target": "draft_model", "ngram": "ngram", "suffix": "suffix", "mtp": "mtp"},
    plan=plan,
    install="pip install vllm",
    image=lambda version: f"vllm/vllm-openai:v{version}",
    port=8000,
    forms=("command", "python", "container"),
    entrypoint="vllm",
    config_file=None,
    loads=("vllm", "speculators"),
)

"""SGLang: ``python -m sglang.launch_server --model-path TARGET --speculative-…``.

Sources: SGLang's advanced_features/speculative_decoding page and the fields of 0.5.23's server arguments
(``arg_groups/fields/spec.py``). Names were read, nothing was run here.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.servers import flag_value
from trainer.config import Section
from trainer.serve.drafter import text_config
from trainer.serve.plan import ServePlan, ServeRequest, ServingEngine, flags_of, hyphened_settings, port_of

VERSION = "0.5.23"
# Classes of targets in srt/models with set_eagle3_layers_to_capture alone, and with no such method at all.
_FOR_EAGLE3_ONLY = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Gemma3ForCausalLM")
_FOR_NONE = (
    *("GraniteForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"),
    *("CohereForCausalLM", "Cohere2ForCausalLM", "Olmo2ForCausalLM"),
)


class Speculation(Section):
    """Settings behind ``--speculative-``, their hyphens as underscores."""

    num_steps: PositiveInt | None = None
    eagle_topk: PositiveInt | None = None
    num_draft_tokens: PositiveInt | None = None
    dflash_block_size: int | None = Field(None, ge=2)
    domino_candidate_pool_size: NonNegativeInt | None = None
    dspark_block_size: PositiveInt | None = None
    dspark_sps_table_path: str | None = None
    dspark_confidence_sts_path: str | None = None
    dspark_align_verify_tokens_to_graph_tier: bool | None = None
    draft_model_revision: str | None = None
    draft_load_format: str | None = None
    draft_model_quantization: str | None = None
    draft_attention_backend: str | None = None
    draft_kv_cache_dtype: str | None = None
    draft_window_size: PositiveInt | None = None
    draft_sink_size: NonNegativeInt | None = None
    accept_threshold_single: NonNegativeFloat | None = None
    accept_threshold_acc: NonNegativeFloat | None = None
    use_rejection_sampling: bool | None = None
    use_block_verification: bool | None = None
    adaptive: bool | None = None
    adaptive_config: str | None = None
    attention_mode: Literal["prefill", "decode"] | None = None
    dsa_topk_backend: str | None = None
    token_map: str | None = None
    moe_runner_backend: str | None = None
    moe_a2a_backend: str | None = None
    enable_w4a4_mxfp4_megamoe: bool | None = None
    ngram_min_bfs_breadth: PositiveInt | None = None
    ngram_max_bfs_breadth: PositiveInt | None = None
    ngram_match_type: Literal["BFS", "PROB"] | None = None
    ngram_max_trie_depth: PositiveInt | None = None
    ngram_capacity: PositiveInt | None = None
    ngram_external_corpus_path: str | None = None
    ngram_external_sam_budget: NonNegativeInt | None = None
    ngram_external_corpus_max_tokens: PositiveInt | None = None


def speculative_flags(request: ServeRequest, settings: Mapping[str, Any]) -> list[str]:
    """The ``--speculative-*`` flags of a request; none for ``none``. A chain of ``draft_len`` tokens is one branch a
    step (``eagle_topk`` 1) verified with the token before it: ``num_draft_tokens`` = ``draft_len`` + 1, which is also
    DFlash's block; DSpark's is ``draft_len``. ``settings`` are fields of `Speculation`. Raises ConfigError:
    ``serve-unsupported``, ``serve-setting``."""
    algorithm, draft_len = SGLANG.method(request.method, request.version, request.drafter), request.draft_len
    if request.method == "none":
        return []
    lengths = {"num_steps": draft_len, "eagle_topk": 1, "num_draft_tokens": draft_len + 1}
    if algorithm == "DFLASH":
        lengths = {"dflash_block_size": draft_len + 1}
    elif algorithm == "DSPARK":
        lengths = {"dspark_block_size": draft_len}
    elif algorithm == "NGRAM":
        lengths = {"num_draft_tokens": draft_len + 1}
    values: dict[str, Any] = lengths | dict(settings)
    if values.get("eagle_topk", 1) > 1 and "num_draft_tokens" not in settings:
        raise ConfigError(
            f"eagle-topk {values['eagle_topk']} drafts a tree: say how many of its tokens are verified",
            kind=Kind.SERVE_SETTING,
            hint="--set num-draft-tokens=16, what SGLang's page verifies with 3 steps of top 4",
        )
    flags = ["--speculative-algorithm", algorithm]
    if request.drafter is not None:
        flags += ["--speculative-draft-model-path", request.drafter]
    # The one flag whose absence is a third answer: what the target does.
    if values.get("enable_w4a4_mxfp4_megamoe") is False:
        flags.append("--no-speculative-enable-w4a4-mxfp4-megamoe")
    return flags + flags_of("--speculative-", values)


def plan(request: ServeRequest) -> ServePlan:
    """The command that serves ``request``. Raises ConfigError: see ``speculative_flags``."""
    flags = speculative_flags(request, hyphened_settings(Speculation, request.settings))
    return ServePlan(
        command=("python", "-m", "sglang.launch_server", "--model-path", request.target, *flags, *request.flags),
        served_as=flag_value(request.flags, "--served-model-name") or request.target,
        port=port_of(request.flags, SGLANG.port),
        notes=_notes(request),
    )


def _notes(request: ServeRequest) -> tuple[str, ...]:
    algorithm = SGLANG.method(request.method, request.version, request.drafter)
    blind = {"EAGLE3": _FOR_NONE, **dict.fromkeys(("DFLASH", "DSPARK"), (*_FOR_NONE, *_FOR_EAGLE3_ONLY))}
    classes = (text_config(request.target) or {}).get("architectures")
    names = [name for name in blind.get(algorithm, ()) if isinstance(classes, list) and name in classes]
    return tuple(f"{name} of SGLang {VERSION} hands out no layers for {algorithm}: it will not start" for name in names)


SGLANG = ServingEngine(
    name="sglang",
    version=VERSION,
    untrained={"draft-target": "STANDALONE", "ngram": "NGRAM", "mtp": "NEXTN"},
    plan=plan,
    install="pip install sglang",
    image=lambda version: f"lmsysorg/sglang:v{version}",
    port=30000,
    forms=("command", "container"),
    entrypoint=None,
    config_file=None,
    loads=("sglang",),
)

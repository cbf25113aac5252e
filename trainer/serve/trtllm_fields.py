"""What TensorRT-LLM's YAML file may hold: every setting, its kind, and the published document that names it.

Restated from documents and source that anyone can read; no TensorRT-LLM was run. Versions are bounded only where a
document shows the change.
"""

from dataclasses import replace

from trainer.serve.fields import Field, Kind, Source

SOURCES = {
    "spec": Source("NVIDIA/TensorRT-LLM docs/source/features/speculative-decoding.md", "1.4.0rc1"),
    "args": Source("NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py", "1.2 – 1.4.0rc1"),
    "args-1.1": Source("NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py", "1.1"),
    "args-0.21": Source("NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py", "0.20 – 0.21"),
    "curated": Source("NVIDIA/TensorRT-LLM examples/configs/curated", "1.2 – 1.4.0rc1"),
    "guide-r1": Source("NVIDIA/TensorRT-LLM docs/source/deployment-guide, DeepSeek-R1", "1.2"),
    "blog6": Source("NVIDIA/TensorRT-LLM docs/source/blogs/tech_blog/blog6, Llama 4 Maverick", "1.1"),
    "blog11": Source("NVIDIA/TensorRT-LLM docs/source/blogs/tech_blog/blog11, GPT-OSS", "1.1.0rc0"),
    "card-r1": Source("huggingface.co nvidia/DeepSeek-R1-0528-FP4, README.md", "0.21"),
    "playbook": Source("NVIDIA/dgx-spark-playbooks nvidia/speculative-decoding", "1.2.0rc6 – 1.3.0rc12"),
    "triton": Source("triton-inference-server/tutorials Feature_Guide/Speculative_Decoding/TRT-LLM", "26"),
}


def _all(kind: Kind, source: str, names: str, since: str | None = None, before: str | None = None) -> tuple[Field, ...]:
    return tuple(Field(name, kind, source, since=since, before=before) for name in names.split())


def _section(name: str, source: str, fields: tuple[Field, ...]) -> Field:
    return Field(name, "section", source, fields=fields)


_KV_CACHE = (
    *_all("bool", "args", "enable_block_reuse onboard_blocks enable_partial_reuse copy_on_partial_reuse use_uvm"),
    *_all("bool", "args", "use_kv_cache_manager_v2"),
    *_all("int", "args", "max_tokens sink_token_length host_cache_size secondary_offload_min_priority"),
    *_all("int", "args", "event_buffer_max_size attention_dp_events_gather_period_ms max_gpu_total_bytes"),
    *_all("int", "args", "tokens_per_block"),
    *_all("float", "args", "free_gpu_memory_fraction cross_kv_cache_fraction max_util_for_resume"),
    *_all("text", "args", "dtype mamba_ssm_cache_dtype"),
    *_all("ints", "args", "max_attention_window"),
)
_CUDA_GRAPH = (
    *_all("ints", "args", "batch_sizes"),
    *_all("int", "args", "max_batch_size"),
    *_all("bool", "args", "enable_padding"),
)
_MOE = (
    Field(
        "backend",
        "text",
        "args",
        choices=(
            *("AUTO", "CUTLASS", "CUTEDSL", "CUTEDSL_FC12", "WIDEEP", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA"),
            *("TRITON", "MARLIN", "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL"),
        ),
    ),
    *_all("int", "guide-r1", "max_num_tokens"),
    *_all("any", "guide-r1", "load_balancer"),
    *_all("bool", "args", "disable_finalize_fusion"),
    *_all("bool", "curated", "use_low_precision_moe_combine"),
)
_ATTENTION_DP = (
    *_all("bool", "curated", "enable_balance"),
    *_all("int", "curated", "batching_wait_iters timeout_iters"),
)
_SCHEDULER = (
    Field(
        "capacity_scheduler_policy",
        "text",
        "args",
        choices=("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"),
    ),
    Field("context_chunking_policy", "text", "args", choices=("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")),
    *_all("any", "args", "dynamic_batch_config"),
)
_TORCH_COMPILE = (
    *_all("bool", "args", "enable_fullgraph enable_inductor enable_piecewise_cuda_graph enable_userbuffers"),
    *_all("ints", "args", "capture_num_tokens"),
    *_all("int", "args", "max_num_streams"),
)
_CACHE_TRANSCEIVER = (
    Field("backend", "text", "args", choices=("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI")),
    Field("transceiver_runtime", "text", "args", choices=("CPP", "PYTHON")),
    *_all("int", "args", "max_tokens_in_buffer kv_transfer_timeout_ms kv_transfer_sender_future_timeout_ms"),
)

_MODEL = Field("speculative_model", "text", "spec", aliases=("speculative_model_dir",))
_BASE = (
    Field("decoding_type", "text", "spec"),
    Field("max_draft_len", "int", "spec", least=0, may_be_null=True),
    Field("max_total_draft_tokens", "int", "spec", least=1),
    _MODEL,
    *_all("int", "args", "max_concurrency acceptance_window"),
    *_all("mapping", "args", "draft_len_schedule"),
    *_all("float", "args", "acceptance_length_threshold acceptance_rate_threshold"),
    *_all("int", "args", "acceptance_rate_window_size", since="1.3"),
    *_all("text", "args", "load_format"),
    *_all("bool", "args", "allow_advanced_sampling"),
    *_all("bool", "args", "use_rejection_sampling enable_penalty", since="1.3"),
    *_all("text", "args", "advanced_sampling_mode moe_backend", since="1.3"),
)
_SUFFIX = (
    _section("sa_config", "args", (*_all("int", "args", "threshold"), *_all("bool", "args", "enable_global_pool"))),
    *_all("bool", "spec", "use_sa_spec", since="1.3"),
    *_all("int", "spec", "sa_spec_threshold", since="1.3"),
)
_TREE = (
    *_all("bool", "spec", "use_dynamic_tree"),
    *_all("int", "spec", "dynamic_tree_max_topK"),
)
_EAGLE = (
    *_TREE,
    *_all("bool", "args", "eagle3_one_model greedy_sampling"),
    *_all("ints", "args", "eagle3_layers_to_capture"),
    Field("eagle3_model_arch", "text", "args", since="1.2", choices=("llama3", "mistral_large3")),
    *_all("int", "args", "num_eagle_layers max_non_leaves_per_layer"),
    *_all("int", "spec", "max_batch_size"),
    *_all("float", "args", "posterior_threshold"),
    *_all("any", "args", "eagle_choices"),
    *_all("text", "args-0.21", "pytorch_weights_path", before="1.1"),
)
_POOL = (
    Field("max_matching_ngram_size", "int", "spec", least=1),
    *_all("bool", "spec", "is_keep_all is_use_oldest is_public_pool"),
    *_all("int", "args-0.21", "prompt_lookup_num_tokens", before="1.0"),
)
_MTP = (
    Field("num_nextn_predict_layers", "int", "spec", least=1),
    *_all("bool", "spec", "use_relaxed_acceptance_for_thinking"),
    Field("relaxed_topk", "int", "spec", least=1),
    Field("relaxed_delta", "float", "spec", least=0),
    *_all("bool", "args", "use_mtp_vanilla mtp_eagle_one_model"),
    *_all("int", "args", "begin_thinking_phase_token end_thinking_phase_token"),
    *_TREE,
)
_SAVE = (
    *_all("text", "args", "output_directory file_prefix"),
    *_all("int", "args", "write_interval"),
    *_all("ints", "args", "eagle3_layers_to_capture"),
)
_MASK = _all("int", "spec", "mask_token_id")

DECODING_TYPES = {
    "Eagle3": replace(_section("Eagle3", "spec", (*_BASE, *_EAGLE, *_SUFFIX)), since="1.2"),
    "Eagle": _section("Eagle", "playbook", (*_BASE, *_EAGLE)),
    "DraftTarget": _section("DraftTarget", "spec", _BASE),
    "Draft_Target": replace(_section("Draft_Target", "args", _BASE), since="1.2"),
    "NGram": _section("NGram", "spec", (*_BASE, *_POOL)),
    "MTP": _section("MTP", "spec", (*_BASE, *_MTP, *_SUFFIX)),
    "PARD": replace(_section("PARD", "spec", (*_BASE, *_MASK, *_SUFFIX)), since="1.3"),
    "DFlash": replace(
        _section(
            "DFlash",
            "spec",
            (
                *_BASE,
                *_MASK,
                *_all("ints", "spec", "target_layer_ids"),
                Field("attention_backend", "text", "args", choices=("VANILLA", "TRTLLM", "FA4")),
            ),
        ),
        since="1.3",
    ),
    "SA": replace(
        _section(
            "SA",
            "spec",
            (
                *_BASE,
                *_all("int", "args", "max_matching_ngram_size global_pool_size"),
                *_all("bool", "args", "enable_global_pool"),
            ),
        ),
        since="1.3",
    ),
    "SaveState": replace(_section("SaveState", "args", (*_BASE, *_SAVE)), since="1.1"),
    "AUTO": _section("AUTO", "args", _BASE),
    "Medusa": _section(
        "Medusa",
        "args-1.1",
        (*_BASE, *_all("any", "args-1.1", "medusa_choices"), *_all("int", "args-1.1", "num_medusa_heads")),
    ),
}
"""``decoding_type`` → the fields of its section, and the versions that have it."""

NEEDS_MODEL = ("Eagle3", "Eagle", "DraftTarget", "Draft_Target", "PARD", "DFlash")
NEEDS_LENGTH = (*NEEDS_MODEL, "NGram", "SA")

FILE = (
    _section("speculative_config", "spec", ()),
    _section("kv_cache_config", "playbook", _KV_CACHE),
    _section("cuda_graph_config", "playbook", _CUDA_GRAPH),
    _section("moe_config", "curated", _MOE),
    _section("attention_dp_config", "curated", _ATTENTION_DP),
    _section("scheduler_config", "args", _SCHEDULER),
    _section("torch_compile_config", "args", _TORCH_COMPILE),
    _section("cache_transceiver_config", "curated", _CACHE_TRANSCEIVER),
    _section("nvfp4_gemm_config", "args", _all("texts", "args", "allowed_backends")),
    *_all("any", "args", "lora_config peft_cache_config cp_config sparse_attention_config kv_connector_config"),
    *_all("any", "args", "build_config quant_config model_kwargs"),
    *_all("any", "triton", "triton_config"),
    *_all("bool", "playbook", "enable_attention_dp disable_overlap_scheduler enable_autotuner print_iter_log"),
    *_all("bool", "playbook", "enable_chunked_prefill"),
    *_all("bool", "blog6", "enable_min_latency"),
    *_all("bool", "blog11", "trust_remote_code"),
    *_all("bool", "blog11", "use_torch_sampler", before="1.2"),
    *_all("bool", "curated", "enable_lm_head_tp_in_adp disable_mm_encoder"),
    *_all("bool", "args", "skip_tokenizer_init enable_lora gather_generation_logits return_perf_metrics"),
    *_all("bool", "args", "enable_iter_perf_stats enable_iter_req_stats enable_layerwise_nvtx_marker"),
    *_all("bool", "args", "force_dynamic_quantization disable_flashinfer_sampling mm_encoder_only enable_sleep"),
    *_all("bool", "args", "use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm sampler_force_async_worker"),
    *_all("int", "curated", "max_batch_size max_num_tokens max_seq_len stream_interval num_postprocess_workers"),
    *_all("int", "curated", "tensor_parallel_size pipeline_parallel_size moe_expert_parallel_size"),
    *_all("int", "args", "context_parallel_size moe_tensor_parallel_size moe_cluster_parallel_size gpus_per_node"),
    *_all("int", "args", "max_input_len max_beam_width perf_metrics_max_requests iter_stats_max_iterations"),
    *_all("int", "args", "request_stats_max_iterations batch_wait_timeout_iters max_stats_len"),
    *_all("int", "args", "garbage_collection_gen0_threshold"),
    *_all("float", "args", "batch_wait_timeout_ms batch_wait_max_tokens_ratio"),
    *_all("float", "curated", "kv_cache_free_gpu_memory_fraction"),
    *_all("ints", "args", "pp_partition"),
    *_all("text", "args", "model tokenizer tokenizer_mode custom_tokenizer dtype revision tokenizer_revision"),
    *_all("text", "args", "backend attn_backend load_format guided_decoding_backend reasoning_parser"),
    *_all("text", "args", "checkpoint_format orchestrator_type otlp_traces_endpoint postprocess_tokenizer_dir"),
    *_all("text", "args", "attention_backend"),
    Field("sampler_type", "text", "args", since="1.1", choices=("TRTLLMSampler", "TorchSampler", "auto")),
    Field(
        "allreduce_strategy",
        "text",
        "args",
        choices=(
            *("AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"),
        ),
        may_be_null=True,
    ),
    *_all("mapping", "args", "env_overrides"),
    *_all("bool", "card-r1", "use_cuda_graph cuda_graph_padding_enabled", before="1.0"),
    *_all("ints", "card-r1", "cuda_graph_batch_sizes", before="1.0"),
    *_all("text", "card-r1", "moe_backend kv_cache_dtype", before="1.0"),
)
"""The file's top level. ``speculative_config`` takes its fields from ``DECODING_TYPES``."""

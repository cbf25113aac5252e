"""vLLM: ``vllm serve TARGET --speculative-config '<json>'``.

Sources: vLLM's ``SpeculativeConfig`` (docs.vllm.ai, api/vllm/config/speculative, 0.12 to 0.33) and its pages
features/speculative_decoding; field and method names compared with an installed 0.32.0. Run on CPU: eagle, eagle3,
dflash, medusa, draft_model and ngram of 0.32.
"""

import json
from collections.abc import Mapping
from typing import Any

from hiddenstore.errors import ConfigError
from trainer.serve.fields import Field, Source, parse_setting, problems_of, refuse
from trainer.serve.plan import NEEDS_MODEL, ServePlan, ServeRequest, ServingEngine, flag_value, port_of, split_settings

VERSION = "0.32.0"

SOURCES = {
    "config": Source("docs.vllm.ai api/vllm/config/speculative", "0.12 – 0.33"),
    "ngram": Source("docs.vllm.ai features/speculative_decoding/n_gram", "0.12 – 0.33"),
}

NAMES = {
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "eagle3.1": "eagle3",
    "dflash": "dflash",
    "medusa": "medusa",
    "draft-target": "draft_model",
    "ngram": "ngram",
    "mtp": "mtp",
}
"""Our word for a method → vLLM's ``method``."""

FIELDS = (
    Field("method", "text", "config", choices=tuple(dict.fromkeys(NAMES.values()))),
    Field("model", "text", "config"),
    Field("num_speculative_tokens", "int", "config", least=1),
    Field("draft_tensor_parallel_size", "int", "config", least=1),
    Field("max_model_len", "int", "config", least=1),
    Field("quantization", "text", "config"),
    Field("revision", "text", "config"),
    Field("code_revision", "text", "config"),
    Field("kv_cache_dtype", "text", "config"),
    Field("attention_backend", "text", "config"),
    Field("moe_backend", "text", "config"),
    Field("draft_sample_method", "text", "config"),
    Field("rejection_sample_method", "text", "config"),
    Field("parallel_drafting", "bool", "config"),
    Field("use_heterogeneous_vocab", "bool", "config"),
    Field("enforce_eager", "bool", "config"),
    Field("disable_padded_drafter_batch", "bool", "config"),
    Field("prompt_lookup_max", "int", "ngram", least=1),
    Field("prompt_lookup_min", "int", "ngram", least=1),
)
"""What ``--speculative-config`` may hold."""

# vLLM looks up n-grams of 5 tokens unless told; shorter ones find more, and lookup costs next to nothing.
NGRAM_DEFAULTS = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}


def speculative_config(
    method: str,
    model: str | None = None,
    draft_len: int = 3,
    version: str = VERSION,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The value of ``--speculative-config`` (and of ``LLM(speculative_config=…)``); empty for method ``none``.

    ``method`` is our word (eagle1, eagle3, dflash, medusa, draft-target, ngram, mtp, none), ``model`` the drafter's
    folder or hub id, ``draft_len`` the tokens drafted per step, ``settings`` further fields by vLLM's names.

    Raises:
        ConfigError: ``serve-unsupported``: this version lacks the method; ``serve-setting``: a setting is unknown or
            wrong; ``serve-drafter``: the method needs a model and none was given.
    """
    VLLM.check(method, version)
    if method == "none":
        return {}
    if method in NEEDS_MODEL and model is None:
        raise ConfigError(f"{method} needs a drafter: its folder or hub id", kind="serve-drafter")
    config: dict[str, Any] = {"method": NAMES[method]}
    if model is not None:
        config["model"] = model
    config["num_speculative_tokens"] = draft_len
    config |= NGRAM_DEFAULTS if method == "ngram" else {}
    config |= settings or {}
    refuse(list(problems_of(FIELDS, config, None)), "--speculative-config", "serve-setting")
    return config


def plan(request: ServeRequest) -> ServePlan:
    """The command that serves ``request``.

    Raises:
        ConfigError: see ``speculative_config``.
    """
    settings = {key: parse_setting(FIELDS, key, text) for key, text in split_settings(request.settings).items()}
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
    )


VLLM = ServingEngine(
    name="vllm",
    title="vLLM",
    version=VERSION,
    untrained=("draft-target", "ngram", "mtp", "none"),
    plan=plan,
    install="pip install vllm",
    image=lambda version: f"vllm/vllm-openai:v{version}",
    port=8000,
    forms=("command", "python", "container"),
    entrypoint="vllm",
    config_file=None,
    loads=("vllm", "speculators"),
)

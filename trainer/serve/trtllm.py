"""TensorRT-LLM: ``trtllm-serve TARGET --config FILE.yaml`` and the file, with the values of NVIDIA's playbooks.

Names and values are restated from published documents (``trtllm_fields.SOURCES``); no TensorRT-LLM was run.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hiddenstore.errors import ConfigError
from trainer.serve.fields import parse_setting, refuse
from trainer.serve.plan import NEEDS_MODEL, ServePlan, ServeRequest, ServingEngine, flag_value, port_of, split_settings
from trainer.serve.trtllm_check import file_problems, file_table
from trainer.serve.trtllm_fields import DECODING_TYPES
from trainer.serve.trtllm_python import python_program
from trainer.serve.versions import is_within

VERSION = "1.3.0rc12"
CONFIG_FILE = "extra-llm-api-config.yml"


@dataclass(frozen=True)
class Spelling:
    """How versions ``since`` one write things: decoding types, the draft model, MTP's length, the file's option."""

    since: str
    eagle3: str
    draft_target: str
    model: str
    mtp_length: str
    option: str


SPELLINGS = (
    Spelling("1.3", "Eagle3", "DraftTarget", "speculative_model", "max_draft_len", "--config"),
    Spelling(
        "1.2", "Eagle", "Draft_Target", "speculative_model_dir", "num_nextn_predict_layers", "--extra_llm_api_options"
    ),
    Spelling(
        "0", "Eagle", "DraftTarget", "speculative_model_dir", "num_nextn_predict_layers", "--extra_llm_api_options"
    ),
)
"""Newest first. 1.3: the spec page and its playbook; 1.2: what llm_args.py of 1.2 surely has; before: that of 1.1."""

_SAME = {"dflash": "DFlash", "ngram": "NGram", "mtp": "MTP"}

# The rest of the file. Latency: dgx-spark-playbooks, one request at a time. Throughput: examples/configs/curated.
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "latency": {
        "enable_attention_dp": False,
        "enable_autotuner": False,
        "cuda_graph_config": {"max_batch_size": 1},
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.9},
    },
    "throughput": {
        "enable_attention_dp": True,
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 128},
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
        "stream_interval": 10,
    },
}
BATCH = {"latency": 1, "throughput": 128}
PROFILE = "profile"
"""The word of ``settings`` that picks a row of ``PROFILES``; latency where it is not given."""

# Speculation outside the target's own forward needs the overlap scheduler off (the spec page's examples).
_TWO_MODELS = ("draft-target", "ngram")

# The spec page's pool, and relaxed acceptance as DeepSeek-R1's latency configuration has it.
_NGRAM_POOL = {"max_matching_ngram_size": 4, "is_keep_all": True, "is_use_oldest": True, "is_public_pool": True}
RELAXED = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 10, "relaxed_delta": 0.6}


def speculative_config(
    method: str,
    model: str | None = None,
    draft_len: int = 3,
    version: str = VERSION,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The file's ``speculative_config`` in the spelling of ``version``; empty for ``none``.

    Raises:
        ConfigError: ``serve-unsupported`` or ``serve-drafter``.
    """
    TRTLLM.check(method, version)
    if method == "none":
        return {}
    if method in NEEDS_MODEL and model is None:
        raise ConfigError(f"{method} needs a drafter: its folder or hub id", kind="serve-drafter")
    words = spelling(version)
    types = {**_SAME, "eagle3": words.eagle3, "draft-target": words.draft_target}
    config: dict[str, Any] = {"decoding_type": types[method.removesuffix(".1")]}
    config[words.mtp_length if method == "mtp" else "max_draft_len"] = draft_len
    if model is not None:
        config[words.model] = model
    config |= _NGRAM_POOL if method == "ngram" else {}
    extra = dict(settings or {})
    if extra.get("use_relaxed_acceptance_for_thinking"):
        extra = RELAXED | extra
    return config | extra


def file_settings(request: ServeRequest) -> dict[str, Any]:
    """Everything the YAML file says for ``request``, checked against the tables.

    ``settings`` may name a field of ``speculative_config`` alone, any setting by its dotted path, and ``profile``.

    Raises:
        ConfigError: ``serve-setting``, one line a problem; see ``speculative_config``.
    """
    words = split_settings(request.settings)
    words.pop(PROFILE, None)
    table = file_table(speculative_config(request.method, request.drafter, request.draft_len, request.version))
    outer: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    for key, text in words.items():
        path = _place(key, request.method, request.version)
        value = parse_setting(table, path, text)
        section, _, name = path.partition(".")
        if section == "speculative_config":
            inner[name] = value
        elif name:
            outer.setdefault(section, {})[name] = value
        else:
            outer[section] = value
    speculation = speculative_config(request.method, request.drafter, request.draft_len, request.version, inner)
    settings: dict[str, Any] = {}
    for key, value in PROFILES[profile_of(request)].items():
        settings[key] = dict(value) if isinstance(value, Mapping) else value
    settings["disable_overlap_scheduler"] = _without_overlap(request)
    if speculation:
        settings["speculative_config"] = speculation
    for key, value in outer.items():
        both = isinstance(value, Mapping) and isinstance(settings.get(key), dict)
        settings[key] = settings[key] | value if both else value
    refuse(list(file_problems(settings, request.version)), "--set", "serve-setting")
    return settings


def plan(request: ServeRequest) -> ServePlan:
    """The command and its YAML file, ``trtllm-bench`` with the same file, or the Python form.

    Raises:
        ConfigError: see ``file_settings``.
    """
    served_as = flag_value(request.flags, "--served_model_name") or request.target
    if request.method == "user-provided":
        return ServePlan(program=_own_drafter(request), served_as=served_as)
    settings = file_settings(request)
    if request.form == "python":
        return ServePlan(program=python_program(request.target, settings), served_as=served_as)
    file = request.config_file or CONFIG_FILE
    option = spelling(request.version).option
    profile = profile_of(request)
    own_batch = flag_value(request.flags, "--max_batch_size")
    batch = () if own_batch else ("--max_batch_size", str(BATCH[profile]))
    command = ("trtllm-serve", request.target, "--backend", "pytorch", *batch, option, file, *request.flags)
    if request.form == "bench":
        command = (*_bench(request, own_batch or str(BATCH[profile])), *batch, option, file, *request.flags)
    return ServePlan(
        command=command,
        files={file: yaml.safe_dump(settings, sort_keys=False, width=100)},
        env={"TRTLLM_ENABLE_PDL": "1"} if profile == "latency" else {},
        served_as=served_as,
        port=port_of(request.flags, TRTLLM.port),
        notes=_notes(request),
    )


def spelling(version: str) -> Spelling:
    """How ``version`` writes things."""
    return next(row for row in SPELLINGS if is_within(version, row.since, None))


def profile_of(request: ServeRequest) -> str:
    """Which row of ``PROFILES`` the settings ask for.

    Raises:
        ConfigError: there is no such row.
    """
    profile = split_settings(request.settings).get(PROFILE, "latency")
    if profile not in PROFILES:
        raise ConfigError(f"--set profile={profile}: there is {', '.join(PROFILES)}", kind="serve-setting")
    return profile


def _place(key: str, method: str, version: str) -> str:
    """The dotted path of a setting: a bare name that the method's section has lies there."""
    if "." in key or method == "none":
        return key
    kind = speculative_config(method, "drafter", 1, version)["decoding_type"]
    known = {name for field in DECODING_TYPES[kind].fields for name in (field.name, *field.aliases)}
    return f"speculative_config.{key}" if key in known else key


def _without_overlap(request: ServeRequest) -> bool:
    if request.method in _TWO_MODELS:
        return True
    # Model Optimizer's README still switches it off for EAGLE-3; the playbooks leave it on since 1.2.
    return request.method.startswith("eagle3") and not is_within(request.version, "1.2", None)


def _bench(request: ServeRequest, concurrency: str) -> tuple[str, ...]:
    """``trtllm-bench … throughput`` with a workload, unless the user's flags bring one."""
    words = ["trtllm-bench", "--model", request.target, "throughput", "--backend", "pytorch"]
    for name, value in (("--dataset", "dataset.jsonl"), ("--num_requests", "10"), ("--concurrency", concurrency)):
        words += [] if flag_value(request.flags, name) else [name, value]
    return tuple(words)


def _notes(request: ServeRequest) -> tuple[str, ...]:
    notes = []
    if request.method == "draft-target" and is_within(request.version, "1.3", None):
        notes.append(
            "the pages write DraftTarget, llm_args.py Draft_Target; should the server refuse the tag: "
            "--set decoding_type=Draft_Target"
        )
    if request.form == "bench":
        notes.append("dataset.jsonl: see trtllm-bench prepare-dataset, or give --dataset FILE after --")
    return tuple(notes)


def _own_drafter(request: ServeRequest) -> str:
    module, colon, name = (request.drafter or "").partition(":")
    if request.form != "python":
        raise ConfigError(
            "a drafter class of your own is a Python object, which no YAML file can hold",
            kind="serve-unsupported",
            hint="--form python",
        )
    if not (colon and module and name.isidentifier()):
        raise ConfigError(
            f"user-provided wants module:Class of a tensorrt_llm Drafter, found {request.drafter!r}",
            kind="serve-drafter",
            hint="hiddenstore serve my_drafters:MyDrafter --method user-provided --form python …",
        )
    return python_program(request.target, {"disable_overlap_scheduler": True}, own=(module, name, request.draft_len))


def _image(version: str) -> str:
    """NVIDIA's release image; NGC_REGISTRY says where it lies, as ``docker login`` was told."""
    registry = os.environ.get("NGC_REGISTRY")
    return f"{registry + '/' if registry else ''}nvidia/tensorrt-llm/release:{version}"


TRTLLM = ServingEngine(
    name="trtllm",
    title="TensorRT-LLM",
    version=VERSION,
    untrained=("draft-target", "ngram", "mtp", "user-provided", "none"),
    plan=plan,
    install="use its container: hiddenstore serve … --form container",
    image=_image,
    port=8000,
    forms=("command", "python", "container", "bench"),
    entrypoint=None,
    config_file=CONFIG_FILE,
    loads=("trtllm",),
)

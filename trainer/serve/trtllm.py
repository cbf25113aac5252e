"""TensorRT-LLM: ``trtllm-serve TARGET --config FILE.yaml`` and the file, with the values of NVIDIA's playbooks.

What ``--set`` says is written as it stands, and what settings demand of each other is checked where documentation
states it; TensorRT-LLM itself refuses the rest. Names and values are restated from published documents
(NVIDIA/TensorRT-LLM docs/source/features/speculative-decoding.md, ``llm_args.py`` of 1.1 to 1.4.0rc1,
examples/configs/curated, NVIDIA/dgx-spark-playbooks nvidia/speculative-decoding); no TensorRT-LLM was run.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.servers import flag_value
from hiddenstore.settings import all_problems, first_line, parse
from trainer.formats.base import is_within
from trainer.serve.drafter import text_config
from trainer.serve.plan import ServePlan, ServeRequest, ServingEngine, port_of

Settings = Mapping[str, Any]
MODEL = ("speculative_model", "speculative_model_dir")
_LENGTH = ("max_draft_len", "prompt_lookup_num_tokens")
_MTP_LENGTHS = ("num_nextn_predict_layers", "max_draft_len")
_FIRST_LENGTH_DROPPED = "1.4"
"""Since when ``llm_args.py`` drops the former beside the latter."""
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_MTP_UNNAMED = ("qwen3_next",)
"""Where TensorRT-LLM reads a target's MTP layers (``_torch/speculative/utils.py``; one where neither is), and the types
of targets that have some and name none."""
_LIMIT = "max_concurrency"
_WITH_MODEL = ("Eagle3", "Eagle", "DraftTarget", "Draft_Target", "PARD", "DFlash")
_WITH_LENGTH = (*_WITH_MODEL, "NGram", "SA")
SINCE = {
    **{"SaveState": "1.1", "Eagle3": "1.2", "Draft_Target": "1.2"},
    **dict.fromkeys(("PARD", "DFlash", "SA", "DSpark"), "1.3"),
}
"""``decoding_type`` → the first version that has it. ``from_dict`` of llm_args.py up to 1.2.0rc keys a draft model
``DraftTarget``; later it is ``Literal["Draft_Target"]``, while the page and the playbooks of 1.3 go on writing
``DraftTarget``. Which of the two 1.2 and 1.3 read was not tried, so that neither is refused of them."""
_LAYERS = "eagle3_layers_to_capture"
_LAYERS_SINCE = "1.1"


def _all(values: Settings, *names: str) -> bool:
    return all(values.get(name) for name in names)


def _without(values: Settings, kinds: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return values.get("decoding_type") in kinds and not any(values.get(name) for name in names)


def _no_such_tree(values: Settings) -> bool:
    if not _all(values, "use_dynamic_tree", "dynamic_tree_max_topK", "max_draft_len", "max_total_draft_tokens"):
        return False
    depth, total = values["max_draft_len"], values["max_total_draft_tokens"]
    return not depth <= total <= depth * values["dynamic_tree_max_topK"]


Rule = tuple[str, Callable[[Settings], bool], str]
RULES: Mapping[str, tuple[Rule, ...]] = {
    "speculative_config": (
        ("decoding_type", lambda v: not v.get("decoding_type"), "is missing"),
        (
            "decoding_type",
            lambda v: v.get("decoding_type") in ("User_Provided", "UserProvided"),
            "a drafter class of your own is given in Python, not in YAML",
        ),
        (
            "speculative_model",
            lambda v: _without(v, _WITH_MODEL, MODEL),
            "is missing: {decoding_type} needs the drafter's folder or hub id",
        ),
        (
            "max_draft_len",
            lambda v: _without(v, _WITH_LENGTH, _LENGTH),
            "is missing: {decoding_type} needs how many tokens to draft",
        ),
        (
            "num_nextn_predict_layers",
            lambda v: _all(v, *_MTP_LENGTHS) and v[_MTP_LENGTHS[0]] != v[_MTP_LENGTHS[1]],
            "must match max_draft_len, {max_draft_len}: found {num_nextn_predict_layers}",
        ),
        (
            "dynamic_tree_max_topK",
            lambda v: _all(v, "use_dynamic_tree") and not _all(v, "dynamic_tree_max_topK"),
            "is missing: a dynamic tree needs its branches per node",
        ),
        (
            "max_total_draft_tokens",
            _no_such_tree,
            "should be from {max_draft_len} to {dynamic_tree_max_topK} times that, found {max_total_draft_tokens}",
        ),
        ("eagle_choices", lambda v: _all(v, "eagle_choices", "use_dynamic_tree"), "excludes use_dynamic_tree"),
        ("draft_len_schedule", lambda v: _all(v, "draft_len_schedule", _LIMIT), f"excludes {_LIMIT}"),
    ),
    "cuda_graph_config": (
        (
            "max_batch_size",
            lambda v: _all(v, "batch_sizes", "max_batch_size") and v["max_batch_size"] != max(v["batch_sizes"]),
            "should be the largest of batch_sizes, found {max_batch_size}",
        ),
    ),
}
"""By section: a setting, whether the section's values break what is demanded of it, and what to say then."""


def file_problems(settings: Settings, version: str | None = None) -> Iterator[str]:
    """Every contradiction in the settings of a file; with ``version``, also what it lacks: a decoding type, the layers
    of an EAGLE-3. Raises ConfigError: ``serve-setting``: a value is of another kind than those it is compared with."""
    sections = {name: values for name, values in settings.items() if isinstance(values, Mapping)}
    for name in RULES:
        if name not in sections and settings.get(name) is not None:
            yield f"{name}: should hold key: value lines, found {settings[name]!r}"
    drops_one = version is not None and is_within(version, _FIRST_LENGTH_DROPPED, None)
    for section, setting, is_broken, text in ((name, *rule) for name in RULES for rule in RULES[name]):
        if drops_one and setting == _MTP_LENGTHS[0]:
            continue
        try:
            if section in sections and is_broken(sections[section]):
                yield f"{section}.{setting}: {text.format_map(sections[section])}"
        except TypeError as error:
            raise ConfigError(f"{section}.{setting} cannot be compared: {error}", kind=Kind.SERVE_SETTING) from error
    speculation = sections.get("speculative_config", {})
    kind = str(speculation.get("decoding_type"))
    if version is not None and kind in SINCE and not is_within(version, SINCE[kind], None):
        yield f"speculative_config.decoding_type: {kind} is not in version {version} (since {SINCE[kind]})"
    if version is not None and _LAYERS in speculation and not is_within(version, _LAYERS_SINCE, None):
        yield f"speculative_config.{_LAYERS}: is not in version {version} (since {_LAYERS_SINCE})"


def refuse(settings: Settings, version: str | None, where: str, problems: Iterable[str] = ()) -> None:
    """Raise a ConfigError that lists every contradiction of the settings, besides ``problems``; none: return."""
    lines = [f"{where}: {problem}" for problem in (*problems, *file_problems(settings, version))]
    if lines:
        raise ConfigError(all_problems(lines), kind=Kind.SERVE_SETTING)


def check_file(path: Path, version: str | None = None) -> dict[str, Any]:
    """The settings of a YAML file without contradictions; with ``version``, of what it has. Raises
    NotFoundError: no such file; ConfigError: ``serve-setting``, one line a problem."""
    try:
        settings = parse(path.read_text(encoding="utf-8"), plain=True)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", kind=Kind.PATH_MISSING) from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is no text file: {error}", kind=Kind.SERVE_SETTING) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {first_line(error)}", kind=Kind.SERVE_SETTING) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} should hold key: value lines", kind=Kind.SERVE_SETTING)
    refuse(settings, version, str(path))
    return settings


VERSION = "1.3.0rc12"
CONFIG_FILE = "extra-llm-api-config.yml"


@dataclass(frozen=True)
class Spelling:
    """How versions ``since`` one write things: a draft model's decoding type and place, MTP's length, the file's
    option."""

    since: str
    draft_target: str
    model: str
    mtp_length: str
    option: str


SPELLINGS = (
    Spelling("1.3", "Draft_Target", "speculative_model", "max_draft_len", "--config"),
    Spelling("0", "DraftTarget", "speculative_model_dir", "num_nextn_predict_layers", "--extra_llm_api_options"),
)
"""Newest first. 1.3: the spec page, and llm_args.py where a draft model is concerned; before: what llm_args.py of 1.1
and 1.2 has, and the playbook of 1.2.0rc6."""

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
PROFILE = "profile"
"""The word of ``settings`` that picks a row of ``PROFILES``; latency where it is not given."""

# The spec page's pool, and relaxed acceptance as DeepSeek-R1's latency configuration has it.
_NGRAM_POOL = {"max_matching_ngram_size": 4, "is_keep_all": True, "is_use_oldest": True, "is_public_pool": True}
RELAXED = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 10, "relaxed_delta": 0.6}

# A bare name of these is one of ``speculative_config``; any other is written where it says.
_SPECULATION = {"decoding_type", *MODEL, "max_draft_len", "num_nextn_predict_layers", _LAYERS, *_NGRAM_POOL, *RELAXED}


def speculative_config(request: ServeRequest, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The file's ``speculative_config`` in the spelling of the version, ``settings`` over it. It names an EAGLE-3's
    layers to versions that take them, because TensorRT-LLM reads none of ``config.json`` and captures the usual ones
    unless told (``_torch/speculative/eagle3.py``). Raises ConfigError: ``serve-unsupported`` or ``serve-setting``."""
    method, words = request.method, spelling(request.version)
    name = TRTLLM.method(method, request.version, request.drafter)
    config: dict[str, Any] = {"decoding_type": words.draft_target if method == "draft-target" else name}
    config[words.mtp_length if method == "mtp" else "max_draft_len"] = request.draft_len
    if request.drafter is not None:
        config[words.model] = request.drafter
    if request.layers and is_within(request.version, _LAYERS_SINCE, None):
        config[_LAYERS] = list(request.layers)
    config |= _NGRAM_POOL if method == "ngram" else {}
    config |= RELAXED if settings.get("use_relaxed_acceptance_for_thinking") else {}
    return config | dict(settings)


def file_settings(request: ServeRequest) -> dict[str, Any]:
    """Everything the YAML file says for ``request``: the profile's row, speculation, and ``settings`` over both. Raises
    ConfigError: ``serve-setting``, one line a contradiction; see ``speculative_config``."""
    profile, written = split_settings(request.settings)
    settings = copy.deepcopy(dict(PROFILES[profile]))
    settings["disable_overlap_scheduler"] = _without_overlap(request)
    if request.method != "none":
        extra = {name: written.pop(name) for name in list(written) if name in _SPECULATION}
        extra |= _speculation(written)
        settings["speculative_config"] = speculative_config(request, extra)
    for key, value in written.items():
        both = isinstance(value, Mapping) and isinstance(settings.get(key), dict)
        settings[key] = settings[key] | value if both else value
    problems, config = [], text_config(request.target) if request.method == "mtp" else None
    if config is not None and config.get("model_type") not in _MTP_UNNAMED and not any(map(config.get, _MTP_LAYERS)):
        names = " and no ".join(_MTP_LAYERS)
        problems = [f"speculative_config.decoding_type: MTP, but {request.target} has no {names}"]
    refuse(settings, request.version, "--set", problems)
    return settings


def _speculation(written: dict[str, Any]) -> dict[str, Any]:
    """What words say under ``speculative_config``, taken out of them."""
    section = written.pop("speculative_config", {})
    if not isinstance(section, dict):
        problem = f"--set speculative_config={section}: should be speculative_config.KEY=VALUE"
        raise ConfigError(problem, kind=Kind.SERVE_SETTING)
    return section


def split_settings(words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """The profile that ``key.path=value`` words choose, and the rest of them as the mapping they write. Raises
    ConfigError: ``serve-setting``: a word that says nothing, or no such profile."""
    profile, written = "latency", dict[str, Any]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {word}: should be key=value", kind=Kind.SERVE_SETTING)
        if key == PROFILE:
            profile = text
            continue
        *sections, name = key.split(".")
        section = written
        for part in sections:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        try:
            section[name] = parse(text, plain=True)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())[:120]
            raise ConfigError(f"{key}={text}: no value: {reason}", kind=Kind.SERVE_SETTING) from error
    if profile not in PROFILES:
        raise ConfigError(f"--set profile={profile}: there is {', '.join(PROFILES)}", kind=Kind.SERVE_SETTING)
    return profile, written


def plan(request: ServeRequest) -> ServePlan:
    """The command and its YAML file, ``trtllm-bench`` with the same file, or the Python form. Raises ConfigError: see
    ``file_settings``."""
    served_as = flag_value(request.flags, "--served_model_name") or request.target
    if request.method == "user-provided":
        return ServePlan(program=_user_provided(request), served_as=served_as)
    settings = file_settings(request)
    if request.form == "python":
        return ServePlan(program=python_program(request.target, settings), served_as=served_as)
    file = request.config_file or CONFIG_FILE
    option = spelling(request.version).option
    profile, _settings = split_settings(request.settings)
    batch = flag_value(request.flags, "--max_batch_size")
    batch_flags: tuple[str, ...] = ()
    if batch is None:
        graphs = settings.get("cuda_graph_config")
        own = graphs.get("max_batch_size") if isinstance(graphs, Mapping) else None
        batch = str(own or PROFILES[profile]["cuda_graph_config"]["max_batch_size"])
        batch_flags = ("--max_batch_size", batch)
    serve = ("trtllm-serve", request.target, "--backend", "pytorch")
    start = _bench(request, batch) if request.form == "bench" else serve
    return ServePlan(
        command=(*start, *batch_flags, option, file, *request.flags),
        files={file: yaml.safe_dump(settings, sort_keys=False, width=100)},
        env={"TRTLLM_ENABLE_PDL": "1"} if profile == "latency" else {},
        folders={ENCODINGS: os.environ.get(ENCODINGS, ENCODINGS_FOLDER)} if _speaks_harmony(request.target) else {},
        served_as=served_as,
        port=port_of(request.flags, TRTLLM.port),
        notes=_notes(request, settings),
    )


def spelling(version: str) -> Spelling:
    """How ``version`` writes things."""
    return next(row for row in SPELLINGS if is_within(version, row.since, None))


def _without_overlap(request: ServeRequest) -> bool:
    # Speculation outside the target's own forward needs the overlap scheduler off (the spec page's examples).
    if request.method in ("draft-target", "ngram"):
        return True
    # Model Optimizer's README still switches it off for EAGLE-3; the playbooks leave it on since 1.2.
    return _is_eagle3(request) and not is_within(request.version, "1.2", None)


def _bench(request: ServeRequest, concurrency: str) -> tuple[str, ...]:
    """``trtllm-bench … throughput`` with a workload, unless the user's flags bring one."""
    words = ["trtllm-bench", "--model", request.target, "throughput", "--backend", "pytorch"]
    for name, value in (("--dataset", "dataset.jsonl"), ("--num_requests", "10"), ("--concurrency", concurrency)):
        words += [] if flag_value(request.flags, name) else [name, value]
    return tuple(words)


ENCODINGS = "TIKTOKEN_ENCODINGS_BASE"
ENCODINGS_FOLDER = "harmony-reqs"


def _speaks_harmony(target: str) -> bool:
    """Whether a target's chat needs OpenAI's harmony encodings: gpt-oss, by its config or, of a hub id, its name."""
    config = text_config(target)
    return "gpt-oss" in target.lower() if config is None else config.get("model_type") == "gpt_oss"


def _is_eagle3(request: ServeRequest) -> bool:
    return TRTLLM.method(request.method, request.version, "") in ("Eagle", "Eagle3")


def _notes(request: ServeRequest, settings: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if _is_eagle3(request) and _LAYERS not in settings["speculative_config"]:
        can_be_told = is_within(request.version, _LAYERS_SINCE, None)
        trained = f" (this one: {', '.join(map(str, request.layers))})" if request.layers else ""
        notes.append(
            "TensorRT-LLM reads no layers of a drafter's config.json; of n layers it captures 1, n // 2 - 1 and n - 4. "
            f"Of a drafter that was trained on others{trained}: "
            + (f"--set {_LAYERS}=[…], from 0" if can_be_told else f"--engine-version {_LAYERS_SINCE} or later")
        )
    if request.method == "draft-target":
        written = spelling(request.version).draft_target
        other = "DraftTarget" if written == "Draft_Target" else "Draft_Target"
        notes.append(
            f"releases before 1.3 and all pages write DraftTarget, llm_args.py of later ones Draft_Target; should the "
            f"server refuse the tag: --set decoding_type={other}"
        )
    if request.method == "mtp" and text_config(request.target) is None:
        notes.append(f"MTP needs a target with such layers ({', '.join(_MTP_LAYERS)}): {request.target} is not local")
    if _speaks_harmony(request.target):
        notes.append(
            f"{ENCODINGS} is a folder with o200k_base.tiktoken and cl100k_base.tiktoken, which OpenAI publishes; "
            f"{ENCODINGS_FOLDER} unless the variable names another"
        )
    if request.form == "container" and not os.environ.get("NGC_REGISTRY"):
        notes.append("NGC_REGISTRY should name the host of NVIDIA's registry, the one you gave `docker login`")
    if request.form == "bench":
        notes.append("dataset.jsonl: see trtllm-bench prepare-dataset, or give --dataset FILE after --")
    return tuple(notes)


def _user_provided(request: ServeRequest) -> str:
    """The program for a class ``module:Class`` of the user's."""
    module, colon, name = (request.drafter or "").partition(":")
    if request.form != "python":
        problem = "a drafter class of your own is a Python object, which no YAML file can hold"
        raise ConfigError(problem, kind=Kind.SERVE_UNSUPPORTED, hint="--form python")
    if not (colon and module and name.isidentifier()):
        raise ConfigError(
            f"user-provided wants module:Class of a tensorrt_llm Drafter, found {request.drafter!r}",
            kind=Kind.SERVE_SETTING,
            hint="hiddenstore serve my_drafters:MyDrafter --method user-provided --form python …",
        )
    imports = ["", f"from {module} import {name}"]
    profile, written = split_settings(request.settings)
    speculation = {
        "decoding_type": "User_Provided",
        "max_draft_len": request.draft_len,
        "drafter": _Source(f"{name}()"),
        **{key: written.pop(key) for key in [*written] if key in (*_SPECULATION, RESOURCES)},
        **_speculation(written),
    }
    if RESOURCES in speculation:
        module, colon, name = str(speculation[RESOURCES]).partition(":")
        if not (colon and module and name.isidentifier()):
            problem = f"{RESOURCES}={speculation[RESOURCES]}: should be module:Class of a tensorrt_llm ResourceManager"
            raise ConfigError(problem, kind=Kind.SERVE_SETTING, hint=f"--set {RESOURCES}=my_drafters:MyResources")
        imports.append(f"from {module} import {name}")
        speculation[RESOURCES] = _Source(f"{name}()")
    named = any(word.startswith(f"{PROFILE}=") for word in request.settings)
    settings = {**(PROFILES[profile] if named else {}), "disable_overlap_scheduler": True, **written}
    return python_program(request.target, {**settings, "speculative_config": speculation}, imports)


RESOURCES = "resource_manager"


class _Source(str):
    """A value that is Python source already."""

    __slots__ = ()


def python_program(target: str, settings: Mapping[str, Any], imports: Sequence[str] = ()) -> str:
    """Source that serves ``settings``, a file's, in process, after further lines of ``imports``. Sections are classes
    of ``tensorrt_llm.llmapi``, called as their keys and decoding types are. The program guards its entry point, because
    TensorRT-LLM starts processes that import it."""
    classes, arguments = set(), [_literal(target)]
    for name, value in settings.items():
        if not (name.endswith("_config") and isinstance(value, Mapping)):
            arguments.append(f"{name}={_literal(value)}")
            continue
        fields = dict(value)
        kind = f"{fields.pop('decoding_type')}_decoding_config" if "decoding_type" in fields else name
        kind = "".join(part[:1].upper() + part[1:] for part in kind.split("_"))
        classes.add(kind)
        arguments.append(f"{name}={_call(kind, fields)}")
    lines = ["from tensorrt_llm import LLM, SamplingParams"]
    lines += [f"from tensorrt_llm.llmapi import {', '.join(sorted(classes))}"] if classes else []
    lines += [*imports, "", "", "def main():", "    llm = LLM("]
    lines += [f"        {argument}," for argument in arguments]
    lines += [
        "    )",
        '    outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=32))',
        "    print(outputs[0].outputs[0].text)",
        "",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]
    return "\n".join(lines) + "\n"


def _call(name: str, fields: Mapping[str, Any]) -> str:
    """A call as one argument of ``LLM``: on one line where that is short, else a line for each field."""
    words = [f"{key}={_literal(value)}" for key, value in fields.items()]
    line = f"{name}({', '.join(words)})"
    if len(line) <= 80:
        return line
    return "\n".join([f"{name}(", *(f"            {word}," for word in words), "        )"])


def _literal(value: Any) -> str:
    text = str(value) if isinstance(value, _Source) else repr(value)
    is_plain = text.startswith("'") and '"' not in text and "\\" not in text
    return f'"{text[1:-1]}"' if is_plain else text


def _image(version: str) -> str:
    """NVIDIA's release image; NGC_REGISTRY says where it lies, as ``docker login`` was told."""
    registry = os.environ.get("NGC_REGISTRY")
    return f"{registry + '/' if registry else ''}nvidia/tensorrt-llm/release:{version}"


TRTLLM = ServingEngine(
    name="trtllm",
    version=VERSION,
    untrained={"draft-target": "Draft_Target", "ngram": "NGram", "mtp": "MTP", "user-provided": "User_Provided"},
    plan=plan,
    install="use its container: hiddenstore serve … --form container",
    image=_image,
    port=8000,
    forms=("command", "python", "container", "bench"),
    entrypoint=None,
    config_file=CONFIG_FILE,
    loads=("trtllm",),
)

"""Which TensorRT-LLM is installed, and whether it has everything that the engine uses.

Run as a program it prints that as JSON: importing TensorRT-LLM takes tens of seconds and may end the process.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, util
from types import ModuleType
from typing import Any

from collectors.engines.versions import check_version
from collectors.targets.folder import first_line
from hiddenstore.doctor.installation import DoctorCheck, version_of
from hiddenstore.errors import ConfigError, Kind

PACKAGE = "tensorrt_llm"
DISTRIBUTIONS = ("tensorrt-llm", "tensorrt_llm")
CONTAINER_HINT = "run in the TensorRT-LLM release container of NGC: docs/tensorrt-llm.md"
IMPORT_S = 180
# Versions whose documentation this engine was written to.
OLDEST, NEWEST = (1, 2), (1, 3)

# module, attribute, fields or methods that are used of it
NEEDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (PACKAGE, "LLM", ("generate_async", "shutdown")),
    (PACKAGE, "SamplingParams", ("max_tokens", "temperature")),
    ("tensorrt_llm.llmapi", "KvCacheConfig", ("enable_block_reuse",)),
    (
        "tensorrt_llm.llmapi",
        "SaveHiddenStatesDecodingConfig",
        ("output_directory", "write_interval", "file_prefix", "eagle3_layers_to_capture"),
    ),
    (
        "tensorrt_llm.llmapi",
        "TorchLlmArgs",
        (
            *("model", "revision", "dtype", "tensor_parallel_size", "kv_cache_config", "speculative_config"),
            *("enable_chunked_prefill", "disable_overlap_scheduler", "max_batch_size", "max_num_tokens"),
        ),
    ),
)


def load_package() -> ModuleType:
    """The ``tensorrt_llm`` package.

    Raises:
        ConfigError: ``not-installed``: it cannot be imported here, with where it can.
    """
    try:
        return import_module(PACKAGE)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"TensorRT-LLM cannot be imported: {first_line(error)}", kind=Kind.NOT_INSTALLED, hint=CONTAINER_HINT
        ) from error


def package_version(package: ModuleType) -> str:
    """The version the package states, or its distribution's."""
    stated = getattr(package, "__version__", None)
    return stated if isinstance(stated, str) else version_of(*DISTRIBUTIONS) or "unknown"


def missing_parts() -> list[str]:
    """Classes, fields and methods this engine uses that the installed TensorRT-LLM does not have, as dotted names."""
    missing = []
    for module, attribute, members in NEEDED:
        try:
            used = getattr(import_module(module), attribute, None)
        except ImportError:
            used = None
        if used is None:
            missing.append(f"{module}.{attribute}")
        else:
            missing += [f"{module}.{attribute}.{name}" for name in members if not _has_member(used, name)]
    return missing


def _has_member(used: Any, name: str) -> bool:
    declared = {*getattr(used, "model_fields", ()), *getattr(used, "__dataclass_fields__", ())}
    return name in declared or hasattr(used, name)


def checks() -> Iterator[DoctorCheck]:
    """What ``doctor`` says of TensorRT-LLM; it is imported in a process of its own."""
    name, version = "engine trtllm", version_of(*DISTRIBUTIONS)
    if util.find_spec(PACKAGE) is None:
        yield DoctorCheck(name, "absent", "tensorrt_llm is not installed", CONTAINER_HINT)
        return
    problem = None
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
        document = json.loads(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        problem = f"tensorrt_llm {version} did not import within {IMPORT_S} s"
    except (IndexError, ValueError):
        last = (process.stderr.strip().splitlines() or [f"exit {process.returncode}"])[-1]
        problem = f"tensorrt_llm {version} ends the process that imports it: {last}"
    else:
        problem = document.get("error")
        if document.get("missing"):
            problem = f"TensorRT-LLM {document['version']} lacks {', '.join(document['missing'])}"
    if problem is not None:
        yield DoctorCheck(name, "problem", problem, CONTAINER_HINT)
        return
    detail = f"TensorRT-LLM {document['version']} has what is used of it · layer ids are ours, final hidden post-norm"
    yield check_version(name, document["version"], detail, OLDEST, NEWEST, "read in the documentation of")


def main() -> int:
    """Print ``{"version": …, "missing": […]}`` or ``{"error": …}`` as the last line of stdout."""
    try:
        document: dict[str, object] = {"version": package_version(load_package()), "missing": missing_parts()}
    except ConfigError as error:
        document = {"error": error.message}
    sys.stdout.write("\n" + json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

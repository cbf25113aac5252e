"""What this engine needs of a TensorRT-LLM installation, and what a given one lacks.

The names are those of the published documentation of TensorRT-LLM 1.2 (llm-api reference). Nothing here imports
``tensorrt_llm`` before it is asked to; ``python -m collectors.trtllm_install`` prints one JSON document.
"""

import json
import sys
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from hiddenstore.errors import ConfigError

PACKAGE = "tensorrt_llm"
DISTRIBUTIONS = ("tensorrt-llm", "tensorrt_llm")
CONTAINER_HINT = "run in the TensorRT-LLM release container of NGC: docs/tensorrt-llm.md"

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
            "model",
            "revision",
            "dtype",
            "tensor_parallel_size",
            "kv_cache_config",
            "speculative_config",
            "enable_chunked_prefill",
            "disable_overlap_scheduler",
            "max_batch_size",
            "max_num_tokens",
        ),
    ),
)


def load_tensorrt_llm() -> ModuleType:
    """The ``tensorrt_llm`` package.

    Raises:
        ConfigError: ``engine-missing``: it cannot be imported here, with where it can.
    """
    try:
        return import_module(PACKAGE)
    except (ImportError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"TensorRT-LLM cannot be imported: {first}", kind="engine-missing", hint=CONTAINER_HINT
        ) from error


def version_of(module: ModuleType) -> str:
    """The version the package states, or its distribution's."""
    stated = getattr(module, "__version__", None)
    if isinstance(stated, str):
        return stated
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def missing_parts() -> list[str]:
    """Classes, fields and methods this engine uses that the installed TensorRT-LLM does not have, as dotted names."""
    lacking = []
    for module_name, attribute, used in NEEDED:
        try:
            found = getattr(import_module(module_name), attribute, None)
        except ImportError:
            found = None
        if found is None:
            lacking.append(f"{module_name}.{attribute}")
            continue
        lacking += [f"{module_name}.{attribute}.{name}" for name in used if not _has(found, name)]
    return lacking


def _has(found: Any, name: str) -> bool:
    declared = {*getattr(found, "model_fields", ()), *getattr(found, "__dataclass_fields__", ())}
    return name in declared or hasattr(found, name)


def main() -> int:
    """Print ``{"version": …, "missing": […]}`` or ``{"error": …}`` as the last line of stdout."""
    try:
        document: dict[str, object] = {"version": version_of(load_tensorrt_llm()), "missing": missing_parts()}
    except ConfigError as error:
        document = {"error": error.message}
    sys.stdout.write("\n" + json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The Python form of a TensorRT-LLM file: ``LLM(…, speculative_config=…)`` as source that runs as it stands.

Class names are those of ``tensorrt_llm.llmapi`` (NVIDIA/TensorRT-LLM docs/source/features/speculative-decoding.md).
"""

from collections.abc import Mapping
from typing import Any

_SPECULATION = {
    "Eagle3": "Eagle3DecodingConfig",
    "Eagle": "EagleDecodingConfig",
    "DraftTarget": "DraftTargetDecodingConfig",
    "Draft_Target": "DraftTargetDecodingConfig",
    "NGram": "NGramDecodingConfig",
    "MTP": "MTPDecodingConfig",
    "DFlash": "DFlashDecodingConfig",
}
_SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
    "scheduler_config": "SchedulerConfig",
    "torch_compile_config": "TorchCompileConfig",
    "attention_dp_config": "AttentionDpConfig",
}


def python_program(target: str, settings: Mapping[str, Any], own: tuple[str, str, int] | None = None) -> str:
    """Source that serves ``settings``, a file's, in process; ``own`` is (module, class, draft_len) of a user's drafter.

    The program guards its entry point, because TensorRT-LLM starts processes that import it.
    """
    classes: set[str] = set()
    arguments = [_literal(target)]
    for name, value in settings.items():
        if name == "speculative_config":
            kind = _SPECULATION[value["decoding_type"]]
            fields = {key: item for key, item in value.items() if key != "decoding_type"}
            arguments.append(f"{name}={_call(kind, fields)}")
            classes.add(kind)
        elif name in _SECTIONS:
            arguments.append(f"{name}={_call(_SECTIONS[name], value)}")
            classes.add(_SECTIONS[name])
        else:
            arguments.append(f"{name}={_literal(value)}")
    lines = ["from tensorrt_llm import LLM, SamplingParams"]
    if own is not None:
        _module, drafter, draft_len = own
        classes.add("UserProvidedDecodingConfig")
        arguments.append(
            f"speculative_config=UserProvidedDecodingConfig(max_draft_len={draft_len}, drafter={drafter}())"
        )
    if classes:
        lines.append(f"from tensorrt_llm.llmapi import {', '.join(sorted(classes))}")
    if own is not None:
        lines += ["", f"from {own[0]} import {own[1]}"]
    lines += ["", "", "def main():", "    llm = LLM("]
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
    text = repr(value)
    return '"' + text[1:-1] + '"' if isinstance(value, str) and '"' not in text and "\\" not in text else text

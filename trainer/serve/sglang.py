"""SGLang: ``python -m sglang.launch_server --model-path TARGET --speculative-…``.

Source: SGLang's advanced_features/speculative_decoding page and the fields of 0.5.23's server arguments. Names were
read, nothing was run here.
"""

from collections.abc import Mapping
from typing import Any

from hiddenstore.errors import ConfigError
from trainer.serve.fields import Field, Source, parse_setting, problems_of, refuse
from trainer.serve.plan import NEEDS_MODEL, ServePlan, ServeRequest, ServingEngine, flag_value, port_of, split_settings

VERSION = "0.5.23"

SOURCES = {
    "page": Source("docs.sglang.ai advanced_features/speculative_decoding", "0.5.23"),
    "arguments": Source("sglang/srt/arg_groups/fields/spec.py", "0.5.23"),
}

ALGORITHMS = {
    "eagle1": "EAGLE",
    "eagle3": "EAGLE3",
    "eagle3.1": "EAGLE3",
    "dflash": "DFLASH",
    "draft-target": "STANDALONE",
    "ngram": "NGRAM",
    "mtp": "NEXTN",
}
"""Our word for a method → ``--speculative-algorithm``. EAGLE is EAGLE-1's and 2's; NEXTN its alias for MTP heads."""

FIELDS = (
    Field("num-steps", "int", "page", least=1),
    Field("eagle-topk", "int", "page", least=1),
    Field("num-draft-tokens", "int", "page", least=1),
    Field("dflash-block-size", "int", "arguments", least=2),
    Field("draft-model-revision", "text", "page"),
    Field("draft-load-format", "text", "page"),
    Field("draft-model-quantization", "text", "page"),
    Field("draft-attention-backend", "text", "page"),
    Field("draft-window-size", "int", "arguments", least=1),
    Field("accept-threshold-single", "float", "page", least=0),
    Field("accept-threshold-acc", "float", "page", least=0),
    Field("attention-mode", "text", "page", choices=("prefill", "decode")),
    Field("token-map", "text", "page"),
    Field("moe-runner-backend", "text", "page"),
    Field("moe-a2a-backend", "text", "page"),
    Field("ngram-min-bfs-breadth", "int", "page", least=1),
    Field("ngram-max-bfs-breadth", "int", "page", least=1),
    Field("ngram-match-type", "text", "page", choices=("BFS", "PROB")),
    Field("ngram-max-trie-depth", "int", "page", least=1),
    Field("ngram-capacity", "int", "page", least=1),
)
"""Settings behind ``--speculative-``."""


def speculative_flags(
    method: str,
    model: str | None = None,
    draft_len: int = 3,
    version: str = VERSION,
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """The ``--speculative-*`` flags for a method by our word; none for ``none``.

    A chain of ``draft_len`` tokens is one branch a step (``eagle-topk`` 1) verified with the token before it:
    ``num-draft-tokens`` = ``draft_len`` + 1, which is also DFlash's block. ``settings`` are names without
    ``--speculative-``.

    Raises:
        ConfigError: ``serve-unsupported``, ``serve-setting`` or ``serve-drafter``.
    """
    SGLANG.check(method, version)
    if method == "none":
        return []
    if method in NEEDS_MODEL and model is None:
        raise ConfigError(f"{method} needs a drafter: its folder or hub id", kind="serve-drafter")
    values: dict[str, Any] = dict(_lengths(method, draft_len)) | dict(settings or {})
    refuse(list(problems_of(FIELDS, values, version)), "--speculative", "serve-setting")
    if values.get("eagle-topk", 1) > 1 and "num-draft-tokens" not in (settings or {}):
        raise ConfigError(
            f"eagle-topk {values['eagle-topk']} drafts a tree: say how many of its tokens are verified",
            kind="serve-setting",
            hint="--set num-draft-tokens=16, what SGLang's page verifies with 3 steps of top 4",
        )
    flags = ["--speculative-algorithm", ALGORITHMS[method]]
    if model is not None:
        flags += ["--speculative-draft-model-path", model]
    for name, value in values.items():
        flags += [f"--speculative-{name}", str(value)]
    return flags


def plan(request: ServeRequest) -> ServePlan:
    """The command that serves ``request``.

    Raises:
        ConfigError: see ``speculative_flags``.
    """
    settings = {
        key.replace("_", "-"): parse_setting(FIELDS, key.replace("_", "-"), text)
        for key, text in split_settings(request.settings).items()
    }
    flags = speculative_flags(request.method, request.drafter, request.draft_len, request.version, settings)
    return ServePlan(
        command=("python", "-m", "sglang.launch_server", "--model-path", request.target, *flags, *request.flags),
        served_as=flag_value(request.flags, "--served-model-name") or request.target,
        port=port_of(request.flags, SGLANG.port),
        notes=("SGLang looks n-grams up on CUDA only",) if request.method == "ngram" else (),
    )


def _lengths(method: str, draft_len: int) -> dict[str, int]:
    if method == "dflash":
        return {"dflash-block-size": draft_len + 1}
    if method == "ngram":
        return {"num-draft-tokens": draft_len + 1}
    return {"num-steps": draft_len, "eagle-topk": 1, "num-draft-tokens": draft_len + 1}


SGLANG = ServingEngine(
    name="sglang",
    title="SGLang",
    version=VERSION,
    untrained=("draft-target", "ngram", "mtp", "none"),
    plan=plan,
    install="pip install sglang",
    image=lambda version: f"lmsysorg/sglang:v{version}",
    port=30000,
    forms=("command", "container"),
    entrypoint=None,
    config_file=None,
    loads=("sglang",),
)

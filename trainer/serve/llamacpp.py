"""llama.cpp: ``llama-server -m TARGET.gguf -md DRAFTER.gguf --spec-type …``.

Sources: llama.cpp b11434, its page on speculative decoding and ``common/arg.cpp``. Run on CPU: draft-eagle3,
draft-dflash, draft-dspark, draft-mtp, draft-simple and ngram-simple.
"""

import re
import shlex
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.servers import flag_value
from trainer.config import Section
from trainer.formats.gguf import drafter_file
from trainer.serve.plan import ServePlan, ServeRequest, ServingEngine, flags_of, hyphened_settings, port_of

VERSION = "11434"
# llama.cpp looks up n-grams of 12 tokens unless told, for edits of long code; shorter ones find more.
NGRAM = 3


class Speculation(Section):
    """Settings behind ``--spec-``, their hyphens as underscores."""

    draft_n_min: NonNegativeInt | None = None
    draft_p_min: float | None = Field(None, ge=0, le=1)
    draft_p_split: float | None = Field(None, ge=0, le=1)
    draft_threads: PositiveInt | None = None
    draft_threads_batch: PositiveInt | None = None
    draft_device: str | None = None
    draft_ngl: str | None = None
    draft_type_k: str | None = None
    draft_type_v: str | None = None
    ngram_simple_size_n: PositiveInt | None = None
    ngram_simple_size_m: PositiveInt | None = None
    ngram_simple_min_hits: PositiveInt | None = None


def speculative_flags(request: ServeRequest) -> list[str]:
    """The flags of a request; none for ``none``. Raises ConfigError: ``serve-unsupported``, ``serve-setting``."""
    model, draft_len = request.drafter, request.draft_len
    kind = LLAMACPP.method(request.method, request.version, model)
    if request.method == "none":
        return []
    if request.method == "ngram":
        sizes = ["--spec-ngram-simple-size-n", str(NGRAM), "--spec-ngram-simple-size-m", str(draft_len)]
        return ["--spec-type", kind, *sizes]
    drafter = [] if model is None else ["-md", str(drafter_file(Path(model)) or model)]
    return [*drafter, "--spec-type", kind, "--spec-draft-n-max", str(draft_len)]


def plan(request: ServeRequest) -> ServePlan:
    """The command that serves ``request``; ``--metrics``, because `hiddenstore eval` reads them. Raises ConfigError:
    see ``speculative_flags``; ``serve-setting``: the target is no GGUF."""
    settings = hyphened_settings(Speculation, request.settings)
    flags = speculative_flags(request) + flags_of("--spec-", settings)
    return ServePlan(
        command=("llama-server", *_target(request.target), *flags, "--metrics", *request.flags),
        served_as=flag_value(request.flags, "--alias", "-a") or Path(request.target).name,
        port=port_of(request.flags, LLAMACPP.port),
    )


def _target(name: str) -> list[str]:
    """``-m`` and a file, or ``-hf`` and a repository of GGUF files."""
    file = drafter_file(Path(name))
    if file is not None:
        return ["-m", str(file)]
    if Path(name).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", name):
        raise ConfigError(
            f"llama.cpp reads GGUF files, and {name} is none",
            kind=Kind.SERVE_SETTING,
            hint=f"python convert_hf_to_gguf.py {shlex.quote(name)} --outfile target.gguf, which llama.cpp brings",
        )
    return ["-hf", name]


LLAMACPP = ServingEngine(
    name="llamacpp",
    version=VERSION,
    untrained={"draft-target": "draft-simple", "ngram": "ngram-simple", "mtp": "draft-mtp"},
    plan=plan,
    install="put llama.cpp's llama-server on the PATH (docs/llamacpp.md)",
    image=lambda version: f"ghcr.io/ggml-org/llama.cpp:server-b{version}",
    port=8080,
    forms=("command",),
    entrypoint=None,
    config_file=None,
    loads=("llamacpp",),
)

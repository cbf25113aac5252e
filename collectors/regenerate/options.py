"""What regenerate is asked for, and what it says at the end."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from collectors.regenerate.rewrite import Rewrite
from collectors.tokenize.template import read_template
from hiddenstore.conversation import TEMPLATE_KWARGS, Problem, Row, parse_row
from hiddenstore.errors import ConfigError, HiddenstoreError, Kind
from hiddenstore.settings import plain_value
from hiddenstore.targets.checkpoint import checkpoint_sha256
from hiddenstore.targets.folder import TargetFolder, open_target

TARGET_DIGESTS = ("checkpoint_sha256", "config_sha256", "chat_template_sha256")
LIMIT_HERE, LIMIT_OF_A_SERVER = 256, 2048
"""Tokens of an answer where nobody says: a server is made for answers of their own length, and batches them as they
come; in this process a batch lasts as long as its longest answer."""


@dataclass(frozen=True)
class RegenerateOptions:
    """``target`` answers in this process (``workers`` processes, ``batch_size`` prompts at a time), or ``server`` does.

    ``shard`` (i, n) takes every n-th conversation, i in 1 … n. ``api_key_env`` names an environment variable.
    ``system`` opens conversations without a system message. ``turns``: which answers are rewritten. ``raw``: the server
    continues the text of the turns as it is, without a chat template. ``rows_per_file``: ``out`` is a folder of files.
    ``extra`` members join every request to a server; ``chat_template_kwargs`` among them go to the chat template in
    this process too, and into the rows. ``engine_args``: the flags of a server that was started for this.
    ``seed`` None is 0 in this process, and no seed for a server; ``top_p`` None is 1 in this process, and what a server
    takes by itself. More than ``max_failures`` conversations that fail, or
    than ``max_failure_share`` of all, end the run. ``serves``: the target that a server was started with for this.
    """

    inputs: tuple[str, ...]
    out: str | Path
    target: str | None = None
    server: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = 32
    shard: tuple[int, int] = (1, 1)
    system: str | None = None
    turns: Literal["all", "last"] = "all"
    raw: bool = False
    rows_per_file: int | None = None
    revision: str | None = None
    template: str | None = None
    temperature: float = 0.8
    top_p: float | None = None
    max_new_tokens: int | None = None
    max_samples: int | None = None
    batch_size: int = 128
    workers: int = 1
    seed: int | None = None
    dtype: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    adapter: str | None = None
    retries: int = 6
    timeout_s: float = 600.0
    max_failures: int = 10
    max_failure_share: float = 0.5
    extra: Mapping[str, Any] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()
    serves: str | None = None

    @property
    def limit(self) -> int:
        """Tokens of an answer at most."""
        return self.max_new_tokens or (LIMIT_HERE if self.server is None else LIMIT_OF_A_SERVER)

    @property
    def keeps_ended(self) -> bool:
        """Whether an answer that ended would be the same under a larger limit: it is the most probable one, or was
        drawn with a seed of its own. Else a new try at the cut ones alone would prefer short answers; the noise of a
        batch in this process depends on which others there are."""
        return self.temperature == 0 or (self.server is not None and self.seed is not None)


@dataclass
class RegenerateReport:
    """Conversations read and written, and what their answers were; of one shard while ``waiting`` names others, or
    where ``written_by_another``: it ended at the same time, and writes all of them.

    ``dropped`` counts conversations by reason, with the first of each in ``examples``; ``short`` ones end where
    the target called other tools than the recorded results answer. ``resumed`` answers were there before.
    """

    out: str
    read: int = 0
    written: int = 0
    answers: int = 0
    tokens: int = 0
    cut: int = 0
    short: int = 0
    resumed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    written_by_another: bool = False
    seconds: float = 0.0
    answering_s: float = 0.0
    new_tokens: int = 0

    @property
    def looping_share(self) -> float:
        """Share of the generated answers that loop."""
        return self.dropped["looping"] / self.answers if self.answers else 0.0

    @property
    def tokens_per_s(self) -> float:
        """While they were drawn: imports, the load of the target and its first prompts are no part of the rate."""
        return self.new_tokens / self.answering_s if self.answering_s else 0.0

    def drop(self, reason: str, where: str) -> None:
        """Count one conversation that is left out."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, where)

    def count(self, rewrite: Rewrite) -> None:
        """Count one conversation that has all its replies."""
        for reply in rewrite.replies:
            self.answers += reply.is_answer
            self.tokens += reply.tokens
            self.cut += reply.is_cut
        self.short += rewrite.is_short
        if rewrite.drop is not None:
            detail = rewrite.replies[-1].detail
            self.drop(rewrite.drop, f"conversation {rewrite.number + 1}" + (f": {detail}" if detail else ""))


class MoreSettings(BaseModel):
    """The settings that are seldom needed: ``--set key=value``. They mean what they mean in ``RegenerateOptions``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    turns: Literal["all", "last"] = "all"
    raw: bool = False
    rows_per_file: int | None = Field(None, ge=1)
    top_p: float | None = None
    revision: str | None = None
    batch_size: int = 128
    dtype: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    adapter: str | None = None
    retries: int = 6
    timeout_s: float = 600.0
    max_failures: int = 10
    max_failure_share: float = 0.5
    extra: dict[str, Any] = {}

    @field_validator("extra")
    @classmethod
    def _values(cls, extra: dict[str, Any]) -> dict[str, Any]:
        return {name: _value(item) if isinstance(item, dict | list) else item for name, item in extra.items()}


def _value(item: Any) -> Any:
    """What settings below the first level say: they arrive as the text that was written."""
    if isinstance(item, dict):
        return {name: _value(inner) for name, inner in item.items()}
    if isinstance(item, list):
        return [_value(inner) for inner in item]
    return plain_value(item) if isinstance(item, str) else item


def require_possible(options: RegenerateOptions) -> None:
    """ConfigError ``option-invalid`` when an option is out of range or two exclude each other."""
    if (options.target is None) == (options.server is None):
        problem = "either a target answers in this process, or a server does"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint="--target T, or --server URL --model M")
    if options.adapter is not None and options.server is not None:
        raise ConfigError(
            "a server answers with the adapter it was started with",
            kind=Kind.OPTION_INVALID,
            hint="--model NAME, as the server calls it, without --set adapter",
        )
    if options.raw and options.server is None:
        raise ConfigError("raw text is continued by a server", kind=Kind.OPTION_INVALID, hint="--server URL")
    _require_switches(options.extra.get(TEMPLATE_KWARGS))
    at_least_0, at_least_1 = (
        ("temperature", "retries", "max_failures"),
        ("max_new_tokens", "batch_size", "workers", "concurrency"),
    )
    for name in (*at_least_0, *at_least_1):
        value, limit = getattr(options, name), int(name in at_least_1)
        if value is not None and value < limit:
            raise ConfigError(f"{name.replace('_', ' ')} must be at least {limit}", kind=Kind.OPTION_INVALID)
    if options.top_p is not None and not 0 < options.top_p <= 1:
        problem = f"top-p must be above 0 and at most 1, found {options.top_p:g}"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint="--set top_p=1 draws from every token")
    if options.timeout_s <= 0:
        raise ConfigError(f"the timeout must be above 0 s, found {options.timeout_s:g}", kind=Kind.OPTION_INVALID)
    if not 0 <= options.max_failure_share <= 1:
        raise ConfigError("max failure share must lie in 0…1", kind=Kind.OPTION_INVALID)
    shard, shards = options.shard
    if not 1 <= shard <= shards:
        raise ConfigError(f"shard {shard}/{shards} does not exist: they count from 1", kind=Kind.OPTION_INVALID)


def _require_switches(kwargs: Any) -> None:
    """The rows that are written hold them, and must be readable."""
    row = parse_row(Row("", {"prompt": "?", TEMPLATE_KWARGS: kwargs}, 0))
    problem = row.detail if isinstance(row, Problem) else None if isinstance(kwargs, dict | None) else "no object"
    if problem is not None:
        raise ConfigError(f"extra.{TEMPLATE_KWARGS}: {problem}", kind=Kind.OPTION_INVALID)


def _template_sha256(file: str | Path) -> str:
    return hashlib.sha256(str(read_template(file)).encode()).hexdigest()[:16]


def open_answering(options: RegenerateOptions, name: str) -> TargetFolder:
    """The target that answers, with its template; raises as ``read_template`` and ``open_target``."""
    template = read_template(options.template)
    return open_target(name, options.revision, template, options.trust_remote_code, options.adapter)


def target_digests(options: RegenerateOptions) -> dict[str, str | None]:
    """Which target answers, beside its name: another checkpoint may lie in the same folder. None of a server that was
    started by others, and of what an engine alone can read. Raises as ``open_target`` and ``checkpoint_sha256``."""
    name = options.target or options.serves
    if name is None:
        return {}
    try:
        folder = open_answering(options, name)
    except HiddenstoreError:
        if options.target is not None:
            raise
        # The engine may read what is no target here.
        return {}
    digests = checkpoint_sha256(folder), folder.config_sha256, folder.chat_template_sha256
    return {name: digest and digest[:16] for name, digest in zip(TARGET_DIGESTS, digests, strict=True)}


def answer_settings(
    options: RegenerateOptions, label: str | None, digests: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """What the answers depend on; a run that goes on with others would mix two kinds of answers. ``label`` None: it is
    not known which model answers."""
    names = ["temperature", "max_samples", "system", "revision"]
    if options.server is None:
        names += ["batch_size", "dtype"]
    return {
        "answers_by": "server" if options.server is not None else "target",
        **({"model": label} if label is not None else {}),
        **(digests or {}),
        "inputs": hashlib.sha256("\0".join(Path(text).name for text in options.inputs).encode()).hexdigest()[:16],
        "extra": dict(options.extra),
        "max_new_tokens": options.limit,
        "top_p": 1.0 if options.top_p is None else options.top_p,
        **{name: getattr(options, name) for name in names},
        # Runs that were begun before there was a choice do not name it.
        **({"sends_top_p": True} if options.server is not None and options.top_p == 1 else {}),
        **({"template_sha256": _template_sha256(options.template)} if options.template else {}),
        **({"turns": "last"} if options.turns == "last" else {}),
        **({"raw": True} if options.raw else {}),
        **({"engine_args": sorted(options.engine_args)} if options.engine_args else {}),
        "seed": options.seed if options.server is not None else options.seed or 0,
    }

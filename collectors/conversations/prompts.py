"""Conversations → prompts: system and user turns without the answers, for ``regenerate`` to have them answered anew.

Variants of them ask for other languages, styles and switches, so that a drafter meets more than plain English. Which
variants a conversation gets follows from its own text and the seed, so that they stay what they were when rows are
added.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from collectors.conversations.mix import Mix, MixedSource, open_inputs, resolved
from hiddenstore.console.progress import Progress
from hiddenstore.conversation import (
    COMPLETIONS,
    TEMPLATE_KWARGS,
    TOOLS_COLUMN,
    Conversation,
    Problem,
    Row,
    decoded_row,
    parse_row,
    way_to_keep,
)
from hiddenstore.conversation.messages import Message
from hiddenstore.errors import ConfigError, InterruptError, Kind
from hiddenstore.fs.publish import new_file, refuse_existing_file
from hiddenstore.settings import load

PLAIN = "plain"
DEFAULT = "default"


class Variant(BaseModel):
    """One way to ask differently: ``user_suffix`` ends every user turn, ``system`` opens a conversation without one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    user_suffix: str | None = None
    system: str | None = None
    enabled: bool = True

    @model_validator(mode="after")
    def _changes_something(self) -> "Variant":
        if not (self.user_suffix or self.system):
            raise ValueError(f"variant {self.name} has neither user_suffix nor system")
        return self

    def fits(self, messages: Sequence[Message]) -> bool:
        """Whether it can be asked: a system message of the conversation's own is never replaced."""
        return self.system is None or messages[0]["role"] != "system"

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation asked this way."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        suffixes = {"user": self.user_suffix or ""}
        return system + [
            {**message, "content": message["content"] + suffixes.get(message["role"], "")} for message in messages
        ]


class Augmentation(BaseModel):
    """``copies`` variants of every conversation, each another one; ``plain`` keeps the conversation as it was too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variants: tuple[Variant, ...] = Field(min_length=1)
    copies: int = Field(default=1, ge=1)
    plain: bool = True
    seed: int = 0

    @model_validator(mode="after")
    def _enough(self) -> "Augmentation":
        names = [variant.name for variant in self.variants]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two variants are named {twice}")
        if self.copies > (count := sum(variant.enabled for variant in self.variants)):
            raise ValueError(f"{self.copies} copies asked for, but {count} variants are enabled")
        return self

    def select(self, messages: Sequence[Message]) -> list[Variant]:
        """The variants this conversation gets; fewer than ``copies`` where few fit it."""
        key = hashlib.blake2b(json.dumps([self.seed, messages], sort_keys=True).encode()).digest()
        fitting = [variant for variant in self.variants if variant.enabled and variant.fits(messages)]

        def rank(variant: Variant) -> bytes:
            return hashlib.blake2b(variant.name.encode(), key=key, digest_size=8).digest()

        return sorted(fitting, key=rank)[: self.copies]


def read_augmentation(file: str | Path) -> Augmentation:
    """From YAML, or ``default``: the variants that come with hiddenstore. ConfigError lists every problem."""
    return load(Augmentation, Path(__file__).with_name("variants.yaml") if str(file) == DEFAULT else file)


@dataclass
class PromptReport:
    """Rows read, prompts written by variant and source, and what was left out by reason: [rows, the first of them]."""

    out: str
    read: int = 0
    written: int = 0
    duplicates: int = 0
    variants: Counter[str] = field(default_factory=Counter)
    sources: list[dict[str, Any]] = field(default_factory=list)
    rejects: dict[str, list[Any]] = field(default_factory=dict)
    mix: str | None = None


def write_prompts(
    inputs: Sequence[str] | Mix,
    out: str | Path,
    augmentation: Augmentation | None = None,
    dataset_root: str | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> PromptReport:
    """Write one JSON line with ``messages`` for every prompt, and its tools; all of them or nothing.

    A row whose answers call tools is refused: without the calls its tool results answer nothing. Give such rows to
    ``regenerate`` as they are. A mix is written beside ``out`` as it was resolved. Raises ConflictError:
    ``output-exists``; ConfigError: an input cannot be used, or ``nothing-usable``; InterruptError: ``interrupted``;
    nothing was written."""
    out = Path(out)
    mix_path = out.with_name(f"{out.name}.mix.yaml")
    refuse_existing_file(out)
    if isinstance(inputs, Mix):
        refuse_existing_file(mix_path)
    sources = open_inputs(inputs, dataset_root)
    counts = [mixed.source.count for mixed in sources]
    total = None if None in counts else sum(count for count in counts if count is not None)
    report = PromptReport(str(out))
    digests: set[bytes] = set()
    with new_file(out) as file, Progress("prepare", total, "rows") as progress:
        for mixed in sources:
            rows, prompts = report.read, report.written
            for prompt, location, variant in _prompts(mixed, augmentation, report):
                if stopping():
                    raise InterruptError("stopped as asked; nothing was written", kind=Kind.INTERRUPTED)
                digest = hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=16).digest()
                if digest in digests:
                    report.duplicates += 1
                else:
                    digests.add(digest)
                    label = {"variant": variant} if variant != PLAIN else {}
                    line = prompt | {"source": location} | label
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    report.written += 1
                    report.variants[variant] += 1
                progress.update(report.read, prompts=report.written)
            rows, prompts = report.read - rows, report.written - prompts
            report.sources.append(
                {"source": mixed.source.label, "rows": rows, "prompts": prompts, "available": mixed.available}
            )
        if not report.written:
            reasons = [f"{reason}: {count:,} rows, first {first}" for reason, (count, first) in report.rejects.items()]
            message = f"none of {report.read:,} rows holds a prompt; nothing was written"
            raise ConfigError(
                "\n".join([message, *reasons]), kind=Kind.NOTHING_USABLE, hint=way_to_keep(report.rejects)
            )
        if isinstance(inputs, Mix):
            report.mix = str(mix_path)
            with new_file(mix_path) as mix_file:
                text = yaml.safe_dump(resolved(inputs, sources), sort_keys=False, allow_unicode=True)
                mix_file.write(text.encode())
    return report


def with_one_answer(row: Row) -> Row:
    """A row without all but the first of its whole answers, for those who ask for another one."""
    value = decoded_row(row)
    if isinstance(value, Problem):
        return row
    others = [name for name in COMPLETIONS if str(value.get(name) or "").strip()][1:]
    return replace(row, payload={name: member for name, member in value.items() if name not in others})


def prompt_of(conversation: Conversation) -> list[Message] | Problem:
    """The system and user turns, with the names of who speaks; user turns of one name with no answer between them
    become one, unless nothing has an answer."""
    if any(message["role"] == "tool" or message.get("tool_calls") for message in conversation.messages):
        detail = "tool results mean nothing without the answers that call them"
        return Problem(conversation.location, "tool-turns", detail)
    prompt: list[Message] = []
    before: Message = {}
    for message in conversation.messages:
        turn: Message = {name: message[name] for name in ("role", "name", "content") if name in message}
        goes_on = turn["role"] == before.get("role") == "user" and turn.get("name") == before.get("name")
        if goes_on and conversation.has_answer:
            prompt[-1] = {**turn, "content": f"{prompt[-1]['content']}\n\n{turn['content']}"}
        elif turn["role"] != "assistant":
            prompt.append(turn)
        before = turn
    if not any(message["role"] == "user" for message in prompt):
        return Problem(conversation.location, "no-user", "no message of a user to answer")
    return prompt


def _prompts(
    mixed: MixedSource, augmentation: Augmentation | None, report: PromptReport
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(row, location, variant) of every prompt; what has none is counted in ``report``."""
    augmentation = augmentation if mixed.is_augmented else None
    for row in mixed.source.rows():
        report.read += 1
        parsed = parse_row(with_one_answer(row))
        prompt = parsed if isinstance(parsed, Problem) else _row_of(parsed)
        if isinstance(prompt, Problem):
            report.rejects.setdefault(prompt.reason, [0, f"{prompt.location}: {prompt.detail}"])[0] += 1
            continue
        if augmentation is None or augmentation.plain:
            yield prompt, row.location, PLAIN
        if augmentation is not None:
            for variant in augmentation.select(prompt["messages"]):
                yield {**prompt, "messages": variant.apply(prompt["messages"])}, row.location, variant.name


def _row_of(conversation: Conversation) -> dict[str, Any] | Problem:
    """A prompt with the tools that its answers may call, and what its chat template is given besides."""
    messages = prompt_of(conversation)
    if isinstance(messages, Problem):
        return messages
    beside = {TOOLS_COLUMN: conversation.tools, TEMPLATE_KWARGS: dict(conversation.template_kwargs)}
    return {"messages": messages} | {name: value for name, value in beside.items() if value}

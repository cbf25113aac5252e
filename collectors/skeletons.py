"""Conversations → prompts: system and user turns without the answers, for ``regenerate`` to have them answered anew."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from collectors.augment import Augmentation
from collectors.conversations import Conversation, Message, parse_row
from collectors.mix import Mix, MixedSource, open_inputs, resolved
from collectors.rows import Problem
from collectors.whole_file import new_file, refuse_existing_file
from hiddenstore.errors import ConfigError, InterruptError
from hiddenstore.progress import Progress

PLAIN = "plain"
MIX_SUFFIX = ".mix.yaml"


@dataclass
class SkeletonReport:
    """Rows read, prompts written by variant and source, and what was left out by reason."""

    out: str
    read: int = 0
    written: int = 0
    duplicates: int = 0
    variants: Counter[str] = field(default_factory=Counter)
    sources: list[dict[str, Any]] = field(default_factory=list)
    rejects: dict[str, list[Any]] = field(default_factory=dict)
    mix: str | None = None


def write_skeletons(
    inputs: Sequence[str] | Mix,
    out: str | Path,
    augmentation: Augmentation | None = None,
    preset_root: str | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> SkeletonReport:
    """Write one JSON line with ``messages`` for every prompt; all of them or nothing.

    A row whose answers call tools is refused: without the calls its tool results answer nothing. Give such rows to
    ``regenerate`` as they are. A mix is written beside ``out`` as it was resolved.

    Raises:
        ConflictError: ``output-exists``.
        ConfigError: an input cannot be used, or ``nothing-usable``.
        InterruptError: ``interrupted``; nothing was written.
    """
    out = Path(out)
    refuse_existing_file(out)
    if isinstance(inputs, Mix):
        refuse_existing_file(_mix_path(out))
    sources = open_inputs(inputs, preset_root)
    report = SkeletonReport(str(out))
    seen: set[bytes] = set()
    with new_file(out) as file, Progress("prepare", _total(sources), "rows") as progress:
        for mixed in sources:
            before = (report.read, report.written)
            for messages, place, variant in _prompts(mixed, augmentation, report):
                if stopping():
                    raise InterruptError("stopped as asked; nothing was written", kind="interrupted")
                if _is_new(messages, seen):
                    line = {"messages": messages, "source": place} | ({"variant": variant} if variant != PLAIN else {})
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    report.written += 1
                    report.variants[variant] += 1
                else:
                    report.duplicates += 1
                progress.update(report.read, prompts=report.written)
            rows, prompts = report.read - before[0], report.written - before[1]
            counts = {"source": mixed.source.label, "rows": rows, "prompts": prompts, "available": mixed.available}
            report.sources.append(counts)
        if not report.written:
            raise _nothing_usable(report)
        if isinstance(inputs, Mix):
            report.mix = str(_write_mix(inputs, sources, out))
    return report


def skeleton(conversation: Conversation) -> list[Message] | Problem:
    """The system and user turns; user turns with no answer between them become one, unless nothing has an answer."""
    if any(message["role"] == "tool" or message.get("tool_calls") for message in conversation.messages):
        return Problem(conversation.place, "tool-turns", "tool results mean nothing without the answers that call them")
    kept: list[Message] = []
    was_user = False
    for message in conversation.messages:
        is_user = message["role"] == "user"
        if is_user and was_user and conversation.has_answer:
            kept[-1] = {"role": "user", "content": f"{kept[-1]['content']}\n\n{message['content']}"}
        elif message["role"] != "assistant":
            kept.append({"role": message["role"], "content": message["content"]})
        was_user = is_user
    if not any(message["role"] == "user" for message in kept):
        return Problem(conversation.place, "no-user", "no message of a user to answer")
    return kept


def _prompts(
    mixed: MixedSource, augmentation: Augmentation | None, report: SkeletonReport
) -> Iterator[tuple[list[Message], str, str]]:
    for row in mixed.source.rows():
        report.read += 1
        parsed = parse_row(row)
        messages = parsed if isinstance(parsed, Problem) else skeleton(parsed)
        if isinstance(messages, Problem):
            report.rejects.setdefault(messages.reason, [0, f"{messages.place}: {messages.detail}"])[0] += 1
            continue
        is_varied = augmentation is not None and mixed.is_augmented
        if augmentation is None or augmentation.plain or not is_varied:
            yield messages, row.place, PLAIN
        if augmentation is not None and is_varied:
            for variant in augmentation.chosen(messages):
                yield variant.of(messages), row.place, variant.name


def _is_new(messages: list[Message], seen: set[bytes]) -> bool:
    key = hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=16).digest()
    is_new = key not in seen
    seen.add(key)
    return is_new


def _total(sources: Sequence[MixedSource]) -> int | None:
    counts = [mixed.source.count for mixed in sources]
    return None if None in counts else sum(count for count in counts if count is not None)


def _write_mix(mix: Mix, sources: Sequence[MixedSource], out: Path) -> Path:
    path = _mix_path(out)
    with new_file(path) as file:
        file.write(yaml.safe_dump(resolved(mix, sources), sort_keys=False, allow_unicode=True).encode())
    return path


def _mix_path(out: Path) -> Path:
    return out.with_name(f"{out.name}{MIX_SUFFIX}")


def _nothing_usable(report: SkeletonReport) -> ConfigError:
    reasons = [f"{reason}: {count:,} rows, first {first}" for reason, (count, first) in report.rejects.items()]
    return ConfigError(
        "\n".join([f"none of {report.read:,} rows holds a prompt; nothing was written", *reasons]),
        kind="nothing-usable",
    )

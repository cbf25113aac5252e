"""Conversations whose answers the target itself wrote: what a drafter should learn to predict.

Every assistant turn is rewritten in order, each one after the rewritten turns before it, by the target in this process
or behind an OpenAI-compatible server. Answers are kept as they come in ``OUT.answers``: the same command goes on after
a kill, and the last of ``--shard i/n`` to finish writes ``OUT`` in the order of the input.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from collectors.regenerating.answers import AnswerLog, AnswersFolder
from collectors.regenerating.options import RegenerateOptions, RegenerateReport, answer_settings, require_possible
from collectors.regenerating.rewrite import Rewrite
from collectors.regenerating.work import Work, conversations
from collectors.rows import Source
from collectors.sources import open_sources
from collectors.whole_file import new_file, refuse_existing_file
from hiddenstore.cli.terminal import plural
from hiddenstore.errors import ConfigError, InterruptError

__all__ = ["RegenerateOptions", "RegenerateReport", "regenerate"]


def regenerate(
    options: RegenerateOptions,
    note: Callable[[str], None] = print,
    stopping: Callable[[], bool] = lambda: False,
) -> RegenerateReport:
    """Rewrite every answer and write ``messages`` JSONL, in input order, whole or not at all.

    Raises:
        ConflictError: ``output-exists``, ``regenerate-running``, ``regenerate-settings-differ`` or
            ``regenerate-input-differs``.
        ConfigError: ``nothing-usable``: no conversation has an answer to rewrite; or an option is out of range.
        StorageError: ``server-unreachable`` or ``server-failing``; what was answered is kept.
        InterruptError: ``interrupted``; what was answered is kept.
    """
    out = Path(options.out)
    require_possible(options)
    refuse_existing_file(out)
    began = time.monotonic()
    report = RegenerateReport(str(out))
    work = Work(options, report)
    sources = open_sources(options.inputs)
    answer_all = work.by_server() if options.server is not None else work.in_process()
    _require_something(sources, options)
    folder = AnswersFolder(out, options.shard[1])
    folder.claim(answer_settings(options, work.label))
    try:
        with AnswerLog(folder.file(options.shard[0])) as log, work.counting(log, sources):
            answer_all(work.rewrites(sources), log, _check(stopping))
            log.finish(work.conversations)
    finally:
        folder.remove_if_empty()
    report.waiting = folder.unfinished()
    if report.waiting:
        report.seconds = time.monotonic() - began
        return report
    whole = _write(sources, options, folder)
    whole.resumed, whole.new_tokens = report.resumed, report.new_tokens
    folder.remove()
    whole.seconds = time.monotonic() - began
    if whole.dropped:
        note("dropped: " + ", ".join(f"{count} {reason}" for reason, count in sorted(whole.dropped.items())))
    return whole


def _require_something(sources: list[Source], options: RegenerateOptions) -> None:
    """At least one conversation must be usable; the reasons of the others are counted for the error."""
    reasons: dict[str, list[Any]] = {}
    for item in conversations(sources, options):
        if isinstance(item, Rewrite):
            return
        reasons.setdefault(item[0], [0, item[1]])[0] += 1
    listed = [f"{reason}: {plural(count, 'row')}, first {first}" for reason, (count, first) in reasons.items()]
    what = f"no conversation with an answer in {', '.join(options.inputs)}; nothing was written"
    raise ConfigError("\n".join([what, *listed]), kind="nothing-usable")


def _write(sources: list[Source], options: RegenerateOptions, folder: AnswersFolder) -> RegenerateReport:
    """The output from the answers of all shards, in the order of the input."""
    report = RegenerateReport(str(options.out))
    shards = range(1, folder.shards + 1)
    with ExitStack() as opened, new_file(Path(options.out)) as file:
        logs = [opened.enter_context(AnswerLog(folder.file(shard), is_read_only=True)) for shard in shards]
        for item in conversations(sources, options):
            report.read += 1
            if not isinstance(item, Rewrite):
                report.drop(*item)
                continue
            for reply in logs[item.number % folder.shards].replies(item):
                item.advance()
                item.take(reply)
            report.count(item)
            if item.drop is None:
                file.write(json.dumps(item.row(), ensure_ascii=False).encode() + b"\n")
                report.written += 1
    return report


def _check(stopping: Callable[[], bool]) -> Callable[[], None]:
    def check() -> None:
        if stopping():
            raise InterruptError(
                "stopped as asked; every answer so far is kept", kind="interrupted", hint="the same command goes on"
            )

    return check

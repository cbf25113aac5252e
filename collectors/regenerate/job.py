"""Conversations whose answers the target itself wrote: what a drafter should learn to predict.

Every assistant turn is rewritten in order, each one after the rewritten turns before it, by the target in this process
or behind an OpenAI-compatible server. Answers are kept as they come in ``OUT.answers``: the same command goes on after
a kill, and the last of ``--shard i/n`` to finish writes ``OUT`` in the order of the input.
"""

import io
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from collectors.conversations.mix import open_sources
from collectors.conversations.prompts import with_one_answer
from collectors.regenerate.answers import AnswerLog, AnswersFolder
from collectors.regenerate.options import (
    RegenerateOptions,
    RegenerateReport,
    answer_settings,
    require_possible,
    target_digests,
)
from collectors.regenerate.rewrite import Reply, Rewrite
from hiddenstore.console.output import output
from hiddenstore.console.progress import Progress
from hiddenstore.console.text import plural
from hiddenstore.conversation import TEMPLATE_KWARGS, TOOLS_COLUMN, Conversation, Source, parse_row, way_to_keep
from hiddenstore.conversation.messages import FINISH_REASON, MEMBERS_OF_TEXT, WEIGHT
from hiddenstore.errors import CaptureError, ConfigError, ConflictError, InterruptError, Kind, NotFoundError
from hiddenstore.fs import require_local
from hiddenstore.fs.publish import new_file, new_folder, refuse_existing_file, refuse_existing_folder
from hiddenstore.fs.seam import WritableFile

COUNTED_BYTES = 64 << 20
"""Inputs up to this size are read through once before the first answer, to say how many there will be."""
LOOKED_AT, MOST_CUT = 200, 0.1
"""Of so many answers at the beginning no larger share should meet the limit."""

Row = dict[str, Any]

_TEXTS = ("role", "content", FINISH_REASON, *MEMBERS_OF_TEXT)
_MESSAGE = pa.struct([(name, pa.string()) for name in (*_TEXTS, "tool_calls")] + [(WEIGHT, pa.int8())])
_BESIDE = (TOOLS_COLUMN, TEMPLATE_KWARGS)
SCHEMA = pa.schema([("messages", pa.list_(_MESSAGE)), *((name, pa.string()) for name in _BESIDE)])
"""Columns of a parquet file: ``tool_calls`` and those beside the messages are JSON text, for their members differ by
row."""
_GROUP_ROWS = 1000


def regenerate(options: RegenerateOptions, stopping: Callable[[], bool] = lambda: False) -> RegenerateReport:
    """Rewrite the answers and write rows of ``messages``, in input order, all of it or nothing. Raises ConflictError:
    ``output-exists``, ``answers-running`` or ``answers-differ``; ConfigError: ``nothing-usable``: no conversation has
    an answer to rewrite; ``template-unstable``: the chat template writes the first answers as other text; or an option
    is out of range; StorageError: ``server-unreachable`` or ``server-failing``; what was answered is kept;
    CaptureError: ``nothing-answered``: every conversation was left out; InterruptError: ``interrupted``; what was
    answered is kept."""
    out = require_local(options.out, "a file of answers")
    require_possible(options)
    refuse_existing(out, options.rows_per_file)
    began = time.monotonic()
    sources = open_sources(options.inputs)
    if options.server is not None:
        from collectors.regenerate.server import open_server as open_answerer
    else:
        from collectors.regenerate.in_process import open_in_process as open_answerer
    label, answer_all = open_answerer(options)
    total = _usable(sources, options)
    growing = options.limit if options.keeps_ended else None
    folder = AnswersFolder(out, options.shard[1], growing)
    folder.claim(answer_settings(options, label, target_digests(options)))

    def beat(drawn: int, read: int) -> None:
        shard.count_underway(drawn, read)
        if stopping():
            raise InterruptError(
                "stopped as asked; every answer so far is kept", kind=Kind.INTERRUPTED, hint="the same command goes on"
            )

    try:
        with (
            AnswerLog(folder.file(options.shard[0]), growing) as log,
            Progress("regenerate", total, "answers") as progress,
        ):
            shard = _Shard(options, RegenerateReport(str(out)), log, progress)
            answer_all(shard.rewrites(sources), log.replies, shard.record, beat)
            log.finish(shard.conversations)
    finally:
        folder.remove_if_empty()
    answering_s = time.monotonic() - shard.answers_since
    report = _finish(sources, folder, shard)
    report.seconds, report.answering_s = time.monotonic() - began, answering_s
    return report


def take_answered(options: RegenerateOptions, path: Path) -> RegenerateReport:
    """Write the conversations whose answers are all there to ``path``, from a run that goes on or was stopped; its
    answers stay. The others are counted as ``not-answered``. Raises ConflictError: ``output-exists``;
    ``answers-differ``: the answers belong to other conversations, or were made under other settings; NotFoundError:
    ``path-missing``: no such run has answered anything; CaptureError: ``nothing-answered``."""
    began = time.monotonic()
    refuse_existing(path, options.rows_per_file)
    growing = options.limit if options.keeps_ended else None
    folder = AnswersFolder(require_local(options.out, "a file of answers"), options.shard[1], growing)
    if not any(folder.file(shard).is_file() for shard in range(1, folder.shards + 1)):
        raise NotFoundError(
            f"{folder.path} holds no answers of {plural(folder.shards, 'shard')}",
            kind=Kind.PATH_MISSING,
            hint="the same INPUT, -o and --shard as the run that answers",
        )
    folder.require(answer_settings(options, options.model, target_digests(options)))
    report = _write(open_sources(options.inputs), options, folder, path)
    report.seconds = time.monotonic() - began
    return report


@dataclass
class _Shard:
    """One run over one shard: its conversations, and what is counted while their answers come."""

    options: RegenerateOptions
    report: RegenerateReport
    log: AnswerLog
    progress: Progress
    conversations: int = 0
    of_all: int = 0
    drawn: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    answers_since: float = field(default_factory=time.monotonic)
    warned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rewrites(self, sources: list[Source]) -> Iterator[Rewrite]:
        shard, shards = self.options.shard
        for item in _conversations(sources, self.options):
            self.report.read += 1
            if isinstance(item, Rewrite):
                self.of_all += 1
                if item.number % shards == shard - 1:
                    self.conversations += 1
                    yield item

    def record(self, rewrite: Rewrite, reply: Reply) -> None:
        """Log a reply, advance its conversation, and count that once it has all."""
        is_new = self.log.append(rewrite, reply)
        rewrite.take(reply)
        is_done = not rewrite.advance()
        with self.lock:
            self.report.resumed += not is_new
            self.report.new_tokens += reply.tokens * is_new
            self.ended += reply.tokens * is_new
            if is_done:
                self.report.count(rewrite)
                self._warn_of_cuts()
            self._show(1)

    def count_underway(self, drawn: int, read: int) -> None:
        """Show tokens of answers that have not ended, and of prompts, which are read before the first of those."""
        with self.lock:
            if drawn and not self.drawn:
                self.answers_since = time.monotonic()
                self.progress.restart_clock(drawn / self.options.limit)
            self.drawn += drawn
            self.prompt_tokens += read
            self._show(0)

    def _warn_of_cuts(self) -> None:
        """Once, as long as little is lost by it."""
        report, limit = self.report, self.options.limit
        if self.warned or report.answers > LOOKED_AT or report.cut <= MOST_CUT * LOOKED_AT:
            return
        self.warned = True
        cost = f"them all answered anew: stop this run and {shlex.join(['rm', '-r', str(self.log.path.parent)])}"
        if self.options.keeps_ended:
            cost = "those alone answered anew: stop this run (Ctrl-C) and give the same command with it"
        output().warn(
            f"{report.cut} of the first {report.answers} answers met --max-new-tokens {limit} and are cut: how such an "
            f"answer ends is not learned. A larger limit, --max-new-tokens {4 * limit} say, has {cost}"
        )

    def _show(self, answers: int) -> None:
        tokens = max(self.drawn, self.report.new_tokens)
        # Answers that have not ended count by how far they have come, or nothing could be said of the first minute.
        self.progress.underway = max(0, self.drawn - self.ended) / self.options.limit
        counts = {"tokens": tokens, "cut": self.report.cut, "looping": self.report.dropped["looping"]}
        # A server does not say what it has read.
        counts |= {"prompt_tokens": self.prompt_tokens} if self.prompt_tokens else {}
        self.progress.advance(answers, **counts)


def _conversations(sources: list[Source], options: RegenerateOptions) -> Iterator[Rewrite | tuple[str, str]]:
    """Every usable conversation, numbered from 0, and (reason, where) of the others; ``max_samples`` usable at most."""
    number, kwargs = 0, {} if options.raw else options.extra.get(TEMPLATE_KWARGS) or {}
    for source in sources:
        for row in source.rows():
            if options.max_samples is not None and number >= options.max_samples:
                return
            item = parse_row(with_one_answer(row))
            if not isinstance(item, Conversation):
                yield item.reason, f"{item.location}: {item.detail}"
            elif not Rewrite.has_slot(item):
                yield "no-answer", f"{item.location}: nothing in it can be answered"
            else:
                yield Rewrite.of(number, item, options.system, options.turns, kwargs)
                number += 1


def _usable(sources: list[Source], options: RegenerateOptions) -> int | None:
    """How many answers this shard will have at most, None where counting them would take long. At least one
    conversation must be usable; the reasons of the others are counted for the error."""
    reasons: dict[str, list[Any]] = {}
    counts, answers = [source.count for source in sources], None
    for item in _conversations(sources, options):
        if not isinstance(item, Rewrite):
            reasons.setdefault(item[0], [0, item[1]])[0] += 1
        elif sum(source.size for source in sources) > COUNTED_BYTES or not any(source.size for source in sources):
            return None if None in counts else sum(count or 0 for count in counts) // options.shard[1]
        else:
            is_ours = item.number % options.shard[1] == options.shard[0] - 1
            answers = (answers or 0) + is_ours * sum(message["role"] == "assistant" for message in item.todo)
    if answers is not None:
        return answers
    listed = [f"{reason}: {plural(count, 'row')}, first {first}" for reason, (count, first) in reasons.items()]
    what = f"no conversation with an answer in {', '.join(options.inputs)}; nothing was written"
    raise ConfigError("\n".join([what, *listed]), kind=Kind.NOTHING_USABLE, hint=way_to_keep(reasons))


def _finish(sources: list[Source], folder: AnswersFolder, shard: _Shard) -> RegenerateReport:
    """Write the output where no shard is missing: the report of all of it, or of this shard alone where others are, or
    where another writes."""
    report, options = shard.report, shard.options
    out = Path(report.out)
    report.waiting = folder.unfinished(shard.of_all)
    # Who has written takes the folder away, which looks as if no shard had ended.
    if report.waiting and not _is_there(out, options.rows_per_file):
        return report
    with folder.lock() as is_ours:
        if not is_ours or _is_there(out, options.rows_per_file):
            report.waiting, report.written_by_another = [], True
            return report
        whole = _write(sources, options, folder, out)
    whole.resumed, whole.new_tokens = report.resumed, report.new_tokens
    folder.remove()
    return whole


def _write(sources: list[Source], options: RegenerateOptions, folder: AnswersFolder, out: Path) -> RegenerateReport:
    """The output from the answers of all shards, in the order of the input."""
    report = RegenerateReport(str(out))
    with ExitStack() as stack, rows_into(out, options.rows_per_file) as write:
        shards = (folder.file(shard) for shard in range(1, folder.shards + 1))
        logs = [stack.enter_context(AnswerLog(path, is_read_only=True)) if path.is_file() else None for path in shards]
        for item in _conversations(sources, options):
            report.read += 1
            if not isinstance(item, Rewrite):
                report.drop(*item)
                continue
            log = logs[item.number % folder.shards]
            for reply in log.replies(item) if log is not None else ():
                item.advance()
                item.take(reply)
            if item.advance():
                report.drop("not-answered", f"conversation {item.number + 1}")
                continue
            report.count(item)
            if item.drop is None:
                write(item.row())
                report.written += 1
        if not report.written:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(report.dropped.items()))
            problem = f"none of {plural(report.read, 'conversation')} has an answer to learn from: {reasons}"
            hint = f"{shlex.join(['rm', '-r', str(folder.path)])} has them answered again"
            if too_long := report.examples.get("prompt-too-long"):
                problem += f"; {too_long}"
                hint += f", with a smaller limit, --max-new-tokens {max(1, options.limit // 2)} say"
            raise CaptureError(problem, kind=Kind.NOTHING_ANSWERED, hint=hint)
    return report


def refuse_existing(out: Path, rows_per_file: int | None) -> None:
    """Raise ConflictError ``output-exists`` where something lies at ``out``."""
    (refuse_existing_folder if rows_per_file else refuse_existing_file)(out)


def _is_there(out: Path, rows_per_file: int | None) -> bool:
    try:
        refuse_existing(out, rows_per_file)
    except ConflictError:
        return True
    return False


@contextmanager
def rows_into(out: Path, rows_per_file: int | None = None) -> Iterator[Callable[[Row], None]]:
    """What takes each row with ``messages``; all of it is there in the end, or nothing. ``out`` is a file of JSON
    lines, or parquet by its name, or with ``rows_per_file`` a folder of parquet files with so many rows each. Raises
    ConflictError: ``output-exists``. StorageError: the disk refused."""
    if rows_per_file is not None:
        numbers = count()
        with new_folder(out) as folder:

            def write_file(table: pa.Table) -> None:
                with (folder / f"train-{next(numbers):05}.parquet").open("wb", buffering=0) as part:
                    pq.write_table(table, part)

            yield from _grouped(rows_per_file, write_file)
    elif out.suffix == ".parquet":
        with new_file(out) as file, pq.ParquetWriter(_Sink(file), SCHEMA) as writer:
            yield from _grouped(_GROUP_ROWS, writer.write_table)
    else:
        with new_file(out) as file:
            yield lambda row: file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _grouped(size: int, write: Callable[[pa.Table], None]) -> Iterator[Callable[[Row], None]]:
    """What takes rows for ``write``, so many at once; the rest where nothing goes wrong."""
    rows: list[Row] = []

    def take(row: Row) -> None:
        messages = [{**message, "tool_calls": _json_text(message.get("tool_calls"))} for message in row["messages"]]
        rows.append({"messages": messages, **{name: _json_text(row.get(name)) for name in _BESIDE}})
        if len(rows) == size:
            write(pa.Table.from_pylist(rows, schema=SCHEMA))
            rows.clear()

    yield take
    if rows:
        write(pa.Table.from_pylist(rows, schema=SCHEMA))


class _Sink(io.RawIOBase):
    """A new file as pyarrow writes one."""

    def __init__(self, file: WritableFile) -> None:
        self._new = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._new.write(memoryview(data))
        return len(data)


def _json_text(value: Any) -> str | None:
    return json.dumps(value, ensure_ascii=False) if value else None

"""What running servers get accepted: questions asked task by task, timed, counted, and set in a table."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hiddenstore.errors import CaptureError, ConfigError, Kind
from trainer.evaluate.prompts import Message, Question
from trainer.evaluate.server import Completion, DraftCounts, SamplingOptions, Server

WARM_UP_TOKENS = 8
ALL = "all"
"""The name of all tasks as one."""

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """One task on one server. ``seconds`` of wall time for all its questions; ``counts`` None where nothing drafts."""

    task: str
    questions: int
    seconds: float
    answers: list[Completion] = field(repr=False)
    counts: DraftCounts | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the time of all, prefills included."""
        return self.tokens / self.seconds

    @property
    def others_were_served(self) -> bool:
        """Whether the server drafted for others meanwhile: more tokens were counted than these answers can hold."""
        if self.counts is None:
            return False
        # The last draft of an answer is counted whole, however early the answer ends within it.
        past_end = len(self.answers) * (1 + (self.counts.draft_len or 0))
        return self.counts.drafts + self.counts.accepted > self.tokens + past_end


def measure(
    server: Server,
    questions: Sequence[Question],
    sampling: SamplingOptions,
    concurrency: int = 1,
    on_question: Callable[[], None] | None = None,
) -> list[TaskResult]:
    """Ask every question, ``concurrency`` at a time, one task after another; the last result is that of all tasks.

    The server is warmed up with one short answer, which is in no figure.

    Raises:
        StorageError, CaptureError, ConfigError: the server stopped answering, as HttpClient says it.
    """
    server.ask(questions[0].history, SamplingOptions(WARM_UP_TOKENS, sampling.temperature))

    def ask(question: Question) -> list[Completion]:
        answers = _conversation(server, question, sampling)
        if on_question:
            on_question()
        return answers

    results = []
    ordered = sorted(questions, key=lambda question: question.task)
    for task, group in groupby(ordered, key=lambda question: question.task):
        before, started = server.counts(), time.perf_counter()
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            conversations = list(pool.map(ask, group))
        seconds = time.perf_counter() - started
        answers = [answer for conversation in conversations for answer in conversation]
        if not sum(answer.tokens for answer in answers):
            raise CaptureError(f"{server.client.url} answered {task} without a single token", kind=Kind.SERVER_ANSWER)
        after = server.counts()
        if server.counts_each_answer:
            counts = _sum(answer.counts for answer in answers)
        else:
            counts = after - before if after is not None and before is not None else None
        results.append(TaskResult(task, len(conversations), seconds, answers, counts))
    return [*results, _total(results)]


def _conversation(server: Server, question: Question, sampling: SamplingOptions) -> list[Completion]:
    """Answers to the turns of one question, each reading those before it."""
    messages: list[Message] = list(question.history)
    answers = [server.ask(messages, sampling)]
    for turn in question.more:
        messages += [{"role": "assistant", "content": answers[-1].text}, {"role": "user", "content": turn}]
        answers.append(server.ask(messages, sampling))
    return answers


def _total(results: Sequence[TaskResult]) -> TaskResult:
    return TaskResult(
        task=ALL,
        questions=sum(result.questions for result in results),
        seconds=sum(result.seconds for result in results),
        answers=[answer for result in results for answer in result.answers],
        counts=_sum(result.counts for result in results),
    )


def _sum(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """The counts there are, added; None where there are none."""
    present = [each for each in counts if each is not None]
    return sum(present, DraftCounts()) if present else None


def require_one_model(server: Server, baseline: Server) -> None:
    """Refuse a baseline of another model; ConfigError ``server-unfit``."""
    if server.model != baseline.model:
        raise ConfigError(
            f"{server.client.url} serves {server.model}, the baseline {baseline.client.url} serves {baseline.model}",
            kind=Kind.SERVER_UNFIT,
            hint="start the baseline with the same target and --served-model-name",
        )


def row_of(url: str, result: TaskResult, baseline: TaskResult | None) -> Row:
    """A task on a server as ``eval --json`` has it, beside the same questions without speculation."""
    counts, same = result.counts, None
    if baseline is not None:
        same = sum(a.text == b.text for a, b in zip(result.answers, baseline.answers, strict=True))
    return {
        "server": url,
        "task": result.task,
        "draft_len": counts.draft_len if counts else None,
        "questions": result.questions,
        "answers": len(result.answers),
        "answer_tokens": result.tokens,
        "drafts": counts.drafts if counts else None,
        "accepted_length": counts.accepted_length if counts else None,
        "per_position": counts.per_position if counts else [],
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "baseline_tokens_per_s": baseline.tokens_per_s if baseline else None,
        "speedup": result.tokens_per_s / baseline.tokens_per_s if baseline else None,
        "same_as_baseline": same,
        "others_were_served": result.others_were_served,
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells for a terminal or Markdown; a server's total is left out where it is that of one task."""
    servers = [row["server"] for row in rows]
    listed = [row for row in rows if row["task"] != ALL or servers.count(row["server"]) > 2]
    head = ["task", "draft of", "accepted length", "by position", "tokens/s"]
    cells = [
        [
            row["task"],
            _text(row["draft_len"], "{}"),
            _text(row["accepted_length"], "{:.2f}"),
            " ".join(f"{share:.2f}" for share in row["per_position"]) or "–",
            f"{row['tokens_per_s']:,.1f}",
        ]
        for row in listed
    ]
    if any(row["speedup"] is not None for row in rows):
        head += ["without", "speed-up", "same answers"]
        for line, row in zip(cells, listed, strict=True):
            line += [
                _text(row["baseline_tokens_per_s"], "{:,.1f}"),
                _text(row["speedup"], "{:.2f}x"),
                _text(row["same_as_baseline"], "{}") + f" of {row['answers']}",
            ]
    return head, cells


def markdown(document: Mapping[str, Any]) -> str:
    """The report: what was measured in a line, and the table."""
    head, cells = table(document["rows"])
    how = "greedy" if not document["temperature"] else f"temperature {document['temperature']:g}"
    beside = "; speed-up against the same server without speculation" if document["baseline_server"] else ""
    lines = [
        f"{document['model']} on {document['engine']}, {how}, answers of at most {document['max_new_tokens']} tokens, "
        f"{document['concurrency']} at a time. Accepted length counts the target's own token{beside}.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(line)} |" for line in cells),
    ]
    return "\n".join(lines) + "\n"


def _text(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)

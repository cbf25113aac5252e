"""Questions asked of a running server, task by task, timed and counted."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from hiddenstore.errors import CaptureError, ConfigError
from trainer.drafting.questions import Message, Question
from trainer.served.counts import DraftCounts
from trainer.served.servers import Answer, Sampling, Server

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measured:
    """One task on one server. ``seconds`` of wall time for all its questions; ``counts`` None where nothing drafts."""

    task: str
    questions: int
    seconds: float
    answers: list[Answer] = field(repr=False)
    counts: DraftCounts | None = None

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Of all answers together, prefills included."""
        return self.tokens / self.seconds

    @property
    def foreign(self) -> bool:
        """Whether the server drafted for others meanwhile: more tokens were counted than these answers can hold."""
        if self.counts is None:
            return False
        # The last draft of an answer is counted whole, however early the answer ends within it.
        past_end = len(self.answers) * (1 + (self.counts.draft_len or 0))
        return self.counts.drafts + self.counts.accepted > self.tokens + past_end


def measure(
    server: Server,
    questions: Sequence[Question],
    sampling: Sampling,
    concurrency: int = 1,
    on_answer: Callable[[int], None] | None = None,
) -> list[Measured]:
    """Ask every question, ``concurrency`` at a time, one task after another; ``on_answer`` gets each answer's tokens.

    The server is warmed up with one short answer, which is in no figure.

    Raises:
        StorageError, CaptureError: the server stopped answering.
    """
    server.ask(questions[0].history, Sampling(WARM_UP_TOKENS, sampling.temperature))
    ordered = sorted(questions, key=lambda question: question.task)
    return [
        _measure_task(server, task, list(asked), sampling, concurrency, on_answer)
        for task, asked in groupby(ordered, key=lambda question: question.task)
    ]


def total(found: Sequence[Measured]) -> Measured:
    """All tasks as one, whose name is ``all``."""
    counted = [one.counts for one in found if one.counts is not None]
    return Measured(
        task="all",
        questions=sum(one.questions for one in found),
        seconds=sum(one.seconds for one in found),
        answers=[answer for one in found for answer in one.answers],
        counts=sum(counted, DraftCounts()) if counted else None,
    )


def require_one_model(server: Server, baseline: Server) -> None:
    """Refuse a baseline of another model; ConfigError ``served-model``."""
    if server.model != baseline.model:
        raise ConfigError(
            f"{server.client.url} serves {server.model}, the baseline {baseline.client.url} serves {baseline.model}",
            kind="served-model",
            hint="start the baseline with the same target and --served-model-name",
        )


def _measure_task(
    server: Server,
    task: str,
    questions: list[Question],
    sampling: Sampling,
    concurrency: int,
    on_answer: Callable[[int], None] | None,
) -> Measured:
    before = server.counts()

    def ask(question: Question) -> list[Answer]:
        answers = _conversation(server, question, sampling)
        if on_answer:
            on_answer(sum(answer.tokens for answer in answers))
        return answers

    started = time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        answers = [answer for conversation in pool.map(ask, questions) for answer in conversation]
    seconds = time.perf_counter() - started
    if not sum(answer.tokens for answer in answers):
        raise CaptureError(f"{server.client.url} answered {task} without a single token", kind="server-refused")
    if server.counts_each_answer:
        counted = [answer.counts for answer in answers if answer.counts is not None]
        counts = sum(counted, DraftCounts()) if counted else None
    else:
        after = server.counts()
        counts = after - before if after is not None and before is not None else None
    return Measured(task, len(questions), seconds, answers, counts)


def _conversation(server: Server, question: Question, sampling: Sampling) -> list[Answer]:
    """Answers to the turns of one question, each reading those before it."""
    messages: list[Message] = list(question.history)
    answers = [server.ask(messages, sampling)]
    for turn in question.more:
        messages += [{"role": "assistant", "content": answers[-1].text}, {"role": "user", "content": turn}]
        answers.append(server.ask(messages, sampling))
    return answers

"""Servers measured in turn, round after round, and where their answers part.

A machine that others use is faster in one minute than in the next: only rounds that lie beside each other can be
compared, and their spread says how far to trust the ratio.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

from hiddenstore.conversation.messages import Message
from hiddenstore.errors import HiddenstoreError
from trainer.evaluate.acceptance import tie_gap
from trainer.evaluate.prompts import Beside, Question
from trainer.evaluate.server import (
    Choice,
    Row,
    SamplingOptions,
    Server,
    TaskResult,
    by_task,
    measure,
    row_of,
)

SURELY_A_LOGIT = 1e-3
"""No log-probability is greater, rounding included."""

FEWEST_ROUNDS = 3

Rounds = list[list[TaskResult]]
"""Of one server: its tasks in each round."""


def rounds_for(lengths: int) -> int:
    """Rounds that ``lengths`` draft lengths are compared in where nobody says: one is enough for one, or for what it
    does by itself. Where drafting changes nothing a round's ratio is above 1 half of the time, so that among n lengths
    one is above 1 in all of r rounds with n/2^r at most: an eighth here."""
    return FEWEST_ROUNDS + (lengths - 1).bit_length() if lengths > 1 else 1


def is_shown_to_pay(ratios: Sequence[float]) -> bool:
    """Whether drafting was faster in every round, of enough of them."""
    return len(ratios) >= FEWEST_ROUNDS and min(ratios) > 1


def measure_rounds(
    servers: Sequence[Server],
    questions: Sequence[Question],
    sampling: SamplingOptions,
    concurrency: int,
    rounds: int,
    on_question: Callable[[], None],
) -> list[Rounds]:
    """Every question asked of each server in each round; what went first goes last in the next. Raises as `measure`."""
    measured: list[Rounds] = [[] for _ in servers]
    for number in range(rounds):
        order = range(len(servers)) if number % 2 == 0 else reversed(range(len(servers)))
        for index in order:
            measured[index].append(measure(servers[index], questions, sampling, concurrency, on_question))
    return measured


def rows_of(url: str, drafted: Rounds, plain: Rounds | None) -> list[Row]:
    """A row for each task: the speed-up is the median of the rounds', which stand beside it."""
    rows = []
    for index, result in enumerate(_merged(drafted)):
        row = row_of(url, result, None if plain is None else _merged(plain)[index])
        if plain is not None:
            pairs = zip(drafted, plain, strict=True)
            ratios = [one[index].tokens_per_s / other[index].tokens_per_s for one, other in pairs]
            row |= {"speedup": median(ratios), "speedup_rounds": ratios}
        rows.append(row)
    return rows


def _merged(rounds: Rounds) -> list[TaskResult]:
    """All rounds of each task as one result."""
    return [TaskResult.of_all(task[0].task, task[0].questions, task) for task in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class Departure:
    """The first turn of a question whose answer differs from the plain server's: the words where they part, by how much
    the plain one's token led there in logits, None where the server does not say or does not repeat itself, and its
    logit, None where it gives log-probabilities only. ``rounds``: in how many rounds these two answers were given.
    ``dtype``: what it computes in, bf16 where nobody knows."""

    task: str
    question: str
    turn: int
    at: int
    plain: str
    drafted: str
    logit_gap: float | None
    logit: float | None
    rounds: int = 1
    dtype: str = "bfloat16"

    @property
    def is_tie(self) -> bool:
        return self.logit_gap is not None and self.logit_gap <= tie_gap(self.logit, self.dtype)

    def document(self) -> dict[str, Any]:
        """As ``eval --json`` has it."""
        return asdict(self) | {"tie_gap": tie_gap(self.logit, self.dtype)}


_Turns = tuple[tuple[str, str], ...]
"""Of a question: the plain and the drafted answer to each turn."""
Parted = Counter[tuple[int, _Turns]]
"""Rounds in which a question, by its place among those by task, was answered so, up to the first turn that differs."""


def parted(questions: Sequence[Question], of_plain: Rounds, of_drafted: Rounds) -> Parted:
    """Every two answers that differ. Of a conversation the first turn that differs: what follows answers another
    text."""
    found: Parted = Counter()
    for one, other in zip(of_plain, of_drafted, strict=True):
        # The last result is that of all tasks, in their order.
        answers, others = iter(one[-1].answers), iter(other[-1].answers)
        for number, question in enumerate(_ordered(questions)):
            given = [(next(answers).text, next(others).text) for _ in range(1 + len(question.more))]
            turn = next((i for i, (a, b) in enumerate(given) if a != b), None)
            if turn is not None:
                found[number, tuple(given[: turn + 1])] += 1
    return found


def _ordered(questions: Sequence[Question]) -> list[Question]:
    return [question for _, group in by_task(questions) for question in group]


def departures(
    plain: Server, questions: Sequence[Question], differing: Parted, sampling: SamplingOptions
) -> Iterator[Departure]:
    """Each of these judged by what the plain server says when it is asked again with its logits."""
    ordered, known = _ordered(questions), dict[str, list[Choice]]()

    def choices(messages: list[Message], beside: Beside) -> list[Choice]:
        """The tokens of the plain answer, asked for once; empty where the server does not say."""
        key = json.dumps([messages, beside.columns()])
        if key not in known:
            # What was measured is not lost over a server that says no more.
            known[key] = []
            with suppress(HiddenstoreError):
                known[key] = plain.choices(messages, replace(sampling, beside=beside))
        return known[key]

    for (number, turns), rounds in sorted(differing.items()):
        departure = replace(_departure(choices, ordered[number], turns), rounds=rounds)
        yield departure if plain.dtype is None else replace(departure, dtype=plain.dtype)


def _departure(
    choices_of: Callable[[list[Message], Beside], list[Choice]], question: Question, turns: _Turns
) -> Departure:
    greedy, drafted = turns[-1]
    shorter = min(len(greedy), len(drafted))
    at = next((i for i in range(shorter) if greedy[i] != drafted[i]), shorter)
    before: list[Message] = list(question.history)
    for (answer, _), more in zip(turns[:-1], question.more, strict=False):
        before += [{"role": "assistant", "content": answer}, {"role": "user", "content": more}]
    choices = choices_of(before, question.beside)
    repeats = "".join(choice.token for choice in choices).startswith(greedy[:at])
    parting = _parting(choices, drafted, at) if repeats else None
    says_logits = any(choice.value > SURELY_A_LOGIT for choice in choices)
    return Departure(
        task=question.task,
        question=question.history[-1]["content"][:80],
        turn=len(turns) - 1,
        at=at,
        plain=greedy[at : at + 20],
        drafted=drafted[at : at + 20],
        logit_gap=parting.lead if parting else None,
        logit=parting.value if parting and says_logits else None,
    )


def _parting(choices: Sequence[Choice], drafted: str, at: int) -> Choice | None:
    """The token at which another text begins to differ, given the first letter that does: the token of that letter, or
    one before it whose second choice begins alike and goes on as the other text does (``[`` and ``[:``)."""
    ends = list(accumulate(len(choice.token) for choice in choices))
    last = next((index for index, end in enumerate(ends) if end > at), None)
    if last is None:
        return None
    for choice, end in zip(choices[last::-1], ends[last::-1], strict=True):
        start = end - len(choice.token)
        if start + len(choice.second) > at and drafted.startswith(choice.second, start):
            return choice
    return choices[last]

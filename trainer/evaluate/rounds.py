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
    Completion,
    Row,
    SamplingOptions,
    Server,
    TaskResult,
    Words,
    by_task,
    measure,
    row_of,
)

SURELY_A_LOGIT = 1e-3
"""No log-probability is greater, rounding included."""

FEWEST_ROUNDS = 3
_SHOWN = 20
"""Letters of each answer from where they part."""

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
    """The first turn of a question whose answer differs from the plain server's: the words where they part, behind
    ``at`` letters of thought and text, by how much the plain one's token led the drafted one there in logits, None
    where the server does not say, does not repeat itself or did not weigh the drafted one, and its logit, None where it
    gives log-probabilities only. ``rounds``: in how many rounds these two answers were given. ``dtype``: what it
    computes in, bf16 where nobody knows."""

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


_Turns = tuple[tuple[Words, Words], ...]
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
            given = [(next(answers).words, next(others).words) for _ in range(1 + len(question.more))]
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
    ordered, known = _ordered(questions), dict[str, Completion]()

    def retell(messages: list[Message], beside: Beside) -> Completion:
        """The plain answer, asked for once; without choices where the server does not say."""
        key = json.dumps([messages, beside.columns()])
        if key not in known:
            # What was measured is not lost over a server that says no more.
            known[key] = Completion("", 0)
            with suppress(HiddenstoreError):
                known[key] = plain.retell(messages, replace(sampling, beside=beside))
        return known[key]

    for (number, turns), rounds in sorted(differing.items()):
        departure = replace(_departure(retell, ordered[number], turns), rounds=rounds)
        yield departure if plain.dtype is None else replace(departure, dtype=plain.dtype)


def _departure(retell: Callable[[list[Message], Beside], Completion], question: Question, turns: _Turns) -> Departure:
    plain, drafted = turns[-1]
    index = 0 if plain[0] != drafted[0] else 1
    at = _shared(plain[index], drafted[index])
    before: list[Message] = list(question.history)
    for ((_, answer), _), more in zip(turns[:-1], question.more, strict=False):
        before += [{"role": "assistant", "content": answer}, {"role": "user", "content": more}]
    again = retell(before, question.beside)
    gap, value = _gap(again, plain, drafted, index, at) or (None, None)
    says_logits = any(choice.value > SURELY_A_LOGIT for choice in again.choices)
    return Departure(
        task=question.task,
        question=question.history[-1]["content"][:80],
        turn=len(turns) - 1,
        at=len(plain[0]) * index + at,
        plain=plain[index][at : at + _SHOWN],
        drafted=drafted[index][at : at + _SHOWN],
        logit_gap=gap,
        logit=value if says_logits else None,
    )


def _shared(text: str, other: str) -> int:
    """Letters that two texts begin with alike."""
    shorter = min(len(text), len(other))
    return next((index for index in range(shorter) if text[index] != other[index]), shorter)


def _gap(again: Completion, plain: Words, drafted: Words, index: int, at: int) -> tuple[float, float] | None:
    """By how much the token of one answer led that of the other where their thoughts (``index`` 0) or texts (1) part,
    and what was given for it; None where nobody knows, as where ``again`` goes as neither does."""
    repeat, greedy, other = again.words[index], plain[index], drafted[index]
    stream = "".join(choice.token for choice in again.choices)
    begin = _beginning(again, stream, index, at)
    if begin < 0 or not stream.startswith(greedy[:at], begin):
        return None
    if again.words[:index] != plain[:index] or repeat[:at] != greedy[:at]:
        return None
    if repeat[at : at + 1] == other[at : at + 1]:
        other = greedy
    elif repeat[at : at + 1] != greedy[at : at + 1]:
        return None
    return _parting(again.choices, stream[:begin] + other, begin + at)


def _beginning(again: Completion, stream: str, index: int, at: int) -> int:
    """Where a part of an answer begins among its tokens, of which a parser leaves out the marks of a thought; negative
    where it is not there."""
    if not again.thought:
        return 0
    # Further on a letter that several tokens share may read otherwise.
    if index == 0:
        return stream.find(again.thought[: at + _SHOWN])
    marks, _, rest = stream.partition(again.thought)
    return stream.find(again.text[: at + _SHOWN], len(marks) + len(again.thought)) if rest else -1


def _parting(choices: Sequence[Choice], other: str, at: int) -> tuple[float, float] | None:
    """How far the choice that another text goes on with lies behind the token it was weighed with, and what was given
    for that; None where it was not weighed. ``at``: the first letter that differs. The choice stands at the token of
    that letter, or at one before it where it reaches past that letter (``[`` and ``[:``): of several the nearest."""
    ends = list(accumulate(len(choice.token) for choice in choices))
    last = next((index for index, end in enumerate(ends) if end > at), None)
    if last is None:
        return None
    gaps = []
    for index, choice in enumerate(choices[: last + 1]):
        start = ends[index] - len(choice.token)
        for text, gap in choice.others.items():
            ends_there = start == at == len(other) and _ends_text(text)
            reaches = index == last or start + len(text) > at
            if ends_there or (reaches and _goes_on(other, text, start)):
                gaps.append((gap, choice.value))
    return min(gaps, default=None)


def _goes_on(other: str, token: str, start: int) -> bool:
    """Whether a text goes on with a token; of a letter that several tokens share servers write U+FFFD."""
    letters = token.rstrip("\ufffd")
    end = start + len(letters)
    return bool(token) and other.startswith(letters, start) and (letters == token or other[end : end + 1] > "\x7f")


def _ends_text(token: str) -> bool:
    """Whether a token ends an answer or a thought, as servers write those: ``<|im_end|>``, or nothing."""
    return not token or (token[0], token[-1]) == ("<", ">")

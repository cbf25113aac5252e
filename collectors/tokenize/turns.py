"""Where the turns of a conversation stand in its rendering, and in the tokens of it.

A turn's bounds are found by comparing the whole text with that of the first messages alone, which must be a prefix of
it. Text ranges [start, end) count characters, token spans tokens; n turns.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np

from collectors.tokenize.thoughts import shared_length
from hiddenstore.conversation.messages import Message
from schemas.manifest import ROLES

Range = tuple[int, int]
ASSISTANT = ROLES.index("assistant")
_SHOWN = 24
_TAGS = r"(?:\s|<[^<>]*>)*"


@dataclass(frozen=True)
class Turn:
    """A range of the text: ``role`` indexes ``ROLES``; an assistant turn is exactly what the target writes."""

    role: int
    start: int
    end: int


class RewrittenError(Exception):
    """The template renders earlier messages otherwise once later ones follow."""


class Prefixes:
    """Renderings of the first messages of a conversation beside its whole text; ``render`` takes messages and whether
    to prompt, and gives None where refused; ``length`` says how much of a text that the template ended is the target's
    (`answer_length`), ``header`` what stands between a question and its answer, where that is more than white space."""

    def __init__(
        self,
        text: str,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message], bool], str | None],
        length: Callable[[str], int],
        header: Callable[[], str],
    ) -> None:
        self.text = text
        self.messages = messages
        self._render, self._length, self._find_header = render, length, header
        self._ends: dict[int, int | None] = {0: 0, len(messages): len(text)}

    def end(self, count: int) -> int | None:
        """Where the first ``count`` messages end, None when the template does not reveal it."""
        if count not in self._ends:
            prefix = self._render(self.messages[:count], False)
            # The end of a whole text, as Phi-3.5's template writes one, is in no longer one.
            heads = [] if prefix is None else [prefix, prefix[: self._length(prefix)]]
            self._ends[count] = next((len(head) for head in heads if self.text.startswith(head)), None)
        return self._ends[count]

    def message(self, index: int) -> str:
        """The text of message ``index``, with what stands before or behind it where its bounds are not revealed."""
        return self.text[self.end(index) or 0 : self.end(index + 1)]

    def answer(self, index: int) -> Range:
        """What the target writes of message ``index``: after the generation prompt, up to its end-of-turn token. Raises
        RewrittenError: the rendering of the messages before it, or up to it, is no prefix of the whole text."""
        prompt = self.prompt(index)
        end = self.end(index + 1)
        if prompt is None and not index:
            header = f"the header {self._header!r} of prompts" if self._header else "a header of prompts"
            raise RewrittenError(f"where message 1 begins is not revealed: {header} does not stand before it")
        if prompt is None or not self.text.startswith(prompt):
            raise RewrittenError(self._difference(f"the prompt of message {index + 1}", prompt))
        if end is None:
            alone = self._render(self.messages[: index + 1], False)
            raise RewrittenError(self._difference(f"message {index + 1}", alone))
        written = self.text[len(prompt) : end]
        return len(prompt), len(prompt) + self._length(written)

    def prompt(self, index: int) -> str | None:
        """What the target has read before it writes message ``index``, None where the template refuses or does not
        reveal it. Where the template writes no prompt, before the first message or as GigaChat 3's behind an answer, it
        reaches to the end of the header that stands there all the same."""
        if not index:
            at = self.text.find(self._header, 0, self.end(1)) if self._header else -1
            return None if at < 0 else self.text[: at + len(self._header)]
        prompt = self._render(self.messages[:index], True)
        if prompt is None or prompt != self.text[: self.end(index) or 0] or not self._header:
            return prompt
        # Hy3's ends an answer before the header of the next one, and not where it is the last.
        end = self.end(index + 1) or len(self.text)
        header = re.compile(_TAGS + re.escape(self._header)).match(self.text, len(prompt), end)
        return prompt if header is None else self.text[: header.end()]

    @cached_property
    def _header(self) -> str:
        return self._find_header()

    def _difference(self, title: str, alone: str | None) -> str:
        if alone is None:
            return f"the template refuses to render {title} alone"
        at = shared_length(alone, self.text)
        alone, expected = alone[at : at + _SHOWN], self.text[at : at + _SHOWN]
        return f"{title} alone renders {alone!r} where the whole conversation has {expected!r}"


def answer_length(written: str, end_tokens: Sequence[str], own_ends: Sequence[str] = ()) -> int:
    """The length of what the target writes of a text that the template has ended: white space behind the end-of-turn
    token is the template's, and so is a second end, of the whole text, behind that of the turn. Where the target ends
    with one of ``own_ends``, another token right before it is its own: ``<|END_RESPONSE|>`` of Command A."""
    answer = written.rstrip()
    token = next((token for token in end_tokens if answer.endswith(token)), None)
    if token is None:
        return len(written)
    before = answer.removesuffix(token)
    ends = own_ends if token in own_ends and before == before.rstrip() else end_tokens
    before = before.rstrip()
    return len(before) if before.endswith(tuple(ends)) else len(answer)


def find_turns(prefixes: Prefixes, answers: dict[int, Range]) -> list[Turn]:
    """The turns in order, disjoint, from the ranges of the assistant messages and the ends of the others.

    Messages whose boundary the template does not reveal share a turn, with the role of the last of them. What lies
    between turns (headers of answers, white space after them) belongs to the template.
    """
    turns: list[Turn] = []
    cursor, open_role = 0, None
    for index, message in enumerate(prefixes.messages):
        role = ROLES.index(message["role"])
        end = prefixes.end(index + 1)
        if role == ASSISTANT:
            answer = answers.get(index)
            if open_role is not None and answer is not None and answer[0] > cursor:
                turns.append(Turn(open_role, cursor, answer[0]))
            if answer is not None:
                turns.append(Turn(role, *answer))
            open_role, cursor = None, end if end is not None else answer[1] if answer is not None else cursor
        elif end is None or end < cursor:
            open_role = role
        else:
            if end > cursor:
                turns.append(Turn(role, cursor, end))
            open_role, cursor = None, end
    if open_role is not None and cursor < len(prefixes.text):
        turns.append(Turn(open_role, cursor, len(prefixes.text)))
    return turns


Spans = Callable[[int, int], Range]
"""Which tokens overlap characters [start, end) of a text, as [first, last + 1)."""


def spans_by_offset(offsets: Sequence[Range]) -> Spans:
    """From the character range of each token, as fast tokenizers give it.

    This is what ``return_assistant_tokens_mask`` of transformers marks, save that there a character made of several
    tokens loses all but the first at the end of a range.
    """
    starts, ends = np.maximum.accumulate(np.asarray(offsets, dtype=np.int64).reshape(-1, 2)).T

    def span(start: int, end: int) -> Range:
        first = int(np.searchsorted(ends, start, side="right"))
        return first, max(first, int(np.searchsorted(starts, end, side="left")))

    return span


def spans_by_encoding(text: str, ids: Sequence[int], encode: Callable[[str], Sequence[int]]) -> Spans:
    """The same for a tokenizer without offsets, by encoding the text up to a character and comparing ids."""

    def common(at: int) -> tuple[int, bool]:
        """How many ids the text up to character ``at`` shares with all of it, and whether it has more."""
        prefix = encode(text[:at])
        shortest = min(len(prefix), len(ids))
        shared = next((i for i in range(shortest) if prefix[i] != ids[i]), shortest)
        return shared, shared < len(prefix)

    def span(start: int, end: int) -> Range:
        first, _ = common(start)
        last, is_cut = common(end)
        return first, max(first, min(len(ids), last + is_cut))

    return span


def token_spans(turns: Sequence[Turn], spans_of: Spans) -> np.ndarray:
    """int32 [n, 3] of (role, start, end), disjoint: a token two turns share belongs to the assistant's."""
    ranges = [(turn.role, *spans_of(turn.start, turn.end)) for turn in turns]
    spans: list[tuple[int, int, int]] = []
    for (role, first, last), following in zip_longest(ranges, ranges[1:]):
        start = max(first, spans[-1][2] if spans else 0)
        stop = min(last, following[1]) if following and role != ASSISTANT else last
        if stop > start:
            spans.append((role, start, stop))
    return np.asarray(spans, dtype=np.int32).reshape(-1, 3)

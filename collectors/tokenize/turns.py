"""Who said what in a rendered conversation, and which tokens that is: turns from prefixes of its text, spans of tokens.

Shapes: T tokens of one conversation, n turns. Text ranges [start, end) count characters, token spans tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from collectors.conversations.parse import Message
from schemas.prepared import ROLES

Range = tuple[int, int]
ASSISTANT = ROLES.index("assistant")
_SHOWN = 24


@dataclass(frozen=True)
class Turn:
    """A range of the text: ``role`` indexes ``schemas.ROLES``; an assistant turn is exactly what the target writes."""

    role: int
    start: int
    end: int


class RewrittenError(Exception):
    """The template renders earlier messages otherwise once later ones follow."""


class Prefixes:
    """Renderings of the first messages of a conversation beside its whole text; ``render`` gives None where refused."""

    def __init__(self, text: str, messages: Sequence[Message], render: Callable[[int, bool], str | None]) -> None:
        self.text = text
        self.messages = messages
        self._render = render
        self._ends: dict[int, int | None] = {0: 0, len(messages): len(text)}

    def end(self, count: int) -> int | None:
        """Where the first ``count`` messages end, None when the template does not reveal it."""
        if count not in self._ends:
            prefix = self._render(count, False)
            self._ends[count] = len(prefix) if prefix is not None and self.text.startswith(prefix) else None
        return self._ends[count]

    def answer(self, index: int, end_tokens: Sequence[str]) -> Range:
        """What the target writes of message ``index``: after the generation prompt, up to its end-of-turn token.

        Raises:
            RewrittenError: the rendering of the messages before it, or up to it, is no prefix of the whole text.
        """
        prompt = self._render(index, True) if index else ""
        end = self.end(index + 1)
        if prompt is None or not self.text.startswith(prompt):
            raise RewrittenError(self._difference(f"the prompt of message {index + 1}", prompt))
        if end is None:
            raise RewrittenError(self._difference(f"message {index + 1}", self._render(index + 1, False)))
        written = self.text[len(prompt) : end]
        # White space after the end-of-turn token is the template's, the target never writes it.
        if written.rstrip().endswith(tuple(end_tokens)):
            end = len(prompt) + len(written.rstrip())
        return len(prompt), end

    def _difference(self, title: str, alone: str | None) -> str:
        if alone is None:
            return f"the template refuses to render {title} alone"
        at = next((i for i, (a, b) in enumerate(zip(alone, self.text, strict=False)) if a != b), len(self.text))
        alone, expected = alone[at : at + _SHOWN], self.text[at : at + _SHOWN]
        return f"{title} alone renders {alone!r} where the whole conversation has {expected!r}"


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


class TokenMap:
    """Maps ranges of a text to spans of its tokens: a token belongs to a range when it overlaps it.

    This is what ``return_assistant_tokens_mask`` of transformers marks, save that there a character made of several
    tokens loses all but the first at the end of a range.
    """

    def __init__(self, starts: np.ndarray, ends: np.ndarray) -> None:
        self._starts = np.maximum.accumulate(starts) if len(starts) else starts
        self._ends = np.maximum.accumulate(ends) if len(ends) else ends

    @classmethod
    def from_offsets(cls, offsets: Sequence[Range]) -> "TokenMap":
        """From the character range of each token, as fast tokenizers give it."""
        pairs = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1])

    def span(self, start: int, end: int) -> Range:
        """Tokens that overlap characters [start, end), as [first, last + 1)."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._starts, end, side="left"))
        return first, max(first, last)


class EncodedTokenMap(TokenMap):
    """The same for a tokenizer without offsets, by encoding the text up to a character and comparing ids."""

    def __init__(self, text: str, ids: Sequence[int], encode: Callable[[str], Sequence[int]]) -> None:
        self._text, self._ids, self._encode = text, ids, encode

    def span(self, start: int, end: int) -> Range:
        first, _ = self._common(start)
        last, is_cut = self._common(end)
        return first, max(first, min(len(self._ids), last + is_cut))

    def _common(self, at: int) -> tuple[int, bool]:
        """How many ids the text up to character ``at`` shares with all of it, and whether it has more."""
        prefix = self._encode(self._text[:at])
        shared = next((i for i, (a, b) in enumerate(zip(prefix, self._ids, strict=False)) if a != b), None)
        if shared is None:
            shared = min(len(prefix), len(self._ids))
        return shared, shared < len(prefix)


def token_spans(turns: Sequence[Turn], tokens: TokenMap) -> np.ndarray:
    """int32 [n, 3] of (role, start, end), disjoint: a token two turns share belongs to the assistant's."""
    ranges = [(turn.role, *tokens.span(turn.start, turn.end)) for turn in turns]
    spans: list[tuple[int, int, int]] = []
    for (role, first, last), following in zip_longest(ranges, ranges[1:]):
        start = max(first, spans[-1][2] if spans else 0)
        stop = min(last, following[1]) if following and role != ASSISTANT else last
        if stop > start:
            spans.append((role, start, stop))
    return np.asarray(spans, dtype=np.int32).reshape(-1, 3)

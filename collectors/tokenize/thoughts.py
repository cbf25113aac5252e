"""What of a rendered answer are thoughts: between tags, or in a member of their own that the template wrote.

Text ranges [start, end) count characters.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from hiddenstore.conversation import Conversation
from hiddenstore.conversation.messages import REASONING, Message

Range = tuple[int, int]
_HEADER = 64
_QUOTES = "`'\"([{*_“”‘’„«»"

THINK_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Around reasoning: DeepSeek-R1, Qwen3, Nemotron and most others; Seed-OSS; Magistral; Command A Reasoning."""

_BEGUN_TAG = re.compile(r"<(?:[^<>\s]*|[^<>\s/]*think>\s*)\Z")
_ANALYSIS = re.compile(r"(?s)<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)")


def reasoning_ranges(text: str, answers: Sequence[Range]) -> list[Range]:
    """Ranges of characters inside ``answers`` that are thoughts, with their tags, ascending.

    Reasoning whose opening tag the generation prompt wrote begins where the answer begins; one that was cut off ends
    where the answer ends. A tag that a sentence speaks of is a word of it. Of harmony it is the channel of analysis.
    """
    ranges: list[Range] = []
    for start, end in answers:
        for opening, closing in THINK_TAGS:
            ranges += _between(text, (start, end), opening, closing)
        for match in _ANALYSIS.finditer(text, start, end):
            ranges.append(match.span())
    return sorted(ranges)


def read_length(prompt: str, text: str) -> int:
    """How many characters of ``text`` a target has read that ``prompt`` is the prompt of. Where its answer goes on
    otherwise, as with thoughts where Laguna's template prompts for none, it wrote the tag that tells them apart."""
    if text.startswith(prompt):
        return len(prompt)
    return len(_BEGUN_TAG.sub("", text[: shared_length(prompt, text)]))


def shared_length(one: str, other: str) -> int:
    """How many characters two texts begin alike with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def stated_reasoning_ranges(
    messages: Sequence[Message], text: str, answers: Mapping[int, Range], known: Sequence[Range]
) -> list[Range]:
    """Ranges of thoughts that messages state in a member of their own and a template wrote between tags that nobody
    knows here: from where the answer begins to its content, tags and all; of ``answers`` by message, those in ``known``
    left out. A thought that the template left out may be words of the content, or of a call."""
    ranges = []
    for index, (start, end) in answers.items():
        message = messages[index]
        content = str(message.get("content") or "").strip()
        calls = json.dumps(message.get("tool_calls") or [], ensure_ascii=False)
        first = text.find(content, start, end)
        for thought in (str(message[name]).strip() for name in REASONING if message.get(name)):
            at = text.find(thought, start, end) if thought else -1
            stop = at + len(thought)
            content_at = text.find(content, stop, end)
            is_word = first <= at and stop <= first + len(content) if content not in ("", thought) else thought in calls
            is_known = any(low <= at and stop <= high for low, high in known)
            if at >= 0 and content_at >= 0 and not is_known and not is_word:
                ranges.append((start, content_at))
    return ranges


def _between(text: str, answer: Range, opening: str, closing: str) -> Iterator[Range]:
    """Thoughts of one answer between two tags."""
    start, end = answer
    first, close = text.find(opening, start, end), text.find(closing, start, end)
    is_opened = text[max(0, start - _HEADER) : start].rstrip().endswith(opening)
    is_alone = not 0 <= first < close and not _is_spoken_of(text, answer, (close, close + len(closing)))
    if close >= 0 and (is_opened or is_alone):
        start = close + len(closing)
        yield answer[0], start
    while (begin := text.find(opening, start, end)) >= 0:
        close = text.find(closing, begin, end)
        start = begin + len(opening)
        # What begins an answer is a thought, that of a cut answer too.
        if not text[answer[0] : begin].strip() or not _is_spoken_of(text, answer, (begin, start), close >= 0):
            start = end if close < 0 else close + len(closing)
            yield begin, start


def _is_spoken_of(text: str, answer: Range, tag: Range, is_closed: bool = True) -> bool:
    """Whether a tag stands inside a sentence: behind a space or a quotation mark, with words behind it on its line. One
    that nothing closes has a line of its own, or is spoken of."""
    before = text[max(answer[0], text.rfind("\n", answer[0], tag[0]) + 1) : tag[0]]
    has_words = tag[1] < answer[1] and not text.startswith("\n", tag[1])
    if not is_closed:
        return has_words or bool(before.strip())
    return has_words and bool(before.strip()) and (before[-1].isspace() or before[-1] in _QUOTES)


def is_reasoning_lost(conversation: Conversation, text: str) -> bool:
    """Earlier reasoning is left out by design of most templates; that of the last answer is what the target wrote."""
    last = next((message for message in reversed(conversation.messages) if message["role"] == "assistant"), {})
    reasoning = [str(last[name]).strip() for name in REASONING if last.get(name)]
    content = last.get("content")
    for opening, closing in THINK_TAGS:
        thought, tag, _ = (content if isinstance(content, str) else "").partition(closing)
        if tag and (thought := thought.replace(opening, "", 1).strip()):
            reasoning.append(thought)
    return any(reasoning) and not any(line and line in text for line in reasoning)


def are_words_lost(conversation: Conversation, written: Callable[[int], str]) -> bool:
    """Whether the template, whose text of a message is ``written``, leaves words of an answer out that are no thoughts,
    as Llama 3.1's does beside a tool call. White space is the template's to change."""
    for index, message in enumerate(conversation.messages):
        content = message.get("content")
        if message["role"] != "assistant" or not isinstance(content, str):
            continue
        thoughts = reasoning_ranges(content, [(0, len(content))])
        starts, ends = [0, *(end for _, end in thoughts)], [*(start for start, _ in thoughts), len(content)]
        words = ["".join(content[start:end].split()) for start, end in zip(starts, ends, strict=True)]
        if any(words):
            text = "".join(written(index).split())
            if not all(piece in text for piece in words):
                return True
    return False

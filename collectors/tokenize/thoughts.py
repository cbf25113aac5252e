"""What of a rendered answer are thoughts: between tags, or in a member of their own that the template wrote.

Text ranges [start, end) count characters.
"""

from collections.abc import Callable, Sequence

from collectors.conversations.parse import REASONING, Conversation

Range = tuple[int, int]

THINK_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Around reasoning: DeepSeek-R1, Qwen3, Nemotron and most others; Seed-OSS; Magistral; Command A Reasoning."""


def reasoning_ranges(text: str, answers: Sequence[Range]) -> list[Range]:
    """Ranges of characters inside ``answers`` from an opening tag up to and with its closing tag, ascending.

    Reasoning whose opening tag the generation prompt wrote begins where the answer begins; one that was cut off ends
    where the answer ends.
    """
    ranges: list[Range] = []
    for opening, closing in THINK_TAGS:
        for start, end in answers:
            begin, close = text.find(opening, start, end), text.find(closing, start, end)
            if close >= 0 and not 0 <= begin < close:
                begin = start
            while begin >= 0:
                close = text.find(closing, begin, end)
                stop = end if close < 0 else close + len(closing)
                ranges.append((begin, stop))
                begin = text.find(opening, stop, end)
    return sorted(ranges)


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

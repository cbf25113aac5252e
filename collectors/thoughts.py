"""Where the thoughts of an answer lie in rendered text: the spans that reasoning targets write before they answer."""

from collections.abc import Sequence

from collectors.turns import Range

THINK_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Opening and closing tags: DeepSeek-R1, Qwen3, Nemotron and most others; Seed-OSS; Magistral; Command A Reasoning."""


def thought_ranges(text: str, answers: Sequence[Range]) -> list[Range]:
    """Ranges of characters inside ``answers`` from an opening tag up to and with its closing tag, ascending.

    A thought whose opening tag the generation prompt wrote begins where the answer begins; one that was cut off ends
    where the answer ends.
    """
    found: list[Range] = []
    for opening, closing in THINK_TAGS:
        for start, end in answers:
            found += _in_answer(text, start, end, opening, closing)
    return sorted(found)


def _in_answer(text: str, start: int, end: int, opening: str, closing: str) -> list[Range]:
    found: list[Range] = []
    at = start
    first_close = text.find(closing, start, end)
    first_open = text.find(opening, start, end)
    if first_close >= 0 and (first_open < 0 or first_close < first_open):
        at = first_close + len(closing)
        found.append((start, at))
    while (begin := text.find(opening, at, end)) >= 0:
        close = text.find(closing, begin, end)
        at = end if close < 0 else close + len(closing)
        found.append((begin, at))
    return found

"""Prompt lookup as engines do it, stated plainly, and what of it a greedy text accepts.

Sources: vLLM 0.32 ``v1/spec_decode/ngram_proposer.py``; llama.cpp b11434 ``common/ngram-map.cpp`` and, for how long a
draft may be, ``tools/server/server-context.cpp``.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM

Lookup = Callable[[list[int], int], list[int]]
"""Tokens proposed after a text, for an answer that lacks so many."""


def as_vllm(draft_len: int, shortest: int = 1, longest: int = 4) -> Lookup:
    """What follows the first place of the longest end of the text that stands in it twice; answers to come do not cut a
    draft."""

    def proposed(text: list[int], _: int) -> list[int]:
        for size in range(longest, shortest - 1, -1):
            for at in range(len(text) - size):
                if text[at : at + size] == text[-size:]:
                    return text[at + size : at + size + draft_len]
        return []

    return proposed


def as_llamacpp(draft_len: int, size: int) -> Lookup:
    """What follows the last place of the text's end of ``size`` tokens, of which no part may be the newest token; at
    least ``size`` tokens, and none where the answer lacks one: a token of the target's own always comes after."""

    def proposed(text: list[int], lacking: int) -> list[int]:
        read, draft = text[:-1], []
        if len(read) > size + draft_len + 1:
            places = (at for at in range(len(read) - size - 1, 0, -1) if read[at : at + size] == text[-size:])
            at = next(places, None)
            draft = [] if at is None else read[at + size : at + size + draft_len]
        return draft[: lacking - 1] if len(draft) >= size else []

    return proposed


Text = tuple[list[int], list[int], list[int]]
"""A prompt, an answer, and the tokens that would follow its end."""


def continued(target: str, greedy: Sequence[tuple[list[int], list[int]]], count: int) -> list[Text]:
    """Prompts and greedy answers of a target in fp32, and ``count`` tokens beyond each."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found = []
    for prompt, answer in greedy:
        text = [*prompt, *answer]
        for _ in range(count):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        found.append((prompt, answer, text[-count:]))
    return found


def accepted_length(lookup: Lookup, texts: Sequence[Text], limit: int) -> tuple[float, int]:
    """1 + accepted proposals a draft, those past an answer's end included, and how many drafts there were; of answers
    of at most ``limit`` tokens, each of whose first comes without a draft."""
    drafts = accepted = 0
    for prompt, answer, beyond in texts:
        said, done = [*answer, *beyond], 1
        while done < len(answer):
            draft = lookup([*prompt, *said[:done]], limit - done)
            right = next((i for i, token in enumerate(draft) if token != said[done + i]), len(draft))
            drafts, accepted, done = drafts + bool(draft), accepted + right, done + right + 1
    return 1 + accepted / drafts, drafts

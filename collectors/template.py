"""The target's chat template and tokenizer: conversations → token ids, loss mask and turn spans.

The ids are those of ``tokenizer.apply_chat_template``: the template writes BOS itself, the tokenizer adds none.

Shapes: T tokens of one conversation, n turns.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectors.conversations import REASONING, Conversation
from collectors.rows import Problem
from collectors.thoughts import thought_ranges
from collectors.turns import (
    EncodedPlaces,
    Prefixes,
    Range,
    RewrittenError,
    TokenPlaces,
    find_turns,
    token_spans,
)
from hiddenstore.errors import ConfigError, NotFoundError, StorageError
from hiddenstore.identity import chat_template_sha256, tokenizer_sha256
from schemas.prepared import LossOn, MaskFrom

NOT_STABLE = "not-prefix-stable"
NOTHING_SUPERVISED = "nothing-supervised"

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DETAIL = 200


@dataclass(frozen=True, eq=False)
class Tokenised:
    """input_ids int32 [T]; loss_mask uint8 [T]; spans int32 [n, 3] of (role, start, end), ascending and disjoint.

    ``is_reasoning_lost``: the last answer has reasoning in a member of its own, and the template wrote none of it.
    """

    place: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    spans: np.ndarray
    is_reasoning_lost: bool = False


def tokenizer_digests(target: Any, template: str | None = None) -> tuple[str, str]:
    """(tokenizer_sha256, chat_template_sha256) of a target folder, hub id or loaded tokenizer.

    ``template`` stands in for the tokenizer's own chat template, as ``--template FILE`` does.
    """
    if isinstance(target, str | Path):
        from collectors.target import open_target

        target = open_target(str(target)).tokenizer
    return tokenizer_sha256(target), chat_template_sha256(template or target.chat_template)


def read_template(file: str | Path) -> str:
    """The text of a chat template file.

    Raises:
        NotFoundError: ``template-missing``.
        ConfigError: ``template-invalid`` when it is empty or not UTF-8.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"template {file} does not exist", kind="template-missing") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"template {file} is not UTF-8 text", kind="template-invalid") from error
    except OSError as error:
        raise StorageError(f"template {file}: {error.strerror}", kind="template-unreadable") from error
    if not text.strip():
        raise ConfigError(f"template {file} is empty", kind="template-invalid")
    return text


class ChatTemplate:
    """Renders and tokenises conversations and says what of them is supervised. Sent whole to worker processes."""

    def __init__(
        self, tokenizer: Any, loss_on: LossOn = "assistant", template: str | None = None, think_loss: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self.think_loss = think_loss
        self._given = template
        if template is None and not tokenizer.chat_template:
            raise ConfigError(
                "the target's tokenizer has no chat template",
                kind="target-no-chat-template",
                hint="give one: --template FILE",
            )
        self.is_tagged = bool(_GENERATION_TAG.search(self.text_for(None)))
        self._special = dict(tokenizer.special_tokens_map)
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.end_tokens = tuple(token for token in {*tokenizer.all_special_tokens, *added} if token)

    @property
    def mask_from(self) -> MaskFrom:
        if self.loss_on == "all":
            return "all"
        return "generation-tags" if self.is_tagged else "prefixes"

    @property
    def digests(self) -> tuple[str, str]:
        return tokenizer_digests(self.tokenizer, self._given)

    def text_for(self, tools: list[dict[str, Any]] | None) -> str:
        """The template's text; some tokenizers have another one for conversations with tools."""
        return self._given if self._given is not None else str(self.tokenizer.get_chat_template(None, tools))

    def render(self, conversation: Conversation, count: int | None = None, prompt: bool = False) -> str:
        """Text of the first ``count`` messages, ``prompt`` adds the generation prompt. Raises what templates raise."""
        return self.rendered(conversation, count, prompt)[0]

    def rendered(
        self, conversation: Conversation, count: int | None = None, prompt: bool = False
    ) -> tuple[str, list[Range]]:
        """The same text, and the ranges of it within generation tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, ranges = render_jinja_template(
            conversations=[conversation.messages[:count]],
            tools=conversation.tools,
            chat_template=self.text_for(conversation.tools),
            return_assistant_tokens_mask=self.is_tagged,
            add_generation_prompt=prompt,
            **self._special,
        )
        return texts[0], [tuple(pair) for pair in ranges[0]] if ranges else []

    def prefixes(self, conversation: Conversation, text: str) -> Prefixes:
        """The conversation's text beside that of its first messages alone."""

        def render(count: int, prompt: bool) -> str | None:
            try:
                return self.render(conversation, count, prompt)
            except template_errors():
                return None

        return Prefixes(text, conversation.messages, render)

    def tokenise(self, conversations: Sequence[Conversation]) -> list[Tokenised | Problem]:
        """One result per conversation, in order."""
        found: list[Tokenised | Problem | None] = []
        ready: list[tuple[int, Conversation, str, list[Range]]] = []
        for conversation in conversations:
            try:
                text, generated = self.rendered(conversation)
                text.encode("utf-8")
            except template_errors() as error:
                detail = " ".join((str(error) or type(error).__name__).split())[:_DETAIL]
                found.append(Problem(conversation.place, "template-refused", detail))
                continue
            ready.append((len(found), conversation, text, generated))
            found.append(None)
        encodings = self._encode([text for _, _, text, _ in ready])
        for (slot, conversation, text, generated), (ids, places) in zip(ready, encodings, strict=True):
            found[slot] = self._located(conversation, text, generated, ids, places)
        return [result for result in found if result is not None]

    def _encode(self, texts: list[str]) -> list[tuple[list[int], TokenPlaces]]:
        if not texts:
            return []
        is_fast = bool(self.tokenizer.is_fast)
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=is_fast,
            verbose=False,
        )
        if is_fast:
            places = [TokenPlaces.from_offsets(offsets) for offsets in encoded["offset_mapping"]]
            return list(zip(encoded["input_ids"], places, strict=True))

        def encode(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        return [(ids, EncodedPlaces(text, ids, encode)) for text, ids in zip(texts, encoded["input_ids"], strict=True)]

    def _located(
        self, conversation: Conversation, text: str, generated: list[Range], ids: list[int], places: TokenPlaces
    ) -> Tokenised | Problem:
        prefixes = self.prefixes(conversation, text)
        asked = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        try:
            answers, supervised = self._answers(prefixes, asked, generated)
        except RewrittenError as error:
            return Problem(conversation.place, NOT_STABLE, str(error))
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in [(0, len(text))] if self.loss_on == "all" else supervised:
            mask[slice(*places.span(start, end))] = 1
        if not self.think_loss:
            for start, end in thought_ranges(text, list(answers.values()) if self.loss_on == "all" else supervised):
                mask[slice(*places.span(start, end))] = 0
        if not mask.any():
            return Problem(conversation.place, NOTHING_SUPERVISED, "no token of it is supervised")
        spans = token_spans(find_turns(prefixes, answers), places)
        is_lost = _is_reasoning_lost(conversation, text)
        return Tokenised(conversation.place, np.asarray(ids, dtype=np.int32), mask, spans, is_lost)

    def _answers(
        self, prefixes: Prefixes, asked: list[int], generated: list[Range]
    ) -> tuple[dict[int, Range], list[Range]]:
        """Text ranges of the assistant messages by index, and those that ``loss_on`` supervises."""
        if self.is_tagged:
            return self._tagged_answers(prefixes, asked, generated)
        answers: dict[int, Range] = {}
        for index in asked:
            try:
                answers[index] = prefixes.answer(index, self.end_tokens)
            except RewrittenError:
                if self.loss_on == "assistant" or (self.loss_on == "last-turn" and index == asked[-1]):
                    raise
        ranges = [answers[index] for index in asked if index in answers]
        return answers, ranges[-1:] if self.loss_on == "last-turn" else ranges

    def _tagged_answers(
        self, prefixes: Prefixes, asked: list[int], generated: list[Range]
    ) -> tuple[dict[int, Range], list[Range]]:
        generated = [(start, end) for start, end in generated if end > start]
        if len(generated) == len(asked):
            answers = dict(zip(asked, generated, strict=True))
            return answers, generated[-1:] if self.loss_on == "last-turn" else generated
        # Several tags in a message, or messages without: the ends of the messages tell which is whose.
        answers = {}
        for index in asked:
            start, end = prefixes.end(index), prefixes.end(index + 1)
            inside = [pair for pair in generated if start is not None and end is not None and start <= pair[0] < end]
            if inside:
                answers[index] = (inside[0][0], inside[-1][1])
        if self.loss_on != "last-turn":
            return answers, generated
        last = answers.get(asked[-1]) if asked else None
        return answers, [pair for pair in generated if last and last[0] <= pair[0] < last[1]] or generated[-1:]


def _is_reasoning_lost(conversation: Conversation, text: str) -> bool:
    """Earlier reasoning is left out by design of most templates; that of the last answer is what the target wrote."""
    last = next((message for message in reversed(conversation.messages) if message["role"] == "assistant"), {})
    thoughts = [str(last[name]).strip() for name in REASONING if last.get(name)]
    return any(thoughts) and not any(thought and thought in text for thought in thoughts)


def template_errors() -> tuple[type[Exception], ...]:
    """What rendering may raise: the template's own refusals, and Python's for expressions its data does not suit."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

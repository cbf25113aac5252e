"""The target's chat template and tokenizer: conversations → token ids, loss mask and turn spans.

A turn is a range of the rendered text and of its tokens. The ids are those of ``tokenizer.apply_chat_template``: the
template writes BOS itself, the tokenizer adds none. What the target itself writes is found by the ``{% generation %}``
tags of the template, or by comparing the whole text with that of the first messages alone, which must be a prefix of
it (turns.py); a template that strips old thoughts has none.

Shapes: T tokens of one conversation, n turns. Text ranges [start, end) count characters, token spans tokens.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from collectors.tokenize.thoughts import (
    THINK_TAGS,
    are_words_lost,
    is_reasoning_lost,
    read_length,
    reasoning_ranges,
    stated_reasoning_ranges,
)
from collectors.tokenize.turns import (
    Prefixes,
    Range,
    RewrittenError,
    Spans,
    answer_length,
    find_turns,
    spans_by_encoding,
    spans_by_offset,
    token_spans,
)
from hiddenstore.conversation import Conversation, Problem
from hiddenstore.conversation.messages import (
    REASONING,
    Message,
    has_open_seam,
    with_known_reasoning,
    without_seam,
)
from hiddenstore.errors import ConfigError, Kind, NotFoundError, StorageError
from hiddenstore.targets.identity import chat_template_sha256, tokenizer_sha256
from hiddenstore.targets.rendering import RENDER_ERRORS, date_of, dated, limited_rendering, reason_of, template_of
from schemas.manifest import ImageEntry
from schemas.prepared import LossOn, MaskFrom

_THOUGHT, _WORDS = "A-thought-of-two", "Words-of-four"

NOT_STABLE = "not-prefix-stable"
NOTHING_SUPERVISED = "nothing-supervised"
TOOL_CALLS_LOST = "tool-calls-lost"
CUT_IN_THOUGHT = "cut-in-thought"
WEIGHT_UNPLACED = "weight-unplaced"

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, eq=False)
class Tokenised:
    """input_ids int32 [T]; loss_mask uint8 [T]; spans int32 [n, 3] of (role, start, end), ascending and disjoint.

    ``is_reasoning_lost``: the last answer has reasoning in a member of its own, and the template wrote none of it.
    ``are_words_lost``: of other words of an answer, such as those beside a tool call, the template wrote none.
    ``is_end_unlearned``: no token that ends the last answer is part of it. ``is_cut``: it was longer.
    ``images`` with the bytes of each in ``image_files``: ascending.
    """

    location: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    spans: np.ndarray
    is_reasoning_lost: bool = False
    is_end_unlearned: bool = False
    are_words_lost: bool = False
    is_cut: bool = False
    images: tuple[ImageEntry, ...] = ()
    image_files: tuple[bytes, ...] = ()


def read_template(file: str | Path | None) -> str | None:
    """The text of a template file, None for none; NotFoundError ``path-missing``, ConfigError ``template-invalid``."""
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"template {file} does not exist", kind=Kind.PATH_MISSING) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"template {file} is not UTF-8 text", kind=Kind.TEMPLATE_INVALID) from error
    except OSError as error:
        raise StorageError(f"template {file}: {error.strerror}", kind=Kind.IO_ERROR) from error
    if not text.strip():
        raise ConfigError(f"template {file} is empty", kind=Kind.TEMPLATE_INVALID)
    return text


def _with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls give their arguments as JSON text, which a row's may have been."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if not isinstance(function, dict) or isinstance(function.get("arguments"), str | None):
            return call
        return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


class ChatTemplate:
    """Renders and tokenises conversations and says what of them is supervised. Pickled to worker processes. ``end_ids``
    end an answer of the target; ``date`` is the day that is today for a template that asks, None for others. Raises
    ConfigError: ``template-missing``, ``template-invalid``."""

    def __init__(
        self,
        tokenizer: Any,
        loss_on: LossOn = "assistant",
        template: str | None = None,
        think_loss: bool = True,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self.think_loss = think_loss
        self._template = template
        if template is None and not tokenizer.chat_template:
            problem = "the target's tokenizer has no chat template"
            raise ConfigError(problem, kind=Kind.TEMPLATE_MISSING, hint="give one: --template FILE")
        own = tokenizer.chat_template
        texts = [template] if template is not None else own.values() if isinstance(own, dict) else [own]
        self.date = next((date for date in map(date_of, texts) if date is not None), None)
        self.is_tagged = bool(_GENERATION_TAG.search(self.text_for(None)))
        self._special = dict(tokenizer.special_tokens_map)
        self._seams: dict[str, tuple[str, str]] = {}
        self._headers: dict[bytes, str] = {}
        decoder = tokenizer.added_tokens_decoder
        added = [token.content for token in decoder.values() if token.special]
        self._own_ends = tuple(decoder[one].content for one in end_ids if one in decoder and decoder[one].content)
        self.end_tokens = tuple(token for token in {*tokenizer.all_special_tokens, *added} if token)

    @property
    def mask_from(self) -> MaskFrom:
        if self.loss_on == "all":
            return "all"
        return "generation-tags" if self.is_tagged else "prefixes"

    @property
    def digests(self) -> tuple[str, str]:
        """(tokenizer_sha256, chat_template_sha256)."""
        return tokenizer_sha256(self.tokenizer), chat_template_sha256(self._template or self.tokenizer.chat_template)

    def answer_length(self, written: str) -> int:
        """How many characters the target writes of a text that begins behind its prompt and that the template ended."""
        return answer_length(written, self.end_tokens, self._own_ends)

    def text_for(self, tools: list[dict[str, Any]] | None) -> str:
        """The template's text, with its date; some tokenizers have another one for conversations with tools."""
        return dated(self._template) if self._template is not None else template_of(self.tokenizer, tools)

    def render(
        self, conversation: Conversation, count: int | None = None, prompt: bool = False
    ) -> tuple[str, list[Range]]:
        """Text of the first ``count`` messages, ``prompt``: and its generation prompt; ranges in generation tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.text_for(conversation.tools)
        render = partial(
            render_jinja_template,
            tools=conversation.tools,
            chat_template=template,
            return_assistant_tokens_mask=self.is_tagged,
            add_generation_prompt=prompt,
            **{**self._special, **conversation.template_kwargs},
        )
        messages = with_known_reasoning(conversation.messages[:count], template)
        if has_open_seam(messages):
            messages = without_seam(messages, *self._seam(conversation.template_kwargs))
        with limited_rendering(conversation.location):
            try:
                texts, ranges = render(conversations=[messages])
            except TypeError:
                # DeepSeek's templates join arguments to other text, most others take them for an object.
                if (texted := _with_arguments_as_text(messages)) == messages:
                    raise
                texts, ranges = render(conversations=[texted])
        return texts[0], [tuple(pair) for pair in ranges[0]] if ranges else []

    def _seam(self, kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """White space that the template writes between a thought and what closes it, and between that and the words;
        none of a template that writes no thoughts."""
        key = json.dumps(kwargs, sort_keys=True, ensure_ascii=False)
        if key not in self._seams:
            answer = {"role": "assistant", "content": _WORDS, "reasoning_content": _THOUGHT}
            probe = Conversation("probe", [{"role": "user", "content": "?"}, answer], template_kwargs=kwargs)
            text = ""
            with suppress(*RENDER_ERRORS):
                text, _ = self.render(probe)
            seam, words, _ = text.partition(_THOUGHT)[2].partition(_WORDS)
            tag = seam.strip() if words else ""
            before, after = seam.split(tag, 1) if tag else ("", "")
            self._seams[key] = before, after
        return self._seams[key]

    def _header(self, conversation: Conversation) -> str:
        """What the template writes between a question and its answer; empty where that is white space or not
        revealed."""
        beside = [conversation.tools, conversation.template_kwargs]
        # Digests, for each conversation may have tools of its own.
        key = hashlib.blake2b(json.dumps(beside, sort_keys=True).encode(), digest_size=16).digest()
        if key not in self._headers:
            question: Message = {"role": "user", "content": "What is two and two?"}
            probe, alone, prompted = replace(conversation, messages=[question]), "", ""
            with suppress(*RENDER_ERRORS):
                (alone, _), (prompted, _) = self.render(probe), self.render(probe, prompt=True)
            header = prompted[len(alone) :] if prompted.startswith(alone) else ""
            self._headers[key] = header if header.strip() else ""
        return self._headers[key]

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids up to where the next answer begins. Raises as rendering does: one of ``RENDER_ERRORS``."""
        return self._ids(self.render(conversation, prompt=True)[0])

    def prefixes(self, conversation: Conversation, text: str) -> Prefixes:
        """The conversation's text beside that of its first messages alone."""

        def render(messages: Sequence[Message], prompt: bool) -> str | None:
            try:
                return self.render(replace(conversation, messages=list(messages)), prompt=prompt)[0]
            except RENDER_ERRORS:
                return None

        header = partial(self._header, conversation)
        return Prefixes(text, conversation.messages, render, self.answer_length, header)

    def tokenise(self, conversations: Sequence[Conversation]) -> list[Tokenised | Problem]:
        """One result per conversation, in order."""
        rendered = [self._rendered(conversation) for conversation in conversations]
        encodings = iter(self._encode([item[0] for item in rendered if not isinstance(item, Problem)]))
        return [
            item if isinstance(item, Problem) else self._masked(conversation, *item, *next(encodings))
            for conversation, item in zip(conversations, rendered, strict=True)
        ]

    def _rendered(self, conversation: Conversation) -> tuple[str, list[Range]] | Problem:
        try:
            if self._is_cut_in_thought(conversation):
                detail = "its thoughts met the limit; regenerate with a larger one"
                return Problem(conversation.location, CUT_IN_THOUGHT, detail)
            text, tagged = self.render(conversation)
            text.encode("utf-8")
            if len(conversation.messages) - 1 in conversation.cut:
                end = self._words_end(text, conversation.messages[-1], (0, len(text)))
                text, tagged = text[:end], [(start, min(stop, end)) for start, stop in tagged if start < end]
        except RENDER_ERRORS as error:
            return Problem(conversation.location, "template-refused", reason_of(error))
        return text, tagged

    def _is_cut_in_thought(self, conversation: Conversation) -> bool:
        """Whether the last answer ends inside its thoughts: templates take those for its words, and close thoughts of
        their own before them."""
        last, message = len(conversation.messages) - 1, conversation.messages[-1]
        content = message.get("content")
        # Where thoughts stand in a member of their own, the text is what followed them.
        if last not in conversation.cut or not isinstance(content, str) or any(message.get(name) for name in REASONING):
            return False
        tags = [pair for pair in THINK_TAGS if pair[1] not in content]
        if any(content.lstrip().startswith(opening) for opening, _ in tags):
            return True
        prompt = self.render(conversation, last, prompt=True)[0].rstrip() if last else ""
        return bool(content.strip()) and prompt.endswith(tuple(opening for opening, _ in tags))

    def _encode(self, texts: list[str]) -> list[tuple[list[int], Spans]]:
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
            return list(zip(encoded["input_ids"], map(spans_by_offset, encoded["offset_mapping"]), strict=True))
        pairs = zip(texts, encoded["input_ids"], strict=True)
        return [(ids, spans_by_encoding(text, ids, self._ids)) for text, ids in pairs]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _masked(
        self, conversation: Conversation, text: str, tagged: list[Range], ids: list[int], spans_of: Spans
    ) -> Tokenised | Problem:
        prefixes = self.prefixes(conversation, text)
        try:
            answers, supervised = self._answers(prefixes, tagged, conversation.untaught)
        except RewrittenError as error:
            return Problem(conversation.location, NOT_STABLE, str(error))
        if lost := self._lost(conversation, prefixes, answers):
            return Problem(conversation.location, *lost)
        for index, end in self._next_headers(conversation, prefixes, answers).items():
            if any(stop == answers[index][1] for _, stop in supervised):
                supervised = [*supervised, (answers[index][1], end)]
            answers[index] = (answers[index][0], end)
        if unplaced := self._unplaced(conversation, prefixes, answers):
            return Problem(conversation.location, WEIGHT_UNPLACED, f"where message {unplaced} stands is not revealed")
        ends = [answers.pop(index) for index in sorted(conversation.untaught & answers.keys())]
        is_unlearned = self._is_end_unlearned(conversation, prefixes, answers)
        for index in sorted(conversation.cut & answers.keys()):
            start, end = answers[index]
            answers[index] = (start, self._words_end(text, conversation.messages[index], (start, end)))
            ends.append((answers[index][1], end))
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in [(0, len(text))] if self.loss_on == "all" else supervised:
            mask[slice(*spans_of(start, end))] = 1
        if not self.think_loss:
            thoughts = reasoning_ranges(text, list(answers.values()) if self.loss_on == "all" else supervised)
            thoughts += stated_reasoning_ranges(conversation.messages, text, answers, thoughts)
            for start, end in thoughts:
                mask[slice(*spans_of(start, end))] = 0
        for start, end in ends:
            mask[slice(*spans_of(start, end))] = 0
        if not mask.any():
            return Problem(conversation.location, NOTHING_SUPERVISED, "no token of it is supervised")
        spans = token_spans(find_turns(prefixes, answers), spans_of)
        losses = is_reasoning_lost(conversation, text), is_unlearned, are_words_lost(conversation, prefixes.message)
        return Tokenised(conversation.location, np.asarray(ids, dtype=np.int32), mask, spans, *losses)

    def _next_headers(
        self, conversation: Conversation, prefixes: Prefixes, answers: dict[int, Range]
    ) -> dict[int, int]:
        """Where answers end whose end the template writes as the first token of the next turn, as GLM-4's does: it is
        the target's own."""
        ends = {}
        for index, (start, end) in answers.items():
            if index in conversation.cut or prefixes.text[start:end].endswith(self.end_tokens):
                continue
            header = next((token for token in self._own_ends if prefixes.text.startswith(token, end)), None)
            if header is not None and prefixes.end(index + 1) == end:
                ends[index] = end + len(header)
        return ends

    def _unplaced(self, conversation: Conversation, prefixes: Prefixes, answers: dict[int, Range]) -> int | None:
        """The number of a message of weight 0 that might be supervised, for its range is not known."""
        if self.loss_on != "all" and not self.is_tagged:
            return None
        indices = [index for index, message in enumerate(prefixes.messages) if message["role"] == "assistant"]
        likely = indices[-1:] if self.loss_on == "last-turn" else indices
        return next((index + 1 for index in likely if index in conversation.untaught - answers.keys()), None)

    def _is_end_unlearned(self, conversation: Conversation, prefixes: Prefixes, answers: dict[int, Range]) -> bool:
        """Whether the conversation ends with an answer that ends with no special token. None is added to it: the ids
        stay the template's, and which one the target wrote of several is not in the data."""
        last = len(conversation.messages) - 1
        if last not in answers or last in conversation.cut:
            return False
        return not prefixes.text[slice(*answers[last])].rstrip().endswith(self.end_tokens)

    def _words_end(self, text: str, message: Message, within: Range) -> int:
        """Where the words of an answer end in its range of the text: before what the template ends it with."""
        start, end = within
        words = text[start:end].rstrip()
        while token := next((token for token in self.end_tokens if words.endswith(token)), None):
            words = words.removesuffix(token).rstrip()
        content = message["content"].rstrip()
        at = words.rfind(content) if content else -1
        return start + (len(words) if at < 0 else at + len(content))

    def _lost(
        self, conversation: Conversation, prefixes: Prefixes, answers: dict[int, Range]
    ) -> tuple[str, str] | None:
        """What the target wrote and the template does not: a tool call, or all of an answer; reason and detail."""
        for index, message in enumerate(conversation.messages):
            calls, content = message.get("tool_calls") or [], message["content"]
            content = content.strip() if isinstance(content, str) else ""
            if calls:
                written = prefixes.message(index)
                # Words about a tool are no call of it.
                for words in (content, *(str(message[name]).strip() for name in REASONING if message.get(name))):
                    written = written.replace(words, "", 1) if words else written
                names = [str(call.get("function", call).get("name") or "") for call in calls]
                missing = []
                for name in names:
                    missing += [name] if name not in written else []
                    written = written.replace(name, "", 1)
                if missing:
                    return TOOL_CALLS_LOST, f"the template writes no call of {', '.join(missing)}"
            written = prefixes.text[slice(*answers.get(index, (0, 0)))]
            if index in answers and not (content and content in written) and (content or calls):
                for token in (*self.end_tokens, *chain.from_iterable(THINK_TAGS)):
                    written = written.replace(token, "")
                if not written.strip():
                    return "empty-answer", f"the template writes nothing of message {index + 1}"
        return None

    def _answers(
        self, prefixes: Prefixes, tagged: list[Range], untaught: frozenset[int]
    ) -> tuple[dict[int, Range], list[Range]]:
        """Text ranges of the assistant messages by index, and those that ``loss_on`` supervises."""
        indices = [index for index, message in enumerate(prefixes.messages) if message["role"] == "assistant"]
        if self.is_tagged:
            return self._tagged_answers(prefixes, indices, [(start, end) for start, end in tagged if end > start])
        answers: dict[int, Range] = {}
        for index in indices:
            try:
                answers[index] = prefixes.answer(index)
            except RewrittenError:
                if index in untaught:
                    continue
                if self.loss_on == "assistant" or (self.loss_on == "last-turn" and index == indices[-1]):
                    raise
        if self.loss_on == "last-turn":
            return answers, [answers[index] for index in indices[-1:] if index in answers]
        return answers, list(answers.values())

    def _tagged_answers(
        self, prefixes: Prefixes, indices: list[int], tagged: list[Range]
    ) -> tuple[dict[int, Range], list[Range]]:
        if len(tagged) == len(indices):
            tagged = [self._without_header(prefixes, *pair) for pair in zip(indices, tagged, strict=True)]
            answers = dict(zip(indices, tagged, strict=True))
            return answers, tagged[-1:] if self.loss_on == "last-turn" else tagged
        # Several tags in a message, or messages without: the ends of the messages tell which is whose.
        answers = {}
        for index in indices:
            start, end = prefixes.end(index), prefixes.end(index + 1)
            inside = [pair for pair in tagged if start is not None and end is not None and start <= pair[0] < end]
            if inside:
                answers[index] = (inside[0][0], inside[-1][1])
        if self.loss_on != "last-turn":
            return answers, tagged
        last = answers.get(indices[-1]) if indices else None
        return answers, [pair for pair in tagged if last and last[0] <= pair[0] < last[1]] or tagged[-1:]

    def _without_header(self, prefixes: Prefixes, index: int, tagged: Range) -> Range:
        """What the target writes of a tagged range, which SmolLM3's template begins with the header of the answer."""
        start, end = tagged
        header_end = read_length(prefixes.prompt(index) or "", prefixes.text)
        if start < header_end < end:
            start = header_end
        return start, start + self.answer_length(prefixes.text[start:end])

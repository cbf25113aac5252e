"""One conversation whose answers are written anew, in order, each after the new ones before it."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from hiddenstore.conversation import TEMPLATE_KWARGS, TOOLS_COLUMN, Conversation
from hiddenstore.conversation.messages import CUT, FINISH_REASON, WEIGHT, Message


@dataclass(frozen=True)
class Reply:
    """What became of one answer.

    ``tokens`` were generated (0: the server did not say); ``is_cut``: a limit, a stop string or the server ended them.
    ``drop`` is the reason why its conversation is left out, ``detail`` the words of whoever refused.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tokens: int = 0
    is_cut: bool = False
    drop: str | None = None
    detail: str | None = None

    @property
    def is_answer(self) -> bool:
        """Whether the target wrote anything."""
        return self.drop not in ("prompt-too-long", "refused", "server-failed")

    def document(self) -> dict[str, Any]:
        """Its members that say something, as JSON holds them."""
        members = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return {key: value for key, value in members.items() if value not in (None, (), "", 0, False)}

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Reply":
        """The reply of a ``document``."""
        members = {key: document[key] for key in cls.__dataclass_fields__ if key in document}
        return cls(**{**members, "tool_calls": tuple(members.get("tool_calls", ()))})


NO_QUESTION = Reply(drop="refused", detail="it begins with an answer, before which nothing was said")
"""What becomes of an answer to nothing: no template and no server takes a conversation without a message."""


@dataclass
class Rewrite:
    """Conversation ``number``; ``is_short``: the target called other tools than the recorded results answer;
    ``template_kwargs``: what its chat template is given besides."""

    number: int
    digest: str
    done: list[Message]
    todo: list[Message]
    tools: list[dict[str, Any]] | None
    turn: int = 0
    drop: str | None = None
    is_short: bool = False
    replies: list[Reply] = field(default_factory=list)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        number: int,
        conversation: Conversation,
        system: str | None,
        turns: Literal["all", "last"] = "all",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Rewrite":
        """Answers are rewritten, ``all`` or the ``last`` one after those before it as they are; a conversation without
        any gets one after every user turn, or at its end. ``template_kwargs`` win over those of the conversation; both
        are part of the row that is written."""
        messages = list(conversation.messages)
        if turns == "last":
            cut, untaught = conversation.cut, conversation.untaught
            messages = [
                {**one, **({FINISH_REASON: CUT} if i in cut else {}), **({WEIGHT: 0} if i in untaught else {})}
                for i, one in enumerate(messages)
            ]
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        if not conversation.has_answer:
            slot: Message = {"role": "assistant", "content": ""}
            pairs = [(message, slot) if message["role"] == "user" else (message,) for message in messages]
            messages = list(chain.from_iterable(pairs)) if turns == "all" else [*messages, slot]
        kwargs = {**conversation.template_kwargs, **(template_kwargs or {})}
        # Those of all conversations are a setting of the run, which is compared by itself.
        beside = [conversation.tools, *([kwargs] if conversation.template_kwargs else [])]
        key = json.dumps([messages, *beside], sort_keys=True, ensure_ascii=False).encode()
        digest = hashlib.blake2b(key, digest_size=8).hexdigest()
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        kept = last if turns == "last" else 0
        return cls(number, digest, messages[:kept], messages[kept:], conversation.tools, template_kwargs=kwargs)

    @property
    def so_far(self) -> Conversation:
        """What the next answer follows."""
        location = f"conversation {self.number + 1}"
        return Conversation(location, self.done, self.tools, template_kwargs=self.template_kwargs)

    @staticmethod
    def has_slot(conversation: Conversation) -> bool:
        """Whether anything in a conversation can be answered."""
        return any(message["role"] in ("assistant", "user") for message in conversation.messages)

    def advance(self) -> bool:
        """Move up to the next answer; False when none is left (what follows the last answer is dropped)."""
        while self.todo and self.todo[0]["role"] != "assistant":
            self.done.append(self.todo.pop(0))
        return bool(self.todo)

    def take(self, reply: Reply) -> None:
        """Put the next answer in its place."""
        recorded = self.todo.pop(0)
        self.turn += 1
        self.replies.append(reply)
        if reply.drop is not None:
            self.drop, self.todo = reply.drop, []
            return
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = list(reply.tool_calls)
        if reply.is_cut:
            message[FINISH_REASON] = CUT
        self.done.append(message)
        before = recorded.get("tool_calls") or []
        if _names(before) != _names(reply.tool_calls):
            self.is_short, self.todo = True, []
        elif before:
            self._answer_to(before, reply.tool_calls)

    def row(self) -> dict[str, Any]:
        """The rewritten conversation, up to its last answer."""
        last = max(i for i, message in enumerate(self.done) if message["role"] == "assistant")
        beside = {TOOLS_COLUMN: self.tools, TEMPLATE_KWARGS: dict(self.template_kwargs)}
        return {"messages": self.done[: last + 1]} | {name: value for name, value in beside.items() if value}

    def _answer_to(self, before: list[dict[str, Any]], now: tuple[dict[str, Any], ...]) -> None:
        """The recorded results answer the new calls: they carry the ids of those."""
        ids = {call.get("id"): other.get("id") for call, other in zip(before, now, strict=True) if call.get("id")}
        for at, message in enumerate(self.todo):
            if message["role"] != "tool":
                return
            new = ids.get(message.get("tool_call_id"), now[at].get("id") if at < len(now) else None)
            self.todo[at] = {**message, "tool_call_id": new} if new else message


def _names(calls: Any) -> list[str]:
    return [str(call.get("function", call).get("name")) for call in calls]


Recorded = Callable[[Rewrite], list[Reply]]
Take = Callable[[Rewrite, Reply], None]
Beat = Callable[[int, int], None]
"""Gets the tokens drawn, and those of prompts read, since it was called last; often; may raise to stop."""
AnswerAll = Callable[[Iterator[Rewrite], Recorded, Take, Beat], None]
"""Answers every turn of every conversation: those recorded first; ``Take`` gets each reply."""

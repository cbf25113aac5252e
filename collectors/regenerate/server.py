"""An OpenAI-compatible server answers: ``concurrency`` conversations at a time, each turn after turn.

Spoken here is ``POST /v1/chat/completions`` (raw: ``/v1/completions``) and ``GET /v1/models`` as vLLM, SGLang,
TensorRT-LLM and OpenAI serve them, with the reasoning of vLLM's and SGLang's reasoning parsers (``reasoning_content``,
newer ``reasoning``).
"""

import hashlib
import json
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from collectors.regenerate.answers import AnswersFolder
from collectors.regenerate.options import RegenerateOptions
from collectors.regenerate.rewrite import NO_QUESTION, AnswerAll, Beat, Recorded, Reply, Rewrite, Take
from hiddenstore.console.text import plural
from hiddenstore.conversation import TEMPLATE_KWARGS
from hiddenstore.conversation.messages import Message, for_server
from hiddenstore.errors import CaptureError, ConfigError, HiddenstoreError, Kind, StorageError
from hiddenstore.records import LOOP_SHARE, repeated_share
from hiddenstore.servers.http import HttpClient, RefusedError, ServerAccess

REFUSALS_WITHOUT_ANSWER = 10
_POLL_S = 0.2
_WRONG_ACCESS = frozenset({401, 403, 404, 405})
_MOST_TOKENS = 1 << 31
# Why an answer ended that is whole, or dropped for its filter; in the words of OpenAI's servers and of Hugging Face's.
_ENDED = (None, "", "stop", "tool_calls", "function_call", "content_filter", "eos", "eos_token", "end_turn")
# Where vLLM and SGLang say what ended it: the id or the text of a token of the target's own, or a stop string.
_STOPPED_BY = ("stop_reason", "matched_stop")
# As targets have them that end a turn; ``</answer>`` is a stop string.
_END_TOKEN = re.compile(r"<[^/<>][^<>]*>|</s>")


class UnansweredError(Exception):
    """A request failed as often as it was tried, in ways that another try may mend."""


class ChatServer:
    """Used by many threads at once. Raises what HttpClient raises."""

    def __init__(self, access: ServerAccess, options: RegenerateOptions) -> None:
        self.model, self._options = options.model, options
        self._client = HttpClient(access)

    def only_model(self) -> str:
        """The name of the one model it serves; ConfigError ``model-unclear`` where it serves none or several."""
        models = self._client.get("/v1/models", lambda document: [str(model["id"]) for model in document["data"]])
        if len(models) != 1:
            problem = f"{self._client.access.url} serves {', '.join(models) or 'nothing'}; which one is the target?"
            raise ConfigError(
                problem, kind=Kind.MODEL_UNCLEAR, hint=shlex.join(["--model", models[0]]) if models else None
            )
        return models[0]

    def reply(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        seed: int | None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The next answer of a conversation; ``refused`` where the server takes other requests but not this one. Raises
        UnansweredError: as often as was tried. ConfigError: ``server-refused``: wrong key, model or address."""
        options = self._options
        request: dict[str, Any] = {
            "model": self.model,
            **({"prompt": "".join(message["content"] for message in messages)} if options.raw else {}),
            **({} if options.raw else {"messages": [for_server(message) for message in messages]}),
            "temperature": options.temperature,
            "max_tokens": options.limit,
        }
        if seed is not None:
            request["seed"] = seed
        if options.top_p is not None:
            request["top_p"] = options.top_p
        if tools and not options.raw:
            request["tools"] = tools
        # They hold those of the options already.
        given = {TEMPLATE_KWARGS: dict(template_kwargs)} if template_kwargs and not options.raw else {}
        path, read = ("/v1/completions", _read_text) if options.raw else ("/v1/chat/completions", _read_reply)
        try:
            return self._client.post(path, request | dict(options.extra) | given, read)
        except RefusedError as error:
            if error.status in _WRONG_ACCESS or error.status < 400:
                raise
            return Reply(drop="refused", detail=str(error))
        except (StorageError, CaptureError) as error:
            raise UnansweredError(str(error)) from error

    def close(self) -> None:
        """Close its connections; requests under way in other threads fail."""
        self._client.close()


def _read_text(document: Any) -> Reply:
    """The continuation of a text, which ``/v1/completions`` gives as ``text``."""
    choice = document["choices"][0]
    message = {"content": choice["text"]}
    return _read_reply({**document, "choices": [{**choice, "message": message}]})


def _read_reply(document: Any) -> Reply:
    choice = document["choices"][0]
    message, finish = choice["message"], choice.get("finish_reason")
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = "".join(piece.get("text", "") for piece in text)
    calls = tuple(message.get("tool_calls") or ())
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    tokens = int((document.get("usage") or {}).get("completion_tokens") or 0)
    _require_usable(reasoning, calls, tokens)
    # vLLM gives them when asked with return_token_ids; the last one of a finished answer is its end token.
    # Without the server's token ids, loops show in words as numbers too.
    numbers: dict[str, int] = {}
    ids = choice.get("token_ids") or [numbers.setdefault(word, len(numbers)) for word in text.split()]
    words = ids[:-1] if finish == "stop" and choice.get("token_ids") else ids
    drop = None
    if finish == "content_filter":
        drop = "content-filter"
    elif not text.strip() and not calls:
        drop = "empty"
    elif repeated_share(words) > LOOP_SHARE:
        drop = "looping"
    is_cut = finish not in _ENDED or any(_is_stop_string(choice.get(name)) for name in _STOPPED_BY)
    reply = Reply(text, reasoning, calls, tokens, is_cut, drop)
    # A lone surrogate cannot be written; it must fail here, as this answer's error.
    json.dumps(reply.document(), ensure_ascii=False).encode()
    return reply


def _is_stop_string(stop: Any) -> bool:
    return isinstance(stop, str) and stop not in _ENDED and _END_TOKEN.fullmatch(stop) is None


def _require_usable(reasoning: Any, calls: tuple[Any, ...], tokens: int) -> None:
    """TypeError or ValueError for members of an answer that nothing downstream can take."""
    if reasoning is not None and not isinstance(reasoning, str):
        raise TypeError("reasoning is no text")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function["name"], str) or not isinstance(call.get("id"), str | None):
            raise TypeError("a tool call names no function, or itself otherwise than by text")
    if not 0 <= tokens < _MOST_TOKENS:
        raise ValueError("completion_tokens is no count")


class _ServerRun:
    """A conversation given up is tried once more at the end, and left out if the budget of failures has room for it."""

    def __init__(self, server: ChatServer, options: RegenerateOptions, recorded: Recorded, take: Take) -> None:
        self._server, self._options, self._recorded, self._take = server, options, recorded, take
        self._folder = AnswersFolder(Path(options.out), options.shard[1])
        self._lock, self._input_lock = threading.Lock(), threading.Lock()
        self._failed: list[tuple[Rewrite, UnansweredError]] = []
        # Refusals before the first answer: the request is wrong, or a few conversations are.
        self._refused: list[tuple[Rewrite, Reply]] = []
        self._conversations = self._answers = 0
        self._first_failure: UnansweredError | None = None
        self._error: BaseException | None = None
        self._is_over = False

    def answer_all(self, rewrites: Iterator[Rewrite], beat: Beat) -> None:
        """Answer every turn of every conversation; ``beat`` may raise to stop. Raises StorageError: ``server-failing``:
        the budget is spent, or nothing was answered; ConfigError: ``server-refused``: wrong key or model, or every
        request was refused."""
        try:
            self._pass(rewrites, beat, last=False)
            again, self._failed = [rewrite for rewrite, _ in self._failed], []
            if again:
                self._pass(iter(again), beat, last=True)
            share = self._options.max_failure_share
            if self._failed and (not self._answers or len(self._failed) > share * self._conversations):
                raise self._failing(f"more than max_failure_share={share:g} of {self._conversations}")
            # What no shard has an answer under is wrong; else these few conversations are.
            if self._refused and not self._answers and not self._folder.holds_answers():
                raise _all_refused(self._refused[-1][1])
            failures = [(rewrite, Reply(drop="server-failed", detail=str(error))) for rewrite, error in self._failed]
            for rewrite, reply in (*self._refused, *failures):
                self._take(rewrite, reply)
        finally:
            self._is_over = True
            self._server.close()

    def _pass(self, rewrites: Iterator[Rewrite], beat: Beat, last: bool) -> None:
        # Daemons: a request on its way must not hold up a process that was asked to stop.
        threads = [
            threading.Thread(target=self._work, args=(rewrites, last), daemon=True)
            for _ in range(self._options.concurrency)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and self._error is None:
                thread.join(_POLL_S)
                beat(0, 0)
        if self._error is not None:
            raise self._error
        beat(0, 0)

    def _work(self, rewrites: Iterator[Rewrite], last: bool) -> None:
        try:
            while self._error is None and not self._is_over:
                with self._input_lock:
                    rewrite = next(rewrites, None)
                    self._conversations += rewrite is not None and not last
                if rewrite is None:
                    return
                try:
                    self._answer(rewrite)
                except UnansweredError as error:
                    self._give_up(rewrite, error, last)
        except HiddenstoreError as error:
            self._error = error
        except BaseException as error:
            # A bug in a thread must end the run like one in the main thread.
            self._error = error
            raise

    def _answer(self, rewrite: Rewrite) -> None:
        for reply in self._recorded(rewrite)[rewrite.turn :]:
            rewrite.advance()
            self._take(rewrite, reply)
            with self._lock:
                self._answers += reply.is_answer
        while rewrite.advance() and not self._is_over:
            if not rewrite.done:
                self._take(rewrite, NO_QUESTION)
                return
            reply = self._server.reply(rewrite.done, rewrite.tools, self._seed(rewrite), rewrite.template_kwargs)
            with self._lock:
                self._answers += reply.is_answer
                if not self._answers:
                    self._refused.append((rewrite, reply))
                    if len(self._refused) >= REFUSALS_WITHOUT_ANSWER:
                        raise _all_refused(reply)
                    return
                refused, self._refused = self._refused, []
            if not self._is_over:
                for one in (*refused, (rewrite, reply)):
                    self._take(*one)

    def _seed(self, rewrite: Rewrite) -> int | None:
        """A seed for each answer, so that equal prompts get different answers; none where none was asked for."""
        if self._options.seed is None:
            return None
        name = f"{self._options.seed}/{rewrite.number}/{rewrite.turn}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little") >> 1

    def _give_up(self, rewrite: Rewrite, error: UnansweredError, last: bool) -> None:
        # A request that the end of the run cut short says nothing about the server.
        if self._is_over:
            return
        with self._lock:
            self._failed.append((rewrite, error))
            self._first_failure = self._first_failure or error
            if not last and len(self._failed) > (limit := self._options.max_failures):
                self._error = self._failing(f"more than max_failures={limit}")

    def _failing(self, budget: str) -> StorageError:
        """The server's own words first, as they came first: what follows them is often their consequence."""
        kept = "what was answered is kept; the same command goes on" if self._answers else "the same command starts"
        return StorageError(
            f"{self._first_failure}; {plural(len(self._failed), 'conversation')} failed, "
            f"{budget if self._answers else 'and none was answered'}",
            kind=Kind.SERVER_FAILING,
            hint=f"{kept} once the server is well",
        )


def _all_refused(reply: Reply) -> ConfigError:
    return ConfigError(
        f"every request was refused so far; the last: {reply.detail}",
        kind=Kind.SERVER_REFUSED,
        hint="check the settings; conversations that are refused alone are left out and counted",
    )


def open_server(options: RegenerateOptions) -> tuple[str, AnswerAll]:
    """The model's name, and what answers with it; without a model named, the server must serve exactly one."""
    access = ServerAccess(
        url=str(options.server),
        timeout_s=options.timeout_s,
        tries=options.retries + 1,
        api_key_env=options.api_key_env,
        hint="the same command goes on once the server is back",
    )
    server = ChatServer(access, options)
    if server.model is None:
        with closing(ChatServer(replace(access, tries=2), options)) as asked_once:
            server.model = asked_once.only_model()

    def answer_all(rewrites: Iterator[Rewrite], recorded: Recorded, take: Take, beat: Beat) -> None:
        _ServerRun(server, options, recorded, take).answer_all(rewrites, beat)

    return server.model, answer_all

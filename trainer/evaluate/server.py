"""Running servers measured: how each is asked, and where it counts the drafted tokens it accepted."""

import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from typing import Any, NamedTuple, Self

from hiddenstore.conversation import TEMPLATE_KWARGS
from hiddenstore.conversation.messages import REASONING, Message, for_server
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.servers.http import NO_PENALTIES, HttpClient, RefusedError
from trainer.evaluate.prompts import NOTHING_BESIDE, Beside, Question, has_tools

VLLM_PREFIX, LLAMACPP_PREFIX = "vllm:spec_decode_num_", "llamacpp:spec_decode_num_"
LLAMACPP_EXACT = 1_000_000
"""llama.cpp prints its counters with six digits."""

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

# The spellings of successive SGLang releases, newest first.
_SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_SGLANG_DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_SGLANG_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


_MOST_DEPTHS = 4096
MORE_CHOICES = (20, 5)
"""Choices that a token is asked for first, the most that OpenAI's chats and its completions allow."""


@dataclass(frozen=True)
class DraftCounts:
    """Counts of greedy or sampled drafts. ``accepted_at[i]``: drafts whose first i+1 tokens were all accepted; empty
    where the server does not say."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return self._with(other, 1)

    def __sub__(self, other: "DraftCounts") -> "DraftCounts":
        return self._with(other, -1)

    def _with(self, other: "DraftCounts", sign: int) -> "DraftCounts":
        longest = max(len(self.accepted_at), len(other.accepted_at))
        padded = (list(counts.accepted_at) + [0] * (longest - len(counts.accepted_at)) for counts in (self, other))
        return DraftCounts(
            self.drafts + sign * other.drafts,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            tuple(a + sign * b for a, b in zip(*padded, strict=True)),
        )

    @property
    def accepted_length(self) -> float | None:
        """Tokens per draft, the target's own token included; None when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def per_position(self) -> list[float]:
        """Joint acceptance by depth: share of drafts whose first i+1 tokens were all accepted."""
        return [count / self.drafts for count in self.accepted_at] if self.drafts else []

    @property
    def draft_len(self) -> int | None:
        """Tokens drafted at a time."""
        if self.accepted_at:
            return len(self.accepted_at)
        return round(self.drafted / self.drafts) if self.drafts and self.drafted else None


def vllm_counts(text: str, prefix: str = VLLM_PREFIX) -> DraftCounts | None:
    """The counters of vLLM's ``/metrics``, all engines and models of the server added; None where it does not draft.
    Read under their own names and with the ``_total`` that Prometheus clients append; no name is read twice."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None or not sample["name"].startswith(prefix):
            continue
        name = sample["name"].removeprefix(prefix).removesuffix("_total")
        if name == "accepted_tokens_per_pos":
            if label := _POSITION.search(sample["labels"] or ""):
                position = int(label[1])
                positions[position] = positions.get(position, 0.0) + float(sample["value"])
        else:
            sums[name] = sums.get(name, 0.0) + float(sample["value"])
    if "drafts" not in sums:
        return None
    depths = _depths(max(positions, default=-1) + 1)
    return DraftCounts(
        drafts=int(sums["drafts"]),
        drafted=int(sums.get("draft_tokens", 0)),
        accepted=int(sums.get("accepted_tokens", 0)),
        accepted_at=tuple(int(positions.get(depth, 0)) for depth in depths),
    )


def sglang_counts(meta_info: Mapping[str, Any]) -> DraftCounts | None:
    """The counts in the ``meta_info`` of one SGLang answer; None where the server did not draft. A histogram there says
    how many verifications accepted exactly n drafted tokens. Where the number of accepted tokens is missing it follows
    from the answer's length: one token of the prefill, one of each verification, and those. SGLang's own
    ``spec_accept_length`` counts the prefill's token too, so it is not read."""
    drafts = int(meta_info.get("spec_verify_ct") or 0)
    if not drafts:
        return None
    histogram = _first(meta_info, _SGLANG_HISTOGRAM)
    exactly = [int(count) for count in histogram] if isinstance(histogram, Sequence) else []
    accepted = _first(meta_info, _SGLANG_ACCEPTED)
    if accepted is None and exactly:
        accepted = sum(depth * count for depth, count in enumerate(exactly))
    if accepted is None:
        accepted = max(0, int(meta_info.get("completion_tokens") or 0) - 1 - drafts)
    drafted = int(_first(meta_info, _SGLANG_DRAFTED) or 0)
    # The histogram ends at the deepest acceptance; the draft may be longer.
    depths = _depths(max(len(exactly) - 1, drafted // drafts) if exactly else 0)
    return DraftCounts(drafts, drafted, int(accepted), tuple(sum(exactly[depth + 1 :]) for depth in depths))


def _depths(count: int) -> range:
    """ValueError for more than any draft has: a server's number must not fill memory."""
    if count > _MOST_DEPTHS:
        raise ValueError(f"{count} tokens a draft")
    return range(count)


def trtllm_counts(iterations: Sequence[Mapping[str, Any]]) -> DraftCounts | None:
    """The counts in TensorRT-LLM's iteration statistics; None where no iteration drafted. A draft is a request of an
    iteration that had draft tokens. Ranks of attention data parallelism repeat the first one's."""
    of_first_rank = (one for one in iterations if not one.get("attentionDpRank"))
    stats = [each for one in of_first_rank if (each := one.get("specDecodingStats")) and each["numDraftTokens"]]
    names = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
    drafts, drafted, accepted = (sum(int(each[name]) for each in stats) for name in names)
    return DraftCounts(drafts, drafted, accepted) if stats else None


def _first(meta_info: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((meta_info[name] for name in names if meta_info.get(name) is not None), None)


Render = Callable[[Sequence[Message], Beside], list[int]]
"""Messages, and what the target's own chat template is given besides, to the token ids of a prompt."""


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled, temperature 0 is greedy; and what the chat template is given besides the messages."""

    max_new_tokens: int
    temperature: float = 0.0
    beside: Beside = NOTHING_BESIDE


Words = tuple[str, str]
"""Of an answer, what a server with a reasoning parser gives as its thought, and the text behind it."""


class Choice(NamedTuple):
    """A token of an answer, how far each other choice that the server weighed there lies behind in logits, by its text,
    and what the server gave for the first: its log-probability, or its logit where the server says those (vLLM's
    ``--logprobs-mode raw_logits``)."""

    token: str
    others: Mapping[str, float]
    value: float = -inf


@dataclass(frozen=True)
class Completion:
    """One answer: its text, how many tokens it has, and the drafts counted for it where the server says so; its
    ``thought`` where a reasoning parser takes that out of the text, its ``choices`` where they were asked for."""

    text: str
    tokens: int
    counts: DraftCounts | None = None
    thought: str = ""
    choices: tuple[Choice, ...] = ()

    @property
    def words(self) -> Words:
        return self.thought, self.text


class Server:
    """A running server that serves one model over ``/v1``; drafts are counted where its ``/metrics`` is vLLM's.
    ``render`` makes the prompts here, all of them or, without ``renders_all``, those with tools, which servers take in
    ways of their own; else the server applies its own chat template."""

    counts_each_answer = False
    """Whether answers carry their counts; else ``counts`` is read before and after."""
    lost: str | None = None
    """Why drafts are not counted any more that were at first."""
    dtype: str | None = None
    """What it computes logits in, where that is known."""
    plain: Mapping[str, float] = NO_PENALTIES
    """What leaves the target's own choices as they are, in the words of the server."""
    _counting = ""
    """Options of ``hiddenstore serve`` without which the server counts no drafts."""

    def __init__(
        self, client: HttpClient, model: str | None = None, render: Render | None = None, renders_all: bool = True
    ) -> None:
        self.client = client
        self.model = served_model(client, model)
        self._render, self._renders_all = render, renders_all

    def ask(self, messages: Sequence[Message], sampling: SamplingOptions) -> Completion:
        """The answer to a conversation."""
        body = self._body(messages, sampling)
        if "prompt" in body:
            return self.client.post("/v1/completions", body, _read_completion)
        return self.client.post("/v1/chat/completions", body, _read_chat)

    def retell(self, messages: Sequence[Message], sampling: SamplingOptions) -> Completion:
        """The answer once more with its choices, as many of each token as the server allows; none where it does not say
        them."""
        body = self._body(messages, sampling)
        is_text = "prompt" in body
        path, read = ("/v1/completions", _read_completion) if is_text else ("/v1/chat/completions", _read_chat)

        def answer(count: int) -> Completion:
            more = {"logprobs": count} if is_text else {"logprobs": True, "top_logprobs": count}
            return self.client.post(path, {**body, **more}, with_choices(read))

        for count in MORE_CHOICES:
            with suppress(RefusedError):
                return answer(count)
        return answer(2)

    def counts(self) -> DraftCounts | None:
        """Everything the server ever drafted; None where it does not say."""
        try:
            return self.client.text("/metrics", vllm_counts)
        except RefusedError as error:
            if error.status in (404, 405):
                return None
            raise

    def no_counts(self) -> ConfigError:
        """Why accepted length cannot be read of this server, and what would help."""
        return self._silent("does not draft: its /metrics has no vllm:spec_decode counters", "vllm")

    def _silent(self, problem: str, engine: str) -> ConfigError:
        problem = f"the server at {self.client.url} {problem}"
        return ConfigError(problem, kind=Kind.NO_SPECULATION, hint=self._command(engine))

    def _command(self, engine: str) -> str:
        return f"hiddenstore serve DRAFTER --engine {engine} --target {shlex.quote(self.model)}{self._counting}"

    def _body(self, messages: Sequence[Message], sampling: SamplingOptions) -> dict[str, Any]:
        """A request with the ``prompt`` that was rendered here, or with ``messages``."""
        asked = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
        body = {"model": self.model, **asked, **self.plain}
        if (prompt := self._prompt(messages, sampling.beside)) is not None:
            return {**body, "prompt": prompt}
        kwargs = dict(sampling.beside.template_kwargs)
        sent = [for_server(message) for message in messages]
        return {**body, **({TEMPLATE_KWARGS: kwargs} if kwargs else {}), "messages": sent}

    def _prompt(self, messages: Sequence[Message], beside: Beside) -> list[int] | None:
        """Token ids of a prompt that is rendered here."""
        if self._render is None or not (self._renders_all or has_tools(messages, beside)):
            return None
        return self._render(messages, beside)


class OtherServer(Server):
    """Any OpenAI-like server, of which some refuse what OpenAI's own does not know."""

    plain: Mapping[str, float] = {name: NO_PENALTIES[name] for name in ("presence_penalty", "frequency_penalty")}


class SglangServer(Server):
    """SGLang, which reports drafts with every answer: in ``meta_info`` of ``/generate``, in chat answers when asked.
    Sources: SGLang's ``tokenizer_manager`` (``spec_verify_ct`` and what stands beside it), 0.5; read, not run."""

    counts_each_answer = True

    def ask(self, messages: Sequence[Message], sampling: SamplingOptions) -> Completion:
        if (prompt := self._prompt(messages, sampling.beside)) is not None:
            params = {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, **self.plain}
            return self.client.post("/generate", {"input_ids": prompt, "sampling_params": params}, _read_generated)
        body = {**self._body(messages, sampling), "return_meta_info": True}
        return self.client.post("/v1/chat/completions", body, _read_chat_with_meta)

    def counts(self) -> DraftCounts | None:
        return None

    def no_counts(self) -> ConfigError:
        advice = "" if self._render else "; older releases say it only of /generate, which --target makes it use"
        return self._silent(f"sent no spec_verify_ct with its answers: it does not draft{advice}", "sglang")


class TrtllmServer(Server):
    """TensorRT-LLM, whose ``/metrics`` hands out the statistics of every iteration once, as JSON, where its file says
    ``enable_iter_perf_stats: true``. Sources: trtllm-serve's page and ``SpecDecodingStats``; read, not run. Raises
    CaptureError: ``server-answer``: the server dropped iterations before they were read."""

    _total: DraftCounts | None = None
    _last: int | None = None
    _counting = " --set enable_iter_perf_stats=true --set iter_stats_max_iterations=-1"

    def counts(self) -> DraftCounts | None:
        iterations = self.client.get("/metrics", _iterations)
        # Rows are numbered one by one, and again from the start by a server that was started anew.
        for number in (row["iter"] for row in iterations if isinstance(row.get("iter"), int)):
            if self._last is not None and number > self._last + 1:
                raise CaptureError(
                    f"{self.client.url}/metrics gives iteration {number} after {self._last}: it kept too few, so that "
                    "drafts are missing, or another program reads it too",
                    kind=Kind.SERVER_ANSWER,
                    hint=self._command("trtllm"),
                )
            self._last = number
        self._total = add_counts((self._total, trtllm_counts(iterations)))
        return self._total

    def no_counts(self) -> ConfigError:
        return self._silent("does not say what it drafts: its /metrics has no specDecodingStats", "trtllm")


class LlamacppServer(Server):
    """llama.cpp's ``llama-server``, whose ``/metrics`` counts under vLLM's names with a prefix of its own. Source:
    ``tools/server/server-task.cpp`` of b11434; run. Raises CaptureError: ``server-answer``: its counters were so high
    from the start that it rounds them; where they become so later, ``lost`` says it and what was measured stays."""

    _is_read = False
    plain: Mapping[str, float] = {**OtherServer.plain, "repeat_penalty": 1.0}

    def counts(self) -> DraftCounts | None:
        try:
            counts = self.client.text("/metrics", lambda text: vllm_counts(text, LLAMACPP_PREFIX))
        except RefusedError as error:
            if error.status == 501:
                return None
            raise
        if counts is not None and counts.drafted >= LLAMACPP_EXACT:
            where = f"{self.client.url}/metrics"
            problem = f"{where} counts {counts.drafted:,} drafted tokens, and is rounded from a million on"
            if not self._is_read:
                raise CaptureError(problem, kind=Kind.SERVER_ANSWER, hint="start llama-server anew")
            self.lost, counts = f"{problem}: later drafts are in no figure; start llama-server anew", None
        self._is_read = True
        return counts

    def no_counts(self) -> ConfigError:
        return self._silent("counts no drafts: it was started without --metrics or without a drafter", "llamacpp")


SERVERS: dict[str, type[Server]] = {
    "vllm": Server,
    "sglang": SglangServer,
    "trtllm": TrtllmServer,
    "llamacpp": LlamacppServer,
    "http": OtherServer,
}
"""``--engine`` → how it is measured; ``http``: any OpenAI-like server, whose drafts are known if it counts as vLLM."""


def served_model(client: HttpClient, name: str | None) -> str:
    """The model a server serves; ``name`` must be among them, where given. Raises ConfigError: ``server-unfit``: it
    serves another, or several and none was named; CaptureError: ``server-answer``: it lists no models."""
    # Adapters name the model they belong to.
    names = client.get("/v1/models", lambda page: [str(row["id"]) for row in page["data"] if not row.get("parent")])
    if not names:
        raise CaptureError(f"{client.url}/v1/models lists no model: no OpenAI-like server", kind=Kind.SERVER_ANSWER)
    if name in names or (name is None and len(names) == 1):
        return name or names[0]
    listed = ", ".join(names)
    problem = f"serves several models: {listed}" if name is None else f"serves {listed}, not {name}"
    raise ConfigError(f"{client.url} {problem}", kind=Kind.SERVER_UNFIT, hint=shlex.join(["--model", names[0]]))


def _iterations(document: Any) -> list[dict[str, Any]]:
    # Some releases answer with each iteration as JSON text.
    return [json.loads(row) if isinstance(row, str) else dict(row) for row in document]


def _read_chat(document: Any) -> Completion:
    message = document["choices"][0]["message"]
    thought = next((str(message[name]) for name in REASONING if message.get(name)), "")
    return replace(_completion(document, message.get("content")), thought=thought)


def _read_completion(document: Any) -> Completion:
    return _completion(document, document["choices"][0].get("text"))


def with_choices(read: Callable[[Any], Completion]) -> Callable[[Any], Completion]:
    """What reads an answer that was asked for with its choices."""

    def read_both(document: Any) -> Completion:
        logprobs = document["choices"][0].get("logprobs") or {}
        return replace(read(document), choices=tuple(_choice(token, tops) for token, tops in _steps(logprobs)))

    return read_both


def _steps(logprobs: Any) -> Iterable[tuple[str, list[tuple[str, float]]]]:
    """Each token with its choices, in the form of chats, which is also that of llama.cpp's completions, or of texts."""
    if logprobs.get("content"):
        for step in logprobs["content"]:
            yield step["token"], [(each.get("token", ""), each["logprob"]) for each in step["top_logprobs"]]
    else:
        for token, top in zip(logprobs.get("tokens") or [], logprobs.get("top_logprobs") or [], strict=True):
            yield token, list((top or {}).items())


def _choice(token: str, tops: Sequence[tuple[str, float]]) -> Choice:
    first = max((logprob for _, logprob in tops), default=-inf)
    # Two tokens may have one text: the likelier one counts.
    others = {text: first - logprob for text, logprob in sorted(tops, key=lambda top: top[1]) if text != token}
    return Choice(token, others, first)


def _completion(document: Any, text: Any) -> Completion:
    return Completion(str(text or ""), int((document.get("usage") or {}).get("completion_tokens") or 0))


def _read_chat_with_meta(document: Any) -> Completion:
    completion = _read_chat(document)
    meta = {"completion_tokens": completion.tokens, **(document["choices"][0].get("meta_info") or {})}
    return replace(completion, counts=sglang_counts(meta))


def _read_generated(document: Any) -> Completion:
    meta = document.get("meta_info") or {}
    return Completion(str(document.get("text") or ""), int(meta.get("completion_tokens") or 0), sglang_counts(meta))


WARM_UP_TOKENS = 8
ALL = "all"
"""The name of all tasks as one."""

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """One task on one server. ``seconds`` of wall time for all its questions; ``counts`` None where nothing drafts."""

    task: str
    questions: int
    seconds: float
    answers: list[Completion] = field(repr=False)
    counts: DraftCounts | None = None

    @classmethod
    def of_all(cls, task: str, questions: int, results: "Sequence[TaskResult]") -> Self:
        """Several results as one."""
        answers = [answer for result in results for answer in result.answers]
        counts = add_counts(result.counts for result in results)
        return cls(task, questions, sum(result.seconds for result in results), answers, counts)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the time of all, prefills included."""
        return self.tokens / self.seconds

    @property
    def others_were_served(self) -> bool:
        """Whether the server drafted for others meanwhile: more tokens were counted than these answers can hold."""
        if self.counts is None:
            return False
        # The last draft of an answer is counted whole, however early the answer ends within it.
        past_end = len(self.answers) * (1 + (self.counts.draft_len or 0))
        return self.counts.drafts + self.counts.accepted > self.tokens + past_end


def measure(
    server: Server,
    questions: Sequence[Question],
    sampling: SamplingOptions,
    concurrency: int = 1,
    on_question: Callable[[], None] | None = None,
) -> list[TaskResult]:
    """Ask every question, ``concurrency`` at a time, one task after another; the last result is that of all tasks. The
    server is warmed up with one short answer, which is in no figure. Raises StorageError, CaptureError, ConfigError:
    the server stopped answering, as HttpClient says it."""
    first = questions[0]
    server.ask(first.history, SamplingOptions(WARM_UP_TOKENS, sampling.temperature, first.beside))

    def ask(question: Question) -> list[Completion]:
        answers = _conversation(server, question, sampling)
        if on_question:
            on_question()
        return answers

    results = []
    for task, group in by_task(questions):
        before, started = server.counts(), time.perf_counter()
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            conversations = list(pool.map(ask, group))
        seconds = time.perf_counter() - started
        answers = [answer for conversation in conversations for answer in conversation]
        if not sum(answer.tokens for answer in answers):
            raise CaptureError(f"{server.client.url} answered {task} without a single token", kind=Kind.SERVER_ANSWER)
        after = server.counts()
        if server.counts_each_answer:
            counts = add_counts(answer.counts for answer in answers)
        else:
            counts = after - before if after is not None and before is not None else None
        results.append(TaskResult(task, len(conversations), seconds, answers, counts))
    return [*results, TaskResult.of_all(ALL, len(questions), results)]


def by_task(questions: Iterable[Question]) -> Iterable[tuple[str, Iterable[Question]]]:
    """Questions of each task, tasks in alphabetical order."""
    return groupby(sorted(questions, key=lambda question: question.task), key=lambda question: question.task)


def _conversation(server: Server, question: Question, sampling: SamplingOptions) -> list[Completion]:
    """Answers to the turns of one question, each reading those before it."""
    messages, sampling = list(question.history), replace(sampling, beside=question.beside)
    answers = [server.ask(messages, sampling)]
    for turn in question.more:
        messages += [{"role": "assistant", "content": answers[-1].text}, {"role": "user", "content": turn}]
        answers.append(server.ask(messages, sampling))
    return answers


def add_counts(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """The counts there are, added; None where there are none."""
    present = [each for each in counts if each is not None]
    return sum(present, DraftCounts()) if present else None


def require_one_model(server: Server, baseline: Server) -> None:
    """Refuse a baseline of another model; ConfigError ``server-unfit``."""
    if server.model != baseline.model:
        raise ConfigError(
            f"{server.client.url} serves {server.model}, the baseline {baseline.client.url} serves {baseline.model}",
            kind=Kind.SERVER_UNFIT,
            hint="start the baseline with the same target and --served-model-name",
        )


def row_of(url: str, result: TaskResult, baseline: TaskResult | None) -> Row:
    """A task on a server as ``eval --json`` has it, beside the same questions without speculation."""
    counts, same = result.counts, None
    if baseline is not None:
        same = sum(a.words == b.words for a, b in zip(result.answers, baseline.answers, strict=True))
    return {
        "server": url,
        "task": result.task,
        "draft_len": counts.draft_len if counts else None,
        "questions": result.questions,
        "answers": len(result.answers),
        "answer_tokens": result.tokens,
        "drafts": counts.drafts if counts else None,
        "accepted_length": counts.accepted_length if counts else None,
        "per_position": counts.per_position if counts else [],
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "baseline_tokens_per_s": baseline.tokens_per_s if baseline else None,
        "speedup": result.tokens_per_s / baseline.tokens_per_s if baseline else None,
        "speedup_rounds": [],
        "same_as_baseline": same,
        "others_were_served": result.others_were_served,
    }

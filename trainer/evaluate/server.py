"""Servers that can be measured: how each is asked, and where each counts the drafted tokens it accepted."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.http import HttpClient, RefusedError
from trainer.evaluate.prompts import Message

VLLM_PREFIX = "vllm:spec_decode_num_"

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

# The spellings of successive SGLang releases, newest first.
_SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_SGLANG_DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_SGLANG_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


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


def vllm_counts(text: str) -> DraftCounts | None:
    """The counters of vLLM's ``/metrics``, all engines and models of the server added; None where it does not draft.

    Read under their own names and with the ``_total`` that Prometheus clients append; no name is read twice.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None or not sample["name"].startswith(VLLM_PREFIX):
            continue
        name = sample["name"].removeprefix(VLLM_PREFIX).removesuffix("_total")
        if name == "accepted_tokens_per_pos":
            if label := _POSITION.search(sample["labels"] or ""):
                position = int(label[1])
                positions[position] = positions.get(position, 0.0) + float(sample["value"])
        else:
            sums[name] = sums.get(name, 0.0) + float(sample["value"])
    if "drafts" not in sums:
        return None
    depths = range(max(positions, default=-1) + 1)
    return DraftCounts(
        drafts=int(sums["drafts"]),
        drafted=int(sums.get("draft_tokens", 0)),
        accepted=int(sums.get("accepted_tokens", 0)),
        accepted_at=tuple(int(positions.get(depth, 0)) for depth in depths),
    )


def sglang_counts(meta_info: Mapping[str, Any]) -> DraftCounts | None:
    """The counts in the ``meta_info`` of one SGLang answer; None where the server did not draft.

    A histogram there says how many verifications accepted exactly n drafted tokens. Where the number of accepted tokens
    is missing it follows from the answer's length: one token of the prefill, one of each verification, and those.
    SGLang's own ``spec_accept_length`` counts the prefill's token too, so it is not read.
    """
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
    depths = max(len(exactly) - 1, drafted // drafts) if exactly else 0
    return DraftCounts(drafts, drafted, int(accepted), tuple(sum(exactly[depth + 1 :]) for depth in range(depths)))


def _first(meta_info: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((meta_info[name] for name in names if meta_info.get(name) is not None), None)


Render = Callable[[Sequence[Message]], list[int]]
"""Messages to the token ids of a prompt, by the target's own chat template."""


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One answer: its text, how many tokens it has, and the drafts counted for it where the server says so."""

    text: str
    tokens: int
    counts: DraftCounts | None = None


class Server:
    """A running server that serves one model over ``/v1``; drafts are counted where its ``/metrics`` is vLLM's.

    ``render`` makes the prompts here; without one the server applies its own chat template.
    """

    counts_each_answer = False
    """Whether answers carry their counts; else ``counts`` is read before and after."""

    def __init__(self, client: HttpClient, model: str | None = None, render: Render | None = None) -> None:
        self.client = client
        self.model = served_model(client, model)
        self._render = render

    def ask(self, messages: Sequence[Message], sampling: SamplingOptions) -> Completion:
        """The answer to a conversation."""
        body = self._body(sampling)
        if self._render:
            return self.client.post("/v1/completions", {**body, "prompt": self._render(messages)}, _read_completion)
        return self.client.post("/v1/chat/completions", {**body, "messages": list(messages)}, _read_chat)

    def counts(self) -> DraftCounts | None:
        """Everything the server ever drafted; None where it does not say."""
        try:
            return vllm_counts(self.client.text("/metrics"))
        except RefusedError as error:
            if error.status in (404, 405):
                return None
            raise

    def no_counts(self) -> ConfigError:
        """Why accepted length cannot be read of this server, and what would help."""
        return ConfigError(
            f"the server at {self.client.url} does not draft: its /metrics has no vllm:spec_decode counters",
            kind=Kind.NO_SPECULATION,
            hint=f"hiddenstore serve DRAFTER --engine vllm --target {self.model}",
        )

    def _body(self, sampling: SamplingOptions) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}


class SglangServer(Server):
    """SGLang, which reports drafts with every answer: in ``meta_info`` of ``/generate``, in chat answers when asked.

    Sources: SGLang's ``tokenizer_manager`` (``spec_verify_ct`` and what stands beside it), 0.5; read, not run.
    """

    counts_each_answer = True

    def ask(self, messages: Sequence[Message], sampling: SamplingOptions) -> Completion:
        if self._render:
            params = {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
            prompt = {"input_ids": self._render(messages), "sampling_params": params}
            return self.client.post("/generate", prompt, _read_generated)
        body = {**self._body(sampling), "messages": list(messages), "return_meta_info": True}
        return self.client.post("/v1/chat/completions", body, _read_chat_with_meta)

    def counts(self) -> DraftCounts | None:
        return None

    def no_counts(self) -> ConfigError:
        advice = "" if self._render else "; older releases say it only of /generate, which --target makes it use"
        return ConfigError(
            f"the server at {self.client.url} sent no spec_verify_ct with its answers: it does not draft{advice}",
            kind=Kind.NO_SPECULATION,
            hint=f"hiddenstore serve DRAFTER --engine sglang --target {self.model}",
        )


SERVERS: dict[str, type[Server]] = {"vllm": Server, "sglang": SglangServer, "http": Server}
"""``--engine`` → how it is measured; ``http``: any OpenAI-like server, whose drafts are known if it counts as vLLM."""


def served_model(client: HttpClient, name: str | None) -> str:
    """The model a server serves; ``name`` must be among them, where given.

    Raises:
        ConfigError: ``server-unfit``: it serves another, or several and none was named.
        CaptureError: ``server-answer``: it lists no models.
    """
    # Adapters name the model they belong to.
    names = client.get("/v1/models", lambda page: [str(row["id"]) for row in page["data"] if not row.get("parent")])
    if not names:
        raise CaptureError(f"{client.url}/v1/models lists no model: no OpenAI-like server", kind=Kind.SERVER_ANSWER)
    if name in names or (name is None and len(names) == 1):
        return name or names[0]
    listed = ", ".join(names)
    problem = f"serves several models: {listed}" if name is None else f"serves {listed}, not {name}"
    raise ConfigError(f"{client.url} {problem}", kind=Kind.SERVER_UNFIT, hint=f"--model {names[0]}")


def _read_chat(document: Any) -> Completion:
    return _completion(document, document["choices"][0]["message"].get("content"))


def _read_completion(document: Any) -> Completion:
    return _completion(document, document["choices"][0].get("text"))


def _completion(document: Any, text: Any) -> Completion:
    return Completion(str(text or ""), int((document.get("usage") or {}).get("completion_tokens") or 0))


def _read_chat_with_meta(document: Any) -> Completion:
    completion = _read_chat(document)
    meta = {"completion_tokens": completion.tokens, **(document["choices"][0].get("meta_info") or {})}
    return replace(completion, counts=sglang_counts(meta))


def _read_generated(document: Any) -> Completion:
    meta = document.get("meta_info") or {}
    return Completion(str(document.get("text") or ""), int(meta.get("completion_tokens") or 0), sglang_counts(meta))

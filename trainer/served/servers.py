"""The servers that can be measured: how each is asked, and where each says what its drafter got accepted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hiddenstore.errors import CaptureError, ConfigError
from trainer.drafting.questions import Message
from trainer.served.client import Client
from trainer.served.counts import DraftCounts, sglang_counts, vllm_counts

Render = Callable[[Sequence[Message]], list[int]]
"""Messages to the token ids of a prompt, by the target's own chat template."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Answer:
    """One answer: its text, how many tokens it has, and what was counted for it where the server says so."""

    text: str
    tokens: int
    counts: DraftCounts | None = None


class Server(Protocol):
    """A running server that serves one model. ``counts_each_answer``: answers carry their counts."""

    client: Client
    model: str
    counts_each_answer: bool

    def ask(self, messages: Sequence[Message], sampling: Sampling) -> Answer:
        """The answer to a conversation."""

    def counts(self) -> DraftCounts | None:
        """Everything the server ever drafted; None where it does not say."""

    def no_counts(self) -> ConfigError:
        """Why accepted length cannot be read of this server, and what would help."""


class OpenAiServer:
    """Any server with ``/v1/chat/completions``; drafts are counted where its ``/metrics`` is vLLM's."""

    counts_each_answer = False

    def __init__(self, client: Client, model: str | None = None, render: Render | None = None) -> None:
        self.client = client
        self.model = served_model(client, model)
        self._render = render

    def ask(self, messages: Sequence[Message], sampling: Sampling) -> Answer:
        how = {"model": self.model, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
        if self._render:
            found = self.client.post("/v1/completions", {**how, "prompt": self._render(messages)})
            text = _choice(found).get("text")
        else:
            found = self.client.post("/v1/chat/completions", {**how, "messages": list(messages)})
            text = _choice(found).get("message", {}).get("content")
        return Answer(str(text or ""), _tokens(found))

    def counts(self) -> DraftCounts | None:
        return vllm_counts(self.client.text("/metrics") or "")

    def no_counts(self) -> ConfigError:
        return ConfigError(
            f"the server at {self.client.url} does not draft: its /metrics has no vllm:spec_decode counters",
            kind="no-speculation",
            hint=f"hiddenstore serve DRAFTER --engine vllm --target {self.model}",
        )


class SglangServer:
    """SGLang, which reports drafts with every answer: in ``meta_info`` of ``/generate``, in chat answers when asked.

    Sources: SGLang's ``tokenizer_manager`` (``spec_verify_ct`` and what stands beside it), 0.5; read, not run.
    """

    counts_each_answer = True

    def __init__(self, client: Client, model: str | None = None, render: Render | None = None) -> None:
        self.client = client
        self.model = served_model(client, model)
        self._render = render

    def ask(self, messages: Sequence[Message], sampling: Sampling) -> Answer:
        if self._render:
            how = {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
            found = self.client.post("/generate", {"input_ids": self._render(messages), "sampling_params": how})
            text, meta = found.get("text"), found.get("meta_info") or {}
            return Answer(str(text or ""), int(meta.get("completion_tokens") or 0), sglang_counts(meta))
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "return_meta_info": True,
        }
        found = self.client.post("/v1/chat/completions", body)
        choice = _choice(found)
        meta = {"completion_tokens": _tokens(found), **(choice.get("meta_info") or {})}
        return Answer(str(choice.get("message", {}).get("content") or ""), _tokens(found), sglang_counts(meta))

    def counts(self) -> DraftCounts | None:
        return None

    def no_counts(self) -> ConfigError:
        advice = "" if self._render else "; older releases say it only of /generate, which --target makes it use"
        return ConfigError(
            f"the server at {self.client.url} sent no spec_verify_ct with its answers: it does not draft{advice}",
            kind="no-speculation",
            hint=f"hiddenstore serve DRAFTER --engine sglang --target {self.model}",
        )


SERVERS: dict[str, type[OpenAiServer] | type[SglangServer]] = {
    "vllm": OpenAiServer,
    "sglang": SglangServer,
    "http": OpenAiServer,
}
"""``--engine`` → how it is measured; ``http``: any OpenAI-like server, whose drafts are known if it counts as vLLM."""


def served_model(client: Client, wanted: str | None) -> str:
    """The model a server serves; ``wanted`` must be among them.

    Raises:
        ConfigError: ``served-model``: it serves another, or several and none was named.
        CaptureError: ``server-refused``: it lists no models.
    """
    listed = client.json("/v1/models")
    rows = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(rows, list) or not rows:
        raise CaptureError(f"{client.url}/v1/models lists no model: no OpenAI-like server", kind="server-refused")
    # Adapters name the model they belong to.
    names = [str(row.get("id")) for row in rows if isinstance(row, dict) and not row.get("parent")]
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(
                f"{client.url} serves {', '.join(names)}, not {wanted}", kind="served-model", hint=f"--model {names[0]}"
            )
        return wanted
    if len(names) > 1:
        raise ConfigError(
            f"{client.url} serves several models: {', '.join(names)}", kind="served-model", hint=f"--model {names[0]}"
        )
    return names[0]


def _choice(found: dict[str, Any]) -> dict[str, Any]:
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise CaptureError(f"an answer without choices: {str(found)[:120]}", kind="server-refused")
    choice: dict[str, Any] = choices[0]
    return choice


def _tokens(found: dict[str, Any]) -> int:
    return int((found.get("usage") or {}).get("completion_tokens") or 0)

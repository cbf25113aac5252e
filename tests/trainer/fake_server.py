"""A tiny OpenAI-like server on this machine whose counters are known: it answers as any of the engines does."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = (Path(__file__).parent / "vllm_metrics.txt").read_text(encoding="utf-8")
"""``/metrics`` of a real vLLM 0.32 with a drafter of 3 tokens, before its first request."""


class FakeServer(ThreadingHTTPServer):
    """Every answer is the last question in capitals, of ``tokens`` tokens: one of the prefill, the rest by drafts that
    accept ``accepts`` tokens in turn. With a ``key`` it answers nobody without. ``says`` are other answers by question;
    ``lead`` is by how much each word of an answer leads the ``second`` choice, None for a server that does not say;
    ``top`` what it gives for each word, a logit where it is positive. ``thinks`` are thoughts by question, which a
    reasoning parser gives apart. It refuses more than ``most_choices`` of a token."""

    daemon_threads = True

    def __init__(
        self,
        engine: str = "vllm",
        models: tuple[str, ...] = ("target",),
        accepts: tuple[int, ...] = (),
        key: str | None = None,
        says: Mapping[str, str] | None = None,
        lead: float | None = None,
        top: float = -0.5,
        second: str = "other",
        thinks: Mapping[str, str] | None = None,
        most_choices: int = 20,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine, self.models, self.accepts, self.key = engine, models, accepts, key
        self.says, self.lead, self.top, self.second = says or {}, lead, top, second
        self.thinks, self.most_choices = thinks or {}, most_choices
        self.tokens = 1 + sum(1 + accepted for accepted in accepts) if accepts else 7
        self.answered = self.iteration = 0
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.iterations: list[dict[str, Any]] = []
        self.kept_iterations = 1000
        self.has_metrics, self.counted_before = True, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def accepted_at(self) -> list[int]:
        """Drafts of one answer by how deep they were accepted."""
        return [sum(accepted > depth for accepted in self.accepts) for depth in range(3)]

    def metrics(self) -> str:
        """The recorded page with this server's numbers."""
        lines = []
        for line in RECORDED.splitlines():
            if not line.startswith("vllm:spec_decode"):
                lines.append(line)
            elif self.accepts and "_created" not in line:
                lines.append(f"{line.rpartition(' ')[0]} {float(self.answered * self._count(line))}")
        return "\n".join(lines) + "\n"

    def llamacpp_metrics(self) -> str:
        """The page of llama.cpp: floats of six digits, and whole numbers by position."""
        drafts, before = self.answered * len(self.accepts), self.counted_before
        drafted, accepted = 3 * drafts + before, self.answered * sum(self.accepts) + before
        sums = {"draft_tokens_total": drafted, "accepted_tokens_total": accepted, "drafts_total": drafts + before}
        lines = ["llamacpp:n_decode_total 12", "# TYPE llamacpp:spec_decode_num_drafts_total counter"]
        lines += [f"llamacpp:spec_decode_num_{name} {value:g}" for name, value in sums.items()]
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{i}"}} {count * self.answered}' for i, count in enumerate(self.accepted_at())]
        return "\n".join(lines) + "\n"

    def _count(self, line: str) -> int:
        if "per_pos" in line:
            return self.accepted_at()[int(line.split('position="')[1].split('"')[0])]
        if "draft_tokens" in line:
            return 3 * len(self.accepts)
        return sum(self.accepts) if "accepted_tokens" in line else len(self.accepts)

    def iterate(self) -> None:
        """The iterations of one answer: its prefill, and a verification for each draft."""
        drafts = [{"numDraftTokens": 3, "numAcceptedTokens": accepted} for accepted in self.accepts]
        for spec in (None, *drafts):
            row: dict[str, Any] = {"iter": self.iteration, "attentionDpRank": 0}
            if spec is not None:
                row["specDecodingStats"] = {**spec, "numRequestsWithDraftTokens": 1, "acceptanceLength": 2.5}
            self.iteration += 1
            self.iterations += [row, {**row, "attentionDpRank": 1}]

    def drained(self) -> list[dict[str, Any]]:
        """What `/metrics` of TensorRT-LLM gives: the newest iterations, each once."""
        with self.lock:
            given, self.iterations = self.iterations[-self.kept_iterations :], []
        return given

    def meta_info(self) -> dict[str, Any]:
        """What SGLang says of one answer."""
        if not self.accepts:
            return {"completion_tokens": self.tokens}
        histogram = [self.accepts.count(depth) for depth in range(1 + max(self.accepts))]
        return {
            "completion_tokens": self.tokens,
            "spec_verify_ct": len(self.accepts),
            "spec_accept_token_num": sum(self.accepts),
            "spec_draft_token_num": 3 * len(self.accepts),
            "spec_accept_length": self.tokens / len(self.accepts),
            "spec_accept_histogram": histogram,
        }


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if not self._is_let_in():
            return
        if self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": name} for name in self.server.models]}))
        elif self.path == "/metrics" and self.server.engine == "vllm":
            self._answer(self.server.metrics())
        elif self.path == "/metrics" and self.server.engine == "llamacpp":
            has_metrics = self.server.has_metrics
            self._answer(self.server.llamacpp_metrics() if has_metrics else "{}", 200 if has_metrics else 501)
        elif self.path == "/metrics" and self.server.engine == "trtllm":
            self._answer(json.dumps(self.server.drained()))
        else:
            self._answer("not found", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_let_in():
            return
        with self.server.lock:
            self.server.asked.append((self.path, body))
            self.server.answered += 1
            self.server.iterate()
        if body.get("messages", [{}])[-1].get("content") == "too long":
            self._answer(json.dumps({"error": {"message": "the prompt is longer than the context"}}), 400)
            return
        if max(body.get("top_logprobs", 0), body.get("logprobs") or 0) > self.server.most_choices:
            self._answer(json.dumps({"error": {"message": "more choices than are sent"}}), 400)
            return
        meta = self.server.meta_info()
        if self.path == "/generate":
            self._answer(json.dumps({"text": "MADE", "meta_info": meta}))
            return
        question = body["messages"][-1]["content"] if "messages" in body else "made"
        said = self.server.says.get(question, question.upper())
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": said or None}, "text": said}
        words = re.findall(r"\S+\s*", said)
        if question in self.server.thinks and "messages" in body:
            thought = self.server.thinks[question]
            choice["message"]["reasoning" if self.server.engine == "vllm" else "reasoning_content"] = thought
            words = ["<think>", "\n", *re.findall(r"\S+\s*", thought), "</think>", "\n\n", *words]
        if body.get("logprobs") and self.server.lead is not None:
            choice["logprobs"] = self._logprobs(words, "prompt" in body)
        if self.server.engine == "sglang" and body.get("return_meta_info"):
            choice["meta_info"] = meta
        self._answer(json.dumps({"choices": [choice], "usage": {"completion_tokens": self.server.tokens}}))

    def _logprobs(self, words: list[str], is_text: bool) -> dict[str, Any]:
        first, second = self.server.top, self.server.top - self.server.lead
        tops = [{word: first, self.server.second: second} for word in words]
        # llama.cpp answers completions in the form of chats.
        if is_text and self.server.engine != "llamacpp":
            return {"tokens": words, "top_logprobs": tops}
        listed = [[{"token": text, "logprob": value} for text, value in top.items()] for top in tops]
        return {"content": [{"token": word, "top_logprobs": top} for word, top in zip(words, listed, strict=True)]}

    def _is_let_in(self) -> bool:
        """A server with a key repeats what it was sent in its refusal, as some do."""
        said = self.headers.get("Authorization", "")
        let_in = self.server.key is None or said == f"Bearer {self.server.key}"
        if not let_in:
            self._answer(json.dumps({"error": {"message": f"not a key: {said}"}}), 401)
        return let_in

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_words: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def fake_server(**how: Any) -> Iterator[FakeServer]:
    """A server, up until the block ends."""
    server = FakeServer(**how)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

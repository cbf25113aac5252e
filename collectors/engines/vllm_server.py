"""A running vLLM server: prompts as token ids over HTTP, states through a folder that both sides see.

Shapes: T tokens of one request, L aux layers, N decoder layers, D target width.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from collectors.engines import Captured, CaptureRequest, EngineOptions, take_settings
from collectors.engines.assembly import Assembly
from collectors.engines.vllm_files import AskedIds, StateFile, server_command
from collectors.target import EngineTarget
from hiddenstore.errors import CaptureError, ConfigError, HiddenstoreError, InterruptError
from schemas.capture import NormState
from schemas.manifest import Engine

SETTINGS = {"model": None, "concurrency": 32, "timeout_s": 600}
API_KEY = "OPENAI_API_KEY"
TRIES = 4
WAIT_S = 0.5
_POLL_S = 0.2
_PROBE = "The quick brown fox jumps over the lazy dog. 0123456789"


@dataclass(frozen=True, eq=False)
class _Answer:
    """What came back for one request: token_ids int32 [T], states [T, n, D], the token sampled after the last."""

    token_ids: np.ndarray
    states: Tensor
    next_token: int | None


class VllmServer:
    """An OpenAI-compatible vLLM endpoint that was started for hidden states.

    Settings: ``model`` (the served name, where it is not the target's), ``concurrency``, ``timeout_s``.
    ``options.scratch`` is where the server's folder is seen from here, when not at the path the server says.
    """

    final_norm: NormState = "pre_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        settings = take_settings("vllm with --server", options.extra, SETTINGS)
        self.target = target
        self._asked = AskedIds.of(options.aux_layers, target.folder.num_layers)
        self._layers = len(options.aux_layers)
        self._scratch = options.scratch
        self._concurrency = int(settings["concurrency"])
        command = server_command(target, self._asked)
        self._client = _Client(str(options.server), float(settings["timeout_s"]), command)
        self._version = str(self._client.get("version")["version"])
        self._model = self._own_model(settings["model"], options.longest)
        self._require_tokenizer()

    def _own_model(self, named: str | None, longest: int) -> str:
        """The served name that is the target."""
        cards = self._client.get("v1/models")["data"]
        folder = self.target.folder
        for card in cards:
            root = str(card.get("root") or card["id"])
            own = named == card["id"] if named else folder.name in (card["id"], root) or _same_folder(root, folder.name)
            if not own:
                continue
            room = card.get("max_model_len")
            if room is not None and longest >= int(room):
                raise ConfigError(
                    f"the server takes {room} positions, and a sample has {longest} tokens and one is sampled",
                    kind="server-too-short",
                    hint=f"start it with --max-model-len {longest + 1}",
                )
            return str(card["id"])
        served = ", ".join(f"{card['id']} (of {card.get('root')})" for card in cards) or "nothing"
        raise ConfigError(
            f"the server serves {served}, expected {named or folder.name}",
            kind="server-model",
            hint="--engine-arg model=NAME, if NAME is this target under another name",
        )

    def _require_tokenizer(self) -> None:
        """A server of another vocabulary would take the ids and answer with states of other words."""
        own = self.target.tokenizer.encode(_PROBE, add_special_tokens=False)
        asked = {"model": self._model, "prompt": _PROBE, "add_special_tokens": False}
        served = self._client.post("tokenize", asked)["tokens"]
        if served != own:
            raise ConfigError(
                f"the server's tokenizer reads a text as {served[:8]}…, the target's as {own[:8]}…: another model",
                kind="server-model",
            )

    def describe(self) -> Engine:
        settings = {"server": "true", "concurrency": str(self._concurrency)}
        return Engine(name="vllm", version=self._version, settings=settings)

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False) -> Captured:
        """States of one unit; at most ``concurrency`` requests, and as many files, are under way at one time."""
        assembly = Assembly(requests, self._layers, self.target.head.hidden_size)
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="vllm") as pool:
            running: dict[Future[_Answer], int] = {}
            waiting = iter(enumerate(requests))
            try:
                while True:
                    for index, request in _take(waiting, self._concurrency - len(running)):
                        running[pool.submit(self._ask, request)] = index
                    if not running:
                        return assembly.captured()
                    done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        answer, index = future.result(), running.pop(future)
                        aux, final = self._asked.split(answer.states)
                        assembly.put(index, answer.token_ids, aux, final, answer.next_token)
                    if stop():
                        raise InterruptError("stopped by a signal; the open unit was dropped", kind="interrupted")
            finally:
                # Those under way still remove their files; the pool waits for them.
                for future in running:
                    future.cancel()

    def _ask(self, request: CaptureRequest) -> _Answer:
        """One request; runs in a thread of the pool. Its file is removed whatever is wrong with it."""
        asked = {
            "model": self._model,
            "prompt": request.input_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = self._client.post("v1/completions", asked)
        file = StateFile(self._path(answer))
        try:
            token_ids, states = file.wait()
        finally:
            file.remove()
        choice = answer["choices"][0]
        echo = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        if echo is not None and echo != asked["prompt"]:
            raise CaptureError(
                f"the server ran {len(echo)} tokens that are not the {len(request.input_ids)} it was given",
                kind="engine-tokens",
                hint="prompts must reach vLLM as token ids: check what stands between",
            )
        if states.ndim != 3 or states.shape[1] != len(self._asked.ids):
            raise ConfigError(
                f"the server hands out states {list(states.shape)}, expected {len(self._asked.ids)} layers for vLLM's "
                f"ids {list(self._asked.ids)}",
                kind="server-layers",
                hint=self._client.command,
            )
        sampled = choice.get("token_ids") or []
        return _Answer(token_ids, states, int(sampled[0]) if sampled else None)

    def _path(self, answer: dict[str, Any]) -> Path:
        """Where the states of an answer are on this machine."""
        said = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if said is None:
            raise ConfigError(
                "the server answered without hidden states: it was started without them",
                kind="server-layers",
                hint=self._client.command,
            )
        path = Path(said) if self._scratch is None else self._scratch / Path(said).name
        if path.suffix != ".safetensors" or not path.parent.is_dir():
            raise ConfigError(
                f"the server writes its states to {said}, which cannot be reached from here",
                kind="server-path",
                hint="run collect where that folder is mounted; --scratch FOLDER if it is mounted at another path",
            )
        return path

    def close(self) -> None:
        """The server goes on."""


class _Client:
    """JSON over HTTP, tried again where trying again may help."""

    def __init__(self, url: str, timeout_s: float, command: str) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self.command = command
        key = os.environ.get(API_KEY)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> Any:
        return self._call(urllib.request.Request(f"{self._base}/{path}", headers=self._headers))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        return self._call(urllib.request.Request(f"{self._base}/{path}", data=data, headers=self._headers))

    def _call(self, request: urllib.request.Request) -> Any:
        problem: HiddenstoreError
        for attempt in range(TRIES):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                problem = self._refused(request, error)
                if error.code < 500 and error.code != 429:
                    raise problem from error
            except (urllib.error.URLError, OSError, json.JSONDecodeError) as error:
                problem = ConfigError(
                    f"no vLLM server at {self._base}: {getattr(error, 'reason', error)}",
                    kind="server-unreachable",
                    hint=self.command,
                )
            if attempt < TRIES - 1:
                time.sleep(WAIT_S * 2**attempt)
        raise problem

    def _refused(self, request: urllib.request.Request, error: urllib.error.HTTPError) -> CaptureError:
        text = error.read(500).decode("utf-8", "replace").strip()
        hint = f"set {API_KEY}" if error.code in (401, 403) else None
        return CaptureError(
            f"the server refused {request.full_url}: {error.code} {text}", kind="server-refused", hint=hint
        )


def _take(items: Any, count: int) -> list[Any]:
    return [item for _, item in zip(range(count), items, strict=False)]


def _same_folder(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).resolve() == Path(other).resolve()

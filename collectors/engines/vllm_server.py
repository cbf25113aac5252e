"""A running vLLM server: prompts as token ids over HTTP, states through a folder that both sides see.

Shapes: T tokens of one request, L aux layers, N decoder layers, D target width.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from collectors.engines import Captured, CaptureRequest, EngineOptions, raise_if_stopped, read_settings
from collectors.engines.assembly import Assembly
from collectors.engines.vllm_files import LayerIds, StateFile, server_command
from collectors.targets.load import EngineTarget
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.http import HttpClient, ServerAccess
from schemas.capture import NormState
from schemas.manifest import Engine

SETTINGS = {"model": None, "concurrency": 32, "timeout_s": 600, "api_key_env": None}
_POLL_S = 0.2
_PROBE = "The quick brown fox jumps over the lazy dog. 0123456789"


# token_ids int32 [T], states [T, n, D], the token sampled after the last.
_Answer = tuple[np.ndarray, Tensor, int | None]


class VllmServer:
    """An OpenAI-compatible vLLM endpoint that was started for hidden states.

    Settings: ``model`` (the served name, where it is not the target's), ``concurrency``, ``timeout_s``,
    ``api_key_env`` (the environment variable that holds the server's key).
    ``options.scratch`` is where the server's folder is seen from here, when not at the path the server says.
    """

    final_norm: NormState = "pre_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        settings = read_settings("vllm with --server", options.extra, SETTINGS)
        self.target = target
        self._layer_ids = LayerIds.of(options.aux_layers, target.folder.num_layers)
        self._layers = len(options.aux_layers)
        self._scratch = options.scratch
        self._concurrency = int(settings["concurrency"])
        self._command = server_command(target, self._layer_ids)
        access = ServerAccess(
            url=str(options.server),
            timeout_s=float(settings["timeout_s"]),
            api_key_env=settings["api_key_env"],
            key_option="--engine-arg api_key_env=NAME",
            hint=self._command,
        )
        self._client = HttpClient(access)
        self._version = self._client.get("/version", lambda document: str(document["version"]))
        self._model = self._served_name(settings["model"], options.longest)
        self._require_tokenizer()

    def _served_name(self, name: str | None, longest: int) -> str:
        """The name that the target is served under: ``name``, if one was given."""
        cards = self._client.get("/v1/models", _read_cards)
        folder = self.target.folder
        for card in cards:
            root = str(card.get("root") or card["id"])
            if name is not None and name != card["id"]:
                continue
            if name is None and folder.name not in (card["id"], root) and not _same_folder(root, folder.name):
                continue
            room = card.get("max_model_len")
            if room is not None and longest >= int(room):
                raise ConfigError(
                    f"the server takes {room} positions, and a sample has {longest} tokens and one is sampled",
                    kind=Kind.SERVER_UNFIT,
                    hint=f"start it with --max-model-len {longest + 1}",
                )
            return str(card["id"])
        served = ", ".join(f"{card['id']} (of {card.get('root')})" for card in cards) or "nothing"
        raise ConfigError(
            f"the server serves {served}, expected {name or folder.name}",
            kind=Kind.SERVER_UNFIT,
            hint="--engine-arg model=NAME, if NAME is this target under another name",
        )

    def _require_tokenizer(self) -> None:
        """A server of another vocabulary would take the ids and answer with states of other words."""
        expected = self.target.tokenizer.encode(_PROBE, add_special_tokens=False)
        request = {"model": self._model, "prompt": _PROBE, "add_special_tokens": False}
        served = self._client.post("/tokenize", request, lambda document: list(document["tokens"]))
        if served != expected:
            raise ConfigError(
                f"the server's tokenizer reads a text as {served[:8]}…, the target's as {expected[:8]}…: another model",
                kind=Kind.SERVER_UNFIT,
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
                    for index, request in islice(waiting, self._concurrency - len(running)):
                        running[pool.submit(self._ask, request)] = index
                    if not running:
                        return assembly.captured()
                    done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        token_ids, states, next_token = future.result()
                        assembly.put(running.pop(future), token_ids, *self._layer_ids.split(states), next_token)
                    raise_if_stopped(stop)
            finally:
                # Those under way still remove their files; the pool waits for them.
                for future in running:
                    future.cancel()

    def _ask(self, request: CaptureRequest) -> _Answer:
        """One request; runs in a thread of the pool. Its file is removed whatever is wrong with it."""
        ids = request.input_ids.tolist()
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        path, prompt, next_token = self._client.post("/v1/completions", body, _read_completion)
        file = StateFile(self._path(path))
        try:
            token_ids, states = file.wait()
        finally:
            file.remove()
        if prompt is not None and prompt != ids:
            raise CaptureError(
                f"the server ran {len(prompt)} tokens that are not the {len(ids)} it was given",
                kind=Kind.ENGINE_TOKENS,
                hint="prompts must reach vLLM as token ids: check what stands between",
            )
        layer_ids = list(self._layer_ids.ids)
        if states.ndim != 3 or states.shape[1] != len(layer_ids):
            raise ConfigError(
                f"the server hands out states {list(states.shape)}, expected {len(layer_ids)} layers for vLLM's ids "
                f"{layer_ids}",
                kind=Kind.SERVER_UNFIT,
                hint=self._command,
            )
        return token_ids, states, next_token

    def _path(self, named: str | None) -> Path:
        """Where the states of an answer are on this machine."""
        if named is None:
            raise ConfigError(
                "the server answered without hidden states: it was started without them",
                kind=Kind.SERVER_UNFIT,
                hint=self._command,
            )
        path = Path(named) if self._scratch is None else self._scratch / Path(named).name
        if path.suffix != ".safetensors" or not path.parent.is_dir():
            raise ConfigError(
                f"the server writes its states to {named}, which cannot be reached from here",
                kind=Kind.SERVER_UNFIT,
                hint="run collect where that folder is mounted; --scratch FOLDER if it is mounted at another path",
            )
        return path

    def close(self) -> None:
        """The server goes on."""
        self._client.close()


def _read_completion(document: Any) -> tuple[str | None, list[int] | None, int | None]:
    """Where the states of a request are, the prompt as the server read it, the token it sampled."""
    choice = document["choices"][0]
    prompt = choice.get("prompt_token_ids", document.get("prompt_token_ids"))
    sampled = choice.get("token_ids") or []
    path = (document.get("kv_transfer_params") or {}).get("hidden_states_path")
    return (
        None if path is None else str(path),
        None if prompt is None else [int(token) for token in prompt],
        int(sampled[0]) if sampled else None,
    )


def _read_cards(document: Any) -> list[dict[str, Any]]:
    return [{**card, "id": str(card["id"])} for card in document["data"]]


def _same_folder(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).resolve() == Path(other).resolve()

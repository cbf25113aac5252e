"""A vLLM server: prompts go to it as token ids; states come as the files that vLLM's connector writes.

Measured on vLLM 0.32: a file holds ``hidden_states`` [T, n, D] in the model's dtype and ``token_ids`` int64 [T]; a
writer holds an exclusive ``flock`` on ``<file>.lock`` until the file is whole.

Shapes: T tokens of one request, n ids, L aux layers, D target width.
"""

import fcntl
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from collectors.engines import (
    Captured,
    CaptureRequest,
    Done,
    EngineOptions,
    nobody,
    raise_if_stopped,
    read_settings,
)
from collectors.engines.assembly import Assembly
from collectors.targets.load import EngineTarget
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.files.damage import raise_refusal
from hiddenstore.servers.http import NO_PENALTIES, HttpClient, ServerAccess
from hiddenstore.targets.rope import rope_boundary, rope_kind
from schemas.capture import NormState
from schemas.layers import to_convention
from schemas.manifest import Engine

_STATES, _TOKENS = "hidden_states", "token_ids"
SETTINGS: Mapping[str, Any] = {"model": None, "concurrency": 32, "timeout_s": 600, "api_key_env": None}
_SERVER_POLL_S = 0.2
_PROBE_LINES = 8192
_PROBE = "The quick brown fox jumps over the lazy dog. 0123456789"

CONNECTOR_MODULE = "collectors.engines.vllm_connector"
# States that are not there so long after their request was answered will never be.
LATE_S = 120.0


@dataclass(frozen=True)
class LayerIds:
    """The ids vLLM is asked for, ascending: ``aux`` of them the aux layers', the last one N, the final hidden."""

    ids: tuple[int, ...]
    aux: int

    @classmethod
    def of(cls, aux_layers: tuple[int, ...], num_layers: int) -> "LayerIds":
        """
        >>> LayerIds.of((-1, 1, 3), 4)
        LayerIds(ids=(0, 2, 4), aux=3)
        """
        ids = {*to_convention(aux_layers, "vllm"), num_layers}
        return cls(tuple(sorted(ids)), len(aux_layers))


def speculative_config(layer_ids: LayerIds) -> dict[str, Any]:
    """What vLLM's ``speculative_config`` says to hand out hidden states."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids.ids)}},
    }


def kv_transfer_config(folder: str, on_cpu: bool = False) -> dict[str, Any]:
    """What vLLM's ``kv_transfer_config`` says to write them below ``folder``."""
    config: dict[str, Any] = {
        "kv_connector": "CpuHiddenStatesConnector" if on_cpu else "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return config | ({"kv_connector_module_path": CONNECTOR_MODULE} if on_cpu else {})


def server_command(target: EngineTarget, layer_ids: LayerIds) -> str:
    """The command that starts a server which hands out these layers."""
    words = ["vllm", "serve", target.folder.name, "--dtype", target.identity.dtype]
    words += ["--speculative-config", json.dumps(speculative_config(layer_ids))]
    words += ["--kv-transfer-config", json.dumps(kv_transfer_config("/dev/shm/states"))]
    boundary = long_factors_above(target)
    return shlex.join([*words, *(() if boundary is None else ("--max-model-len", str(boundary)))])


def long_factors_above(target: EngineTarget) -> int | None:
    """The ``max_model_len`` above which vLLM turns every sample by the long factors of LongRoPE; None of others."""
    return rope_boundary(target.config) if rope_kind(target.config) == "longrope" else None


def require_short_factors(target: EngineTarget, room: int, longest: int, setting: str) -> None:
    """ConfigError ``rope-scaling`` where a ``max_model_len`` of ``room``, which ``setting`` sets, would give short
    samples other states than transformers does: it takes the long factors for long ones alone."""
    boundary = long_factors_above(target)
    if boundary is None or room <= boundary:
        return
    shorter = f"hiddenstore prepare INPUT -o DATA --target T --max-tokens {boundary - 1}"
    raise ConfigError(
        f"with a max_model_len of {room} vLLM turns every sample by this target's long rotary factors, which are for "
        f"samples of more than {boundary} tokens; the longest here has {longest}",
        kind=Kind.ROPE_SCALING,
        hint=f"{f'{setting}{boundary}' if longest < boundary else shorter}; or --engine hf",
    )


# token_ids int32 [T], aux [L, T, D], final [T, D], the token sampled after the last.
_Answer = tuple[np.ndarray, Tensor, Tensor, int | None]


class StateFile:
    """The answer to one request on disk; ``read`` it, then ``remove`` it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = self.path.with_name(f"{self.path.name}.lock")
        self._answered_s = time.monotonic()

    def read(self) -> tuple[np.ndarray, Tensor]:
        """token_ids int32 [T], states [T, n, D] once the file is whole. Raises CaptureError: ``states-late``,
        ``engine-file``."""
        while not self._is_complete():
            if time.monotonic() - self._answered_s > LATE_S:
                raise CaptureError(
                    f"vLLM answered a request, but {self.path} is not there after {LATE_S:.0f} s",
                    kind=Kind.STATES_LATE,
                    hint="vLLM's log says why it could not be written: a full folder is the usual reason",
                )
            time.sleep(0.002)
        try:
            with safe_open(self.path, framework="pt") as file:
                tokens, states = file.get_tensor(_TOKENS), file.get_tensor(_STATES)
        except (SafetensorError, OSError) as error:
            raise_refusal(error, self.path)
            raise CaptureError(f"cannot read {self.path}: {error}", kind=Kind.ENGINE_FILE) from error
        return tokens.numpy().astype(np.int32), states

    def remove(self) -> None:
        """Remove the file and its lock; CaptureError ``engine-file`` where this user may not."""
        for path in (self.path, self._lock):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                problem = f"cannot remove {path}, so the folder would fill up: {error.strerror}"
                hint = "run collect as the user of the server, or give both the same group and a writable folder"
                raise CaptureError(problem, kind=Kind.ENGINE_FILE, hint=hint) from error

    def _is_complete(self) -> bool:
        """True once nobody writes: the writer lets go of its lock when the file is closed."""
        try:
            descriptor = os.open(self._lock, os.O_RDONLY)
        except FileNotFoundError:
            # A server without locks writes a file before it answers.
            return self.path.exists()
        try:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return self.path.exists()
            return False
        finally:
            os.close(descriptor)


class VllmServer:
    """An OpenAI-compatible vLLM endpoint that was started for hidden states.

    Settings: ``model`` (the served name, where it is not the target's), ``concurrency``, ``timeout_s``,
    ``api_key_env`` (the environment variable that holds the server's key).
    ``options.scratch`` is where the server's folder is seen from here, when not at the path the server says.
    """

    final_norm: NormState = "pre_norm"

    def __init__(self, target: EngineTarget, options: EngineOptions) -> None:
        settings = _settings(options.extra)
        self.target = target
        self._layer_ids = LayerIds.of(options.aux_layers, target.folder.num_layers)
        self._scratch = options.scratch
        self._folders: set[Path] = set()
        self._concurrency = settings["concurrency"]
        self._command = server_command(target, self._layer_ids)
        access = ServerAccess(
            url=str(options.server),
            timeout_s=settings["timeout_s"],
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
        cards = self._client.get("/v1/models", lambda page: [{**card, "id": str(card["id"])} for card in page["data"]])
        folder = self.target.folder
        for card in cards:
            root = str(card.get("root") or card["id"])
            if name is not None and name != card["id"]:
                continue
            if name is None and folder.name not in (card["id"], root) and not _same_folder(root, folder.name):
                continue
            room = card.get("max_model_len")
            if room is not None and longest >= int(room):
                problem = f"the server takes {room} positions, and a sample has {longest} tokens and one is sampled"
                raise ConfigError(problem, kind=Kind.SERVER_UNFIT, hint=f"start it with --max-model-len {longest + 1}")
            require_short_factors(self.target, int(room or 0), longest, "start it with --max-model-len ")
            return str(card["id"])
        served = ", ".join(f"{card['id']} (of {card.get('root')})" for card in cards) or "nothing"
        raise ConfigError(
            f"the server serves {served}, expected {name or folder.name}",
            kind=Kind.SERVER_UNFIT,
            hint="--engine-arg model=NAME, if NAME is this target under another name",
        )

    def _require_tokenizer(self) -> None:
        """A server of another vocabulary would take the ids and answer with states of other words."""
        for text in (_PROBE, *_vocabulary_texts(self.target.tokenizer)):
            expected = self.target.tokenizer.encode(text, add_special_tokens=False)
            request = {"model": self._model, "prompt": text, "add_special_tokens": False}
            served = self._client.post("/tokenize", request, lambda document: list(document["tokens"]))
            if served != expected:
                at = next((i for i, (a, b) in enumerate(zip(served, expected, strict=False)) if a != b), 0)
                ids, own = served[at : at + 8], expected[at : at + 8]
                raise ConfigError(
                    f"the server's tokenizer reads a text as {ids}…, the target's as {own}…: another model",
                    kind=Kind.SERVER_UNFIT,
                )

    def describe(self) -> Engine:
        settings = {"server": "true", "concurrency": str(self._concurrency)}
        return Engine(name="vllm", version=self._version, settings=settings)

    def capture(
        self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False, done: Done = nobody
    ) -> Captured:
        """States of one unit; at most ``concurrency`` requests, and as many files, are under way at one time."""
        assembly = Assembly(requests, self._layer_ids.aux, self.target.head.hidden_size, done=done)
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="vllm") as pool:
            running: dict[Future[_Answer], int] = {}
            waiting = iter(enumerate(requests))
            try:
                while True:
                    for index, request in islice(waiting, self._concurrency - len(running)):
                        running[pool.submit(self._ask, request)] = index
                    if not running:
                        return assembly.captured()
                    ended, _ = wait(running, timeout=_SERVER_POLL_S, return_when=FIRST_COMPLETED)
                    for future in ended:
                        assembly.put(running.pop(future), *future.result())
                    raise_if_stopped(stop)
            finally:
                # Those under way still remove their files; the pool waits for them.
                for future in running:
                    future.cancel()

    def _ask(self, request: CaptureRequest) -> _Answer:
        """One request; runs in a thread of the pool. The server says which file is its answer: one that does not hold
        the tokens of the request may be anybody's, and stays."""
        ids = request.input_ids.tolist()
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        body |= NO_PENALTIES
        path, prompt, next_token = self._client.post("/v1/completions", body, _read_completion)
        file = StateFile(self._path(path))
        token_ids, states = file.read()
        if np.array_equal(token_ids, request.input_ids):
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
        return token_ids, states[:, : self._layer_ids.aux].transpose(0, 1), states[:, -1], next_token

    def _path(self, named: str | None) -> Path:
        """Where the states of an answer are on this machine."""
        if named is None:
            problem = "the server answered without hidden states: it was started without them"
            raise ConfigError(problem, kind=Kind.SERVER_UNFIT, hint=self._command)
        path = Path(named) if self._scratch is None else self._scratch / Path(named).name
        if path.suffix != ".safetensors" or not path.parent.is_dir():
            raise ConfigError(
                f"the server writes its states to {named}, which cannot be reached from here",
                kind=Kind.SERVER_UNFIT,
                hint="run collect where that folder is mounted; --scratch FOLDER if it is mounted at another path",
            )
        self._folders.add(path.parent)
        if len(self._folders) > 1:
            folders = " and ".join(sorted(map(str, self._folders)))
            raise ConfigError(
                f"the server says that its states are in {folders}, expected one folder: files there are removed",
                kind=Kind.SERVER_UNFIT,
                hint="--scratch FOLDER, where no file of another server or of yours is",
            )
        return path

    def close(self) -> None:
        """The server goes on."""
        self._client.close()


def _settings(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``SETTINGS`` as given, each of its kind; ConfigError ``engine-arg``."""
    settings = read_settings("vllm with --server", extra, SETTINGS)
    kinds: dict[str, Callable[[Any], Any]] = {"concurrency": int, "timeout_s": float}
    for name, value in settings.items():
        try:
            settings[name] = None if value is None and SETTINGS[name] is None else kinds.get(name, str)(value)
        except (TypeError, ValueError, OverflowError):
            settings[name] = 0
        if name in kinds and not settings[name] > 0:
            problem = f"{name} of engine vllm with --server is a number above 0, found {value!r}"
            raise ConfigError(problem, kind=Kind.ENGINE_ARG, hint=f"--engine-arg {name}={SETTINGS[name]}")
    return settings


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


def _vocabulary_texts(tokenizer: Any) -> Iterator[str]:
    """The text of every token that its own text becomes, in lines: a merge or word that one side lacks shows."""
    special = set(tokenizer.all_special_ids)
    words = {index: tokenizer.decode([index]) for index in range(len(tokenizer)) if index not in special}
    encoded = tokenizer([*words.values()], add_special_tokens=False)["input_ids"]
    lines = [word for (index, word), ids in zip(words.items(), encoded, strict=True) if ids == [index] and word.strip()]
    for start in range(0, len(lines), _PROBE_LINES):
        yield "\n".join(lines[start : start + _PROBE_LINES])


def _same_folder(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).resolve() == Path(other).resolve()

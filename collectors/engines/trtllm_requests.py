"""Requests that TensorRT-LLM is working on: each has an answer and, apart from it, a file with its states."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collectors.engines import CaptureRequest
from collectors.engines.trtllm_files import SavedFolder, SavedStates
from hiddenstore.errors import CaptureError, Kind

PATIENCE_S = 60.0
"""How long the file of a request may take once the request was answered."""


class _Answer:
    """What TensorRT-LLM says to one request, awaited by a thread of its own, which its shutdown may leave waiting."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.token = -1
        self.error: Exception | None = None
        self.time_s: float | None = None
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self.token = int(self.handle.result().outputs[0].token_ids[0])
        except Exception as error:  # noqa: BLE001 - raised by the thread that owns the engine
            self.error = error
        self.time_s = time.monotonic()


class RunningRequests:
    """Requests under way; each leaves once both its answer and its states are here."""

    def __init__(self, requests: Sequence[CaptureRequest]) -> None:
        self._requests = requests
        self._answers: dict[int, _Answer] = {}
        self._states: dict[int, SavedStates] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, index: int, handle: Any) -> None:
        self._answers[index] = _Answer(handle)

    def match(self, saved: SavedStates) -> None:
        """Give states to the request their tokens were sent for; equal ones have equal states, so to the oldest.

        Raises:
            CaptureError: ``engine-tokens``: nobody sent these tokens.
        """
        similar = ""
        for index in sorted(self._answers.keys() - self._states.keys()):
            ids = self._requests[index].input_ids
            if np.array_equal(ids, saved.token_ids):
                self._states[index] = saved
                return
            common = min(len(ids), len(saved.token_ids))
            if common and np.array_equal(ids[:common], saved.token_ids[:common]):
                similar = similar or f"; {self._name(index)} begins alike, so it was cut or extended"
        tokens = len(saved.token_ids)
        raise CaptureError(
            f"TensorRT-LLM saved states of {tokens} tokens that nobody sent{similar}", kind=Kind.ENGINE_TOKENS
        )

    def finished(self, folder: SavedFolder) -> Iterator[tuple[int, SavedStates, int]]:
        """Index, states and next token of the requests that have both; they are under way no longer.

        Raises:
            CaptureError: ``engine-request``: TensorRT-LLM failed on one; ``engine-file``: the file
                of one that was answered ``PATIENCE_S`` ago never became whole, or never came to ``folder``.
        """
        for index, answer in list(self._answers.items()):
            if answer.time_s is None:
                continue
            if answer.error is not None:
                raise CaptureError(
                    f"TensorRT-LLM failed on {self._name(index)}: {answer.error}", kind=Kind.ENGINE_REQUEST
                ) from answer.error
            if index in self._states:
                del self._answers[index]
                yield index, self._states.pop(index), answer.token
            elif time.monotonic() - answer.time_s > PATIENCE_S:
                raise self._overdue(index, folder)

    def abort(self) -> None:
        for answer in self._answers.values():
            answer.handle.abort()

    def _name(self, index: int) -> str:
        return f"request {index + 1} of the unit ({len(self._requests[index].input_ids)} tokens)"

    def _overdue(self, index: int, folder: SavedFolder) -> CaptureError:
        answered = f"{self._name(index)} was answered {PATIENCE_S:.0f} s ago, but"
        if torn := folder.unfinished():
            return CaptureError(
                f"{answered} {', '.join(torn)} is no whole torch file yet: its writer died, or {folder.folder.parent} "
                f"is full",
                kind=Kind.ENGINE_FILE,
                hint=f"df -h {folder.folder.parent}",
            )
        return CaptureError(
            f"{answered} no file with its tokens came to {folder.folder}: TensorRT-LLM writes after every "
            f"write_interval requests, which this engine sets to 1, and never writes the rest",
            kind=Kind.ENGINE_FILE,
            hint="hiddenstore doctor",
        )

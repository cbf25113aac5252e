"""Requests that TensorRT-LLM has and has not finished: which states belong to which, and which are overdue.

Shapes: T tokens of a request.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collectors.engines import CaptureRequest
from collectors.engines.trtllm_files import SavedFolder, SavedStates
from hiddenstore.errors import CaptureError

PATIENCE_S = 60.0
"""How long the file of a request may take once the request was answered."""


class Answer:
    """What TensorRT-LLM says to one request, awaited by a thread of its own, which its shutdown may leave waiting."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.token: int | None = None
        self.error: Exception | None = None
        self.at: float | None = None
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self.token = int(self.handle.result().outputs[0].token_ids[0])
        except Exception as error:  # noqa: BLE001 - raised by the thread that owns the engine
            self.error = error
        self.at = time.monotonic()


@dataclass(eq=False)
class Finished:
    """A request with its states and the token TensorRT-LLM sampled after it."""

    index: int
    saved: SavedStates
    next_token: int


@dataclass(eq=False)
class Waiting:
    """Requests under way; each leaves once both its answer and its states are here."""

    requests: Sequence[CaptureRequest]
    _answers: dict[int, Answer] = field(default_factory=dict)
    _saved: dict[int, SavedStates] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, index: int, handle: Any) -> None:
        self._answers[index] = Answer(handle)

    def match(self, saved: SavedStates) -> None:
        """Give states to the request their tokens were sent for; equal ones have equal states, so to the oldest.

        Raises:
            CaptureError: ``engine-tokens``: nobody sent these tokens.
        """
        for index in self._unsaved():
            if np.array_equal(self.requests[index].input_ids, saved.token_ids):
                self._saved[index] = saved
                return
        raise CaptureError(self._stranger(saved.token_ids), kind="engine-tokens")

    def finished(self, folder: SavedFolder) -> Iterator[Finished]:
        """Requests whose answer and states are both here, which are under way no longer.

        Raises:
            CaptureError: ``engine-request``: TensorRT-LLM failed on one; ``engine-file``, ``engine-no-file``: the file
                of one that was answered ``PATIENCE_S`` ago never became whole, or never came to ``folder``.
        """
        for index, answer in list(self._answers.items()):
            if answer.at is None:
                continue
            if answer.error is not None:
                raise CaptureError(
                    f"TensorRT-LLM failed on {self._name(index)}: {answer.error}", kind="engine-request"
                ) from answer.error
            if index in self._saved:
                assert answer.token is not None
                del self._answers[index]
                yield Finished(index, self._saved.pop(index), answer.token)
            elif time.monotonic() - answer.at > PATIENCE_S:
                raise self._overdue(index, folder)

    def abort(self) -> None:
        for answer in self._answers.values():
            answer.handle.abort()

    def _unsaved(self) -> list[int]:
        return [index for index in self._answers if index not in self._saved]

    def _name(self, index: int) -> str:
        return f"request {index + 1} of the unit ({len(self.requests[index].input_ids)} tokens)"

    def _overdue(self, index: int, folder: SavedFolder) -> CaptureError:
        said = f"{self._name(index)} was answered {PATIENCE_S:.0f} s ago, but"
        if torn := folder.unfinished():
            return CaptureError(
                f"{said} {', '.join(torn)} is no whole torch file yet: its writer died, or {folder.folder.parent} is "
                f"full",
                kind="engine-file",
                hint=f"df -h {folder.folder.parent}",
            )
        return CaptureError(
            f"{said} no file with its tokens came to {folder.folder}: TensorRT-LLM writes after every write_interval "
            f"requests, which this engine sets to 1, and never writes the rest",
            kind="engine-no-file",
            hint="hiddenstore doctor",
        )

    def _stranger(self, token_ids: np.ndarray) -> str:
        said = f"TensorRT-LLM saved states of {len(token_ids)} tokens that nobody sent"
        for index in self._unsaved():
            sent = self.requests[index].input_ids
            common = min(len(sent), len(token_ids))
            if common and np.array_equal(sent[:common], token_ids[:common]):
                return f"{said}; {self._name(index)} begins alike, so it was cut or extended"
        return said

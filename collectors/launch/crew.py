"""What a launcher that starts workers of its own gives the driver: start, call, wait, stop and kill, by index."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Lost:
    """In place of an answer: the worker is gone, or failed in a way that no message was written for."""

    why: str


class Crew(Protocol):
    """Workers as a launcher has them, by index from 0: at most one call under way each."""

    size: int

    def start(self, index: int) -> None:
        """Start a worker, or another in place of one that was lost."""
        ...

    def call(self, index: int, method: str, *arguments: Any) -> None:
        """Call a method of ``collectors.launch.worker.CaptureWorker``."""
        ...

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        """What has been answered: index and what the method returned, or Lost."""
        ...

    def stop(self, index: int) -> None:
        """Call ``stop`` beside the call under way."""
        ...

    def kill(self, index: int) -> None:
        """End the worker's process, whatever it does."""
        ...

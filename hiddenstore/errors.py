"""The seven errors, grouped by what the reader of the message does next.

Each carries a stable kebab-case ``kind`` for scripts, an optional ``hint`` (the command that fixes it) and the exit
code of the command line.
"""

import copyreg
from collections.abc import Sequence
from typing import Any


class HiddenstoreError(Exception):
    """Base of every error a user can cause or meet. ``message`` says what, where, expected and found."""

    exit_code = 1

    def __init__(self, message: str, *, kind: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Whole in another process: an exception's own pickling would call the class without its keywords."""
        return copyreg.__newobj__, (type(self), self.message), vars(self)  # type: ignore[attr-defined]


class ConfigError(HiddenstoreError, ValueError):
    """What was asked for cannot be: wrong option, bad input file, unknown setting.

    ``problems``: where there are several, each in a line of its own.
    """

    exit_code = 2

    def __init__(self, message: str, *, kind: str, hint: str | None = None, problems: Sequence[str] = ()) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.problems = tuple(problems) or (message,)


class NotFoundError(HiddenstoreError, KeyError):
    """A file, store, sample or command that does not exist."""

    exit_code = 2


class FormatError(HiddenstoreError):
    """A document or store that this version cannot read, or a target that does not fit."""

    exit_code = 4


class CorruptionError(HiddenstoreError):
    """Bytes disagree with their digest, or a named file is missing or has another size.

    ``samples`` names the sample ids that cannot be read because of it.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, kind: str, hint: str | None = None, path: str = "", samples: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.path = path
        self.samples = samples


class ConflictError(HiddenstoreError):
    """Something is there already and disagrees."""

    exit_code = 6


class StorageError(HiddenstoreError, OSError):
    """The disk, network or permissions refused."""

    exit_code = 5


class CaptureError(HiddenstoreError):
    """The target or its engine misbehaved: too many rejects, wrong tokens, non-finite states."""

    exit_code = 4


class InterruptError(HiddenstoreError):
    """A signal asked to stop; what is committed stays and the same command resumes."""

    exit_code = 75

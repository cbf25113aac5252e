"""Which reads fail and how, for the tests of commands that read for a moment what cannot be read."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from collectors.engines.dump import peer
from hiddenstore.fs.disk import PosixDisk

ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM)


def errors_at(at: int, is_sample: bool) -> tuple[int, ...]:
    """Error numbers for read ``at``: the next one of them in a sample, else every one."""
    return (ERRORS[at % len(ERRORS)],) if is_sample else ERRORS


class Reads:
    """Counts the reads below some folders, and refuses one of them as the system or a library says it."""

    def __init__(self, folders: tuple[Path, ...], patch: pytest.MonkeyPatch) -> None:
        self._folders = tuple(map(str, folders))
        self.count, self.at, self.number = 0, -1, 0
        for owner, name, place in (
            (PosixDisk, "read", 1),
            (PosixDisk, "read_into", 1),
            (PosixDisk, "list", 1),
            (Path, "open", 0),
            (os, "listdir", 0),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name), place, "{reason}"))
        said = "unable to open file <{path}> in read-only mode: {reason} ({number})"
        patch.setattr(torch, "load", self._counted(torch.load, 0, said))
        patch.setattr(peer, "safe_open", self._counted(safe_open, 0, "{reason} (os error {number})"))

    def begin(self, at: int = -1, number: int = 0) -> None:
        """Count anew; the read ``at`` is refused by an error number."""
        self.count, self.at, self.number = 0, at, number

    def _counted(self, read: Callable[..., Any], place: int, says: str) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            if str(args[place]).startswith(self._folders):
                self.count += 1
                if self.count == self.at + 1:
                    reason = os.strerror(self.number)
                    if says == "{reason}":
                        raise OSError(self.number, reason)
                    says_so = SafetensorError if "os error" in says else RuntimeError
                    raise says_so(says.format(path=args[place], reason=reason, number=self.number))
            return read(*args, **more)

        return counted

"""Torch files (``.pt``, ``.ckpt``, ``.ckpt.gz``) of strangers: unpickled by a limited child, tensors only."""

import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import load
from torch import Tensor

from collectors.importers.peer import Unusable
from hiddenstore.errors import StorageError

CHILD = Path(__file__).with_name("torch_child.py")
PATIENCE_S = 120.0
SLOWEST_BYTES_PER_S = 4_000_000
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class TorchFile:
    """What one file holds: tensors that were asked for, shapes of all, scalars (numbers, short texts)."""

    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    scalars: dict[str, Any]

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor; Unusable ``missing-key``."""
        if key not in self.shapes:
            held = ", ".join(sorted(self.shapes)) or "nothing"
            raise Unusable("missing-key", f"there is no tensor {key}; the file holds {held}")
        return self.shapes[key][1]


class TorchFiles:
    """The child, started on first use and again when a file has ended it. Use from one thread.

    ``patience_s``: how long one small file may take; large ones get the time their bytes take.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "TorchFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, path: Path, wanted: Sequence[str] | None = None) -> TorchFile:
        """The tensors ``wanted`` (None: all) of one file.

        Raises:
            Unusable: ``refused`` (it holds more than tensors), ``truncated``, ``unreadable``, ``too-large``,
                ``too-slow``, ``wrong-content``.
        """
        child = self._running()
        deadline = time.monotonic() + self._patience_s + path.stat().st_size / SLOWEST_BYTES_PER_S
        request = {"path": str(path.absolute()), "wanted": None if wanted is None else list(wanted)}
        try:
            assert child.stdin is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            header, payload = json.loads(self._take(child, deadline)), self._take(child, deadline)
        except TimeoutError:
            self.close()
            raise Unusable("too-slow", "reading it took too long") from None
        except (EOFError, BrokenPipeError):
            self.close()
            raise Unusable("unreadable", "the process that read it died: the file may need too much memory") from None
        if "reason" in header:
            raise Unusable(header["reason"], header["detail"])
        shapes = {name: (kind, tuple(shape)) for name, (kind, shape) in header["shapes"].items()}
        return TorchFile(load(payload) if payload else {}, shapes, header["scalars"])

    def close(self) -> None:
        """End the child."""
        if self._child is None:
            return
        child, self._child = self._child, None
        child.kill()
        child.communicate()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None or self._child.poll() is not None:
            self.close()
            # Nothing of this process is handed down but what starting Python takes: no tokens, no proxies.
            kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", str(CHILD)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=kept | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                    start_new_session=True,
                )
            except OSError as error:
                raise StorageError(f"cannot start the process that reads torch files: {error}", kind="child") from error
        return self._child

    @staticmethod
    def _take(child: "subprocess.Popen[bytes]", deadline: float) -> bytes:
        (length,) = struct.unpack("<Q", _exactly(child, 8, deadline))
        return _exactly(child, length, deadline)


def _exactly(child: "subprocess.Popen[bytes]", length: int, deadline: float) -> bytes:
    assert child.stdout is not None
    handle, parts = child.stdout.fileno(), bytearray()
    while len(parts) < length:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([handle], [], [], left)[0]:
            raise TimeoutError
        block = os.read(handle, min(_BLOCK, length - len(parts)))
        if not block:
            raise EOFError
        parts += block
    return bytes(parts)

"""A benchmark's worker: a process that answers requests, both as JSON lines."""

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class WorkerProcess:
    """``command`` run at the root of the repository; what it says besides its answers is added to ``errors``."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], errors: Path) -> None:
        self._errors = errors.open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )

    def ask(self, op: str, **options: Any) -> dict[str, Any]:
        """What the worker answers, ``failed`` where it could not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"op": op, **options}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"failed": "the worker died"}

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

"""``hiddenstore`` as processes of one thread, and the bundled target's own conversations as files."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations

COMMAND = (sys.executable, "-m", "hiddenstore.cli")


class RefusedError(Exception):
    """What a command said of why it could not, and in brackets the kind of that error."""


class Command:
    """``hiddenstore WORDS`` in processes. Raises SystemExit where an exit code is not in ``accepts``."""

    def __init__(self, environment: Mapping[str, str] | None = None, accepts: Sequence[int] = (0,)) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.accepts = accepts

    def cpu_s(self, *words: str) -> float:
        """User and system seconds it took."""
        return self.run([*COMMAND, *words])[1]

    def answer(self, *words: str) -> dict[str, Any]:
        """What it answers with ``--json``."""
        return dict(json.loads(self.run([*COMMAND, *words, "--json"], subprocess.PIPE)[0]))

    def demand(self, *words: str, folder: Path | None = None) -> dict[str, Any]:
        """The same in a folder, of what may be refused. Raises RefusedError."""
        command = [*COMMAND, *words, "--json"]
        done = subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode in self.accepts:
            return dict(json.loads(done.stdout))
        said = done.stderr.splitlines()[-1:]
        if not said or not said[0].startswith("{"):
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
        error = json.loads(said[0])
        raise RefusedError(f"{error['message']} [{error['kind']}]")

    def run(self, command: Sequence[str], stdout: int | None = None) -> tuple[str, float]:
        """Any command: what it printed, where that is piped, and its CPU seconds."""
        with subprocess.Popen(command, env=self.environment, stdout=stdout, text=True) as process:
            printed = process.stdout.read() if process.stdout is not None else ""
            _, status, usage = os.wait4(process.pid, 0)
            # Popen did not see the child end; without this it would wait for it again.
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in self.accepts:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        return printed, usage.ru_utime + usage.ru_stime


def demo_chats(file: Path, count: int) -> Path:
    """The first conversations that the bundled target was trained on, as JSONL."""
    lines = (json.dumps(row) for row in islice(conversations(), count))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def prepare(chats: Path, data: Path, target: str | Path = TARGET_DIR) -> dict[str, Any]:
    """Prepared data of these chats; what the command answers."""
    return Command().answer("prepare", str(chats), "-o", str(data), "--target", str(target))

"""Commands in processes of their own, forked from one that has imported what they need: the imports of a training cost
four times what a small one does.
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer imports it.
_PRELOADED = (
    "hiddenstore.cli", "hiddenstore.testing.suite", "trainer.train.loop", "collectors.capture.job", "torch._dynamo",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


class Forked:
    """``body(*arguments)`` in a process of its own, in this folder, with this environment and ``environment``, on one
    thread; it is asked what a ``Popen`` is asked. ``body`` has to pickle."""

    def __init__(self, body: Callable[..., object], *arguments: object, **environment: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forked-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        _CONTEXT.set_forkserver_preload(list(_PRELOADED))
        place = (os.getcwd(), {**os.environ, "OMP_NUM_THREADS": "1", **environment}, self._folder)
        self._process = _CONTEXT.Process(target=_run, args=(*place, body, arguments), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"process {self.pid} still runs after {timeout} s"
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it printed and what it said on stderr, once it has ended."""
        self.wait(timeout)
        printed, said = ((self._folder / name).read_text(errors="replace") for name in "12")
        return printed, said

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def command(*words: str) -> None:
    """``hiddenstore WORDS``."""
    from hiddenstore.cli import main

    main(list(words), prog_name="hiddenstore")


def _run(
    folder: str, environment: dict[str, str], said: Path, body: Callable[..., object], arguments: tuple[object]
) -> None:
    for number in (1, 2):
        with (said / str(number)).open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    body(*arguments)

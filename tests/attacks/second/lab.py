"""Where an attempt is made: copies of small real things, commands in this process or of their own, and what came of
it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from hiddenstore import inputs
from hiddenstore.files.documents import canonical, sha256_hex
from hiddenstore.store import Store
from hiddenstore.testing.workload import contents
from tests.tiny_world import LAYERS, World, run

SECONDS = 120
UNIT_TOKENS = 400
HELD = "held"
Change = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def word(self) -> str:
        """``held``, the kind of the error, ``findings`` of verify, or what must never be: a traceback, a hang."""
        if "Traceback" in self.err:
            return "traceback"
        if '"schema": "hiddenstore.error/' in self.err:
            return str(json.loads(self.err.splitlines()[-1])["kind"])
        _, is_error, error = self.err.rpartition("error: ")
        if not is_error:
            return {0: HELD, 3: "findings"}.get(self.code, f"exit {self.code}")
        kinds = re.findall(r" \[([a-z-]+)\]$", error, re.MULTILINE)
        return kinds[0] if kinds else f"unnamed: {error}"


@dataclass(frozen=True)
class Attempt:
    """``do`` attacks in a lab and returns how the last command ended; it raises where something was lost or silent.

    ``expected``: the word of the outcome; several joined by | where the machine decides.
    """

    what: str
    do: Callable[["Lab"], Outcome]
    expected: str


@dataclass(frozen=True)
class Lab:
    """A folder of one attempt, the world to copy from, and the stores of several units beside it."""

    world: World
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def path(self, name: str) -> Path:
        """The world's thing of that name, not to be changed."""
        return self.world.root / name

    def copy(self, name: str, to: str | None = None) -> Path:
        """A copy of it to spoil."""
        source, copied = self.path(name), self.folder / (to or name)
        if source.is_dir():
            shutil.copytree(source, copied, symlinks=True)
        else:
            shutil.copy(source, copied)
        return copied

    def run(self, *words: object) -> Outcome:
        """``hiddenstore WORDS`` in this process, in the attempt's folder; a hang is an error."""
        self.capsys.readouterr()
        with _deadline(), _inside(self.folder):
            code = run(*map(str, words))
        printed = self.capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    def shell(self, script: str, **environ: str | None) -> Outcome:
        """A shell's script in which ``$H`` is the command line, in a process group of its own."""
        values = {**os.environ, "H": f"{sys.executable} -m hiddenstore.cli", "OMP_NUM_THREADS": "1", **environ}
        kept = {name: value for name, value in values.items() if value is not None}
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder, env=kept, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise AssertionError(f"hang: {script}") from None
        return Outcome(process.returncode, out, err)

    def collect(self, data: object, store: object, *more: str) -> Outcome:
        return self.run("collect", data, "-o", store, "--target", self.path("target"), "--layers", LAYERS, *more, "-q")

    def require_same(self, store: Path, name: str = "store") -> None:
        """The store holds exactly the samples of the world's, bit for bit."""
        assert contents(Store.open(store)) == contents(Store.open(self.path(name))), "lost or wrong: other samples"


def commit_of(store: Path, number: int = 0) -> Path:
    return sorted((store / "commits").glob("*.json"))[number]


def segment_of(store: Path, number: int = 0) -> Path:
    return store / str(json.loads(commit_of(store, number).read_bytes())["segment"])


def reseal(path: Path, change: Change) -> dict[str, Any]:
    """A sealed document changed, with a digest that fits."""
    content = json.loads(path.read_bytes())
    content.pop("sha256")
    change(content)
    body = canonical(content)
    path.write_bytes(body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode())
    return content


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def set_file(record: Path, name: str, data: bytes) -> None:
    """A segment's file in place of the one its record named, with the record made to fit."""
    content = json.loads(record.read_bytes())
    (record.parent.parent / content["segment"] / name).write_bytes(data)

    def change(document: dict[str, Any]) -> None:
        for file in document["files"]:
            if file["path"] == name:
                file["size"] = len(data)
                file["sha256"] = sha256_hex(data)

    reseal(record, change)


def with_units(world: World) -> World:
    """The world, and stores ``units`` and ``tars`` of its DATA in several units."""
    before, inputs.UNIT_TOKENS = inputs.UNIT_TOKENS, UNIT_TOKENS
    try:
        for name, container in (("units", "zarr"), ("tars", "webdataset")):
            if not (world.root / name).exists():
                words = (
                    "collect",
                    world / "data",
                    "-o",
                    world / name,
                    "--target",
                    world / "target",
                    "--layers",
                    LAYERS,
                )
                assert run(*words, "--container", container, "-q") == 0
    finally:
        inputs.UNIT_TOKENS = before
    return world


@contextmanager
def _deadline() -> Iterator[None]:
    def on_alarm(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise AssertionError("hang")

    before = signal.signal(signal.SIGALRM, on_alarm)
    # The suite's own limit of a test is on the same clock.
    left = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)

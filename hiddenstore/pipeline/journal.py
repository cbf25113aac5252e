"""What of a recipe is done: a sealed document for each finished stage, ``done/<stage>.json`` in its folder."""

import hashlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from hiddenstore.documents import load, seal
from hiddenstore.errors import ConflictError
from hiddenstore.fs_local import LocalFilesystem
from hiddenstore.pipeline.stages import Stage
from schemas.base import FORMAT_VERSION, Document

FOLDER = "done"


class DoneStage(Document):
    """A finished stage: its words, what it answered (JSON text), seconds. ``built_on``: digest of what it read."""

    format: int = FORMAT_VERSION
    stage: str
    words: tuple[str, ...]
    answer: str
    seconds: float
    built_on: str


class Journal:
    """The finished stages of one recipe's folder.

    Raises:
        ConflictError: ``out-exists``: the folder holds other things and no journal.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        if out.exists() and any(out.iterdir()) and not (out / FOLDER).is_dir():
            raise ConflictError(
                f"{out} holds things that no `hiddenstore run` made", kind="out-exists", hint="out: another folder"
            )
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
        self._fs = LocalFilesystem(out)

    def find(self, stage: Stage, built_on: str) -> DoneStage | None:
        """What ``stage`` gave, if it was done as it stands on the same ground; an answer on another ground is dropped.

        Raises:
            ConflictError: ``stage-changed``: what it made is there, made otherwise.
            CorruptionError: its document is damaged.
        """
        path = _path(stage)
        if self._fs.size(path) is None:
            return None
        found = load(self._fs, path, DoneStage)
        is_same = found.words == stage.words and found.built_on == built_on
        if is_same and (stage.makes is None or stage.makes.exists()):
            return found
        if stage.makes is not None and stage.makes.exists():
            how = (
                f"was made by `{shlex.join(['hiddenstore', stage.command, *found.words])}`, the recipe now says "
                f"`{shlex.join(['hiddenstore', stage.command, *stage.words])}`"
                if found.words != stage.words
                else "was made from inputs that have changed since"
            )
            raise ConflictError(
                f"{stage.makes} {how}; name another folder in out:, or remove it",
                kind="stage-changed",
                hint=shlex.join(["rm", "-r", str(stage.makes), str(self.out / path)]),
            )
        (self.out / path).unlink()
        return None

    def add(self, stage: Stage, done: DoneStage) -> None:
        """Record a finished stage."""
        self._fs.put_if_absent(_path(stage), seal(done))


def digest_of(done: Iterable[DoneStage]) -> str:
    """What later stages are built on: sha256 over the documents of earlier ones."""
    return hashlib.sha256(b"".join(seal(one) for one in done)).hexdigest()


def digest_of_files(paths: Iterable[str]) -> str:
    """sha256 over the local files among ``paths``; hub ids are their names."""
    whole = hashlib.sha256()
    for name in paths:
        path = Path(name)
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            whole.update(str(file).encode())
            if file.is_file():
                with file.open("rb") as handle:
                    whole.update(hashlib.file_digest(handle, "sha256").digest())
    return whole.hexdigest()


def _path(stage: Stage) -> str:
    return f"{FOLDER}/{stage.name.replace('/', '.')}.json"

"""What a run has to do with object storage: a local cache of the store it reads, a mirror of the checkpoints it writes.

A mirror is a prefix with the files of the run and a folder for each checkpoint, ``state.json`` last: one without it is
not whole. Nothing is removed there.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from hiddenstore.errors import ConflictError, HiddenstoreError, Kind, NotFoundError, StorageError
from hiddenstore.files.layout import SEGMENTS_DIR
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.cache import CachedFilesystem
from hiddenstore.fs.publish import new_folder, upload
from hiddenstore.fs.seam import Filesystem
from trainer.train import checkpoint

CACHE_BYTES = 64 << 30
_NEXT = ".next"
"""Ends the name of what is about to take the place of a file of a mirror."""


def through_cache(store: str | Path, folder: str | Path | None, most_bytes: int) -> str | Path | Filesystem:
    """Where to open a store: its location, or that read through a cache in ``folder``. Raises ConfigError:
    ``option-invalid``, the store is local or the cache below 16 MiB."""
    return store if folder is None else CachedFilesystem(str(store), folder, most_bytes, SEGMENTS_DIR)


@dataclass
class Mirror:
    """The run folder ``run`` copied to ``location``. ``files``: those beside the checkpoints; ``own``: those of them
    that no two runs share, the first of which decides whose mirror it is. ``behind``: the refusal that left checkpoints
    out, until they are brought by a later one."""

    run: Path
    location: str
    files: tuple[str, ...]
    own: tuple[str, ...]
    behind: HiddenstoreError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._fs = open_filesystem(self.location)

    def check(self, restores: bool = False) -> None:
        """Refuse a place that cannot be written (StorageError), or that is another run's (ConflictError
        ``output-exists``). ``restores``: the run folder is to be made from it."""
        self._fs.require_atomic_put()
        for name in () if restores else self.own:
            local = self.run / name
            if self._fs.size(name) is not None and not (local.is_file() and local.read_bytes() == self._fs.read(name)):
                raise self._another()

    def claim(self) -> None:
        """Put there what makes it this run's. Raises ConflictError ``output-exists``: another run came first;
        StorageError: the storage refused."""
        for name in self.own:
            data = (self.run / name).read_bytes()
            if not self._fs.put_if_absent(name, data) and self._fs.read(name) != data:
                raise self._another()

    def _another(self) -> ConflictError:
        resumes = "--resume " if (self.run / self.own[0]).is_file() else ""
        elsewhere = f"{resumes}--mirror {self.location.rstrip('/')}/{self.run.name}"
        message, hint = f"{self.location} holds the mirror of another run than {self.run}", elsewhere
        if not self._whole():
            # A run that died before its first checkpoint leaves its claim; one that goes on looks the same from here.
            message, hint = f"{message}, without a checkpoint", f"remove it if that run has ended, or {elsewhere}"
        return ConflictError(message, kind=Kind.OUTPUT_EXISTS, hint=hint)

    def bring(self) -> None:
        """Copy the checkpoints that are not there yet, and what the run is beside them."""
        try:
            self.claim()
            for name in self.files:
                if name not in self.own:
                    _replace(self._fs, name, (self.run / name).read_bytes())
            whole = self._whole()
            for path in checkpoint.checkpoints(self.run):
                if path.name not in whole:
                    # What a killed upload left may be of another machine, whose last bits differ.
                    self._fs.remove_tree(f"{checkpoint.FOLDER}/{path.name}")
                    place = open_filesystem(f"{self.location.rstrip('/')}/{checkpoint.FOLDER}/{path.name}")
                    upload(path, place, last=checkpoint.STATE_JSON)
        except (StorageError, ConflictError) as error:
            self.behind = error
        else:
            self.behind = None

    def restore(self) -> None:
        """Make the run folder from the mirror, with its newest checkpoint and those that validated best by then, where
        this machine has none. Raises NotFoundError: ``checkpoint-missing``: the mirror holds no whole checkpoint."""
        whole = self._whole()
        newest = max(whole, key=lambda name: int(name.rpartition("-")[2]), default=None)
        if newest is None:
            raise NotFoundError(f"{self.location} holds no whole checkpoint", kind=Kind.CHECKPOINT_MISSING)
        with new_folder(self.run) as run:
            for name in self.files:
                (run / name).write_bytes(_read(self._fs, name))
            self._fetch(newest, run)
            best = checkpoint.read_state(run / checkpoint.FOLDER / newest).standing.best
            for name in best.keys() & set(whole) - {newest}:
                self._fetch(name, run)

    def _fetch(self, name: str, run: Path) -> None:
        """Copy a checkpoint of the mirror into the folder ``run``."""
        folder = run / checkpoint.FOLDER / name
        folder.mkdir(parents=True)
        for file in self._fs.list(f"{checkpoint.FOLDER}/{name}"):
            (folder / file).write_bytes(self._fs.read(f"{checkpoint.FOLDER}/{name}/{file}"))

    def _whole(self) -> list[str]:
        names = [name for name in self._fs.list(checkpoint.FOLDER) if re.fullmatch(r"step-\d+", name)]
        states = {name: f"{checkpoint.FOLDER}/{name}/{checkpoint.STATE_JSON}" for name in names}
        return [name for name, path in states.items() if self._fs.size(path) is not None]


def _replace(fs: Filesystem, name: str, data: bytes) -> None:
    """Put ``data`` there; wherever this is killed, `_read` gives the old bytes or the new ones."""
    coming = f"{name}{_NEXT}"
    if fs.size(name) is not None and fs.read(name) != data:
        fs.remove_tree(coming)
        fs.put_if_absent(coming, data)
        fs.remove_tree(name)
    fs.put_if_absent(name, data)
    if fs.size(coming) is not None:
        fs.remove_tree(coming)


def _read(fs: Filesystem, name: str) -> bytes:
    coming = f"{name}{_NEXT}"
    return fs.read(coming if fs.size(name) is None and fs.size(coming) is not None else name)

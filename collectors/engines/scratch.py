"""The RAM-backed folder in which an engine hands states over as files, removed with the process that made it."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hiddenstore.errors import ConfigError

PREFIX = "hiddenstore-scratch-"
_OWNER = ".owner"
_MEMORY = Path("/dev/shm")
# A container's /dev/shm is 64 MiB unless it was started with more.
_SMALL_BYTES = 1 << 30


class Scratch:
    """A folder of this process's own under ``root``; what processes that were killed left there is removed."""

    def __init__(self, root: Path | None = None) -> None:
        root = default_root() if root is None else root
        if not root.is_dir():
            raise ConfigError(f"--scratch {root} is no folder", kind="scratch-missing", hint=f"mkdir -p {root}")
        remove_abandoned(root)
        unowned = Path(tempfile.mkdtemp(prefix="hiddenstore-new-", dir=root))
        # Held until this process ends, however it ends: the lock says that the folder is in use.
        self._owner = os.open(unowned / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        self.path = unowned.rename(unowned.with_name(unowned.name.replace("hiddenstore-new-", PREFIX)))

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def require(self, needed_bytes: int) -> None:
        """Refuse a folder that cannot hold what is under way at one time: ConfigError ``scratch-too-small``."""
        free = self.free_bytes()
        if free < needed_bytes:
            raise ConfigError(
                f"{self.path.parent} has {free / 1e6:.0f} MB free, and states of {needed_bytes / 1e6:.0f} MB are under "
                f"way at one time",
                kind="scratch-too-small",
                hint="--scratch FOLDER on a larger tmpfs, or a container with a larger --shm-size",
            )

    def close(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._owner)


def default_root() -> Path:
    """``/dev/shm`` where it exists and has room, else the system's temporary folder."""
    if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _SMALL_BYTES:
        return _MEMORY
    return Path(tempfile.gettempdir())


def remove_abandoned(root: Path) -> None:
    """Remove scratch folders whose process is gone: their lock is free."""
    for folder in root.glob(f"{PREFIX}*"):
        try:
            owner = os.open(folder / _OWNER, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(owner)

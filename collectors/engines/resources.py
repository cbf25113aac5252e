"""What an engine takes of its machine: versions of packages, the GPUs of its rank, and a folder in memory; and what
``doctor`` says of the engines, of Ray, and of that folder.

Versions are read from metadata; what an engine adds to that is in its own file, named by its row.
"""

import fcntl
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from collectors.engines import ENGINES, EngineOptions, load_attribute
from hiddenstore.doctor import DoctorCheck, install_command, version_of
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.folder import first_line

Numbers = tuple[int, int]
START_ERRORS = (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError, OSError)
"""What an engine raises over a machine it is not for, a config or a layer that its model classes do not know."""


def major_minor(version: str | None) -> Numbers:
    """Major and minor number of a version, zeros where it states none."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_version(
    name: str, version: str | None, detail: str, oldest: Numbers, newest: Numbers, source: str
) -> DoctorCheck:
    """``ok`` from ``oldest`` to ``newest``, else a warning that says by ``source`` where ``detail`` is known from."""
    if oldest <= major_minor(version) <= newest:
        return DoctorCheck(name, "ok", detail)
    span = " to ".join(f"{major}.{minor}" for major, minor in (oldest, newest))
    return DoctorCheck(name, "warning", f"{detail}; that was {source} {span}", "collect with --check hf")


def start_failure(engine: str, target: str, error: Exception) -> ConfigError:
    """``engine-start``, for what an engine raised in place of starting for a target."""
    return ConfigError(
        f"{engine} does not start for target {target}: {type(error).__name__}: {first_line(error)}",
        kind=Kind.ENGINE_START,
        hint="its log above says more; its settings are --engine-arg KEY=VALUE; --engine hf needs neither",
    )


def optional_package(distribution: str, extra: str, purpose: str) -> DoctorCheck:
    """A package that only ``purpose`` needs; our ``extra`` brings it."""
    version = version_of(distribution)
    if version is not None:
        return DoctorCheck(distribution, "ok", version)
    fix = install_command(distribution, extra)
    return DoctorCheck(distribution, "absent", f"not installed; serves {purpose}", fix)


PREFIX = "hiddenstore-scratch-"
_OWNER = ".owner"
_MEMORY = Path("/dev/shm")
# A container's /dev/shm is 64 MiB unless it was started with more.
_SMALL_BYTES = 1 << 30


def choose_devices(options: EngineOptions) -> None:
    """Let this process see its rank's own GPUs only; ConfigError ``devices-too-few``."""
    if not torch.cuda.is_available():
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        rank_devices(visible, options.local_rank, gpus_of(options.tensor_parallel, options.extra))
    )


def gpus_of(tensor_parallel: int, extra: Mapping[str, Any]) -> int:
    """How many GPUs one engine takes: vLLM and TensorRT-LLM call the second factor alike."""
    stages = extra.get("pipeline_parallel_size", 1)
    return tensor_parallel * (stages if isinstance(stages, int) and stages > 0 else 1)


def rank_devices(visible: Sequence[str], local_rank: int, count: int) -> list[str]:
    """This rank's devices; a launcher that shows each rank only its own is left alone.

    >>> rank_devices(["0", "1", "2", "3"], local_rank=1, count=2)
    ['2', '3']
    """
    if len(visible) == count:
        return list(visible)
    devices = list(visible[local_rank * count : (local_rank + 1) * count])
    if len(devices) < count:
        raise ConfigError(
            f"rank {local_rank} of this machine needs {count} GPUs, and {len(visible)} are visible to all of its ranks",
            kind=Kind.DEVICES_TOO_FEW,
            hint=f"start {max(1, len(visible) // count)} ranks per machine, or a smaller --tensor-parallel",
        )
    return devices


class Scratch:
    """A folder of this process's own under ``root``; what processes that were killed left there is removed."""

    def __init__(self, root: Path | None = None) -> None:
        root = default_root() if root is None else root
        if not root.is_dir():
            hint = shlex.join(["mkdir", "-p", str(root)])
            raise ConfigError(f"--scratch {root} is no folder", kind=Kind.SCRATCH_INVALID, hint=hint)
        remove_abandoned(root)
        unowned = Path(tempfile.mkdtemp(prefix="hiddenstore-new-", dir=root))
        # Held until this process ends, however it ends: the lock says that the folder is in use.
        self._owner = os.open(unowned / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        self.path = unowned.rename(unowned.with_name(unowned.name.replace("hiddenstore-new-", PREFIX)))

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def require(self, needed_bytes: int) -> None:
        """Refuse a folder that cannot hold what is under way at one time: ConfigError ``scratch-invalid``."""
        free = self.free_bytes()
        if free < needed_bytes:
            raise ConfigError(
                f"{self.path.parent} has {free / 1e6:.0f} MB free, and states of {needed_bytes / 1e6:.0f} MB are under "
                f"way at one time",
                kind=Kind.SCRATCH_INVALID,
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


def checks() -> Iterator[DoctorCheck]:
    """The lines of every engine, and what several of them need."""
    for name in ENGINES:
        yield from load_attribute(ENGINES[name].doctor)()
    yield optional_package("ray", "ray", "collect --launcher ray")
    yield _scratch()


def _scratch() -> DoctorCheck:
    root = default_root()
    free = shutil.disk_usage(root).free
    detail = f"{root} · {free / 1e9:.1f} GB free for states on their way from vLLM and TensorRT-LLM"
    if not _MEMORY.is_dir():
        return DoctorCheck("scratch", "ok", f"{detail}; this system has no {_MEMORY}")
    in_memory = shutil.disk_usage(_MEMORY).free
    # Temporary files may be kept there too.
    if root != _MEMORY or in_memory < _SMALL_BYTES:
        detail += f", for {_MEMORY} has only {in_memory / 1e6:.0f} MB"
        return DoctorCheck("scratch", "warning", detail, "docker run --ipc host, or --shm-size 16g")
    return DoctorCheck("scratch", "ok", detail)

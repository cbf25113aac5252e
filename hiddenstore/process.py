"""Which worker this is, and when it is asked to stop: torchrun, SLURM, or a single process.

The environment is read, never written. A launcher that set only some of its variables is an error naming the others,
because a guess would make two workers do the same work.
"""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hiddenstore.errors import ConfigError, Kind

# rank, world size, local rank; the first launcher with any variable set decides.
_LAUNCHERS: dict[str, tuple[str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
_LAST_STEP = 0xFFFFFFF0
"""Numbers above it are no step that ``srun`` starts tasks in: batch script, interactive shell (SLURM's slurm.h)."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECOND_SIGNAL_EXIT = 130


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch found no memory. torch has a class for a full GPU, and none for a full machine."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


@dataclass(frozen=True)
class Rank:
    """This worker among ``world_size``, counted from 0; ``local_rank`` counts within one machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def from_environment(environment: Mapping[str, str] | None = None) -> Rank:
    """The rank that torchrun or SLURM gave this process; rank 0 of 1 when neither started it.

    A batch script or the shell of ``salloc`` has the SLURM_NTASKS of its job and SLURM_PROCID=0, but is one process:
    outside a step it is rank 0 of 1 where NTASKS is 1. Raises ConfigError: ``rank-invalid``: variables are missing, a
    value cannot be, or a job of several tasks started none of them."""
    environment = os.environ if environment is None else environment
    for launcher, names in _LAUNCHERS.items():
        values = {name: environment[name] for name in names if environment.get(name, "") != ""}
        if not values:
            continue
        if launcher == "SLURM" and not _is_in_step(environment):
            if (tasks := values.get("SLURM_NTASKS", "1")) == "1":
                continue
            raise ConfigError(
                f"SLURM_NTASKS={tasks}, but this process is none of these tasks: no srun started it, and as rank 0 of "
                f"{tasks} it would do one share alone",
                kind=Kind.RANK_INVALID,
                hint="srun hiddenstore … starts a worker for each task; unset SLURM_NTASKS for one that does all",
            )
        missing = [name for name in names if name not in values]
        if missing:
            raise ConfigError(
                f"{launcher} set {', '.join(f'{k}={v}' for k, v in values.items())}, but not {', '.join(missing)}",
                kind=Kind.RANK_INVALID,
                hint=f"start it through {'torchrun' if launcher == 'torchrun' else 'srun'}, "
                f"or unset {' '.join(values)}",
            )
        try:
            rank, world_size, local_rank = (int(values[name]) for name in names)
        except ValueError as error:
            raise ConfigError(f"{launcher}: {values} should be whole numbers", kind=Kind.RANK_INVALID) from error
        if not (0 <= rank < world_size and local_rank >= 0):
            raise ConfigError(
                f"{launcher}: {names[0]}={rank} should lie in 0…{world_size - 1} ({names[1]}={world_size}) "
                f"and {names[2]}={local_rank} not be negative",
                kind=Kind.RANK_INVALID,
            )
        return Rank(rank, world_size, local_rank)
    return Rank()


def _is_in_step(environment: Mapping[str, str]) -> bool:
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) <= _LAST_STEP


@dataclass
class Drain:
    """Whether somebody asked this process to stop, and with which signal."""

    signal_name: str | None = None
    _event: threading.Event = field(default_factory=threading.Event)

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self, signal_name: str = "request") -> None:
        """Ask to stop, as a signal would."""
        self.signal_name = signal_name
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to ``timeout_s`` seconds, less when asked to stop; whether it was."""
        return self._event.wait(timeout_s)


@contextmanager
def drain_on_signal() -> Iterator[Drain]:
    """Turn SIGTERM, SIGINT and SIGUSR1 into a flag while the block runs; a second SIGTERM or SIGINT exits 130 at once.

    A repeated SIGUSR1 is not a second request: SLURM sends it to every step of a job. Outside the main thread, where
    Python allows no handlers, the flag can only be set by ``request``.
    """
    drain = Drain()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if drain.requested and number != signal.SIGUSR1:
            os._exit(_SECOND_SIGNAL_EXIT)
        drain.request(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield drain
        return
    before = {number: signal.signal(number, on_signal) for number in _STOP_SIGNALS}
    try:
        yield drain
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a new process can have: the machine's, or less under a container's limit, whose cached files can
    give way; 0 where the system does not say."""
    rooms = []
    with suppress(OSError, ValueError, KeyError):
        rooms.append(1024 * _numbers(meminfo)["MemAvailable"])
    with suppress(OSError, ValueError, KeyError):
        # ``max`` where there is no limit is no number.
        limit, used = (int((cgroup / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        rooms.append(max(0, limit - used + _numbers(cgroup / "memory.stat")["inactive_file"]))
    return min(rooms, default=0)


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most memory that this process has held so far; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = status.read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return 0


def _numbers(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in words}

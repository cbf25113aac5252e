"""Threads and memory of this process: how many threads are worth starting, work that goes on where none can be, locks
that a forked child finds free, and freed memory that is kept."""

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MOST_LOCAL, FAR = 8, 8
"""Beyond these a disk, and one server, give no more."""

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# How CPython says it; a shut pool raises the same class.
_REFUSED = "can't start new thread"

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_MOST = 32 << 20
"""The largest threshold glibc takes."""
_TRIM_MOST = (1 << 31) - 1


def usable_cores(quota: Path = _QUOTA) -> int:
    """Cores in the affinity mask, or fewer under a cgroup quota (``cpu.max``: microseconds and period)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(share) / int(period))))
    except (OSError, ValueError):
        return cores


def local_ranks() -> int:
    """Ranks that torchrun started on this machine, which share its cores and its memory; 1 elsewhere."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def use_all_cores() -> int:
    """Give torch the cores this process may use, shared with the other ranks of this machine; the number of threads.
    torch already keeps to the affinity mask; a container's CPU quota it does not see. OMP_NUM_THREADS, where set, wins,
    but for the 1 that torchrun sets for each of several ranks where nobody set it."""
    import torch

    ranks = local_ranks()
    stated = os.environ.get("OMP_NUM_THREADS")
    is_torchruns = stated == "1" and ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if is_torchruns or not stated:
        cores = usable_cores() if is_torchruns else min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(max(1, cores // ranks))
    return torch.get_num_threads()


def reading_threads(is_far: bool) -> int:
    """Threads for reading and checking: one a core, two at least, since one waits for a disk while another computes;
    more where ``is_far``, and all of them wait for a network."""
    cores = usable_cores()
    return max(FAR, cores) if is_far else max(2, min(MOST_LOCAL, cores))


class Lock:
    """A lock, ``threading.RLock`` or the other ``kind``, that a forked child finds free.

    A child has the one thread that forked it: the lock of another, which was reading at that moment, would never be
    given back, and a ``DataLoader`` worker would wait for ever."""

    def __init__(self, kind: Callable[[], Any] = threading.RLock) -> None:
        self._kind, self._lock = kind, kind()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def acquire_at_once(self) -> bool:
        """Whether it was free; it is this thread's then."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock = self._kind()


_LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(after_in_child=_renew_locks)


class Threads(ThreadPoolExecutor):
    """A pool that does with fewer threads what it cannot start more for, down to none: then ``submit`` returns when the
    work is done, by the caller's own thread."""

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()
        first = threading.Lock()

        def work() -> None:
            if not first.acquire(blocking=False) or not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
                future.set_exception(error)

        try:
            super().submit(work)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            # The pool noted the work before its thread was refused: whoever comes first does it.
            work()
        return future


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of up to 32 MiB instead of returning them to the kernel; False without glibc. A
    step frees and asks again for the same tensors. Each one returned costs a fault for every page of the next: 5,000 to
    10,000 of them a step, 5 to 10 % of the CPU time of an EAGLE-3 step of 512 tokens, and a tenth of a step that
    answers 60 prompts at once (benchmarks/results/answers-2026-11-25.md)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_MOST)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_MOST))

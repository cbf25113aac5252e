"""How many threads the arithmetic of one process takes on a CPU."""

import os
from pathlib import Path

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def use_all_cores() -> int:
    """Give torch the cores this process may use, shared with the other ranks of this machine; the number of threads.

    torch already keeps to the affinity mask; a container's CPU quota it does not see. OMP_NUM_THREADS, where set, wins.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        cores = min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(max(1, cores // ranks_here))
    return torch.get_num_threads()


def usable_cores(quota: Path = _QUOTA) -> int:
    """Cores in the affinity mask, or fewer under a cgroup quota (``cpu.max``: microseconds and period)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(share) / int(period))))
    except (OSError, ValueError):
        return cores

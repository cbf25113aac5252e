"""Cores, how OpenMP uses them, memory and GPUs of this machine."""

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import util
from pathlib import Path

from hiddenstore.cli.terminal import plural, size
from hiddenstore.doctor.check import Check


def checks() -> Iterator[Check]:
    """What a forward pass can run on; imports torch."""
    yield _cpu()
    memory = _memory_bytes()
    if memory is not None:
        yield Check("memory", "ok", f"{size(memory[1])} free of {size(memory[0])}")
    if util.find_spec("torch") is not None:
        yield from _gpus()


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    text = f"{plural(cores, 'core')} usable of {os.cpu_count()} · OMP_WAIT_POLICY {policy} · OMP_NUM_THREADS {threads}"
    if policy.upper() != "PASSIVE":
        detail = f"{text}: threads that spin cost up to 15x on a shared CPU"
        return Check("cpu", "warning", detail, "export OMP_WAIT_POLICY=PASSIVE")
    if threads.isdigit() and int(threads) > cores:
        return Check("cpu", "warning", f"{text}: more threads than cores", f"export OMP_NUM_THREADS={cores}")
    return Check("cpu", "ok", text)


def _gpus() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        detail = f"none visible to torch {torch.__version__} · {torch.get_num_threads()} CPU threads"
        yield Check("gpu", "absent", detail)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        detail = f"{properties.name} · {size(properties.total_memory)} · {capability} · cuda {torch.version.cuda}"
        yield Check(f"gpu {index}", "ok", detail)


def _memory_bytes() -> tuple[int, int] | None:
    """Total and available bytes, where Linux says."""
    with suppress(OSError, KeyError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemTotal"], found["MemAvailable"]
    return None

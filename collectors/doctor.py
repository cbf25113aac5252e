"""What ``doctor`` says of the engines, of Ray, and of the folder in memory that states pass through.

Versions are read from metadata; what an engine adds to that is in its own file, named by its row.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from collectors.engines import ENGINES, load_attribute
from collectors.engines.resources import optional_package
from hiddenstore.doctor import DoctorCheck

MEMORY = Path("/dev/shm")


def checks() -> Iterator[DoctorCheck]:
    """The lines of every engine, and what several of them need."""
    for name in ENGINES:
        yield from load_attribute(ENGINES[name].doctor)()
    yield optional_package("ray", "ray", "collect --launcher ray")
    yield _scratch()


def _scratch() -> DoctorCheck:
    from collectors.engines.resources import default_root

    root = default_root()
    free = shutil.disk_usage(root).free
    detail = f"{root} · {free / 1e9:.1f} GB free for states on their way from vLLM and TensorRT-LLM"
    if not MEMORY.is_dir():
        return DoctorCheck("scratch", "ok", f"{detail}; this system has no {MEMORY}")
    if root != MEMORY:
        detail += f", for {MEMORY} has only {shutil.disk_usage(MEMORY).free / 1e6:.0f} MB"
        return DoctorCheck("scratch", "warning", detail, "docker run --ipc host, or --shm-size 16g")
    return DoctorCheck("scratch", "ok", detail)

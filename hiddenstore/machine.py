"""Facts about this machine that decide how a capture or a training run goes; what ``doctor`` prints."""

import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from hiddenstore.cli.packages import package_parents
from hiddenstore.cli.terminal import plural, seconds, size

Status = Literal["ok", "absent", "warning", "problem"]

TRIAL_BYTES = 32 << 20
_SYNCS = 8
_LOW_DISK_BYTES = 10 * 10**9
_SLOW_FSYNC_S = 0.05
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"}

# name, module that must be there, extra of ours, distribution to install when we have no such extra
_ENGINES = (
    ("engine hf", "transformers", "", "transformers"),
    ("accelerate", "accelerate", "hf", "accelerate"),
    ("engine vllm", "vllm", "vllm", "vllm"),
    ("engine trtllm", "tensorrt_llm", "trtllm", "tensorrt-llm"),
)
_LIBRARIES = ("torch", "transformers", "zarr", "numcodecs", "datasets", "pyarrow", "webdataset", "safetensors")
_ONE_LINE_EACH = ("torch", "transformers", "zarr")


@dataclass(frozen=True)
class Check:
    """One line of ``doctor``. ``absent`` is fine unless wanted; ``problem`` stops something from working."""

    name: str
    status: Status
    detail: str
    fix: str | None = None


def examine(folder: Path) -> list[Check]:
    """Everything ``doctor`` looks at; ``folder`` is where a store would be written, and gets a small trial file."""
    return [*_installation(), *_libraries(), *_compute(), *_engines(), *_disk(folder)]


def _installation() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} · {platform.system()} {platform.machine()}")
    parents = package_parents()
    home = parents["hiddenstore"]
    elsewhere = [f"{name} in {place or 'no place'}" for name, place in parents.items() if place != home]
    version = _version("hiddenstore") or "not installed, run from a folder"
    if elsewhere:
        fix = "python -m venv fresh && fresh/bin/pip install hiddenstore"
        yield Check("hiddenstore", "problem", f"{version} in {home}, but {', '.join(elsewhere)}", fix)
    else:
        yield Check("hiddenstore", "ok", f"{version} · one install location, {home}")


def _libraries() -> Iterator[Check]:
    others = []
    for name in _LIBRARIES:
        version = _version(name)
        if version is None:
            yield Check(name, "problem", "not installed", f"pip install {name}")
        elif name == "zarr":
            yield _zarr(version)
        elif name in _ONE_LINE_EACH:
            yield Check(name, "ok", version)
        else:
            others.append(f"{name} {version}")
    yield Check("libraries", "ok", " · ".join(others))


def _zarr(version: str) -> Check:
    implementation = "absent"
    with suppress(ImportError):
        import google_crc32c

        implementation = str(google_crc32c.implementation)
    if implementation == "c":
        return Check("zarr", "ok", f"{version} · crc32c native")
    fix = "pip install --force-reinstall google-crc32c"
    return Check("zarr", "warning", f"{version} · crc32c {implementation}: checksums will be slow", fix)


def _compute() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    text = f"{plural(cores, 'core')} usable of {os.cpu_count()} · OMP_WAIT_POLICY {policy}"
    yield Check("cpu", "ok" if policy.upper() == "PASSIVE" else "warning", text)
    memory = _memory_bytes()
    if memory is not None:
        yield Check("memory", "ok", f"{size(memory[1])} free of {size(memory[0])}")
    if util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            detail = f"{properties.name} · {size(properties.total_memory)} · cuda {torch.version.cuda}"
            yield Check(f"gpu {index}", "ok", detail)
    else:
        yield Check(
            "gpu", "absent", f"none visible to torch {torch.__version__} · {torch.get_num_threads()} CPU threads"
        )


def _engines() -> Iterator[Check]:
    extras = _extras()
    for name, module, extra, distribution in _ENGINES:
        if util.find_spec(module) is not None:
            yield Check(name, "ok", f"{distribution} {_version(distribution) or ''}".rstrip())
        else:
            wanted = f"'hiddenstore[{extra}]'" if extra in extras else distribution
            yield Check(name, "absent", f"{distribution} is not installed", f"pip install {wanted}")


def _disk(folder: Path) -> Iterator[Check]:
    place = str(folder)
    if not folder.is_dir():
        yield Check("folder", "problem", f"{place} is no folder", f"mkdir -p {place}")
        return
    free = shutil.disk_usage(folder).free
    kind = _filesystem_type(folder)
    status: Status = "ok" if free > _LOW_DISK_BYTES else "warning"
    yield Check("folder", status, f"{place} · {size(free)} free" + (f" · {kind}" if kind else ""))
    try:
        with tempfile.TemporaryDirectory(prefix=".hiddenstore-doctor-", dir=folder) as trial:
            yield _speed(Path(trial), slow_is_expected=kind in _NETWORK_FILESYSTEMS)
            yield _hard_links(Path(trial))
    except OSError as error:
        yield Check("disk speed", "problem", f"{place} cannot be written: {error.strerror}")


def _speed(trial: Path, slow_is_expected: bool) -> Check:
    block = os.urandom(1 << 20)
    path = trial / "trial"
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(TRIAL_BYTES // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        write_s = time.perf_counter() - began
        syncs = []
        for _ in range(_SYNCS):
            os.write(descriptor, block[:4096])
            began = time.perf_counter()
            os.fsync(descriptor)
            syncs.append(time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    began = time.perf_counter()
    read = len(path.read_bytes())
    read_s = time.perf_counter() - began
    fsync_s = statistics.median(syncs)
    detail = f"write {size(TRIAL_BYTES / write_s)}/s · fsync {seconds(fsync_s)} · read {size(read / read_s)}/s"
    slow = fsync_s > _SLOW_FSYNC_S and not slow_is_expected
    return Check("disk speed", "warning" if slow else "ok", detail)


def _hard_links(trial: Path) -> Check:
    try:
        os.link(trial / "trial", trial / "linked")
    except OSError as error:
        detail = f"this filesystem has no hard links ({error.strerror}), which commits need"
        return Check("commits", "problem", detail, "put stores on a local disk, NFS or Lustre")
    return Check("commits", "ok", "atomic publishing works (hard links)")


def _version(distribution: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def _extras() -> Iterable[str]:
    with suppress(metadata.PackageNotFoundError):
        return metadata.metadata("hiddenstore").get_all("Provides-Extra") or []
    return []


def _memory_bytes() -> tuple[int, int] | None:
    """Total and available bytes, where Linux says."""
    with suppress(OSError, KeyError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemTotal"], found["MemAvailable"]
    return None


def _filesystem_type(folder: Path) -> str | None:
    """The type of the mount a folder lies on, where Linux says: the longest mount point above it."""
    best, kind = "", None
    with suppress(OSError, IndexError):
        resolved = str(folder.resolve())
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, point, found, *_ = line.split()
            inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, found
    return kind

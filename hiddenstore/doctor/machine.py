"""What ``hiddenstore doctor`` says of this machine and this installation: cores, memory, GPUs, the folder a store would
go to; others add to it by entry point ``hiddenstore.doctor``: functions that return checks."""

import os
import platform
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

from hiddenstore.console.text import plural, seconds, size
from hiddenstore.doctor import DoctorCheck, Status, elsewhere, version_of
from hiddenstore.errors import HiddenstoreError
from hiddenstore.fs import is_address, open_filesystem
from hiddenstore.settings import first_line
from hiddenstore.threads import usable_cores

GROUP = "hiddenstore.doctor"
TRIAL_BYTES = 32 << 20
_SYNCS = 8
_LOW_DISK_BYTES = 10 * 10**9
_SLOW_FSYNC_S = 0.05
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"}
# How the kernel writes a blank in the name of a mount point.
_MOUNT_ESCAPE = re.compile(r"\\([0-7]{3})")
_ONE_LINE_EACH = ("torch", "transformers", "zarr")


def installation_checks() -> Iterator[DoctorCheck]:
    """Where our code comes from and what it stands on."""
    yield DoctorCheck("python", "ok", f"{platform.python_version()} · {platform.system()} {platform.machine()}")
    yield _packages()
    yield from _libraries()


def _packages() -> DoctorCheck:
    home, strangers = elsewhere()
    version = version_of("hiddenstore")
    if strangers:
        fix = "python -m venv fresh && fresh/bin/pip install hiddenstore"
        return DoctorCheck("hiddenstore", "problem", f"{version} in {home}, but {', '.join(strangers)}", fix)
    if version is None:
        detail = f"run from {home}, not installed: no bounds of dependencies are known, some commands are missing"
        return DoctorCheck("hiddenstore", "warning", detail, shlex.join(["pip", "install", "-e", str(home)]))
    return DoctorCheck("hiddenstore", "ok", f"{version} · one install location, {home}")


def _libraries() -> Iterator[DoctorCheck]:
    from packaging.requirements import Requirement

    others, needed = [], []
    with suppress(metadata.PackageNotFoundError):
        needed = [Requirement(line) for line in metadata.requires("hiddenstore") or []]
    for requirement in sorted(needed, key=lambda requirement: requirement.name.lower()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, version, bounds = requirement.name, version_of(requirement.name), requirement.specifier
        fix = f"pip install '{name}{bounds}'"
        if version is None:
            yield DoctorCheck(name, "problem", f"not installed, {bounds} is needed", fix)
        elif not bounds.contains(version, prereleases=True):
            yield DoctorCheck(name, "problem", f"{version} is outside {bounds}", fix)
        elif name == "zarr":
            yield _zarr(version)
        elif name in _ONE_LINE_EACH:
            yield DoctorCheck(name, "ok", f"{version} ({bounds})")
        else:
            others.append(f"{name} {version}")
    if others:
        yield DoctorCheck("libraries", "ok", " · ".join(others))


def _zarr(version: str) -> DoctorCheck:
    ours = version_of("awscrt")
    words, implementation = f"{version} · crc32c of awscrt {ours}" if ours else version, "absent"
    with suppress(ImportError):
        import google_crc32c

        implementation = str(google_crc32c.implementation)
    if implementation == "c":
        return DoctorCheck("zarr", "ok", f"{words}, of stock zarr native")
    fix = "pip install --force-reinstall google-crc32c"
    detail = f"{words}; of stock zarr {implementation}: verify --stock and other readers by zarr-python will be slow"
    return DoctorCheck("zarr", "warning", detail, fix)


def disk_checks(folder: Path) -> Iterator[DoctorCheck]:
    """The folder, how fast it writes, syncs and reads, and whether commits can be atomic there."""
    if not folder.is_dir():
        yield DoctorCheck("folder", "problem", f"{folder} is no folder", shlex.join(["mkdir", "-p", str(folder)]))
        return
    free = shutil.disk_usage(folder).free
    kind = _filesystem_type(folder)
    status: Status = "ok" if free > _LOW_DISK_BYTES else "warning"
    yield DoctorCheck("folder", status, f"{folder} · {size(free)} free" + (f" · {kind}" if kind else ""))
    try:
        with tempfile.TemporaryDirectory(prefix=".hiddenstore-doctor-", dir=folder) as trial:
            yield _speed(Path(trial), slow_is_expected=kind in _NETWORK_FILESYSTEMS)
            yield _hard_links(Path(trial))
    except OSError as error:
        yield DoctorCheck("disk speed", "problem", f"{folder} cannot be written: {error.strerror}")


def address_checks(address: str) -> Iterator[DoctorCheck]:
    """Whether object storage can be reached and written, and whether commits can be atomic there."""
    try:
        open_filesystem(address).require_atomic_put()
    except HiddenstoreError as error:
        yield DoctorCheck("commits", "problem", error.message, error.hint)
    else:
        yield DoctorCheck("commits", "ok", f"{address} · atomic publishing works (conditional put)")


def _speed(trial: Path, slow_is_expected: bool) -> DoctorCheck:
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
    fsync_s = sorted(syncs)[_SYNCS // 2]
    detail = f"write {size(TRIAL_BYTES / write_s)}/s · fsync {seconds(fsync_s)} · read {size(read / read_s)}/s"
    slow = fsync_s > _SLOW_FSYNC_S and not slow_is_expected
    return DoctorCheck("disk speed", "warning" if slow else "ok", detail)


def _hard_links(trial: Path) -> DoctorCheck:
    try:
        os.link(trial / "trial", trial / "linked")
    except OSError as error:
        detail = f"this filesystem has no hard links ({error.strerror}), which commits need"
        return DoctorCheck("commits", "problem", detail, "put stores on a local disk, NFS or Lustre")
    return DoctorCheck("commits", "ok", "atomic publishing works (hard links)")


def _filesystem_type(folder: Path) -> str | None:
    """The type of the mount a folder lies on, where Linux says: the longest mount point above it."""
    best, kind = "", None
    with suppress(OSError, IndexError):
        resolved = str(folder.resolve())
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, escaped, mounted, *_ = line.split()
            point = _MOUNT_ESCAPE.sub(lambda match: chr(int(match[1], 8)), escaped)
            inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, mounted
    return kind


def compute_checks() -> Iterator[DoctorCheck]:
    """What a forward pass can run on; imports torch."""
    yield _cpu()
    memory = _memory_bytes()
    if memory is not None:
        yield DoctorCheck("memory", "ok", f"{size(memory[1])} free of {size(memory[0])}")
    if util.find_spec("torch") is not None:
        yield from _examined("gpu", "torch", lambda: _gpus)


def _cpu() -> DoctorCheck:
    cores = usable_cores()
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    text = f"{plural(cores, 'core')} usable of {os.cpu_count()} · OMP_WAIT_POLICY {policy} · OMP_NUM_THREADS {threads}"
    if policy.upper() != "PASSIVE":
        detail = f"{text}: threads that spin cost up to 15x on a shared CPU"
        return DoctorCheck("cpu", "warning", detail, "export OMP_WAIT_POLICY=PASSIVE")
    if threads.isdigit() and int(threads) > cores:
        return DoctorCheck("cpu", "warning", f"{text}: more threads than cores", f"export OMP_NUM_THREADS={cores}")
    return DoctorCheck("cpu", "ok", text)


def _gpus() -> Iterator[DoctorCheck]:
    import torch

    if not torch.cuda.is_available():
        detail = f"none visible to torch {torch.__version__} · {plural(torch.get_num_threads(), 'CPU thread')}"
        yield DoctorCheck("gpu", "absent", detail)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        detail = f"{properties.name} · {size(properties.total_memory)} · {capability} · cuda {torch.version.cuda}"
        yield DoctorCheck(f"gpu {index}", "ok", detail)


def _memory_bytes() -> tuple[int, int] | None:
    """Total and available bytes, where Linux says."""
    with suppress(OSError, KeyError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return sizes["MemTotal"], sizes["MemAvailable"]
    return None


def examine(place: str | Path) -> list[DoctorCheck]:
    """Every check; ``place`` is where a store would be written, and gets a small trial file."""
    storage = address_checks(str(place)) if is_address(place) else disk_checks(Path(place))
    return [*installation_checks(), *compute_checks(), *_added(), *storage]


def _added() -> Iterator[DoctorCheck]:
    """What the upper packages and other distributions look at: functions that return checks."""
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        yield from _examined(point.name, point.value, point.load)


def _examined(name: str, what: str, load: Callable[[], Callable[[], Iterable[DoctorCheck]]]) -> Iterator[DoctorCheck]:
    """What the loaded function says; where one fails, a problem in place of the rest: a doctor is asked by the sick."""
    try:
        yield from load()()
    except ImportError as error:
        yield DoctorCheck(name, "problem", f"{what} cannot be imported: {first_line(error)}")
    except Exception as error:  # noqa: BLE001 - of others' code, and of broken installations
        yield DoctorCheck(name, "problem", f"{what} fails: {type(error).__name__}: {first_line(error)}")

"""Where a store would go: room, speed, and whether commits can be atomic there."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hiddenstore.cli.terminal import seconds, size
from hiddenstore.doctor.check import Check, Status

TRIAL_BYTES = 32 << 20
_SYNCS = 8
_LOW_DISK_BYTES = 10 * 10**9
_SLOW_FSYNC_S = 0.05
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"}


def checks(folder: Path) -> Iterator[Check]:
    """The folder, how fast it writes, syncs and reads, and whether commits can be atomic there."""
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

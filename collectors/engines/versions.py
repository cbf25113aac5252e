"""Versions of engines: the numbers that matter, and what ``doctor`` says of one that nobody has tried."""

import re

from hiddenstore.doctor.installation import DoctorCheck, install_command, version_of

Numbers = tuple[int, int]


def major_minor(version: str | None) -> Numbers:
    """Major and minor number of a version, zeros where it states none.

    >>> major_minor("0.32.0+cpu")
    (0, 32)
    """
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


def optional_package(distribution: str, extra: str, purpose: str) -> DoctorCheck:
    """A package that only ``purpose`` needs; our ``extra`` brings it."""
    version = version_of(distribution)
    if version is not None:
        return DoctorCheck(distribution, "ok", version)
    fix = install_command(distribution, extra)
    return DoctorCheck(distribution, "absent", f"not installed; serves {purpose}", fix)

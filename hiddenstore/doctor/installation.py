"""Python, our packages in one place, and every dependency within the bounds that pyproject.toml states."""

import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from hiddenstore.cli.packages import package_parents
from hiddenstore.doctor.check import Check, version_of

_ONE_LINE_EACH = ("torch", "transformers", "zarr")


def checks() -> Iterator[Check]:
    """Where our code comes from and what it stands on."""
    yield Check("python", "ok", f"{platform.python_version()} · {platform.system()} {platform.machine()}")
    yield _packages()
    yield from _libraries()


def _packages() -> Check:
    parents = package_parents()
    home = parents["hiddenstore"]
    elsewhere = [f"{name} in {place or 'no place'}" for name, place in parents.items() if place != home]
    version = version_of("hiddenstore")
    if elsewhere:
        fix = "python -m venv fresh && fresh/bin/pip install hiddenstore"
        return Check("hiddenstore", "problem", f"{version} in {home}, but {', '.join(elsewhere)}", fix)
    if version is None:
        detail = f"run from {home}, not installed: no bounds of dependencies are known, some commands are missing"
        return Check("hiddenstore", "warning", detail, f"pip install -e {home}")
    return Check("hiddenstore", "ok", f"{version} · one install location, {home}")


def _libraries() -> Iterator[Check]:
    from packaging.requirements import Requirement

    others = []
    needed = []
    with suppress(metadata.PackageNotFoundError):
        needed = [Requirement(line) for line in metadata.requires("hiddenstore") or []]
    for requirement in sorted(needed, key=lambda found: found.name.lower()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, version, bounds = requirement.name, version_of(requirement.name), requirement.specifier
        fix = f"pip install '{name}{bounds}'"
        if version is None:
            yield Check(name, "problem", f"not installed, {bounds} is needed", fix)
        elif not bounds.contains(version, prereleases=True):
            yield Check(name, "problem", f"{version} is outside {bounds}", fix)
        elif name == "zarr":
            yield _zarr(version)
        elif name in _ONE_LINE_EACH:
            yield Check(name, "ok", f"{version} ({bounds})")
        else:
            others.append(f"{name} {version}")
    if others:
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

"""Python, our packages in one place, and every dependency within the bounds that pyproject.toml states."""

import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hiddenstore.errors import Kind, StorageError

PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")


def package_parents() -> dict[str, str | None]:
    """The folder each of our packages lies in; None when it cannot be found. Imports nothing."""
    parents: dict[str, str | None] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        parents[name] = str(Path(spec.origin).parent.parent) if spec is not None and spec.origin else None
    return parents


def _elsewhere() -> tuple[str | None, list[str]]:
    """Where hiddenstore lies, and each of our packages that lies in another folder."""
    parents = package_parents()
    home = parents["hiddenstore"]
    return home, [f"{name} from {parent or 'nowhere'}" for name, parent in parents.items() if parent != home]


def check_packages() -> None:
    """Raise StorageError ``packages-scattered`` unless the four packages share one parent folder."""
    home, strangers = _elsewhere()
    if strangers:
        raise StorageError(
            f"hiddenstore is loaded from {home}, but {', '.join(strangers)}\n"
            "another distribution ships a package of that name, or this installation is incomplete",
            kind=Kind.PACKAGES_SCATTERED,
            hint="an environment of its own: python -m venv fresh && fresh/bin/pip install hiddenstore",
        )


Status = Literal["ok", "absent", "warning", "problem"]


@dataclass(frozen=True)
class DoctorCheck:
    """``absent`` is fine unless a command needs it; ``problem`` stops something from working; ``fix`` is a command."""

    name: str
    status: Status
    detail: str
    fix: str | None = None


def version_of(*distributions: str) -> str | None:
    """The installed version of the first of these distributions that is there."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def install_command(distribution: str, extra: str | None = None) -> str:
    """``pip install`` of what is missing, as our extra where this hiddenstore has it."""
    with suppress(metadata.PackageNotFoundError):
        if extra in (metadata.metadata("hiddenstore").get_all("Provides-Extra") or ()):
            return f"pip install 'hiddenstore[{extra}]'"
    return f"pip install {distribution}"


_ONE_LINE_EACH = ("torch", "transformers", "zarr")


def checks() -> Iterator[DoctorCheck]:
    """Where our code comes from and what it stands on."""
    yield DoctorCheck("python", "ok", f"{platform.python_version()} · {platform.system()} {platform.machine()}")
    yield _packages()
    yield from _libraries()


def _packages() -> DoctorCheck:
    home, strangers = _elsewhere()
    version = version_of("hiddenstore")
    if strangers:
        fix = "python -m venv fresh && fresh/bin/pip install hiddenstore"
        return DoctorCheck("hiddenstore", "problem", f"{version} in {home}, but {', '.join(strangers)}", fix)
    if version is None:
        detail = f"run from {home}, not installed: no bounds of dependencies are known, some commands are missing"
        return DoctorCheck("hiddenstore", "warning", detail, f"pip install -e {home}")
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
    implementation = "absent"
    with suppress(ImportError):
        import google_crc32c

        implementation = str(google_crc32c.implementation)
    if implementation == "c":
        return DoctorCheck("zarr", "ok", f"{version} · crc32c native")
    fix = "pip install --force-reinstall google-crc32c"
    return DoctorCheck("zarr", "warning", f"{version} · crc32c {implementation}: checksums will be slow", fix)

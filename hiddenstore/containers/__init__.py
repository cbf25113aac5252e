"""How a segment lies on disk: one file per container and one line in ``CONTAINERS``."""

import difflib

from hiddenstore.containers.base import Container, EncodedUnit, Group, UnitReader, aux_group, final_group
from hiddenstore.containers.webdataset import WebDatasetContainer
from hiddenstore.containers.zarr import ZarrContainer
from hiddenstore.errors import FormatError

CONTAINERS: dict[str, Container] = {container.name: container for container in (ZarrContainer(), WebDatasetContainer())}


def get_container(name: str) -> Container:
    """The container of that name; FormatError ``container-unknown`` for one of a later version."""
    if name in CONTAINERS:
        return CONTAINERS[name]
    near = difflib.get_close_matches(name, CONTAINERS, n=1, cutoff=0.4)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise FormatError(
        f"unknown container {name!r}, expected one of: {', '.join(CONTAINERS)}{guess}", kind="container-unknown"
    )


__all__ = [
    "CONTAINERS",
    "Container",
    "EncodedUnit",
    "Group",
    "UnitReader",
    "aux_group",
    "final_group",
    "get_container",
]

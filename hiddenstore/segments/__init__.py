"""How a segment lies on disk: one file per container and one line in ``CONTAINERS``, the default first.

Importing this loads no container.
"""

from typing import TYPE_CHECKING

from hiddenstore.registry import Registry

if TYPE_CHECKING:
    from hiddenstore.fs.seam import Filesystem
    from hiddenstore.segments.base import Container

CONTAINERS: "Registry[Container]" = Registry(
    "container",
    "hiddenstore.containers",
    {
        "zarr": "hiddenstore.segments.zarr:ZARR",
        "webdataset": "hiddenstore.segments.tar:WEBDATASET",
        "zarr-shared": "hiddenstore.segments.zarr_shared:ZARR_SHARED",
    },
    "hiddenstore.segments.base:Container",
)


def default_container(fs: "Filesystem") -> str:
    """The container of a new store where nobody names one: two files a unit where every file is paid for."""
    return "webdataset" if fs.prefers_few_files else next(iter(CONTAINERS))

"""How a segment lies on disk: one file per container and one line in ``CONTAINERS``, the default first.

Importing this loads no container.
"""

from typing import TYPE_CHECKING

from hiddenstore.registry import Registry

if TYPE_CHECKING:
    from hiddenstore.segments.base import Container

CONTAINERS: "Registry[Container]" = Registry(
    "container",
    "hiddenstore.containers",
    {"zarr": "hiddenstore.segments.zarr:ZARR", "webdataset": "hiddenstore.segments.tar:WEBDATASET"},
    "hiddenstore.segments.base:Container",
)

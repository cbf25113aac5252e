"""A store's samples in the layouts other projects train on. Adding one is a file here and a line in ``LAYOUTS``."""

from importlib import import_module
from typing import TYPE_CHECKING

from hiddenstore.errors import ConfigError

if TYPE_CHECKING:
    from hiddenstore.interop.common import PeerLayout

LAYOUTS: dict[str, str] = {
    "specforge-eagle3": "hiddenstore.interop.specforge:EAGLE3",
    "specforge-dflash": "hiddenstore.interop.specforge:DFLASH",
    "speculators": "hiddenstore.interop.speculators:LAYOUT",
    "modelopt-hf": "hiddenstore.interop.modelopt:LAYOUT",
    "deepspec": "hiddenstore.interop.deepspec:LAYOUT",
}

# What people call them; an export has one meaning where an import would have several.
SHORT_NAMES: dict[str, str] = {"specforge": "specforge-eagle3", "modelopt": "modelopt-hf"}


def get_layout(name: str) -> "PeerLayout":
    """The layout of a name or a short name; ConfigError ``layout-unknown``."""
    name = SHORT_NAMES.get(name, name)
    if name not in LAYOUTS:
        raise ConfigError(f"unknown layout {name!r}, expected one of: {', '.join(LAYOUTS)}", kind="layout-unknown")
    module, _, attribute = LAYOUTS[name].partition(":")
    layout: PeerLayout = getattr(import_module(module), attribute)
    return layout

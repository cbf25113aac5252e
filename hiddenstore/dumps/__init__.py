"""A store's samples in the layouts other projects train on. Adding one is a file here and a line in ``LAYOUTS``."""

from typing import TYPE_CHECKING

from hiddenstore.registry import Registry

if TYPE_CHECKING:
    from hiddenstore.dumps.common import PeerLayout

LAYOUTS: "Registry[PeerLayout]" = Registry(
    "layout",
    "hiddenstore.dump_layouts",
    {
        "specforge-eagle3": "hiddenstore.dumps.torch_files:EAGLE3",
        "specforge-dflash": "hiddenstore.dumps.torch_files:DFLASH",
        "speculators": "hiddenstore.dumps.speculators:LAYOUT",
        "speculators-store": "hiddenstore.dumps.speculators:STORE_LAYOUT",
        "modelopt-hf": "hiddenstore.dumps.torch_files:MODELOPT",
        "deepspec": "hiddenstore.dumps.deepspec:LAYOUT",
    },
    "hiddenstore.dumps.common:PeerLayout",
)

# What people call them; an export has one meaning where an import would have several.
SHORT_NAMES: dict[str, str] = {"specforge": "specforge-eagle3", "modelopt": "modelopt-hf"}


def get_layout(name: str) -> "PeerLayout":
    """The layout of a name or a short name; ConfigError ``layout-unknown``."""
    return LAYOUTS[SHORT_NAMES.get(name, name)]

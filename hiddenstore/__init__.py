"""The offline data engine for speculative decoding. ``hiddenstore.open(path)`` gives a ``Store``.

>>> import hiddenstore                                    # doctest: +SKIP
>>> store = hiddenstore.open("my-store")                  # doctest: +SKIP
>>> record = store[0]                                     # doctest: +SKIP
>>> record.aux.shape, record.final.shape                  # doctest: +SKIP
(torch.Size([3, 812, 4096]), torch.Size([402, 4096]))

A store is a sequence of records: ``for record in store``, ``store[-1]``, ``store[2:5]``, ``store["4f2a"]`` by the start
of an id. ``loader`` and ``TokenBatches`` feed any training loop (docs/python.md). Nothing heavy is imported until a
store is opened.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenstore.errors import (
    CaptureError,
    ConfigError,
    ConflictError,
    CorruptionError,
    FormatError,
    HiddenstoreError,
    NotFoundError,
    StorageError,
)

if TYPE_CHECKING:
    from hiddenstore.data import SampleDataset, TokenBatches, loader
    from hiddenstore.records import Record, Sample
    from hiddenstore.store import Store

_LAZY = {
    "Store": "hiddenstore.store",
    "Record": "hiddenstore.records",
    "Sample": "hiddenstore.records",
    "SampleDataset": "hiddenstore.data",
    "TokenBatches": "hiddenstore.data",
    "loader": "hiddenstore.data",
}

__all__ = [
    "CaptureError",
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "FormatError",
    "HiddenstoreError",
    "NotFoundError",
    "Record",
    "Sample",
    "SampleDataset",
    "StorageError",
    "Store",
    "TokenBatches",
    "loader",
    "open",
]


def open(location: str | Path, snapshot: str | None = None) -> "Store":
    """The store at a path; ``snapshot``, or ``path@name``, names one of its saved snapshots to freeze what is read."""
    from hiddenstore.files.layout import split_snapshot
    from hiddenstore.store import Store

    return Store.open(*split_snapshot(str(location))) if snapshot is None else Store.open(location, snapshot)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("hiddenstore")
    except metadata.PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'hiddenstore' has no attribute {name!r}")

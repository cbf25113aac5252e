"""``verify``: the three depths in one call."""

from pathlib import Path

from hiddenstore import layout
from hiddenstore.damage import reading_only
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.folders import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.verify.bytes import check_content
from hiddenstore.verify.report import DEPTHS, Advance, Depth, Report
from hiddenstore.verify.structure import check_structure


def verify(
    location: str | Path | Filesystem,
    depth: Depth = "structure",
    sample_share: float = 1.0,
    *,
    also_bytes: bool = False,
    also_stock: bool = False,
    advance: Advance = lambda _: None,
) -> Report:
    """Look at a store and name everything that is wrong; nothing is changed.

    ``structure`` reads metadata only; ``bytes`` also every byte; ``meaning`` also the states of a share of the samples
    (and every byte with ``also_bytes``). ``also_stock`` compares what stock zarr-python or webdataset reads with what
    our reader gives. ``advance`` is told bytes read, then samples looked at.

    Raises:
        NotFoundError: there is no store.
        ConfigError: unknown depth, or a share outside 0…1.
        StorageError: the storage refused to read; what it refuses is no finding, and nothing is reported.
    """
    if depth not in DEPTHS:
        raise ConfigError(f"unknown depth {depth!r}, expected one of {', '.join(DEPTHS)}", kind=Kind.OPTION_INVALID)
    if not 0 < sample_share <= 1:
        raise ConfigError(f"the share of samples must lie in (0, 1], found {sample_share}", kind=Kind.OPTION_INVALID)
    fs = open_filesystem(location)
    if not any(fs.list(folder) for folder in ("", layout.COMMITS_DIR)) or (
        fs.size(layout.STORE_JSON) is None and not fs.list(layout.COMMITS_DIR)
    ):
        raise missing("store", fs.root)
    report = Report(depth)
    with reading_only():
        store = check_structure(fs, report)
        if store is not None and (depth == "bytes" or also_bytes):
            check_content(store, report, advance)
        if store is not None and also_stock:
            from hiddenstore.verify.stock import check_stock

            check_stock(store, report, advance)
        if store is not None and depth == "meaning":
            from hiddenstore.verify.meaning import check_meaning

            check_meaning(store, report, sample_share, advance)
    return report

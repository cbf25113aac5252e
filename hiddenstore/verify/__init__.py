"""Three depths of doubt about a store: is everything there, is every byte intact, does it mean what it says."""

from pathlib import Path

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files import layout
from hiddenstore.files.damage import reading_only
from hiddenstore.files.layout import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.verify.report import DEPTHS, Begin, Depth, Finding, Report, unseen
from hiddenstore.verify.structure import check_structure

__all__ = ["DEPTHS", "Depth", "Finding", "Report", "verify"]


def verify(
    location: str | Path | Filesystem,
    depth: Depth = "structure",
    sample_share: float | None = None,
    *,
    also_bytes: bool = False,
    also_stock: bool = False,
    begin: Begin = unseen,
) -> Report:
    """Look at a store and name everything that is wrong; nothing is changed.

    ``structure`` reads metadata only; ``bytes`` also every byte; ``meaning`` also the states of a share of the samples
    (and every byte with ``also_bytes``), by default as many as a fifth of the capture's arithmetic pays for
    (`meaning.affordable_share`). ``also_stock`` compares what stock zarr-python or webdataset reads with what our
    reader gives. ``begin`` is told of each part. Raises NotFoundError: there is no store; ConfigError: unknown depth,
    or a share outside 0…1; StorageError: the storage refused to read; what it refuses is no finding, and nothing is
    reported."""
    if depth not in DEPTHS:
        raise ConfigError(f"unknown depth {depth!r}, expected one of {', '.join(DEPTHS)}", kind=Kind.OPTION_INVALID)
    if sample_share is not None and not 0 < sample_share <= 1:
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
            from hiddenstore.verify.bytes import check_content

            size = sum(file.size for file in store.manifest.target_files)
            size += sum(record.bytes_stored for record in store.commits())
            check_content(store, report, begin("verify bytes", size, "bytes"))
        if store is not None and also_stock:
            from hiddenstore.verify.stock import check_stock

            check_stock(store, report, begin("verify by stock readers", len(store), "samples"))
        if store is not None and depth == "meaning":
            from hiddenstore.verify.meaning import check_meaning

            check_meaning(store, report, sample_share, begin)
    # What several parts found is one thing.
    report.findings = list(dict.fromkeys(report.findings))
    return report

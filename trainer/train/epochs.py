"""The snapshots that a run which follows its store publishes there, one for what each epoch but the first reads."""

from collections.abc import Mapping

from hiddenstore.data import Cursor
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import saved_snapshots


def epoch_name(first: str, epoch: int | str) -> str:
    """The name that the snapshot of an epoch has. ``first``: that of the run's own snapshot."""
    return f"{first}.epoch-{epoch}"


def epoch_snapshots(fs: Filesystem, first: str) -> dict[int, str]:
    """Names of those published in a store, by epoch."""
    prefix = epoch_name(first, "")
    return {
        int(number): name
        for name in saved_snapshots(fs)
        if name.startswith(prefix) and (number := name.removeprefix(prefix)).isdecimal()
    }


def newest_until(published: Mapping[int, str], epoch: int) -> str | None:
    """The name of the newest that is no later than ``epoch``; None where the run's own is what that epoch reads."""
    return published.get(max((number for number in published if number <= epoch), default=0))


def last_read(cursor: Cursor) -> int:
    """The epoch of the samples that were read last; where one begins, the cursor is at its start."""
    return cursor.epoch if cursor.samples else cursor.epoch - 1

"""The snapshots that a run which follows its store publishes there, one for what each epoch but the first reads."""

import re
import secrets
from collections.abc import Iterator

import numpy as np

from hiddenstore.data import Cursor, Order
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import saved_snapshots
from hiddenstore.index.table import SPLITS
from hiddenstore.store import Store

# The name of a snapshot has 120 characters at most: a branch of many branches forgets those between.
_LONGEST_NAME = 84
_BRANCH = re.compile(r"(.+)\.epoch-(\d+)\.[0-9a-f]{8}")


def epoch_name(run: str, epoch: int) -> str:
    """The name that the snapshot of an epoch has. ``run``: that of the run's own snapshot."""
    return f"{run}.epoch-{epoch}"


def branch_name(run: str, epoch: int) -> str:
    """A name for the own snapshot of a run that leaves ``run`` behind this epoch: nobody else publishes under it."""
    other = run if len(run) <= _LONGEST_NAME else run.partition(".epoch-")[0]
    return f"{epoch_name(other, epoch)}.{secrets.token_hex(4)}"


def snapshot_of(fs: Filesystem, run: str, cursor: Cursor) -> str:
    """The name of the newest snapshot published in the store ``fs``, by the run whose own is ``run``, of the training
    samples that ``cursor`` counts in; empty for the run's own. A run that left off following stays with its list,
    whatever was published for later epochs before a kill. Raises what ``Store.open`` does."""
    for name in _published_until(fs, run, last_read(cursor)):
        table = Store.open(fs, name).catalog.table
        if Order(table.ids.take(np.flatnonzero(table.split == SPLITS.index("train")))).digest == cursor.snapshot:
            return name
    return ""


def _published_until(fs: Filesystem, run: str, epoch: int) -> Iterator[str]:
    """The names of the snapshots up to ``epoch``, newest first, of the run whose own is ``run`` and of the run that it
    left for a branch, up to where it did."""
    published = saved_snapshots(fs)
    while True:
        numbers = [name.removeprefix(f"{run}.epoch-") for name in published if name.startswith(f"{run}.epoch-")]
        until = [int(number) for number in numbers if number.isdecimal() and int(number) <= epoch]
        yield from (epoch_name(run, number) for number in sorted(until, reverse=True))
        left = _BRANCH.fullmatch(run)
        if left is None:
            return
        run, epoch = left[1], min(epoch, int(left[2]))


def last_read(cursor: Cursor) -> int:
    """The epoch of the samples that were read last; where one begins, the cursor is at its start."""
    return cursor.epoch if cursor.samples else cursor.epoch - 1

"""A real collect with small units in a process of its own, for killing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from collectors.capture.job import CollectOptions, collect
from hiddenstore import inputs
from hiddenstore.process import Rank
from tests.forked import Forked


def start_collect(data: Path, store: str | Path, target: Path, rank: int = 0, world_size: int = 1) -> Forked:
    options = CollectOptions(str(data), str(store), str(target))
    return Forked(in_small_units, partial(collect, note=_silent), options, Rank(rank, world_size))


def in_small_units(body: Callable[..., object], *arguments: object) -> None:
    """``body(*arguments)`` where a unit holds few samples."""
    inputs.UNIT_TOKENS = 120
    body(*arguments)


def finish(*workers: Forked) -> None:
    """Wait for workers that are to end well."""
    for worker in workers:
        _out, errors = worker.communicate(240)
        assert worker.returncode == 0, errors


def _silent(_text: str) -> None:
    """No note is shown."""

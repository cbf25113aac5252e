"""A real collect with small units in a process of its own, for killing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from collectors.capture.job import CollectJob, CollectOptions, collect
from hiddenstore import inputs
from hiddenstore.inputs import Unit
from hiddenstore.process import Rank
from tests.forked import Forked


def start_collect(
    data: Path, store: str | Path, target: Path, rank: int = 0, world_size: int = 1, begun: Path | None = None
) -> Forked:
    """``begun``: a file that gets a line for every unit whose capture begins."""
    options = CollectOptions(str(data), str(store), str(target))
    body = partial(collect, note=_silent) if begun is None else partial(_noting, begun)
    return Forked(in_small_units, body, options, Rank(rank, world_size))


def _noting(begun: Path, options: CollectOptions, rank: Rank) -> None:
    """``collect`` in a process that ends with it."""
    honest = CollectJob.capture

    def capture(job: CollectJob, unit: Unit) -> object:
        with begun.open("a") as file:
            file.write(f"{unit.name}\n")
        return honest(job, unit)

    CollectJob.capture = capture  # type: ignore[assignment, method-assign]
    collect(options, rank, note=_silent)


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

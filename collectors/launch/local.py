"""The job in this process: alone, or one rank of those that torchrun or SLURM started."""

from collections.abc import Callable

from collectors.job import CollectReport, collect
from collectors.job_open import CollectOptions
from hiddenstore.errors import ConfigError
from hiddenstore.rank import Drain, from_environment


def launch(options: CollectOptions, workers: int | None, drain: Drain, note: Callable[[str], None]) -> CollectReport:
    """Do this process's share of the units."""
    if workers is not None:
        raise ConfigError(
            "the local launcher is this process alone and takes no number of workers",
            kind="launcher-workers",
            hint=f"torchrun --nproc-per-node {workers} -m hiddenstore.cli collect …, or --launcher ray:{workers}",
        )
    return collect(options, from_environment(), drain, note)

"""What starts the workers of a collect job: this process, or one of the ranks around it, or Ray."""

import re
from collections.abc import Callable

from collectors.capture.job import CollectReport, collect
from collectors.capture.options import CollectOptions
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.process import Drain, from_environment

LAUNCHERS = ("local", "ray")


def launch(launcher: str, options: CollectOptions, drain: Drain, note: Callable[[str], None]) -> CollectReport:
    """Run the job under a launcher, ``local``, ``ray``, or ``ray:WORKERS``; without a number as many as fit. Raises
    ConfigError: ``option-invalid``, ``not-installed``; and whatever ``collect`` raises."""
    name, colon, count = launcher.partition(":")
    if name not in LAUNCHERS or (colon and not re.fullmatch("ray:[1-9][0-9]*", launcher)):
        raise ConfigError(
            f"--launcher should be {', '.join(LAUNCHERS)} or ray:WORKERS, found {launcher!r}",
            kind=Kind.OPTION_INVALID,
            hint="--launcher ray:4; or torchrun --nproc-per-node 4 -m hiddenstore.cli collect …",
        )
    if name == "local":
        return collect(options, from_environment(), drain, note)
    try:
        from collectors.launch.ray import on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        hint = "pip install 'hiddenstore[ray]'"
        raise ConfigError("ray is not installed here", kind=Kind.NOT_INSTALLED, hint=hint) from error
    return on_ray(options, int(count) if colon else None, drain, note)

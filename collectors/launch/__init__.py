"""What starts the workers of a collect job. Adding a launcher is a file here and a line in ``LAUNCHERS``."""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from hiddenstore.errors import ConfigError
from hiddenstore.rank import Drain

if TYPE_CHECKING:
    from collectors.job import CollectReport
    from collectors.job_open import CollectOptions

LAUNCHERS: dict[str, str] = {
    "local": "collectors.launch.local:launch",
    "ray": "collectors.launch.ray:launch",
}


class LauncherChoice(NamedTuple):
    """What ``--launcher`` asks; ``workers`` None: as many as there is room for."""

    name: str
    workers: int | None = None


def read_launcher(text: str) -> LauncherChoice:
    """Read ``NAME`` or ``NAME:WORKERS``.

    >>> read_launcher("ray:3")
    LauncherChoice(name='ray', workers=3)

    Raises:
        ConfigError: ``launcher-unknown``, ``launcher-workers``.
    """
    name, colon, count = text.partition(":")
    if name not in LAUNCHERS:
        near = get_close_matches(name, LAUNCHERS, n=1)
        raise ConfigError(
            f"unknown launcher {name!r}, expected one of: {', '.join(LAUNCHERS)}",
            kind="launcher-unknown",
            hint=f"--launcher {near[0] if near else 'local'}",
        )
    if colon and not (count.isdecimal() and int(count) > 0):
        raise ConfigError(
            f"--launcher {text!r} should end in a number of workers, found {count!r}",
            kind="launcher-workers",
            hint=f"--launcher {name}:4",
        )
    return LauncherChoice(name, int(count) if colon else None)


def launch(asked: str, options: "CollectOptions", drain: Drain, note: Callable[[str], None]) -> "CollectReport":
    """Run the job under the launcher ``asked`` for; raises as ``collectors.job.collect`` and ``read_launcher``."""
    choice = read_launcher(asked)
    module, _, attribute = LAUNCHERS[choice.name].partition(":")
    report: CollectReport = getattr(import_module(module), attribute)(options, choice.workers, drain, note)
    return report

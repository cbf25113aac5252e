"""Options that several commands of the collectors have, and those that follow from the table of engines."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import click

from collectors.engines import ENGINES, EngineRow
from hiddenstore.segments import CONTAINERS

container_option = click.option(
    "--container",
    type=click.Choice(tuple(CONTAINERS)),
    default=next(iter(CONTAINERS)),
    show_default=True,
    help="What a segment is: a Zarr group, or a tar that stock webdataset iterates.",
)

revision_option = click.option("--revision", help="Commit, tag or branch of a hub id.")

remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run the repository's own Python; needs --revision COMMIT."
)


def _our_engines() -> Iterator[tuple[str, EngineRow]]:
    """Engines of other packages are set by ``--engine-arg``: importing them would slow every ``--help``."""
    for name, row in ENGINES.rows.items():
        if isinstance(row, EngineRow):
            yield name, row


*_first, _last = ENGINES
engine_option = click.option(
    "--engine", default=_first[0], show_default=True, help=f"What runs the target: {', '.join(_first)} or {_last}."
)

tensor_parallel_option = click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help=f"GPUs per engine: {', '.join(name for name, row in _our_engines() if row.tensor_parallel)}.",
)

server_option = click.option(
    "--server",
    metavar="URL",
    help=" ".join(f"Engine {name}: {row.server}" for name, row in _our_engines() if row.server),
)


def engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The options that one engine alone takes; those given reach ``command`` as ``engine_flags``, by setting."""
    flags = [(setting, name, text) for name, row in _our_engines() for setting, text in row.flags.items()]

    @wraps(command)
    def run(**options: Any) -> None:
        values = {setting: options.pop(setting) for setting, _, _ in flags}
        command(engine_flags={setting: value for setting, value in values.items() if value}, **options)

    for setting, name, text in reversed(flags):
        run = click.option(f"--{setting.replace('_', '-')}", help=f"Engine {name}: {text}")(run)
    return run

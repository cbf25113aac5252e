"""``--cache`` and ``--cache-bytes`` of the commands that read states again and again."""

from collections.abc import Callable
from typing import Any

import click


def cache_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``cache`` (str or None) and ``cache_bytes`` to the arguments of a command."""
    folder = click.option(
        "--cache", metavar="DIR", type=click.Path(), help="Keep what is read from object storage there."
    )
    room = click.option(
        "--cache-bytes",
        type=click.IntRange(min=16 << 20),
        default=64 << 30,
        show_default=True,
        help="Room for --cache, over all processes that share it.",
    )
    return folder(room(command))

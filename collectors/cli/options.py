"""Options that several commands of the collectors have, and what those that fill a store say at their end."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from collectors.engines import ENGINES, EngineRow
from collectors.targets.layers import layer_names, require_layers
from hiddenstore.cli.words import Name
from hiddenstore.codecs.recipes import RECIPES, get_recipe
from hiddenstore.console.text import size
from hiddenstore.segments import CONTAINERS

if TYPE_CHECKING:
    from collectors.capture.job import CollectReport

layers_type = Name(require_layers, layer_names())
recipe_type = Name(lambda text: text == "auto" or get_recipe(text), (*RECIPES, "auto"))

container_option = click.option(
    "--container",
    type=click.Choice(tuple(CONTAINERS)),
    help="What a segment is: a Zarr group, or a tar that stock webdataset iterates. Default: zarr; on object storage "
    "webdataset; of a store that is there, its own.",
)


def _our_engines() -> Iterator[tuple[str, EngineRow]]:
    """Engines of other packages are set by ``--engine-arg``: importing them would slow every ``--help``."""
    for name, row in ENGINES.rows.items():
        if isinstance(row, EngineRow):
            yield name, row


*_first, _last = ENGINES
engine_option = click.option(
    "--engine",
    type=Name(ENGINES.require, ENGINES),
    default=_first[0],
    show_default=True,
    help=f"What runs the target: {', '.join(_first)} or {_last}.",
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


def job_document(report: "CollectReport") -> dict[str, Any]:
    """What every job that fills a store says for ``--json``."""
    names = ("store", "units", "samples", "tokens", "bytes_stored")
    return {name: getattr(report, name) for name in names} | {
        **{name: number for name, number in report.bytes_in_all.items() if name != "bytes_stored"},
        "rejects": dict(report.rejects),
        "units_before": report.resumed_units,
        "units_pending": report.pending_units,
        "seconds": round(report.seconds, 3),
    }


def job_lines(report: "CollectReport", rate: str = "") -> list[tuple[str, str]]:
    """The same for people; ``rate`` follows the tokens."""
    before = f" ({report.resumed_units} were committed before)" if report.resumed_units else ""
    per_token = f", {report.bytes_stored / report.tokens:,.0f} bytes per token" if report.tokens else ""
    return [
        ("store", report.store),
        ("units", f"{report.units}{before}"),
        ("samples", f"{report.samples:,}"),
        ("tokens", f"{report.tokens:,}{rate}"),
        ("written", f"{size(report.bytes_stored)}{per_token}"),
        ("on disk", f"{size(report.bytes_in_all['bytes_on_disk'])} in all, with target and calibration"),
        ("rejects", counts(report.rejects)),
    ]


def counts(counter: dict[str, int]) -> str:
    """``3 duplicate, 1 empty``, or none."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counter.items())) or "none"

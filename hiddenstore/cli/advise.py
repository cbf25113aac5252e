"""``hiddenstore advise``: which recipe this target's states can take."""

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.output import common_options, examples, output
from hiddenstore.cli.stores import open_store

if TYPE_CHECKING:
    from hiddenstore.store import Store
    from schemas.advice import Advice, PairedRow

HOOKS = "hiddenstore.advise"
PAIRED = "paired"
"""Entry point ``paired`` of the group ``hiddenstore.advise``: called as ``_paired`` calls it, gives PairedRow's."""


@click.command(
    epilog=examples(
        "hiddenstore advise my-store",
        "hiddenstore advise my-store --max-channel-error 0.1",
        "hiddenstore advise my-store --paired --recipe compact --seeds 3 optim.lr=1e-3",
    )
)
@click.argument("store")
@click.argument("settings", nargs=-1, metavar="[key.path=value]...")
@click.option("--max-kl", default=1e-3, show_default=True, type=click.FloatRange(min=0), help="Nats, through the head.")
@click.option(
    "--max-channel-error",
    default=0.03,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Of the worst aux layer, channels counted alike; 0.1 lets q4 pass.",
)
@click.option("--paired", is_flag=True, help="Also train short drafters on original and on decoded states.")
@click.option("--recipe", "recipes", multiple=True, help="With --paired: compare this one; default: safe and compact.")
@click.option(
    "--seeds", default=3, show_default=True, type=click.IntRange(min=2), help="With --paired: pairs to train."
)
@common_options
def advise(
    store: str,
    settings: tuple[str, ...],
    max_kl: float,
    max_channel_error: float,
    paired: bool,
    recipes: tuple[str, ...],
    seeds: int,
) -> None:
    """Which recipe the states of STORE can take: bytes per token and what each recipe costs, measured on them.

    Measured on the raw slice that collect keeps, or on the states themselves where they are exact. Chosen is the
    smallest recipe within both limits; the table is kept in the store. SETTINGS are those of train, for --paired.
    """
    from hiddenstore.advise.document import write_advice
    from hiddenstore.advise.run import Limits, advise_store, trials
    from hiddenstore.look.inspect import raw_bytes_per_token
    from hiddenstore.progress import Progress

    if not paired and (settings or recipes):
        raise click.UsageError(f"{(*settings, *recipes)[0]} is for --paired, which was not asked for")
    opened = open_store(store)
    with Progress("advise", total=trials(opened.capture), unit="recipes") as progress:
        advice = advise_store(opened, Limits(max_kl, max_channel_error), progress.advance)
    if paired:
        advice = advice.model_copy(update={"paired": tuple(_paired(opened, recipes, seeds, settings))})
    path = write_advice(opened.fs, advice)
    document = {"path": opened.path, "advice": path, **advice.model_dump(mode="json", exclude={"format"})}
    output().data(document, human=lambda: _show(advice, raw_bytes_per_token(opened.capture)), quiet=advice.chosen)
    if opened.manifest.recipe != advice.chosen:
        output().hint("hiddenstore", "copy", store, f"{store}-{advice.chosen}", "--recipe", advice.chosen)
    else:
        output().hint("hiddenstore", "info", store)


def _show(advice: "Advice", bytes_raw: float) -> None:
    from hiddenstore.advise.view import paired_lines, smaller_line, table_lines, verdict

    out = output()
    for line in table_lines(advice, bytes_raw):
        out.print(line)
    out.print(
        f"measured on {advice.tokens:,} tokens, {advice.final_rows:,} of them with a final hidden; channel: error"
    )
    out.print("of the worst layer with its channels counted alike; raw rows: kept bit for bit")
    for line in paired_lines(advice.paired):
        out.print(line)
    out.print(verdict(advice))
    more = smaller_line(advice)
    if more is not None:
        out.note(more)


def _paired(store: "Store", recipes: Sequence[str], seeds: int, settings: Sequence[str]) -> "list[PairedRow]":
    from hiddenstore.progress import Progress

    measure = _hook()
    with Progress("paired", unit="steps") as progress:

        def advance(total: int, **fields: Any) -> None:
            progress.total = total
            progress.advance(1, **fields)

        return measure(store, recipes or ("safe", "compact"), range(seeds), settings, advance)


def _hook() -> "Callable[..., list[PairedRow]]":
    from hiddenstore.errors import NotFoundError

    points = [point for point in metadata.entry_points(group=HOOKS) if point.name == PAIRED]
    if not points:
        raise NotFoundError(
            f"--paired trains drafters, and no installed package offers that (entry point {PAIRED!r} of {HOOKS!r})",
            kind="paired-missing",
            hint="pip install --force-reinstall hiddenstore",
        )
    found: Callable[..., list[PairedRow]] = points[0].load()
    return found

"""``hiddenstore advise``: which recipe this target's states can take."""

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.words import STORE, FiniteRange, open_store
from hiddenstore.codecs.recipes import get_recipe, recipe_name
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.progress import Progress
from hiddenstore.errors import Kind, NotFoundError, StorageError
from hiddenstore.files.layout import split_snapshot
from hiddenstore.inspect.choice import RecipeLimits, choose, paired_lines, refusal_lines, verdict

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
        "hiddenstore advise my-store --target T --paired --max-loss 0.3 --minutes 30",
    )
)
@click.argument("store", type=STORE)
@click.argument("settings", nargs=-1, metavar="[key.path=value]...")
@click.option("--max-kl", default=1e-3, show_default=True, type=FiniteRange(min=0), help="Nats, through the head.")
@click.option(
    "--max-channel-error",
    default=0.03,
    show_default=True,
    type=FiniteRange(min=0),
    help="Of the worst aux layer, channels counted alike; 0.1 lets q4 pass.",
)
@click.option("--paired", is_flag=True, help="Also train short drafters on original and on decoded states.")
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    help="With --paired: compare this one; default: compact, and rebuilt where it is measured.",
)
@click.option(
    "--drafter", metavar="NAME", help="With --paired: train this one, eagle3 or one that train can; default: eagle3."
)
@click.option(
    "--seeds", default=3, show_default=True, type=click.IntRange(min=2), help="With --paired: pairs to train."
)
@click.option("--minutes", type=FiniteRange(min=0, min_open=True), help="With --paired: begin no pair that ends later.")
@click.option(
    "--max-loss",
    default=0.5,
    show_default=True,
    type=FiniteRange(min=0),
    help="With --paired: points of acceptance that a recipe may lose at most, 95 % sure.",
)
@click.option("--target", metavar="T", help="The checkpoint the states are of: measures the recipe rebuilt too.")
@common_options
def advise(
    store: str,
    target: str | None,
    settings: tuple[str, ...],
    max_kl: float,
    max_channel_error: float,
    paired: bool,
    recipes: tuple[str, ...],
    drafter: str | None,
    seeds: int,
    minutes: float | None,
    max_loss: float,
) -> None:
    """Which recipe the states of STORE can take: bytes per token and what each recipe costs, measured on them.

    Measured on the raw slice that collect keeps, or on the states themselves where they are exact. Chosen is the
    smallest recipe that trained pairs show to lose no more than --max-loss; where none were trained, or they cannot
    tell, the smallest within KL and channel error. The table is kept in the store, where that can be written.
    SETTINGS are those of train.
    """
    from hiddenstore.care.copy import rebuilder_for
    from hiddenstore.inspect.advise import advise_store, holds_its_slice, inexact_fields, trials, write_advice
    from hiddenstore.inspect.facts import raw_bytes_per_token
    from schemas.capture import REBUILT

    given = (*settings, *recipes, *(("--minutes",) if minutes else ()), *(("--drafter",) if drafter else ()))
    if not paired and given:
        raise click.UsageError(f"{given[0]} is for --paired, which was not asked for")
    limits = RecipeLimits(max_kl, max_channel_error, max_loss / 100)
    opened = open_store(store)
    rebuilder = rebuilder_for(opened, target)
    if rebuilder is not None and not holds_its_slice(opened):
        output().note("rebuilt is not measured: the store lacks samples of its calibration slice")
        rebuilder = None
    with Progress("advise", total=trials(opened.capture, rebuilder is not None), unit="recipes") as progress:
        advice = advise_store(opened, limits, progress.advance, rebuilder)
    if paired:
        named = tuple(recipe_name(get_recipe(text)) for text in recipes)
        compared = named or ("compact", *((REBUILT,) if rebuilder is not None else ()))
        trained = _paired(
            opened, compared, range(seeds), settings, {"target": target, "minutes": minutes, "drafter": drafter}
        )
        advice = choose(advice.rows, limits, advice.tokens, advice.final_rows, trained)
    path = None
    try:
        path = write_advice(opened.fs, advice)
    except StorageError as error:
        # The store of somebody else is measured too, with pairs for hours.
        output().warn(f"the table is not kept: {error.message}")
    document = {"path": opened.path, "advice": path, **advice.model_dump(mode="json", exclude={"format"})}
    document["refused"] = refused = refusal_lines(advice, can_train=not inexact_fields(opened.capture))
    bytes_raw = raw_bytes_per_token(opened.capture)
    output().data(document, human=lambda: _show(advice, bytes_raw, refused), quiet=advice.chosen)
    words = ("--target", target) if target and get_recipe(advice.chosen).final == REBUILT else ()
    if opened.manifest.recipe != advice.chosen:
        beside = f"{split_snapshot(store)[0].rstrip('/')}-{advice.chosen}"
        output().hint("hiddenstore", "copy", store, beside, "--recipe", advice.chosen, *words)
    else:
        output().hint("hiddenstore", "info", store)


def _show(advice: "Advice", bytes_raw: float, refused: Sequence[str]) -> None:
    from hiddenstore.inspect.advise import table_lines

    out = output()
    about = (
        f"measured on {advice.tokens:,} tokens, {advice.final_rows:,} of them with a final hidden; channel: error",
        "of the worst layer with its channels counted alike; raw rows: kept bit for bit",
    )
    for line in (*table_lines(advice, bytes_raw), *about, *paired_lines(advice.paired), verdict(advice)):
        out.print(line)
    for line in refused:
        out.note(line)


def _paired(
    store: "Store", recipes: Sequence[str], seeds: Sequence[int], settings: Sequence[str], options: Mapping[str, Any]
) -> "list[PairedRow]":
    given = {name: value for name, value in options.items() if value is not None}
    measure = _hook()
    with Progress("paired", unit="steps") as progress:

        def advance(total: int, **fields: Any) -> None:
            progress.total = total
            progress.advance(1, **fields)

        return measure(store, recipes, seeds, settings, advance, **given)


def _hook() -> "Callable[..., list[PairedRow]]":
    points = [point for point in metadata.entry_points(group=HOOKS) if point.name == PAIRED]
    if not points:
        raise NotFoundError(
            f"--paired trains drafters, and no installed package offers that (entry point {PAIRED!r} of {HOOKS!r})",
            kind=Kind.PATH_MISSING,
            hint="pip install --force-reinstall hiddenstore",
        )
    measure: Callable[..., list[PairedRow]] = points[0].load()
    return measure

"""The commands that look and change nothing: info, ls, show, stats, diff."""

import click

from hiddenstore.cli.output import common_options, examples, output
from hiddenstore.cli.stores import open_store

DIFFERENT_EXIT = 3


@click.command(epilog=examples("hiddenstore info my-store", "hiddenstore info my-store@train-v1 --json"))
@click.argument("store")
@common_options
def info(store: str) -> None:
    """What STORE holds, on one screen. Reads metadata only."""
    from hiddenstore.cli.look_views import info_view
    from hiddenstore.identity import target_word
    from hiddenstore.look import inspect

    opened = open_store(store, strict=False)
    document = inspect.info(opened)
    output().data(document, human=lambda: info_view(document))
    for problem in document["damaged_commits"]:
        output().warn(problem)
    if document["damaged_commits"]:
        output().hint("hiddenstore", "verify", store)
    elif document["samples"]:
        output().hint("hiddenstore", "show", store, "0")
    else:
        word = target_word(opened.capture.target)
        output().hint("hiddenstore", "collect", "DATA", "-o", store, "--target", word)


@click.command(epilog=examples("hiddenstore ls my-store -n 5", "hiddenstore ls my-store --where 'tokens>4096' -q"))
@click.argument("store")
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Rows to print; 0 prints all."
)
@click.option("--where", multiple=True, metavar="TEST", help="tokens>4096, supervised>0, share<0.1, split=train, …")
@common_options
def ls(store: str, limit: int, where: tuple[str, ...]) -> None:
    """The samples of STORE: length, what is trained on, split and unit. -q prints ids only."""
    from hiddenstore.cli.look_views import ls_view
    from hiddenstore.look import inspect
    from hiddenstore.where import parse_where

    opened = open_store(store)
    rows, passed = inspect.samples(opened, parse_where(where), limit or None)
    document = {"path": opened.path, "samples": len(opened), "matching": passed, "rows": rows}
    output().data(document, human=lambda: ls_view(rows), quiet="\n".join(row["id"] for row in rows))
    output().note(f"{len(rows):,} of {passed:,} samples" + (f" ({len(opened):,} in the store)" if where else ""))
    if rows:
        output().hint("hiddenstore", "show", store, rows[0]["id"][:8])


@click.command(epilog=examples("hiddenstore show my-store", "hiddenstore show my-store 4f2a --all"))
@click.argument("store")
@click.argument("sample", default="0")
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=600,
    show_default=True,
    help="Print at most this many tokens of text.",
)
@click.option("--all", "whole", is_flag=True, help="Print the whole text.")
@common_options
def show(store: str, sample: str, tokens: int, whole: bool) -> None:
    """One SAMPLE of STORE: its text, trained tokens in colour, and the norms of every layer.

    SAMPLE is an index counted from 0, an id, or the start of an id.
    """
    from hiddenstore.cli.look_views import show_view
    from hiddenstore.look.inspect import find_sample
    from hiddenstore.look.sample_view import view

    opened = open_store(store)
    document = view(opened, find_sample(opened, sample))
    output().data(document, human=lambda: show_view(document, None if whole else tokens))
    following = document["index"] + 1
    if following < len(opened):
        output().hint("hiddenstore", "show", store, str(following))
    else:
        output().hint("hiddenstore", "stats", store)


@click.command(epilog=examples("hiddenstore stats my-store", "hiddenstore stats my-store --json"))
@click.argument("store")
@common_options
def stats(store: str) -> None:
    """Lengths, splits, bytes and norms per layer over all of STORE. Reads metadata only."""
    from hiddenstore.cli.look_views import stats_view
    from hiddenstore.look import inspect

    document = inspect.stats(open_store(store))
    output().data(document, human=lambda: stats_view(document))
    output().hint("hiddenstore", "verify", store, "--meaning")


@click.command(
    epilog=examples("hiddenstore diff raw-store q8-store", "hiddenstore diff with-vllm with-hf --tolerance 0.01")
)
@click.argument("a")
@click.argument("b")
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    help="Common samples to compare in numbers; 0: all of them.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Equal means: target, layers and samples are the same, and no row differs by more than this of its length "
    "(one bf16 step is at most 0.008); engine and recipe may differ.",
)
@common_options
def diff(a: str, b: str, samples: int, tolerance: float | None) -> None:
    """How the stores A and B differ: capture, samples held, and the states of samples both hold.

    Exits 3 when anything differs, or with --tolerance when more than that does. Numbers are B minus A.
    """
    from hiddenstore.cli.diff_view import diff_view
    from hiddenstore.look.compare import compare
    from hiddenstore.progress import Progress
    from hiddenstore.writer import capture_differences

    stores = open_store(a), open_store(b)
    common = len(set(stores[0].sample_ids) & set(stores[1].sample_ids))
    total = min(common, samples) if samples else common
    with Progress("compare", total=total, unit="samples") as progress:
        found = compare(*stores, max_samples=samples or None, advance=progress.advance)
    document = {"a": stores[0].path, "b": stores[1].path, **found.document(), "tolerance": tolerance}
    if tolerance is not None:
        document["beyond_tolerance"] = found.beyond(tolerance)
    output().data(document, human=lambda: diff_view(document))
    differs = capture_differences(stores[0].manifest, stores[1].manifest)
    if not all(line.startswith(("capture.codecs.", "container:")) for line in differs):
        output().hint("hiddenstore", "info", b)
    elif found.only_a or found.only_b:
        output().hint("hiddenstore", "copy", a, b, "merged-store")
    else:
        output().hint("hiddenstore", "verify", b, "--meaning")
    if found.different if tolerance is None else document["beyond_tolerance"]:
        raise click.exceptions.Exit(DIFFERENT_EXIT)

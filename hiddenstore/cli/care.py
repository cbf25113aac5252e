"""The commands that keep stores healthy: verify, copy, repair, gc."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.output import common_options, examples, output
from hiddenstore.cli.stores import open_store
from hiddenstore.layout import CONTAINER_NAMES

if TYPE_CHECKING:
    from hiddenstore.copying import CopyPlan, CopyReport
    from schemas.manifest import Container

FOUND_EXIT = 3
_SAME_COLLECT = "hiddenstore collect DATA -o {} --target T   (the same command does the rest)"
_UNREADABLE = ("file-", "commit-", "document-", "segment-", "chunk-", "array-", "shard-", "input-")


@click.command(epilog=examples("hiddenstore verify my-store", "hiddenstore verify my-store --full --meaning --json"))
@click.argument("store")
@click.option("--full", is_flag=True, help="Read every byte and check every digest.")
@click.option(
    "--meaning", is_flag=True, help="Check that the states are those of these tokens, layers and this target."
)
@click.option(
    "--share", default=1.0, show_default=True, type=click.FloatRange(0, 1), help="Share of the samples to read."
)
@common_options
def verify(store: str, full: bool, meaning: bool, share: float) -> None:
    """Check STORE: every file there with its size; with --full every byte; with --meaning what the numbers say.

    Exits 3 when there are findings.
    """
    from hiddenstore.cli.care_views import verify_view
    from hiddenstore.progress import Progress
    from hiddenstore.verify import verify as run_verify

    depth: Any = "meaning" if meaning else "bytes" if full else "structure"
    total = _bytes_to_read(store) if full else None
    with Progress("verify", total=total, unit="bytes" if full else "samples") as progress:
        report = run_verify(store, depth, share, also_bytes=full, advance=progress.advance)
    document = {"path": store, **report.to_json(), "full": full or depth == "bytes"}
    output().data(document, human=lambda: verify_view(document), quiet="")
    if not report.ok:
        output().hint(*_remedy(store, report.kinds, report.affected))
        raise click.exceptions.Exit(FOUND_EXIT)
    if depth == "structure":
        output().hint("hiddenstore", "verify", store, "--full", "--meaning")
    else:
        output().hint("hiddenstore", "train", store, "-o", "RUN")


def _remedy(store: str, kinds: Iterable[str], affected: Sequence[str]) -> tuple[str, ...]:
    """The command that helps: repair drops bytes that cannot be read, but not states that mean something else."""
    kinds = set(kinds)
    if any(kind.startswith(_UNREADABLE) for kind in kinds):
        return "hiddenstore", "repair", store
    if kinds == {"incomplete"}:
        return (_SAME_COLLECT.format(shlex.quote(store)),)
    return ("hiddenstore", "show", store, affected[0][:12]) if affected else ("hiddenstore", "info", store)


def _bytes_to_read(store: str) -> int | None:
    from hiddenstore.errors import HiddenstoreError

    try:
        opened = open_store(store, strict=False)
        target = sum(file.size for file in opened.manifest.target_files)
        return target + sum(record.bytes_stored for record in opened.commits())
    except HiddenstoreError:
        return None  # verify will say what is wrong


@click.command(
    epilog=examples(
        "hiddenstore copy part-1 part-2 whole",
        "hiddenstore copy my-store small-store --recipe safe --where 'tokens<=2048' --split train",
    )
)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.argument("destination", metavar="DST")
@click.option(
    "--recipe",
    metavar="NAME",
    help="safe, compact, tiny, lossless or raw; or per field: aux=q4,final=q8. Default: as DST, else as the first SRC.",
)
@click.option("--container", type=click.Choice(CONTAINER_NAMES), help="Default: as DST, else as the first SRC.")
@click.option("--where", multiple=True, metavar="TEST", help="Only samples with tokens>4096, supervised>0, …")
@click.option("--split", type=click.Choice(["train", "validation"]), help="Only samples of this split.")
@common_options
def copy(
    sources: tuple[str, ...],
    destination: str,
    recipe: str | None,
    container: "Container | None",
    where: tuple[str, ...],
    split: str | None,
) -> None:
    """Merge, subset, re-encode or repack: bring the samples of every SRC store into the store DST.

    Equal codecs and no filter: codes are copied as they are. The same command again continues where it stopped.
    """
    from hiddenstore.cli.care_views import copy_view
    from hiddenstore.copying import plan_copy
    from hiddenstore.where import parse_where

    keep = parse_where(where, split) if where or split else None
    plan = plan_copy([open_store(source) for source in sources], destination, recipe, keep, container)
    out = output()
    for note in plan.notes:
        out.warn(note)
    if plan.unavailable:
        out.warn(f"{plan.unavailable:,} units of the inputs are in no source; the copy stays as incomplete as they are")
    report = _copy_with_progress(plan)
    duplicates = open_store(plan.destination.path).duplicates
    if duplicates:
        out.note(f"{duplicates:,} samples are in more than one unit: they are stored twice and read once")
    document = {
        "sources": [source.path for source in plan.sources],
        "destination": plan.destination.path,
        "recipe": plan.destination.manifest.recipe,
        "container": plan.destination.manifest.container,
        "units": report.units - report.lost_races,
        "units_verbatim": plan.verbatim,
        "units_decoded": sum(not plan.keeps_codes(unit) for unit in plan.units),
        "units_there_already": plan.there_already,
        "units_unavailable": plan.unavailable,
        "duplicates": duplicates,
        "samples": report.samples,
        "tokens": report.tokens,
        "bytes_written": report.bytes_written,
        "notes": plan.notes,
    }
    out.data(document, human=lambda: copy_view(document), quiet="")
    out.hint("hiddenstore", "verify", destination, "--full")


def _copy_with_progress(plan: "CopyPlan") -> "CopyReport":
    from hiddenstore.copying import run_copy
    from hiddenstore.errors import InterruptError
    from hiddenstore.progress import Progress
    from hiddenstore.rank import drain_on_signal

    with drain_on_signal() as drain, Progress("copy", total=plan.samples, unit="samples") as progress:

        def advance(report: "CopyReport") -> bool:
            progress.update(report.samples, written=f"{report.bytes_written / 1e6:.1f}MB")
            return not drain.requested

        report = run_copy(plan, advance)
    if drain.requested and report.units < len(plan.units):
        raise InterruptError(
            f"stopped by {drain.signal_name} after {report.units:,} of {len(plan.units):,} units; they are committed",
            kind="interrupted",
            hint="the same command continues",
        )
    return report


@click.command(epilog=examples("hiddenstore repair my-store", "hiddenstore repair my-store -y"))
@click.argument("store")
@click.option("-y", "--yes", is_flag=True, help="Do it; without this the plan is printed and nothing changes.")
@common_options
def repair(store: str, yes: bool) -> None:
    """Make a damaged STORE whole by leaving out the samples that cannot be read.

    Everything readable is kept bit for bit; old records and segments stay until gc. Damaged files beside the samples
    (target, inputs, snapshots) move to quarantine/. Prints a plan unless -y is given.
    """
    from hiddenstore.cli.care_views import repair_view
    from hiddenstore.maintain import repair as run_repair

    plan = run_repair(store, dry_run=not yes)
    document = {
        "path": store,
        "done": plan.done,
        "dropped": plan.dropped,
        "units": [
            {"unit": u.unit, "record": u.record, "kept": u.kept, "dropped": u.dropped, "forget": u.forget}
            for u in plan.units
        ],
        "aside": plan.aside,
    }
    output().data(document, human=lambda: repair_view(document))
    if (plan.units or plan.aside) and not yes:
        output().hint("hiddenstore", "repair", store, "-y")
    elif plan.aside:
        output().hint(_SAME_COLLECT.format(shlex.quote(store)))
    else:
        output().hint("hiddenstore", "verify", store, "--full")


@click.command(epilog=examples("hiddenstore gc my-store", "hiddenstore gc my-store --older-than 7d -y"))
@click.argument("store")
@click.option(
    "--older-than", default="24h", show_default=True, metavar="AGE", help="Spare what is younger: 30m, 12h, 7d."
)
@click.option("-y", "--yes", is_flag=True, help="Do it; without this the plan is printed and nothing changes.")
@common_options
def gc(store: str, older_than: str, yes: bool) -> None:
    """Sweep what no commit of STORE names: segments of killed writers and what repairs replaced.

    What is younger than --older-than may belong to a running writer and stays. Prints a plan unless -y is given.
    """
    from hiddenstore.cli.care_views import gc_view
    from hiddenstore.maintain import gc as run_gc

    plan = run_gc(store, dry_run=not yes, older_than_s=parse_age(older_than))
    document = {
        "path": store,
        "done": plan.done,
        "bytes": plan.size_bytes,
        "remove": [asdict(item) for item in plan.remove],
        "wait": [asdict(item) for item in plan.wait],
    }
    output().data(document, human=lambda: gc_view(document))
    if plan.remove and not yes:
        output().hint("hiddenstore", "gc", store, "--older-than", older_than, "-y")
    else:
        output().hint("hiddenstore", "info", store)


def parse_age(text: str) -> float:
    """``30m``, ``12h``, ``7d`` or ``90s`` in seconds; ConfigError ``age-invalid``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match is None or (not match[2] and float(match[1]) != 0):
        from hiddenstore.errors import ConfigError

        raise ConfigError(f"--older-than {text!r} is no age", kind="age-invalid", hint="--older-than 24h")
    return float(match[1]) * {"": 0, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]

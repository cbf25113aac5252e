"""The commands that keep stores, and the machine they lie on, healthy: verify, copy, repair, gc, doctor."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.padding import Padding
from rich.text import Text

from hiddenstore.cli.words import STORE, STORE_NOW, FiniteRange, Name, layers_option, open_store, same_target_option
from hiddenstore.codecs.recipes import RECIPE_HELP, RECIPES, get_recipe
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.progress import Progress
from hiddenstore.console.text import Column, clean, clean_line, count, plural, seconds, size
from hiddenstore.doctor.machine import examine
from hiddenstore.errors import ConfigError, InterruptError, Kind
from hiddenstore.files.documents import UPGRADE
from hiddenstore.files.layout import ADVICE_DIR, TARGET_DIR
from hiddenstore.process import drain_on_signal
from hiddenstore.segments import CONTAINERS

if TYPE_CHECKING:
    from hiddenstore.care.copy import Copy, CopyReport
    from hiddenstore.doctor import DoctorCheck
    from hiddenstore.verify.report import Advance, Finding, Report
    from schemas.manifest import Container

_FINDINGS_EXIT = 3
_PROBLEM_EXIT = 5
_MOST_SHOWN = 20
_SEGMENT_PATH = re.compile(r"^\S*segments/[^/\s]+/")
_SAME_COLLECT = "hiddenstore collect DATA -o {} --target T   (the same command does the rest)"
_UNREADABLE = ("file-", "commit-", "document-", "segment-", "chunk-", "array-", "shard-", "input-", "token-range")

_MARKS = {"ok": ("✓", "green"), "absent": ("·", "dim"), "warning": ("!", "yellow"), "problem": ("✗", "red")}

_yes = click.option("-y", "--yes", is_flag=True, help="Do it; without this the plan is printed and nothing changes.")


@click.command(epilog=examples("hiddenstore verify my-store", "hiddenstore verify my-store --full --meaning --json"))
@click.argument("store", type=STORE_NOW)
@click.option("--full", is_flag=True, help="Read every byte and check every digest.")
@click.option(
    "--meaning", is_flag=True, help="Check that the states are those of these tokens, layers and this target."
)
@click.option("--stock", is_flag=True, help="Read all of it with stock zarr-python or webdataset too, and compare.")
@click.option(
    "--share",
    type=FiniteRange(0, 1),
    help="Share of the samples --meaning reads; by default as many as a fifth of the capture's cost pays for, at most "
    "8 GB, or 100 samples where these are more.",
)
@common_options
def verify(store: str, full: bool, meaning: bool, stock: bool, share: float | None) -> None:
    """Check STORE: every file there with its size; with --full every byte; with --meaning what the numbers say.

    Exits 3 when there are findings.
    """
    from hiddenstore.verify import verify as run_verify

    if share is not None and not meaning:
        raise click.UsageError("--share is for --meaning, which was not asked for")
    depth: Any = "meaning" if meaning else "bytes" if full else "structure"
    with ExitStack() as shown:

        def begin(label: str, total: int, unit: str) -> "Advance":
            shown.close()
            return shown.enter_context(Progress(label, total, unit)).advance

        report = run_verify(store, depth, share, also_bytes=full, also_stock=stock, begin=begin)
    document = {"path": store, **report.to_json(), "full": full}
    output().data(document, human=lambda: _show_findings(document), quiet="")
    if not report.ok:
        output().hint(*_remedy(store, report))
        raise click.exceptions.Exit(_FINDINGS_EXIT)
    if depth == "structure":
        output().hint("hiddenstore", "verify", store, "--full", "--meaning")
    else:
        output().hint("hiddenstore", "train", store, "-o", "RUN")


def _remedy(store: str, report: "Report") -> tuple[str, ...]:
    """The command that helps: repair drops bytes that cannot be read, but not states that mean something else, nor
    what is whole and may be a later release's; there is nothing to drop of a file of the target, or of a record, that
    is gone."""
    if any(_is_of_another_release(finding) for finding in report.findings):
        return (UPGRADE,)
    if all(f.kind == "file-missing" and f.path.startswith(f"{TARGET_DIR}/") for f in report.findings):
        return (_SAME_COLLECT.format(shlex.quote(store)),)
    if "incomplete" in report.kinds and set(report.kinds) <= {"incomplete", Kind.COMMIT_MISSING}:
        return (_SAME_COLLECT.format(shlex.quote(store)),)
    if any(kind.startswith(_UNREADABLE) for kind in report.kinds):
        return "hiddenstore", "repair", store
    if not report.affected:
        return "hiddenstore", "info", store
    return "hiddenstore", "show", store, report.affected[0][:12]


def _is_of_another_release(finding: "Finding") -> bool:
    """As ``repair`` judges, which refuses the store for it."""
    is_advice = finding.path.startswith(f"{ADVICE_DIR}/")
    return finding.kind == Kind.FORMAT_FUTURE or (finding.kind == Kind.DOCUMENT_INVALID and not is_advice)


def _show_findings(document: Mapping[str, Any]) -> None:
    """A line or two for each kind of finding in each segment, or one calm line."""
    out, findings = output(), document["findings"]
    if findings:
        groups = _grouped(findings, _place)
        for group in groups[:_MOST_SHOWN]:
            _show_group(group, "✗", "red")
        hidden = sum(len(group) for group in groups[_MOST_SHOWN:])
        if hidden:
            out.print(Text(f"  … and {count(hidden)} more (--json lists all)", style="dim"))
        affected = len({sample for item in findings for sample in item["samples"]})
        # Samples of units without a commit are affected, but not in the store.
        of_all = "" if affected > document["samples"] else f"{count(affected)} of "
        samples = plural(max(affected, document["samples"]), "sample")
        out.print(f"{plural(len(findings), 'finding')}, {of_all}{samples} affected")
    else:
        words = [f"all {count(document['files'])} files are there with their size"]
        if document["full"]:
            words = [f"all {size(document['bytes_checked'])} are as they were written"]
        if document["stock_samples"]:
            words.append(f"stock software reads the same of {plural(document['stock_samples'], 'sample')}")
        if document["depth"] == "meaning":
            samples = plural(document["samples_checked"], "sample")
            of_all = "" if document["sample_share"] == 1 else f" of {count(document['samples'])} (--share 1: all)"
            words.append(f"the states of {samples}{of_all} mean what the store says")
        out.well(f"{document['path']}: {', '.join(words)}")
    for group in _grouped(document["notes"], lambda _: ""):
        _show_group(group, "!", "yellow")


def _place(finding: Mapping[str, Any]) -> str:
    """The path of a finding, of a file in a segment that of the segment: one that is gone is one thing."""
    path: str = finding["path"]
    return "/".join(path.split("/")[:2]) if path.startswith("segments/") else path


def _grouped(
    findings: Sequence[Mapping[str, Any]], place: Callable[[Mapping[str, Any]], str]
) -> list[list[Mapping[str, Any]]]:
    """Findings of one kind in one place, together."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in findings:
        groups.setdefault((item["kind"], place(item)), []).append(item)
    return list(groups.values())


def _show_group(findings: Sequence[Mapping[str, Any]], mark: str, style: str) -> None:
    """Two lines: kind, where and how much; then what exactly, of the first."""
    first, several = findings[0], len(findings) > 1
    places = {"/".join(item["path"].split("/")[:2]) for item in findings}
    where = first["path"] if not several else places.pop() if len(places) == 1 else ""
    samples = {sample for item in findings for sample in item["samples"]}
    numbers = [f"{count(len(findings))} times"] if several else []
    numbers += [plural(len(samples), "sample")] if samples else []
    head = Text.assemble((f"{mark} ", style), (clean_line(first["kind"]), "bold"), f"   {clean_line(where)}".rstrip())
    head.append(f"   {' · '.join(numbers)}".rstrip(), style="dim")
    output().print(head)
    _indented(("first: " if several else "") + first["detail"])


def _indented(text: str) -> None:
    output().print(Padding(Text(clean(text)), (0, 0, 0, 4)))


@click.command(
    epilog=examples(
        "hiddenstore copy part-1 part-2 whole",
        "hiddenstore copy my-store small-store --recipe safe --where 'tokens<=2048' --split train",
    )
)
@click.argument("sources", type=STORE, nargs=-1, required=True, metavar="SRC...")
@click.argument("destination", type=click.Path(), metavar="DST")
@click.option(
    "--recipe",
    type=Name(get_recipe, RECIPES),
    metavar="NAME",
    help=f"{RECIPE_HELP}. Default: as DST, else as the first SRC.",
)
@click.option("--container", type=click.Choice(tuple(CONTAINERS)), help="Default: as DST, else as the first SRC.")
@click.option("--where", multiple=True, metavar="TEST", help="Only samples with tokens>4096, supervised>0, …")
@click.option("--split", type=click.Choice(["train", "validation"]), help="Only samples of this split.")
@layers_option
@click.option("--target", metavar="T", help="With --recipe rebuilt: the checkpoint whose blocks rebuild states.")
@same_target_option
@common_options
def copy(
    sources: tuple[str, ...],
    destination: str,
    recipe: str | None,
    container: "Container | None",
    where: tuple[str, ...],
    split: str | None,
    layers: tuple[int, ...] | None,
    target: str | None,
    same_target: bool,
) -> None:
    """Merge, subset, re-encode or repack: bring the samples of every SRC store into the store DST.

    Where codecs are equal, codes are copied as they are. The same command again continues where it stopped.
    """
    from hiddenstore.inspect.samples import parse_where

    keep = parse_where(where, split) if where or split else None
    from hiddenstore.care.copy import open_copy

    stores = [open_store(source) for source in sources]
    opened = open_copy(stores, destination, recipe, keep, container, same_target, target, layers)
    out = output()
    for note in opened.notes:
        out.warn(note)
    if opened.unavailable:
        out.warn(
            f"{opened.unavailable:,} units of the inputs are in no source; the copy stays as incomplete as they are"
        )
    report = copy_with_progress(opened)
    copied = open_store(opened.destination.path)
    if copied.duplicates:
        out.note(f"{copied.duplicates:,} samples are in more than one unit: they are stored twice and read once")
    document = {
        "sources": [source.path for source in opened.sources],
        "destination": copied.path,
        "recipe": copied.manifest.recipe,
        "container": copied.manifest.container,
        "units": report.units - report.lost_races,
        "units_verbatim": opened.verbatim,
        "units_decoded": sum(not opened.keeps_codes(unit) for unit in opened.units),
        "units_there_already": opened.present,
        "units_unavailable": opened.unavailable,
        "duplicates": copied.duplicates,
        "samples": report.samples,
        "tokens": report.tokens,
        "bytes_written": report.bytes_written,
        "notes": opened.notes,
    }
    out.data(document, human=lambda: _show_copy(document), quiet="")
    out.hint("hiddenstore", "verify", destination, "--full")


def copy_with_progress(opened: "Copy") -> "CopyReport":
    from hiddenstore.care.copy import run_copy

    with drain_on_signal() as drain, Progress("copy", total=opened.samples, unit="samples") as progress:

        def advance(report: "CopyReport") -> bool:
            progress.update(report.samples, written=f"{report.bytes_written / 1e6:.1f}MB")
            return not drain.requested

        report = run_copy(opened, advance)
    if drain.requested and report.units < len(opened.units):
        raise InterruptError(
            f"stopped by {drain.signal_name} after {report.units:,} of {len(opened.units):,} units; they are committed",
            kind=Kind.INTERRUPTED,
            hint="the same command continues",
        )
    return report


def _show_copy(document: Mapping[str, Any]) -> None:
    """What was brought over, and how."""
    if not document["units"]:
        text = "nothing to do"
    else:
        how = f"codes as they are, as {document['container']}"
        if document["units_decoded"]:
            how = "decoded and encoded again"
        elif document["units_verbatim"] == document["units"]:
            how = "byte for byte"
        numbers = f"{plural(document['samples'], 'sample')} in {plural(document['units'], 'unit')}"
        text = f"{numbers}, {how}, {size(document['bytes_written'])} written"
    output().well(f"{document['destination']}: {text}")
    if document["units_there_already"]:
        output().print(f"  {count(document['units_there_already'])} were there already")


@click.command(epilog=examples("hiddenstore repair my-store", "hiddenstore repair my-store -y"))
@click.argument("store", type=STORE_NOW)
@_yes
@click.option(
    "--accept-loss",
    type=click.IntRange(min=0),
    metavar="N",
    help="Drop exactly the N samples of the plan, which prints the number; needed for over 1 %, and for any unseen.",
)
@common_options
def repair(store: str, yes: bool, accept_loss: int | None) -> None:
    """Make a damaged STORE whole by leaving out the samples that cannot be read; the same collect brings them back.

    Everything readable is kept bit for bit; old records and segments stay until gc. Damaged files beside the samples
    (target, inputs, snapshots, and snapshots of a record that is damaged or gone) move to quarantine/. Damage is what
    is read wrong twice, or known to be gone; while the disk refuses to read, nothing is changed. Prints a plan unless
    -y is given.
    """
    from hiddenstore.care.repair import repair as run_repair

    result = run_repair(store, dry_run=not yes, accept_loss=accept_loss)
    document = {"path": store, "dropped": result.dropped, **asdict(result)}
    output().data(document, human=lambda: _show_repair(document))
    if (result.units or result.aside) and not yes:
        accepting = ["--accept-loss", str(result.dropped)] if result.must_be_accepted else []
        output().hint("hiddenstore", "repair", store, "-y", *accepting)
    elif result.aside or (result.dropped and yes):
        output().hint(_SAME_COLLECT.format(shlex.quote(store)))
    else:
        output().hint("hiddenstore", "verify", store, "--full")


def _show_repair(document: Mapping[str, Any]) -> None:
    """What repair drops and keeps, unit by unit, and what it sets aside."""
    out, units, aside = output(), document["units"], document["aside"]
    if not units and not aside:
        out.well(f"{document['path']}: nothing to repair")
    verb, later = ("", "") if document["done"] else ("would be ", "; nothing has changed yet")
    if units:
        columns = ("unit", ">dropped", ">kept", Column("why", wide=True))
        out.table(columns, (_repair_row(unit) for unit in units))
        out.print(f"{plural(document['dropped'], 'sample')} in {plural(len(units), 'unit')} {verb}dropped{later}")
    if unproven := len(document["waiting"]) + (0 if document["done"] else sum(unit["forget"] for unit in units)):
        out.warn(
            f"neither record nor input of {plural(unproven, 'unit')} can be read: the same collect brings the input "
            "back, and repair then keeps what proves itself"
        )
    for path, why in aside.items():
        out.print(Text(clean_line(path)))
        _indented(why)
    if aside:
        out.print(f"{plural(len(aside), 'file')} {verb}moved to quarantine/{later}")


def _repair_row(unit: Mapping[str, Any]) -> tuple[str, str, str, str]:
    why = "its commit record cannot be read"
    if unit["forget"]:
        return unit["unit"], count(len(unit["dropped"])) if unit["dropped"] else "record", "–", why
    if unit["source"] is None:
        why = _SEGMENT_PATH.sub("", next(iter(unit["dropped"].values()), "damaged beside its samples"))
    return unit["unit"], count(len(unit["dropped"])), count(unit["kept"]), why


@click.command(epilog=examples("hiddenstore gc my-store", "hiddenstore gc my-store --older-than 7d -y"))
@click.argument("store", type=STORE_NOW)
@click.option(
    "--older-than", default="24h", show_default=True, metavar="AGE", help="Spare what is younger: 30m, 12h, 7d."
)
@click.option("--abandoned", is_flag=True, help="Also give up segments that a stopped writer could still commit.")
@_yes
@common_options
def gc(store: str, older_than: str, abandoned: bool, yes: bool) -> None:
    """Sweep what can no longer be of use in STORE: segments that lost their race and what repairs replaced.

    What was written or replaced within --older-than stays. Segments of units without a commit stay too: a writer that
    was stopped may go on; --abandoned gives them up. Prints a plan unless -y is given.
    """
    from hiddenstore.care.gc import gc as run_gc

    sweep = run_gc(store, dry_run=not yes, older_than_s=parse_age(older_than), abandoned=abandoned)
    document = {"path": store, "bytes": sweep.size_bytes, **asdict(sweep)}
    output().data(document, human=lambda: _show_sweep(document))
    if sweep.remove and not yes:
        more = ["--abandoned"] if abandoned else []
        output().hint("hiddenstore", "gc", store, "--older-than", older_than, *more, "-y")
    else:
        output().hint("hiddenstore", "info", store)


def _show_sweep(document: Mapping[str, Any]) -> None:
    """What goes, and what is too young to."""
    out, remove = output(), document["remove"]

    def total(items: Sequence[Mapping[str, Any]]) -> str:
        return size(sum(item["size_bytes"] for item in items))

    if remove:
        rows = ((size(item["size_bytes"]), seconds(item["age_s"]), item["reason"], item["path"]) for item in remove)
        out.table((">size", ">age", "reason", "path"), rows)
        done = "removed" if document["done"] else "would be removed; nothing has changed yet"
        out.print(f"{size(document['bytes'])} in {plural(len(remove), 'place')} {done}")
    else:
        out.well(f"{document['path']}: nothing to sweep")
    if given_up := [item for item in remove if item["reason"] == "unfinished"]:
        verb = "was" if document["done"] else "would be"
        out.warn(
            f"{total(given_up)} of them {verb} given up: no record names them yet, and a writer that was stopped could "
            "have; the same collect captures those units again"
        )
    if elsewhere := document["elsewhere"]:
        first = Path(document["path"], elsewhere[0]["path"]).parent
        out.warn(
            f"{total(elsewhere)} in {plural(len(elsewhere), 'place')} stay: {first} leads out of the store, to "
            f"{first.resolve()}, whose files may be of something else; remove there what you know to be of this store"
        )
    for name, why in (
        ("unfinished", "could still be committed by a writer that was stopped; --abandoned gives them up"),
        ("wait", "are too young: a writer may still be at work"),
    ):
        if document[name]:
            out.print(Text(f"  {total(document[name])} more {why}", style="dim"))


def parse_age(text: str) -> float:
    """``30m``, ``12h``, ``7d`` or ``90s`` in seconds; ConfigError ``option-invalid``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match is None or (not match[2] and float(match[1]) != 0):
        raise ConfigError(f"--older-than {text!r} is no age", kind=Kind.OPTION_INVALID, hint="--older-than 24h")
    return float(match[1]) * {"": 0, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@click.command(epilog=examples("hiddenstore doctor", "hiddenstore doctor /data --json"))
@click.argument("folder", default=".", type=click.Path())
@common_options
def doctor(folder: str) -> None:
    """This machine: versions, GPUs, engines, and how fast FOLDER (where a store would go) writes, syncs and reads.

    Writes and removes a 32 MB trial file in FOLDER. Exits 5 when something would not work.
    """
    checks = examine(folder)
    problems = [check for check in checks if check.status == "problem"]
    document = {"ok": not problems, "folder": folder, "checks": [asdict(check) for check in checks]}
    output().data(document, human=lambda: _show_machine(checks), quiet="\n".join(check.detail for check in problems))
    if problems:
        raise click.exceptions.Exit(_PROBLEM_EXIT)
    output().hint("hiddenstore demo")


def _show_machine(checks: "list[DoctorCheck]") -> None:
    rows = []
    for check in checks:
        mark, style = _MARKS[check.status]
        detail = Text(check.detail).append(f"   {check.fix}" if check.fix else "", style="cyan")
        rows.append((Text.assemble((f"{mark} ", style), (check.name, "dim")), detail))
    output().pairs(rows)

"""How the documents of verify, copy, repair and gc look on a terminal."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.padding import Padding
from rich.text import Text

from hiddenstore.cli.output import output
from hiddenstore.cli.table import Column
from hiddenstore.cli.terminal import clean, clean_line, count, plural, seconds, size

_MOST_SHOWN = 20
_SEGMENT_PATH = re.compile(r"^\S*segments/[^/\s]+/")


def verify_view(document: Mapping[str, Any]) -> None:
    """A table of findings, or one calm line."""
    out = output()
    findings = document["findings"]
    if not findings:
        # One line whatever the width, so that it can be grepped.
        out.out.print(Text.assemble(("✓ ", "green"), f"{document['path']}: {_all_well(document)}"), soft_wrap=True)
        _notes(document["notes"])
        return
    groups = _grouped(findings)
    for items in groups[:_MOST_SHOWN]:
        _print_finding(items, "✗", "red")
    if len(groups) > _MOST_SHOWN:
        hidden = sum(len(items) for items in groups[_MOST_SHOWN:])
        out.print(Text(f"  … and {count(hidden)} more (--json lists all)", style="dim"))
    affected = {sample for item in findings for sample in item["samples"]}
    # Samples of units without a commit are affected, but not in the store.
    of_all = "" if len(affected) > document["samples"] else f"{count(len(affected))} of "
    share = f"{of_all}{plural(max(len(affected), document['samples']), 'sample')} affected"
    out.print(f"{plural(len(findings), 'finding')}, {share}")
    _notes(document["notes"])


def _all_well(document: Mapping[str, Any]) -> str:
    words = [f"all {count(document['files'])} files are there with their size"]
    if document["full"]:
        words = [f"all {size(document['bytes_checked'])} are as they were written"]
    if document["depth"] == "meaning":
        words.append(f"the states of {plural(document['samples_checked'], 'sample')} mean what the store says")
    return ", ".join(words)


def _notes(notes: Sequence[Mapping[str, Any]]) -> None:
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for item in notes:
        by_kind.setdefault(item["kind"], []).append(item)
    for items in by_kind.values():
        _print_finding(items, "!", "yellow")


def _grouped(findings: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Findings of one kind in one segment together: a segment that is gone is one thing, not thirty files."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in findings:
        place = "/".join(item["path"].split("/")[:2]) if item["path"].startswith("segments/") else item["path"]
        groups.setdefault((item["kind"], place), []).append(item)
    return list(groups.values())


def _print_finding(items: Sequence[Mapping[str, Any]], mark: str, style: str) -> None:
    """Two lines: kind, where and how much; then what exactly, of the first."""
    first = items[0]
    where = first["path"]
    if len(items) > 1:
        same_place = len({"/".join(item["path"].split("/")[:2]) for item in items}) == 1
        where = "/".join(where.split("/")[:2]) if same_place else ""
    samples = {sample for item in items for sample in item["samples"]}
    numbers = [f"{count(len(items))} times"] if len(items) > 1 else []
    numbers += [plural(len(samples), "sample")] if samples else []
    head = Text.assemble((f"{mark} ", style), (clean_line(first["kind"]), "bold"), f"   {clean_line(where)}".rstrip())
    head.append(f"   {' · '.join(numbers)}".rstrip(), style="dim")
    detail = ("first: " if len(items) > 1 else "") + first["detail"]
    output().print(head)
    output().print(Padding(Text(clean(detail)), (0, 0, 0, 4)))


def copy_view(document: Mapping[str, Any]) -> None:
    """What was brought over, and how."""
    how = "decoded and encoded again" if document["units_decoded"] else f"codes as they are, as {document['container']}"
    if document["units_verbatim"] == document["units"]:
        how = "byte for byte"
    out = output()
    if document["units"]:
        text = f"{plural(document['samples'], 'sample')} in {plural(document['units'], 'unit')}, {how}, "
        out.print(
            Text.assemble(
                ("✓ ", "green"), f"{document['destination']}: {text}{size(document['bytes_written'])} written"
            )
        )
    else:
        out.print(Text.assemble(("✓ ", "green"), f"{document['destination']}: nothing to do"))
    if document["units_there_already"]:
        out.print(f"  {count(document['units_there_already'])} were there already")


def repair_view(document: Mapping[str, Any]) -> None:
    """What repair drops and keeps, unit by unit, and what it sets aside."""
    out = output()
    if not document["units"] and not document["aside"]:
        out.print(Text.assemble(("✓ ", "green"), f"{document['path']}: nothing to repair"))
        return
    later = "" if document["done"] else "; nothing has changed yet"
    if document["units"]:
        out.table(
            ("unit", ">dropped", ">kept", Column("why", wide=True)),
            (
                (
                    unit["unit"],
                    "record" if unit["forget"] else count(len(unit["dropped"])),
                    "–" if unit["forget"] else count(unit["kept"]),
                    "its commit record cannot be read" if unit["forget"] else _why(unit["dropped"]),
                )
                for unit in document["units"]
            ),
        )
        done = "dropped" if document["done"] else "would be dropped"
        out.print(f"{plural(document['dropped'], 'sample')} in {plural(len(document['units']), 'unit')} {done}{later}")
    if document["aside"]:
        for path, why in document["aside"].items():
            out.print(Text(clean_line(path)))
            out.print(Padding(Text(clean(why)), (0, 0, 0, 4)))
        done = "moved" if document["done"] else "would be moved"
        out.print(f"{plural(len(document['aside']), 'file')} {done} to quarantine/{later}")


def gc_view(document: Mapping[str, Any]) -> None:
    """What goes, and what is too young to."""
    out = output()
    if document["remove"]:
        out.table(
            (">size", ">age", "reason", "path"),
            ((size(i["size_bytes"]), seconds(i["age_s"]), i["reason"], i["path"]) for i in document["remove"]),
        )
        done = "removed" if document["done"] else "would be removed; nothing has changed yet"
        out.print(f"{size(document['bytes'])} in {plural(len(document['remove']), 'place')} {done}")
    else:
        out.print(Text.assemble(("✓ ", "green"), f"{document['path']}: nothing to sweep"))
    if document["wait"]:
        waiting = size(sum(item["size_bytes"] for item in document["wait"]))
        out.print(Text(f"  {waiting} more are too young: a writer may still be at work", style="dim"))


def _why(dropped: Mapping[str, str]) -> str:
    why = next(iter(dropped.values()), "damaged beside its samples")
    return _SEGMENT_PATH.sub("", why)

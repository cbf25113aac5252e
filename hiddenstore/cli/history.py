"""The commands about what was: log and snapshot."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from hiddenstore.cli.words import STORE, open_store
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import Column, count, plural, size
from hiddenstore.errors import HiddenstoreError
from hiddenstore.files.layout import split_snapshot


@click.command(epilog=examples("hiddenstore log my-store", "hiddenstore log my-store@train-v1 --units --json"))
@click.argument("store", type=STORE)
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Rows to print; 0 prints all."
)
@click.option("--units", is_flag=True, help="A row for every record, not one for what was written in one go.")
@common_options
def log(store: str, limit: int, units: bool) -> None:
    """Who wrote what into STORE and when, the newest first.

    Engine, versions and amounts are from the records; a record names no host, person or time. When and which machine
    is what the filesystem says of its file: – where it does not, as on object storage and in copies by other programs.
    """
    from hiddenstore.inspect.history import history

    opened = open_store(store, strict=False)
    events, errors = history(opened, each=units)
    shown = [event.document() for event in events[: limit or None]]
    document = {
        "path": opened.path,
        "matching": len(events),
        "events": shown,
        "unreadable": [error.message for error in errors],
    }
    output().data(document, human=lambda: _show_events(shown), quiet="\n".join(event["name"] for event in shown))
    output().note(f"{len(shown):,} of {plural(len(events), 'row')}")
    for error in errors:
        output().warn(error.message)
    output().hint("hiddenstore", *(("verify", store) if errors else ("info", store)))


def _show_events(events: Sequence[Mapping[str, Any]]) -> None:
    output().table(
        (
            "when",
            "what",
            Column("by, as", wide=True),
            Column("on", wide=True),
            ">units",
            ">samples",
            ">rejects",
            ">size",
        ),
        (
            (
                _when(event["last"]),
                event["action"],
                event["name"] if event["action"] == "froze" else f"{event['engine']} {event['version']}",
                _machines(event["hosts"]),
                count(event["units"]),
                count(event["samples"]),
                count(event["rejects"]) if event["rejects"] else "–",
                size(event["size_bytes"]) if event["size_bytes"] else "–",
            )
            for event in events
        ),
    )


def _machines(hosts: Sequence[str]) -> str:
    return "–" if not hosts else f"{len(hosts)} machines" if hosts[1:] else hosts[0]


def _when(text: str | None) -> str:
    """In the time zone of whoever looks."""
    return "–" if text is None else f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M}"


@click.command(
    epilog=examples(
        "hiddenstore snapshot my-store",
        "hiddenstore snapshot my-store train-v1",
        "hiddenstore diff my-store@train-v1 my-store",
    )
)
@click.argument("store", type=STORE)
@click.argument("name", required=False)
@click.option("--remove", is_flag=True, help="Forget NAME; gc may then sweep what only it named.")
@common_options
def snapshot(store: str, name: str | None, remove: bool) -> None:
    """Freeze what STORE holds now under NAME, or list what is frozen.

    STORE@NAME then reads exactly those samples, whatever is collected or repaired later. Training does it by itself.
    """
    from hiddenstore.inspect.history import snapshots

    if remove and name is None:
        raise click.UsageError("--remove needs the NAME of a snapshot")
    opened = open_store(store)
    errors: list[HiddenstoreError] = []
    if name is not None and remove:
        opened.remove_snapshot(name)
    elif name is not None:
        opened.save_snapshot(name)
    frozen = [event.document() for event in snapshots(opened.fs, errors)]
    frozen.sort(key=lambda event: (event["last"] or "", event["name"]))
    document = {"path": opened.path, "name": name, "removed": remove, "snapshots": frozen}
    output().data(document, human=lambda: _show_snapshots(document), quiet="\n".join(item["name"] for item in frozen))
    for error in errors:
        output().warn(error.message)
    path = split_snapshot(store)[0]
    if remove:
        output().hint("hiddenstore", "gc", path)
    elif frozen:
        output().hint("hiddenstore", "info", f"{path}@{name or frozen[-1]['name']}")
    else:
        output().hint("hiddenstore", "snapshot", path, "NAME")


def _show_snapshots(document: Mapping[str, Any]) -> None:
    if document["name"] is not None:
        done = "removed" if document["removed"] else "frozen"
        output().well(f"{document['path']}: {document['name']} {done}")
        return
    output().table(
        ("when", Column("snapshot", wide=True), ">units", ">samples", ">tokens"),
        (
            (_when(item["last"]), item["name"], count(item["units"]), count(item["samples"]), count(item["tokens"]))
            for item in document["snapshots"]
        ),
    )

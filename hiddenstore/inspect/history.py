"""Who wrote what into a store and when, from its records; the documents behind ``log`` and ``snapshot``. No torch.

A record states engine, versions, samples and files, never a clock, a host or a person, so that equal work has equal
bytes. When it was written, and by which machine, is what the storage says of its file: that orders what is shown and
decides nothing.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from hiddenstore.commit import Commit, lost_samples, read_commit
from hiddenstore.errors import ConfigError, HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, twice
from hiddenstore.fs.disk import host_of
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import saved_snapshots
from hiddenstore.store import Store, load_snapshot

ONE_GO_S = 3600.0
"""Records of one kind, input and engine that are this close in time are one line: one capture, on many machines."""

Action = Literal["wrote", "repaired", "recaptured", "froze"]


@dataclass(frozen=True)
class Event:
    """One record or snapshot, or several ``units`` written in one go.

    ``first`` and ``last``: seconds since 1970 at which the storage says they were written, None where it does not say.
    ``hosts``: machines that wrote them, as far as the storage says: object storage and some filesystems do not.
    ``superseded``: units of it that a later record replaced. ``name``: of a snapshot, or the first unit.
    """

    action: Action
    name: str
    first: float | None
    last: float | None
    units: int
    samples: int
    tokens: int
    size_bytes: int
    rejects: int = 0
    superseded: int = 0
    input: str = ""
    engine: str = ""
    version: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    hosts: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The members of one entry of ``events``; times as UTC in ISO 8601."""
        times = {name: _iso(getattr(self, name)) for name in ("first", "last")}
        return {**asdict(self), **times, "versions": dict(self.versions), "settings": dict(self.settings)}


def history(store: "Store", each: bool = False) -> tuple[list[Event], list[HiddenstoreError]]:
    """Events, the newest first, and what could not be read; with ``each`` one for every record.

    A store opened at a snapshot gives the history of what that names.
    """
    errors: list[HiddenstoreError] = list(store.damaged)
    events = list(_records(store, errors))
    if not store.is_frozen:
        events += snapshots(store.fs, errors)
    events.sort(key=lambda event: (event.last or 0.0, event.name))
    return list(reversed(events if each else list(_in_one_go(events)))), errors


def snapshots(fs: Filesystem, errors: list[HiddenstoreError]) -> Iterator[Event]:
    """Every saved snapshot; what cannot be read is added to ``errors``."""
    for name in saved_snapshots(fs):
        try:
            snapshot = load_snapshot(fs, name)
        except DAMAGE as error:
            errors.append(error)
            continue
        time_s = _written_s(fs, layout.snapshot_path(name))
        yield Event("froze", name, time_s, time_s, len(snapshot.commits), snapshot.samples, snapshot.tokens, 0)


def _records(store: "Store", errors: list[HiddenstoreError]) -> Iterator[Event]:
    counting = set(store.catalog.names)
    # In the order of their names, as those below: of all records one at a time is in memory.
    files = iter(store.commit_files)
    upcoming = next(files, None)
    names = list(counting) if store.is_frozen else store.fs.list(layout.COMMITS_DIR)
    parsed = sorted((parsed, name) for name in names if (parsed := layout.parse_commit(name)) is not None)
    unreadable = {getattr(error, "path", "").rpartition("/")[2] for error in errors}
    before: Commit | None = None
    for commit_name, name in parsed:
        if name in unreadable:
            continue
        if upcoming is not None and upcoming.name == name:
            commit, upcoming = upcoming, next(files, None)
        else:
            try:
                commit = twice(store.fs, partial(read_commit, store.fs, name), f"{layout.COMMITS_DIR}/{name}")
            except DAMAGE as error:
                errors.append(error)
                continue
        yield _event(store.fs, commit, commit_name.revision, before, is_last=name in counting)
        before = commit


def _event(fs: Filesystem, commit: Commit, revision: int, before: Commit | None, is_last: bool) -> Event:
    record = commit.record
    action: Action = "wrote"
    if before is not None and layout.parse_commit(before.name) == (record.unit, revision - 1):
        known = {sample.id for sample in before.record.samples}
        action = "recaptured" if any(sample.id not in known for sample in record.samples) else "repaired"
    elif revision:
        action = "repaired" if lost_samples(record) else "recaptured"
    time_s = _written_s(fs, f"{layout.COMMITS_DIR}/{commit.name}")
    engine = record.recaptured[-1].engine if action == "recaptured" and record.recaptured else record.engine
    return Event(
        action, record.unit, time_s, time_s, 1, len(record.samples), record.tokens, record.bytes_stored,
        len(record.rejects), int(not is_last), record.input, engine.name, engine.version,
        tuple(sorted(engine.versions.items())), tuple(sorted(engine.settings.items())),
        tuple(filter(None, [host_of(f"{fs.root}/{layout.COMMITS_DIR}/{commit.name}")])),
    )  # fmt: skip


def _in_one_go(events: Iterable[Event]) -> Iterator[Event]:
    """Neighbours in time by one engine into one input as one event."""
    last: Event | None = None
    for event in events:
        if last is not None and _belongs(event, last):
            last = replace(
                last,
                last=event.last,
                hosts=tuple(sorted({*last.hosts, *event.hosts})),
                **{
                    name: getattr(last, name) + getattr(event, name)
                    for name in ("units", "samples", "tokens", "size_bytes", "rejects", "superseded")
                },
            )
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _belongs(event: Event, last: Event) -> bool:
    same = ("action", "input", "engine", "version", "versions", "settings")
    near = event.last is None or last.last is None or event.last - last.last <= ONE_GO_S
    return event.action != "froze" and near and all(getattr(event, name) == getattr(last, name) for name in same)


def _written_s(fs: Filesystem, path: str) -> float | None:
    try:
        return fs.local_path(path).stat().st_mtime
    except ConfigError:
        size, age_s = fs.usage(path)
        return time.time() - age_s if size else None
    except OSError:
        return None


def _iso(time_s: float | None) -> str | None:
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")

"""Tables of what is chosen by name: our rows, and those that other distributions add through entry points.

Names are known without importing a row. What others ask of a row is a member of it and checked when it is loaded: a
member that is missing or of a wrong type is an error that names it, never a default.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from importlib import metadata
from itertools import takewhile
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

from hiddenstore.errors import ConfigError, Kind

T = TypeVar("T")


def nearest(name: str, names: Collection[str]) -> str:
    """The one of ``names`` that was meant, of several as alike the one that begins most like it; empty where none is
    alike."""

    def likeness(other: str) -> tuple[float, int]:
        same = takewhile(lambda letters: letters[0] == letters[1], zip(name, other, strict=False))
        return SequenceMatcher(None, name, other).ratio(), len(list(same))

    near = max(names, key=likeness, default="")
    return near if near and likeness(near)[0] >= 0.5 else ""


def unknown(thing: str, name: str, names: Collection[str], option: str = "", default: str = "") -> ConfigError:
    """``name-unknown``: the names there are, the nearest one, and ``option`` with it (or ``default``) as the fix."""
    near = nearest(name, names)
    message = f"unknown {thing} {name!r}, expected one of: {', '.join(names)}" + f"; did you mean {near}?" * bool(near)
    hint = f"{option} {near or default}" if option and (near or default) else None
    return ConfigError(message, kind=Kind.NAME_UNKNOWN, hint=hint)


@dataclass(eq=False)
class Registry(Generic[T]):
    """One table. Names, ours first, are what it iterates over; a row is loaded when it is first asked for.

    ``thing``: its word in errors. ``group``: entry points that add rows. ``rows``: ours, or their ``module:attribute``.
    ``contract``: ``module:class`` of a row, or a protocol of its members. ``option``, ``default``: for the hint.
    """

    thing: str
    group: str
    rows: dict[str, str | T]
    contract: str = ""
    option: str = ""
    default: str = ""
    _loaded: dict[str, T] = field(default_factory=dict, init=False)
    _bound: dict[str, Callable[[], T]] = field(default_factory=dict, init=False)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.rows, *self.packages))

    def __len__(self) -> int:
        return len(self.rows) + len(self.packages)

    def __contains__(self, name: object) -> bool:
        return name in self.rows or name in self.packages or name in self._bound

    def __getitem__(self, name: str) -> T:
        """A row; ConfigError ``name-unknown``, or ``plugin-broken``: no import, a member missing, a name twice."""
        row = self._loaded.get(name)
        return self._load(name) if row is None else row

    def bind(self, name: str, make: Callable[[], T]) -> None:
        """Add a row that some data alone knows: taken by its name, and not listed. ``make`` is called when it is first
        taken; whoever binds the name again means the same row."""
        self._bound[name] = make

    @cached_property
    def packages(self) -> dict[str, list[metadata.EntryPoint]]:
        """What other packages add, by name."""
        points = metadata.entry_points(group=self.group)
        return {p.name: [q for q in points if q.name == p.name] for p in points if p.name not in self.rows and p.dist}

    def require(self, name: str) -> None:
        """Refuse a name that is not in the table; ConfigError ``name-unknown``. Nothing is loaded."""
        if name not in self:
            raise unknown(self.thing, name, self, self.option, self.default)

    def check(self, name: str, value: object, contract: str) -> None:
        """Refuse a row, or what it made, that lacks something of ``contract``; ConfigError ``plugin-broken``."""
        if fault := _fault(value, self._point(contract or "collections.abc:Callable").load()):
            raise self.broken(name, fault)

    def _load(self, name: str) -> T:
        self.require(name)
        if name in self._bound:
            return self._loaded.setdefault(name, self._bound[name]())
        points, row = self.packages.get(name, ()), self.rows.get(name)
        if len(points) > 1:
            raise self.broken(name, "is in more than one package")
        try:
            loaded: Any = points[0].load() if points else self._point(row).load() if isinstance(row, str) else row
        except Exception as error:
            if not points:
                raise
            raise self.broken(name, f"cannot be imported: {type(error).__name__}: {error}") from error
        self.check(name, loaded, self.contract)
        return self._loaded.setdefault(name, loaded)

    def _point(self, reference: str) -> metadata.EntryPoint:
        return metadata.EntryPoint(self.thing, reference, self.group)

    def broken(self, name: str, fault: str) -> ConfigError:
        """What to raise for a row of which ``fault`` is true."""
        dists = [p.dist for p in self.packages.get(name, ()) if p.dist] or [metadata.distribution("hiddenstore")]
        message = f"{self.thing} {name} of {' and '.join(f'{d.name} {d.version}' for d in dists)} {fault}"
        command = "install --upgrade" if len(dists) == 1 else "uninstall"
        return ConfigError(message, kind=Kind.PLUGIN_BROKEN, hint=f"pip {command} {dists[0].name}")


def _fault(value: object, contract: type) -> str | None:
    """What is wrong, as the end of a sentence: every member of a protocol counts, of a class those without a value."""
    is_protocol = getattr(contract, "_is_protocol", False)
    if not is_protocol and not isinstance(value, contract):
        return f"is a {type(value).__name__}, not a {contract.__name__}"
    if is_protocol and inspect.isclass(value):
        return f"is the class {value.__name__}, not an object of it"
    for base in contract.__mro__:
        members = {n: hint for n, hint in vars(base).get("__annotations__", {}).items() if n not in vars(base)}
        members |= {n: member for n, member in vars(base).items() if is_protocol and not n.startswith("_")}
        for name, member in members.items():
            # A class that derives from a protocol inherits members that state nothing.
            if not hasattr(value, name) or inspect.getattr_static(value, name) is member:
                return f"states no {name}"
            hint = member.fget.__annotations__["return"] if isinstance(member, property) else member
            if not _fits(getattr(value, name), Callable if inspect.isfunction(member) else hint):
                return f"states {name} = {getattr(value, name)!r}, not {getattr(hint, '__name__', hint)}"
    return None


def _fits(value: object, hint: Any) -> bool:
    """Only types are compared: a Literal or a forward reference takes anything."""
    types = [get_origin(t) or t for t in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
    return any(not isinstance(t, type) or isinstance(value, (int, float) if t is float else t) for t in types)

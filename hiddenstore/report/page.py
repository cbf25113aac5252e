"""A page in one file, with small charts as inline SVG: no network, light and dark, readable on a phone, by keyboard and
by ear.

Text becomes HTML in ``tag`` alone, which escapes whatever is not ``Html``: a conversation may hold ``</script>``. Each
chart has its numbers in a table beside it for those who do not see it. Series differ by colour and by dash, and are
named where they are drawn or in a legend. Drawings are 420 units wide, so that their letters stay readable when a phone
shows them at 340 pixels.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Literal

from hiddenstore.console.text import amount, clean
from hiddenstore.errors import ConflictError, Kind
from hiddenstore.fs.publish import make_folder, replace_file
from hiddenstore.fs.seam import storage_error

TEXT_BYTES = 1_500_000
"""What the samples of a page may take: half of what a page should, so that a phone opens it."""
TEXT_WARNING = (
    "This page shows text of the data set. Token ids are that text too: whoever has the store can read all of it, so "
    "share both only where you would share the conversations."
)
BRAND = "hiddenstore report"
Level = Literal["bad", "look", "unknown", "good"]

# The most urgent first.
_MARKS: dict[Level, str] = {"bad": "✗", "look": "!", "unknown": "·", "good": "✓"}
_SPOKEN: dict[Level, str] = {"good": "healthy", "look": "worth a look", "bad": "a problem", "unknown": "not known"}
_VOID = frozenset({"meta", "input", "br"})
WIDTH, HEIGHT = 420.0, 220.0
MOST_POINTS = 300
STYLES = 8
"""Colours and dashes that ``page.css`` has."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 12.0, 26.0, 40.0
_TICKS = 4
_ROW = 34.0
_TABLE_ROWS = 60

Form = Callable[[float], str]


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(element: str, /, *children: str, **attributes: str | float | None) -> Html:
    """An element. Attributes: ``class_`` is class, ``data_x`` data-x; None leaves one out, ``""`` gives it no value."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    closed = "" if element in _VOID else f"{join(children)}</{element}>"
    return Html(f"<{element}{written}>{closed}")


def _attribute(key: str, value: str | float) -> str:
    # Of a coordinate in a drawing, digits beyond these are a hundredth of a pixel.
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    name = key.rstrip("_").replace("_", "-")
    return f' {name}="{escape(clean(text))}"' if text else f" {name}"


def join(parts: Iterable[str]) -> Html:
    """The parts after each other; what is not ``Html`` is escaped, and its control characters are made visible."""
    return Html("".join(part if isinstance(part, Html) else escape(clean(part)) for part in parts))


def facts(rows: Iterable[tuple[str, str]]) -> Html:
    """Names and values, one pair under the other."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Html:
    """A table; a column named ``>x`` holds numbers. The first cell of a row heads it."""
    numbers = [name.startswith(">") for name in columns]
    style = ["number" if number else None for number in numbers]
    head = [tag("th", name.lstrip(">"), scope="col", class_=kind) for name, kind in zip(columns, style, strict=True)]
    body = []
    for first, *rest in rows:
        cells = [tag("td", cell, class_=kind) for cell, kind in zip(rest, style[1:], strict=True)]
        body.append(tag("tr", tag("th", first, scope="row"), *cells))
    title = [tag("caption", caption)] if caption else []
    return tag(
        "div",
        tag("table", *title, tag("thead", tag("tr", *head)), tag("tbody", *body)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption or "table",
    )


def details(summary: str, *children: str) -> Html:
    """What is shown when it is opened."""
    return tag("details", tag("summary", summary), *children)


def beside(*figures: str) -> Html:
    """Figures next to each other, where there is room."""
    return tag("div", *figures, class_="pair")


@dataclass(frozen=True)
class Verdict:
    """What a figure says about this store or run."""

    level: Level
    text: str

    def html(self, link: str | None = None) -> Html:
        mark = tag("span", _MARKS[self.level], aria_hidden="true")
        spoken = tag("span", f"{_SPOKEN[self.level]}: ", class_="ear")
        text = self.text if link is None else tag("a", self.text, href=f"#{link}")
        return tag("p", mark, spoken, text, class_=f"verdict {self.level}")


@dataclass(frozen=True)
class Section:
    """One part of a page. ``healthy``: a sentence that says what is; ``command``: words of one that tells more."""

    title: str
    body: str
    healthy: str = ""
    verdicts: tuple[Verdict, ...] = ()
    command: tuple[str, ...] = ()
    wide: bool = False

    @property
    def name(self) -> str:
        """What a link to it says."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())

    def html(self) -> Html:
        notes = [verdict.html() for verdict in self.verdicts]
        notes += [tag("p", tag("b", "Healthy: "), self.healthy, class_="healthy")] if self.healthy else []
        if self.command:
            notes.append(tag("p", tag("code", shlex.join(["hiddenstore", *self.command])), class_="command"))
        style = "card wide" if self.wide else "card"
        title = f"{self.name}-title"
        heading = tag("h2", self.title, id=title)
        return tag("section", heading, self.body, *notes, id=self.name, class_=style, aria_labelledby=title)


@dataclass(frozen=True)
class Page:
    """``tiles``: name and value of the few main numbers; ``note`` stands above everything."""

    title: str
    about: str
    tiles: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    note: str = ""

    @property
    def verdicts(self) -> list[tuple[Section, Verdict]]:
        """What is to be looked at first, with the section that shows it."""
        pairs = [(section, verdict) for section in self.sections for verdict in section.verdicts]
        return sorted(pairs, key=lambda pair: list(_MARKS).index(pair[1].level))

    def html(self) -> str:
        """The whole document."""
        summary = tag(
            "section",
            tag("h2", "In short", id="short"),
            *(verdict.html(section.name) for section, verdict in self.verdicts),
            class_="card wide",
            aria_labelledby="short",
        )
        tiles = [tag("div", tag("dt", name), tag("dd", value)) for name, value in self.tiles]
        links = tag("ul", *(tag("li", tag("a", section.title, href=f"#{section.name}")) for section in self.sections))
        body = tag(
            "body",
            tag("a", "Skip to the content", href="#content", class_="skip"),
            tag("header", tag("p", BRAND, class_="brand"), tag("h1", self.title), tag("p", self.about, class_="about")),
            tag("nav", links, aria_label="Sections"),
            tag(
                "main",
                *([tag("p", self.note, class_="note", role="note")] if self.note else []),
                tag("dl", *tiles, class_="tiles"),
                summary,
                *(section.html() for section in self.sections),
                id="content",
            ),
            tag("script", Html(_file("page.js"))),
        )
        return f"<!doctype html>\n{tag('html', _head(self.title), body, lang='en')}\n"


def _head(title: str) -> Html:
    # Nothing is loaded, whatever the text of a conversation says.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=BRAND),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", f"{title} · hiddenstore"),
        tag("style", Html(_file("page.css"))),
    )


def _file(name: str) -> str:
    return files("hiddenstore.report").joinpath(name).read_text(encoding="utf-8")


def refuse_other_file(path: Path) -> None:
    """ConflictError ``output-exists`` where something lies that is no report of ours; StorageError."""
    try:
        with path.open("rb") as file:
            is_report = BRAND.encode() in file.read(400)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, str(path)) from error
    if not is_report:
        message = f"{path} exists and is no report: it stays as it is"
        raise ConflictError(message, kind=Kind.OUTPUT_EXISTS, hint="-o report.html")


def write_page(path: Path, shown: Page) -> int:
    """Publish a page by one rename; its bytes. Raises ConflictError: ``output-exists``, something lies there that is no
    report of ours; StorageError."""
    data = shown.html().encode()
    refuse_other_file(path)
    make_folder(path.parent)
    replace_file(path, data)
    return len(data)


@dataclass(frozen=True)
class Series:
    """Points of one line, x ascending; a value that is not finite is a gap. ``dots``: marked, for few points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False

    def thinned(self) -> "Series":
        """At most ``MOST_POINTS``: the means of neighbours."""
        step = -(-len(self.xs) // MOST_POINTS)
        if step <= 1:
            return self
        parts = [slice(start, start + step) for start in range(0, len(self.xs), step)]
        return Series(self.name, [_mean(self.xs[p]) for p in parts], [_mean(self.ys[p]) for p in parts], self.dots)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def short(value: float) -> str:
    """A number of an axis: ``1.5``, ``12 k``, ``3e-04``."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    if abs(value) >= 10_000:
        return amount(value)
    return f"{value:.0e}" if abs(value) < 1e-3 else f"{value:.4g}"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers inside a range: steps of 1, 2 or 5 times a power of ten."""
    raw = max(high - low, 1e-12) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Scale:
    """Values of an axis to places of a drawing; ``log``: by their logarithm, ten at each tick."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        at, low, high = (math.log10(max(v, 1e-30)) if self.log else v for v in (value, self.low, self.high))
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Where the axis is labelled."""
        if not self.log:
            return ticks(self.low, self.high)
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        marks = [10.0**power for power in powers]
        return marks if len(marks) > 1 else ticks(self.low, self.high)


def lines(title: str, series: Sequence[Series], x: str, y: str, *, log: bool = False, zero: bool = False) -> Html:
    """Lines over a common axis. ``log``: the y axis; ``zero``: it starts at 0."""
    drawn = [one.thinned() for one in series]
    points = [(a, b) for one in drawn for a, b in zip(one.xs, one.ys, strict=True) if math.isfinite(b)]
    points = [point for point in points if not log or point[1] > 0]
    if not points:
        return tag("p", f"{title}: nothing was recorded.", class_="none")
    low, high = min(b for _, b in points), max(b for _, b in points)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    floor = 0.0 if zero else low - margin if low - margin > 0 or low < 0 else 0.0
    first, last = min(a for a, _ in points), max(a for a, _ in points)
    # A single point stands in the middle.
    alone = first == last
    across = Scale(first - alone, last + alone, _LEFT, WIDTH - _RIGHT)
    up = Scale(low if log else floor, high if log else high + margin, HEIGHT - _BOTTOM, _TOP, log)
    parts = [*_frame(across, up, x, y)]
    for number, one in enumerate(drawn):
        parts += _line(one, across, up, number, log)
    numbers = [[one.name, short(a), f"{b:.4g}"] for one in drawn for a, b in _some(one)]
    return _figure(title, _svg(title, HEIGHT, parts), _legend(series), table(("line", f">{x}", f">{y}"), numbers))


def _some(one: Series) -> list[tuple[float, float]]:
    step = -(-len(one.xs) // _TABLE_ROWS) or 1
    return [*zip(one.xs, one.ys, strict=True)][::step]


def _line(one: Series, across: Scale, up: Scale, number: int, log: bool) -> list[Html]:
    words, parts = [], []
    pen = "M"
    for a, b in zip(one.xs, one.ys, strict=True):
        if not math.isfinite(b) or (log and b <= 0):
            pen = "M"
            continue
        words.append(f"{pen}{across(a):.1f} {up(b):.1f}")
        pen = "L"
        if one.dots:
            tip = tag("title", f"{one.name}: {short(a)}, {b:.4g}")
            parts.append(tag("circle", tip, cx=across(a), cy=up(b), r=3.5, class_=f"dot s{number % STYLES}"))
    return [tag("path", d="".join(words), class_=f"line s{number % STYLES}"), *parts]


def _frame(across: Scale, up: Scale, x: str, y: str) -> list[Html]:
    """Grid, labels and names of both axes."""
    bottom, parts = HEIGHT - _BOTTOM, []
    for value in up.ticks():
        at = up(value)
        parts.append(tag("line", x1=across.start, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", short(value), x=across.start - 6, y=at + 4, class_="end"))
    # Steps, positions and tokens are whole: between two of them there is nothing.
    for value in (value for value in across.ticks() if float(value).is_integer()):
        parts.append(tag("text", short(value), x=across(value), y=bottom + 16, class_="middle"))
    parts.append(tag("line", x1=across.start, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", x, x=WIDTH - _RIGHT, y=HEIGHT - 6, class_="end name"))
    parts.append(tag("text", y, x=2.0, y=13.0, class_="name"))
    return parts


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], x: str, y: str) -> Html:
    """Columns of counts between ``edges``, one more than there are counts."""
    if not any(counts):
        return tag("p", f"{title}: nothing to count.", class_="none")
    across = Scale(edges[0], edges[-1], _LEFT, WIDTH - _RIGHT)
    up = Scale(0.0, max(counts) * 1.05, HEIGHT - _BOTTOM, _TOP)
    parts = _frame(across, up, x, y)
    rows = []
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        left, width, top = across(low) + 1, across(high) - across(low) - 2, up(count)
        tip = tag("title", f"{low + 1:,.0f}–{high:,.0f}: {count:,}")
        parts.append(tag("rect", tip, x=left, y=top, width=width, height=up.start - top, rx=2, class_="fill s0"))
        rows.append((f"{low + 1:,.0f}–{high:,.0f}", f"{count:,}"))
    return _figure(title, _svg(title, HEIGHT, parts), Html(), table((x, f">{y}"), rows))


@dataclass(frozen=True)
class Bar:
    """A bar: value, and how it is written, in the colour of a series; on a logarithmic axis a thin line from the value
    to ``high``."""

    name: str
    value: float
    text: str
    series: int = 0
    high: float | None = None


def bars(title: str, rows: Sequence[Bar], *, log: bool = False) -> Html:
    """Horizontal bars, each under its name; ``log``: dots on a logarithmic axis."""
    finite = [v for bar in rows for v in (bar.value, bar.high) if v is not None and math.isfinite(v)]
    finite = [value for value in finite if value > 0 or not log]
    if not finite:
        return tag("p", f"{title}: nothing was measured.", class_="none")
    low = min(finite) / 1.5 if log else 0.0
    high = max(finite) * 1.5 if log else max(*finite, 0.0) or 1.0
    across = Scale(low, high, 2.0, WIDTH - 4, log)
    parts = []
    for number, bar in enumerate(rows):
        y = number * _ROW + 14
        parts += [
            tag("text", _cut(bar.name, 40), x=2.0, y=y),
            tag("text", bar.text, x=WIDTH - 4, y=y, class_="end value"),
        ]
        parts += _bar(bar, across, y + 6, log)
    numbers = [(bar.name, bar.text) for bar in rows]
    return _figure(title, _svg(title, len(rows) * _ROW + 4, parts), Html(), table(("", ">value"), numbers))


def _bar(bar: Bar, across: Scale, y: float, log: bool) -> list[Html]:
    track = tag("rect", x=2.0, y=y, width=WIDTH - 6, height=8.0, rx=4, class_="track")
    if not math.isfinite(bar.value) or (log and bar.value <= 0):
        return [track]
    end, style = across(bar.value), f"fill s{bar.series % STYLES}"
    if not log:
        return [track, tag("rect", x=2.0, y=y, width=max(1.0, end - 2), height=8.0, rx=4, class_=style)]
    reach = across(bar.high or bar.value) - end
    span = tag("rect", x=end, y=y + 2, width=max(1.0, reach), height=4.0, class_="span")
    return [track, span, tag("circle", cx=end, cy=y + 4, r=5.0, class_=style)]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _legend(series: Sequence[Series]) -> Html:
    if len(series) < 2:
        return Html()
    items = []
    for number, one in enumerate(series):
        key = tag("path", d="M0 6L26 6", class_=f"line s{number % STYLES}")
        items.append(tag("li", tag("svg", key, viewBox="0 0 26 12", class_="key", aria_hidden="true"), one.name))
    return tag("ul", *items, class_="legend")


def _svg(title: str, height: float, parts: Sequence[Html]) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=title)


def _figure(title: str, drawing: Html, legend: Html, numbers: Html) -> Html:
    return tag("figure", tag("figcaption", title), legend, drawing, details("The numbers", numbers))

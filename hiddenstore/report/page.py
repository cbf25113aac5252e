"""A page in one file: no network, light and dark, readable on a phone, by keyboard and by ear.

Text becomes HTML in ``tag`` alone, which escapes whatever is not ``Html``: a conversation may hold ``</script>``.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Literal

from hiddenstore.console.text import clean
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

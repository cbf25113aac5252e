"""What text looks like in a terminal: nothing harmful in it, and numbers a person reads at a glance.

Sizes are decimal (GB = 10^9 bytes) everywhere.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.text import Text


@dataclass(frozen=True)
class Column:
    """One column. ``right`` aligns numbers; ``wide`` is the column that gives way first on a narrow terminal."""

    name: str
    right: bool = False
    wide: bool = False
    style: str = ""


def build(columns: Sequence[Column | str], rows: Iterable[Sequence[Any]], width: int, indent: int = 2) -> "Padding":
    """A rich table of the rows; every cell is cleaned. A column is a ``Column`` or a name (``">name"``: to the right).

    Cells may be ``str``, ``rich.text.Text`` or anything ``str()`` takes; None is an empty cell. Where the table would
    be wider than ``width`` characters, headings of several words wrap and columns move together before any cell is cut.
    """
    from rich.padding import Padding
    from rich.table import Table

    specs, cells = _specs(columns), [[_cell(value) for value in row] for row in rows]
    names, narrowest = _headings(specs, cells, width - indent)
    gap = 2 if narrowest <= width - indent else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_header=any(names))
    any_wide = any(spec.wide for spec in specs)
    for index, (spec, name) in enumerate(zip(specs, names, strict=True)):
        shrinks = spec.wide if any_wide else index == 0
        justify: Any = "right" if spec.right else "left"
        table.add_column(name, justify=justify, no_wrap=not shrinks, overflow="ellipsis", style=spec.style)
    for row in cells:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, indent), expand=False)


def fits(columns: Sequence[Column | str], rows: Iterable[Sequence[Any]], width: int, indent: int = 2) -> bool:
    """Whether ``build`` cuts no cell at ``width`` characters."""
    specs = [replace(spec, wide=False) for spec in _specs(columns)]
    _, narrowest = _headings(specs, [[_cell(value) for value in row] for row in rows], width - indent)
    return narrowest - (len(specs) - 1) <= width - indent


def pairs(rows: Iterable[tuple[Any, Any]], indent: int = 2) -> "Padding":
    """A two-column block of dim labels and values, as ``info`` prints it; values wrap under themselves."""
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(_cell(label), _cell(value, keep_lines=True))
    return Padding(table, (0, 0, 0, indent), expand=False)


def _specs(columns: Sequence[Column | str]) -> list[Column]:
    return [c if isinstance(c, Column) else Column(c.lstrip(">"), right=c.startswith(">")) for c in columns]


def _headings(specs: Sequence[Column], cells: "Sequence[Sequence[Text]]", most: int) -> tuple[list[str], int]:
    """Headings, in lines where a row would be wider than ``most`` characters, and how wide a row is then."""
    widest = [max((row[i].cell_len for row in cells if i < len(row)), default=0) for i in range(len(specs))]
    names = [spec.name for spec in specs]
    if _row_width(specs, names, widest) > most:
        words = [max(cell, *map(len, name.split()), 1) for cell, name in zip(widest, names, strict=True)]
        names = ["\n".join(wrap(name, longest)) for name, longest in zip(names, words, strict=True)]
    return names, _row_width(specs, names, widest)


def _row_width(specs: Sequence[Column], names: Sequence[str], widest: Sequence[int]) -> int:
    """Characters of a row with two between columns; a wide column takes what is left, but its heading stays."""
    cells = [0 if spec.wide else cell for spec, cell in zip(specs, widest, strict=True)]
    headings = [max(map(len, name.splitlines()), default=0) for name in names]
    return sum(map(max, cells, headings)) + 2 * (len(specs) - 1)


def _cell(value: Any, keep_lines: bool = False) -> "Text":
    from rich.text import Text

    text = value if isinstance(value, Text) else Text("" if value is None else str(value))
    text.plain = clean(text.plain) if keep_lines else clean_line(text.plain)
    if not keep_lines:
        text.no_wrap, text.overflow = True, "ellipsis"
    return text


_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufff9-\ufffb]"
)
_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def clean(text: str) -> str:
    """The text with control, direction-changing and surrogate characters made visible; same length as before.

    Text from a data set can carry escape sequences that repaint or reprogram a terminal. Line feed and tab stay.
    """
    return _HARMFUL.sub(_visible, text)


def clean_line(text: str) -> str:
    """Like ``clean``, and on one line: line feeds become ``↵``, tabs ``→``; same length as before."""
    return clean(text).replace("\n", "↵").replace("\t", "→")


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def count(number: int) -> str:
    """``207865`` → ``207,865``."""
    return f"{number:,}"


def amount(number: float) -> str:
    """``218_400_000`` → ``218.4 M``; three or four significant digits, exact below 10,000."""
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What would be written as 1,000.0 of one is 1.0 of the next.
        if abs(number) >= (1e4 if suffix == "k" else 0.99995 * scale):
            return f"{number / scale:,.1f} {suffix}"
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"


def size(number_bytes: float) -> str:
    """``5_210_000_000_000`` → ``5.21 TB`` (decimal units)."""
    value = float(number_bytes)
    for suffix in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or suffix == "TB":
            break
        value /= 1000
    if suffix == "B":
        return f"{value:.0f} B"
    return f"{value:,.0f} {suffix}" if abs(value) >= 99.95 else f"{value:.3g} {suffix}"


def percent(share: float) -> str:
    """``0.613`` → ``61.3 %``."""
    return f"{100 * share:.1f} %"


def seconds(duration_s: float) -> str:
    """``13260`` → ``3 h 41 m``; ``72`` → ``1 m 12 s``; ``0.0006`` → ``0.6 ms``."""
    if duration_s < 0.9995:
        return f"{1000 * duration_s:.3g} ms"
    if duration_s < 59.5:
        return f"{duration_s:.3g} s"
    minutes, rest = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {rest:02d} s"


def number(value: float, digits: int = 4) -> str:
    """A measured number in ``digits`` significant digits: ``3.40``, ``0.0938``, ``1.2e+05``."""
    return "0" if value == 0 else f"{value:#.{digits}g}".rstrip(".")


def spark(values: Sequence[float]) -> str:
    """One block character per value, the largest a full block: ``▁▃▇█▆▄▂▁``. Empty bins are spaces, NaN is ``×``."""
    top = max((value for value in values if isfinite(value)), default=0.0)
    return "".join(
        "×" if not isfinite(value) else " " if value <= 0 else _BLOCKS[min(7, int(value / top * 7.999))]
        for value in values
    )


def bar(share: float, width: int = 20) -> str:
    """A horizontal bar filling ``share`` (0…1) of ``width`` columns, in eighths; padded to ``width``. NaN: no bar."""
    eighths = 0 if isnan(share) else round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    text = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return text.ljust(width)


def folded(words: Sequence[str], width: int) -> str:
    """``$ command`` as a shell reads it, in lines of at most ``width`` characters where its words allow."""
    lines = ["$"]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) + 3 > width:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def plural(number_of: int, noun: str) -> str:
    """``plural(1, "sample")`` → ``1 sample``; ``plural(2, "sample")`` → ``2 samples``."""
    ending = "" if number_of == 1 else "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{number_of:,} {noun}{ending}"

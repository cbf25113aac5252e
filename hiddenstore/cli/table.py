"""Calm tables: no boxes, dim headers, two columns of air, numbers to the right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from hiddenstore.cli.terminal import clean, clean_line

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
    from rich.table import Table

    specs = [_spec(column) for column in columns]
    cells = [[_cell(value) for value in row] for row in rows]
    names = _headings(specs, cells, width - indent)
    gap = 2 if _needed(specs, names, cells) <= width - indent else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    gives_way = [spec.wide for spec in specs] if any(spec.wide for spec in specs) else [True] + [False] * len(specs)
    for spec, name, shrinks in zip(specs, names, gives_way, strict=False):
        justify: Any = "right" if spec.right else "left"
        table.add_column(name, justify=justify, no_wrap=not shrinks, overflow="ellipsis", style=spec.style)
    table.show_header = any(spec.name for spec in specs)
    for row in cells:
        table.add_row(*row)
    return _indented(table, indent)


def pairs(rows: Iterable[tuple[Any, Any]], indent: int = 2) -> "Padding":
    """A two-column block of dim labels and values, as ``info`` prints it; values wrap under themselves."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(_cell(label), _cell(value, keep_lines=True))
    return _indented(table, indent)


def _headings(specs: Sequence[Column], cells: Sequence[Sequence["Text"]], width: int) -> list[str]:
    names = [spec.name for spec in specs]
    if _needed(specs, names, cells) <= width:
        return names
    widest = _widest(specs, cells)
    room = [max(cell, *map(len, name.split()), 1) for cell, name in zip(widest, names, strict=True)]
    return ["\n".join(wrap(name, most)) for name, most in zip(names, room, strict=True)]


def _needed(specs: Sequence[Column], names: Sequence[str], cells: Sequence[Sequence["Text"]]) -> int:
    """Characters of a row with two between columns; a wide column takes what is left, but its heading stays."""
    stays = [0 if spec.wide else cell for spec, cell in zip(specs, _widest(specs, cells), strict=True)]
    headings = [max(map(len, name.splitlines()), default=0) for name in names]
    return sum(map(max, stays, headings)) + 2 * (len(specs) - 1)


def _widest(specs: Sequence[Column], cells: Sequence[Sequence["Text"]]) -> list[int]:
    return [max((row[i].cell_len for row in cells if i < len(row)), default=0) for i in range(len(specs))]


def _spec(column: Column | str) -> Column:
    if isinstance(column, Column):
        return column
    return Column(column.lstrip(">"), right=column.startswith(">"))


def _cell(value: Any, keep_lines: bool = False) -> "Text":
    from rich.text import Text

    text = value if isinstance(value, Text) else Text("" if value is None else str(value))
    text.plain = clean(text.plain) if keep_lines else clean_line(text.plain)
    if not keep_lines:
        text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _indented(table: Any, indent: int) -> "Padding":
    from rich.padding import Padding

    return Padding(table, (0, 0, 0, indent), expand=False)

"""Advice in a store: numbered sealed documents under ``advice/``, of which the latest is shown."""

import shlex
from collections.abc import Sequence
from math import ceil, floor, log10

from hiddenstore import layout
from hiddenstore.codecs import RECIPES
from hiddenstore.documents import load, seal
from hiddenstore.fs.seam import Filesystem
from schemas.advice import Advice, AdviceRow, PairedRow
from schemas.capture import TOPK

_WIDTHS = (13, 7, 7, 7, 7, 6, 7, 8)
_HEADER = ("recipe", "B/token", "smaller", "KL", "overlap", "flips", "channel", "raw rows")


def table_lines(advice: Advice, bytes_raw: float) -> list[str]:
    """A line per recipe under a header, the chosen one marked; ``bytes_raw`` is what a token takes as plain bf16."""
    rows = [("→ " if row.chosen else "  ") + _line(_cells(row, bytes_raw)) for row in advice.rows]
    return ["  " + _line(_HEADER), *rows]


def _cells(row: AdviceRow, bytes_raw: float) -> tuple[str, ...]:
    return (
        row.recipe,
        f"{row.bytes_per_token:,.0f}",
        f"{bytes_raw / row.bytes_per_token:.2f}x",
        "–" if row.kl is None else "0" if row.kl == 0 else f"{row.kl:.1e}",
        "–" if row.overlap is None else f"{row.overlap:.4f}",
        *(_percent(share) for share in (row.top1_flips, row.channel_error, row.raw_rows)),
    )


def _percent(share: float | None) -> str:
    if share is None or share == 0:
        return "–" if share is None else "0 %"
    return f"{100 * share:.1f} %" if share < 1e3 else f"{100 * share:.0e} %"


def _line(cells: Sequence[str]) -> str:
    others = (cell.rjust(width) for cell, width in zip(cells[1:], _WIDTHS[1:], strict=True))
    return "  ".join([cells[0].ljust(_WIDTHS[0]), *others])


def verdict(advice: Advice) -> str:
    """What was chosen and under which limits."""
    limits = f"KL ≤ {advice.max_kl:g} and channel error ≤ {100 * advice.max_channel_error:g} %"
    return f"{advice.chosen} is the smallest recipe with {limits}"


def smaller_line(advice: Advice) -> str | None:
    """The next smaller recipe of states that the limits refuse, with the options that would let it pass."""
    chosen = next(row for row in advice.rows if row.chosen)
    smaller = [
        row
        for row in advice.rows
        if RECIPES.get(row.recipe, (TOPK, TOPK))[1] != TOPK
        and row.bytes_per_token < chosen.bytes_per_token
        and not row.within
    ]
    if not smaller:
        return None
    row = max(smaller, key=lambda row: row.bytes_per_token)
    words = []
    if row.kl is not None and row.kl > advice.max_kl:
        words += ["--max-kl", f"{_above(row.kl):g}"]
    if row.channel_error is not None and row.channel_error > advice.max_channel_error:
        words += ["--max-channel-error", f"{_above(row.channel_error):g}"]
    return f"{row.recipe} ({row.bytes_per_token:,.0f} B/token) would be chosen with {shlex.join(words)}"


def _above(value: float) -> float:
    """The next number of two digits not below a value: what a person types as a limit."""
    unit = 10.0 ** (floor(log10(value)) - 1)
    return float(f"{ceil(value / unit - 1e-9) * unit:.2g}")


def paired_lines(rows: Sequence[PairedRow]) -> list[str]:
    """What training on each recipe cost in acceptance, in percentage points."""
    return [
        f"{row.recipe}: {100 * row.difference:+.2f} ± {100 * row.standard_error:.2f} points of acceptance "
        f"(original {100 * sum(row.original_acceptance) / len(row.seeds):.1f} %, {len(row.seeds)} × {row.steps} steps)"
        for row in rows
    ]


def advice_numbers(fs: Filesystem) -> list[int]:
    """The numbers of the advice a store holds, ascending."""
    return sorted(number for name in fs.list(layout.ADVICE_DIR) if (number := layout.parse_advice(name)) is not None)


def read_advice(fs: Filesystem, number: int | None = None) -> Advice | None:
    """One advice, the latest by default; None when a store has none; CorruptionError when it is damaged."""
    if number is None:
        number = max(advice_numbers(fs), default=0)
    return None if number == 0 else load(fs, layout.advice_path(number), Advice)


def write_advice(fs: Filesystem, advice: Advice) -> str:
    """Publish advice under the next number, unless the latest says the same; the path of the document that holds it."""
    number = max(advice_numbers(fs), default=0)
    if number and fs.read(layout.advice_path(number)) == seal(advice):
        return layout.advice_path(number)
    while not fs.put_if_absent(layout.advice_path(number + 1), seal(advice)):
        number += 1
    return layout.advice_path(number + 1)

"""The advisor's table as lines of at most 80 columns: for a terminal, and for what ``collect`` says on the way."""

import shlex
from collections.abc import Sequence
from math import ceil, floor, log10

from schemas.advice import Advice, AdviceRow, PairedRow

_NONE = "–"
_WIDTHS = (13, 7, 7, 7, 7, 6, 7, 8)
_HEADER = ("recipe", "B/token", "smaller", "KL", "overlap", "flips", "channel", "raw rows")


def table_lines(advice: Advice, bytes_raw: float) -> list[str]:
    """A line per recipe under a header, the chosen one marked; ``bytes_raw`` is what a token takes as plain bf16."""
    rows = [("→ " if row.chosen else "  ") + _line(_cells(row, bytes_raw)) for row in advice.rows]
    return ["  " + _line(_HEADER), *rows]


def verdict(advice: Advice) -> str:
    """What was chosen and under which limits."""
    return (
        f"{advice.chosen} is the smallest recipe with KL ≤ {advice.max_kl:g} and channel error ≤ "
        f"{100 * advice.max_channel_error:g} %"
    )


def smaller_choice(advice: Advice) -> tuple[AdviceRow, list[str]] | None:
    """The next smaller recipe of states that the limits refuse, and the options that would let it pass."""
    chosen = next(row for row in advice.rows if row.chosen)
    smaller = [
        row
        for row in advice.rows
        if row.recipe in ("lossless", "safe", "compact")
        and row.bytes_per_token < chosen.bytes_per_token
        and not row.within
    ]
    if not smaller:
        return None
    row = max(smaller, key=lambda one: one.bytes_per_token)
    words = []
    if row.kl is not None and row.kl > advice.max_kl:
        words += ["--max-kl", f"{_above(row.kl):g}"]
    if row.channel_error is not None and row.channel_error > advice.max_channel_error:
        words += ["--max-channel-error", f"{_above(row.channel_error):g}"]
    return row, words


def smaller_line(advice: Advice) -> str | None:
    """One sentence on ``smaller_choice``, None when there is none."""
    found = smaller_choice(advice)
    if found is None:
        return None
    row, words = found
    return f"{row.recipe} ({row.bytes_per_token:,.0f} B/token) would be chosen with {shlex.join(words)}"


def paired_lines(rows: Sequence[PairedRow]) -> list[str]:
    """What training on each recipe cost in acceptance, in percentage points."""
    return [
        f"{row.recipe}: {100 * row.difference:+.2f} ± {100 * row.standard_error:.2f} points of acceptance "
        f"(original {100 * sum(row.original_acceptance) / len(row.seeds):.1f} %, {len(row.seeds)} × {row.steps} steps)"
        for row in rows
    ]


def _cells(row: AdviceRow, bytes_raw: float) -> tuple[str, ...]:
    return (
        row.recipe,
        f"{row.bytes_per_token:,.0f}",
        f"{bytes_raw / row.bytes_per_token:.2f}x",
        _NONE if row.kl is None else "0" if row.kl == 0 else f"{row.kl:.1e}",
        _NONE if row.overlap is None else f"{row.overlap:.4f}",
        _percent(row.top1_flips),
        _percent(row.channel_error),
        _percent(row.raw_rows),
    )


def _percent(share: float | None) -> str:
    return _NONE if share is None else "0 %" if share == 0 else f"{100 * share:.1f} %"


def _line(cells: Sequence[str]) -> str:
    first, *others = cells
    return "  ".join([first.ljust(_WIDTHS[0]), *(c.rjust(w) for c, w in zip(others, _WIDTHS[1:], strict=True))])


def _above(value: float) -> float:
    """The next number of two digits not below a value: what a person types as a limit."""
    unit = 10.0 ** (floor(log10(value)) - 1)
    return float(f"{ceil(value / unit - 1e-9) * unit:.2g}")

"""What text looks like in a terminal: nothing harmful in it, and numbers a person reads at a glance.

Sizes are decimal (GB = 10^9 bytes) everywhere.
"""

import re
from collections.abc import Sequence

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
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\ufffd"


def count(number: int) -> str:
    """``207865`` → ``207,865``."""
    return f"{number:,}"


def amount(number: float, unit: str = "") -> str:
    """``218_400_000`` → ``218.4 M``; three or four significant digits, exact below 10,000."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            scale = 1e3 if suffix == "k" else limit
            return f"{number / scale:,.1f} {suffix}{unit}"
    whole = f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"
    return f"{whole} {unit}".rstrip()


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
    whole = round(duration_s)
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {whole % 60:02d} s"


def number(value: float, digits: int = 4) -> str:
    """A measured number in ``digits`` significant digits: ``3.40``, ``0.0938``, ``1.2e+05``."""
    return "0" if value == 0 else f"{value:#.{digits}g}".rstrip(".")


def spark(values: Sequence[float]) -> str:
    """One block character per value, the largest a full block: ``▁▃▇█▆▄▂▁``. Empty bins are spaces."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    return "".join(" " if v <= 0 else _BLOCKS[min(7, int(v / top * 7.999))] for v in values)


def bar(share: float, width: int = 20) -> str:
    """A horizontal bar filling ``share`` (0…1) of ``width`` columns, in eighths; padded to ``width``."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    text = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return text.ljust(width)


def plural(number_of: int, noun: str) -> str:
    """``plural(1, "sample")`` → ``1 sample``; ``plural(2, "sample")`` → ``2 samples``."""
    ending = "" if number_of == 1 else "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{number_of:,} {noun}{ending}"

"""Progress of a long command on stderr: a live bar on a terminal, elsewhere a greppable line after 5 s, then each 30.

Silent under ``-q``, and under ``--json`` but for a person at a terminal. Live: label, bar, done / total, share, rate,
time left, then the fields given last.
Lines: ``12:04:31 collect samples=126480/207865 rate=6214/s eta=3h41m rank=0``.
"""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hiddenstore.console.output import is_piped, output
from hiddenstore.console.text import amount, clean_line, seconds, size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

FIRST_LINE_S, LINE_EVERY_S = 5.0, 30.0
_REDRAWS_PER_S = 4


class Progress:
    """Counts ``unit`` up to ``total`` (None: unknown); the unit ``bytes`` is shown as sizes.

    ``start`` says how much was done before this process; ``underway`` may be set to what unfinished units amount to,
    which counts for the rate and the time left.

    >>> with Progress("collect", total=3, unit="samples") as progress:
    ...     progress.advance(3, rejects=0)
    """

    def __init__(self, label: str, total: int | None = None, unit: str = "", *, start: int = 0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = start
        self.underway = 0.0
        self._start: float = start
        self._fields: dict[str, Any] = {}
        self._began_s = self._last_line_s = time.monotonic()
        self._live: RichProgress | None = None
        self._task: TaskID | None = None
        self._line_is_last = self._has_line = False
        self._output = output()
        is_watched = self._output.mode == "json" and not is_piped(self._output.err)
        self._silent = not self._output.is_human and not is_watched

    def __enter__(self) -> "Progress":
        self._began_s = self._last_line_s = time.monotonic()
        if not self._silent and self._output.err.is_terminal:
            self._live = self._make_live()
            shown = clean_line(self.label)
            self._task = self._live.add_task(shown, total=self.total, completed=self.done, more="", numbers="")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._redraw()
            self._live.stop()
        elif not self._silent and kind is None and self._has_line and not self._line_is_last:
            self._line()

    def restart_clock(self, underway: float = 0.0) -> None:
        """What was needed so far, to load a model say, is no part of the rate, nor is what is ``underway`` by it."""
        self._began_s, self._start = time.monotonic(), self.done + underway

    def advance(self, count: int = 1, **fields: Any) -> None:
        """``count`` more are done; ``fields`` (kept until replaced) are shown beside them."""
        self.update(self.done + count, **fields)

    def update(self, done: int, **fields: Any) -> None:
        """``done`` are done in all; ``fields`` (kept until replaced) are shown beside them."""
        self.done = done
        self._line_is_last = False
        self._fields.update(fields)
        if self._silent:
            return
        if self._live is not None:
            self._redraw()
        elif time.monotonic() - self._last_line_s >= (LINE_EVERY_S if self._has_line else FIRST_LINE_S):
            self._line()

    def log(self, text: str) -> None:
        """A remark on stderr, above the live bar when there is one; silent under ``-q`` and ``--json``."""
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(clean_line(text), style="dim"))
        elif not self._silent:
            self._output.note(text)

    @property
    def rate(self) -> float:
        """Units per second since this process started."""
        elapsed = time.monotonic() - self._began_s
        return (self.done + self.underway - self._start) / elapsed if elapsed > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this rate; None when the total is unknown or nothing has been done."""
        if self.total is None or self.rate <= 0:
            return None
        return max(0.0, self.total - self.done - self.underway) / self.rate

    def _line(self) -> None:
        self._last_line_s = time.monotonic()
        self._line_is_last = self._has_line = True
        of_total = f"/{self.total}" if self.total is not None else ""
        words = [time.strftime("%H:%M:%S"), self.label, f"{self.unit or 'done'}={self.done}{of_total}"]
        if self.rate > 0:
            words.append(f"rate={self._rate_word}/s")
        if self.eta_s:
            words.append(f"eta={seconds(self.eta_s).replace(' ', '')}")
        words += [f"{key}={_compact(value)}" for key, value in self._fields.items()]
        sys.stderr.write(clean_line(" ".join(words)) + "\n")
        sys.stderr.flush()

    @property
    def _rate_word(self) -> str:
        if self.unit == "bytes":
            return size(self.rate).replace(" ", "")
        if self.rate < 999.5:
            return f"{self.rate:.3g}"
        return amount(round(self.rate)).replace(" ", "").replace(",", "")

    def _redraw(self) -> None:
        assert self._live is not None
        assert self._task is not None
        in_bytes = self.unit == "bytes"
        numbers = " / ".join(
            size(value) if in_bytes else f"{value:,}" for value in (self.done, self.total) if value is not None
        )
        if self.unit and not in_bytes:
            numbers += f" {self.unit}"
        rate = f"{size(self.rate)}/s" if in_bytes else f"{amount(self.rate)} {self.unit or 'steps'}/s"
        if self.rate <= 0:
            rate = ""
        left = f"{seconds(self.eta_s)} left" if self.eta_s else ""
        fields = (f"{key.replace('_', ' ')} {_shown(value)}" for key, value in self._fields.items())
        words = [clean_line(word) for word in (rate, left, *fields) if word]
        # Columns are a blank apart, and nothing is written into the last one.
        room = self._live.console.width - len(self.label) - self._bar_width - len(numbers) - 4
        self._live.update(self._task, completed=self.done, numbers=numbers, more=_in_lines(words, room))

    @property
    def _bar_width(self) -> int:
        return 24 if self._output.err.width >= 120 else 10

    def _make_live(self) -> "RichProgress":
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        return RichProgress(
            TextColumn("{task.description}", style="bold", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(self._bar_width, "bright_black", "cyan", "green"),
            TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True)),
            # What does not fit goes on under itself: a cut figure would be a wrong one.
            TextColumn("{task.fields[more]}", "dim", markup=False, table_column=Column(overflow="ellipsis", ratio=1)),
            console=self._output.err,
            refresh_per_second=_REDRAWS_PER_S,
            transient=False,
        )


def _in_lines(words: Sequence[str], room: int) -> str:
    """Words two blanks apart, each whole in its line: a name away from its figure is read with another's."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 2 + len(word) > room:
            lines.append("")
        lines[-1] += f"  {word}" if lines[-1] else word
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _compact(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace(" ", "")

"""What rendering a chat template may come to: a refusal, or no end, for which there is a limit on its time; and the
date that it writes."""

import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from hiddenstore.errors import ConfigError, FormatError, Kind

RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What rendering may raise: the template's own refusals, and Python's for expressions its data does not suit."""
TEMPLATE_DATE = "2024-07-26"
"""What templates take for today's, which would make other samples of the same rows every day; Llama 3.1's writes it
where there is no clock."""
_CLOCK = "strftime_now"
_ASKS_FOR_NONE = re.compile(r"(?s)\{#.*?#\}|" + _CLOCK + r"\s+is\s+(not\s+)?defined")
_CLOCK_CALL = re.compile(_CLOCK + r"""\(\s*(?P<quote>['"])(?P<format>[^'"\\]*)(?P=quote)\s*\)""")
_REASON = 200
# Processor time of one rendering; the longest of real conversations take hundredths of it.
RENDER_S = 10.0
# What Jinja calls the file of a template that it was given as text.
_TEMPLATE_FILE = "<template>"


def dated(template: str) -> str:
    """The template with ``TEMPLATE_DATE`` where it asks for today's: transformers gives a template no other clock."""

    def date(call: re.Match[str]) -> str:
        written = datetime.fromisoformat(TEMPLATE_DATE).strftime(call["format"])
        return f"({call['quote']}{written}{call['quote']})"

    return _CLOCK_CALL.sub(date, template)


def date_of(template: str) -> str | None:
    """The date that ``dated`` writes; None where the template asks for none. Raises ConfigError: ``template-invalid``:
    it asks in a way that is not seen."""
    if _CLOCK in _ASKS_FOR_NONE.sub("", dated(template)):
        raise ConfigError(
            f"the chat template asks {_CLOCK} for a format that is not written out: its date would change every day",
            kind=Kind.TEMPLATE_INVALID,
            hint=f'{_CLOCK}("%Y-%m-%d"), or a date, in a template of your own: --template FILE',
        )
    return TEMPLATE_DATE if _CLOCK_CALL.search(template) else None


def template_of(tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> str:
    """The ``dated`` template of a tokenizer; some have another one for conversations with tools."""
    return dated(str(tokenizer.get_chat_template(None, tools)))


def reason_of(refusal: Exception) -> str:
    """One of ``RENDER_ERRORS`` in a line of at most 200 characters."""
    return " ".join((str(refusal) or type(refusal).__name__).split())[:_REASON]


@contextmanager
def limited_rendering(location: str, fix: str = "give another template: --template FILE") -> Iterator[None]:
    """FormatError ``template-endless`` once a rendering has taken ``RENDER_S`` of this process's own time, outside the
    main thread of this thread's; ``fix`` is its hint."""
    in_main = threading.current_thread() is threading.main_thread()
    overtime = _Overtime()
    # Signals reach the main thread only; they cost a rendering nothing, a trace makes its loops several times slower.
    with _by_signal(overtime) if in_main else _by_trace(overtime):
        try:
            yield
        except Exception as error:
            # Jinja may stumble over an error that comes from nowhere, and raise its own.
            if not overtime.is_over:
                raise
            problem = f"{location}: the chat template has not rendered it after {RENDER_S:g} s"
            raise FormatError(problem, kind=Kind.TEMPLATE_ENDLESS, hint=fix) from error


class _Overtime:
    is_over = False

    def end(self, *_arguments: object) -> None:
        self.is_over = True
        raise TimeoutError


@contextmanager
def _by_signal(overtime: _Overtime) -> Iterator[None]:
    before = signal.signal(signal.SIGVTALRM, overtime.end)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _by_trace(overtime: _Overtime) -> Iterator[None]:
    deadline, before = time.thread_time() + RENDER_S, sys.gettrace()

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None
        if time.thread_time() > deadline:
            overtime.end()
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)

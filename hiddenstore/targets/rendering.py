"""What rendering a chat template may come to: a refusal, or no end, for which there is a limit on its time."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from hiddenstore.errors import FormatError, Kind

RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What rendering may raise: the template's own refusals, and Python's for expressions its data does not suit."""
_REASON = 200
# Processor time of one rendering; the longest of real conversations take hundredths of it.
RENDER_S = 10.0
# What Jinja calls the file of a template that it was given as text.
_TEMPLATE_FILE = "<template>"


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

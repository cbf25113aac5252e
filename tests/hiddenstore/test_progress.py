"""Progress: lines in a log file, nothing when quiet, rates and time left."""

import io
import re
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from hiddenstore.console import progress as progress_module
from hiddenstore.console.output import Output, common_options
from hiddenstore.console.progress import Progress


def run(body: Callable[[], object], *arguments: str) -> Result:
    @click.command()
    @common_options
    def thing() -> None:
        body()

    return CliRunner().invoke(thing, arguments, catch_exceptions=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_greppable_line_within_ten_seconds_and_then_each_half_minute(clock: list[float]) -> None:
    def body() -> None:
        with Progress("collect", total=100, unit="samples") as progress:
            for _ in range(7):
                clock[0] += 10
                progress.advance(10, rejects=3, queue="3 of 8")

    result = run(body)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    expected = r"\d\d:\d\d:\d\d collect samples=10/100 rate=1/s eta=1m30s rejects=3 queue=3of8"
    assert re.fullmatch(expected, lines[0])
    assert "samples=70/100" in lines[-1]
    assert "\r" not in result.stderr
    assert "\x1b" not in result.stderr


def test_the_last_line_of_a_log_is_said_once_and_without_time_left(clock: list[float]) -> None:
    def body() -> None:
        with Progress("train", total=2, unit="steps") as progress:
            for _ in range(2):
                clock[0] += 40
                progress.advance(1, loss=0.5)

    first, last = run(body).stderr.splitlines()
    assert "steps=1/2 rate=0.025/s eta=40s loss=0.5" in first
    assert last.endswith("train steps=2/2 rate=0.025/s loss=0.5")


@pytest.mark.parametrize(
    ("unit", "done", "shown"),
    [
        ("tokens", 612_000, "61.2k/s"),
        ("tokens", 62_136, "6214/s"),
        ("tokens", 9_997, "1000/s"),
        ("tokens", 25_040_000, "2.5M/s"),
        ("bytes", 1_230_000_000, "123MB/s"),
        ("bytes", 4_000, "400B/s"),
    ],
)
def test_a_rate_reads_as_a_number_with_its_unit(clock: list[float], unit: str, done: int, shown: str) -> None:
    def body() -> None:
        with Progress("push", total=10**12, unit=unit) as progress:
            clock[0] += 10
            progress.advance(done)

    assert f" rate={shown} " in run(body).stderr


def test_no_rate_is_shown_before_anything_is_done(clock: list[float]) -> None:
    def body() -> None:
        with Progress("collect", total=100, unit="samples") as progress:
            clock[0] += 10
            progress.advance(0, rejects=0)

    (line,) = run(body).stderr.splitlines()
    assert line.endswith("collect samples=0/100 rejects=0")


def test_a_short_job_leaves_no_line_in_a_log(clock: list[float]) -> None:
    def body() -> None:
        with Progress("collect", total=2, unit="samples") as progress:
            progress.advance(2)

    assert run(body).stderr == ""


@pytest.mark.parametrize("flag", ["-q", "--json"])
def test_progress_is_silent_when_asked_to_be(clock: list[float], flag: str) -> None:
    def body() -> None:
        with Progress("collect", total=2, unit="samples") as progress:
            clock[0] += 100
            progress.advance(2)
            progress.log("a remark")

    assert run(body, flag).output == ""


def test_a_person_at_a_terminal_sees_the_progress_of_a_command_that_answers_in_json(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Console(file=Terminal(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(Output, "err", terminal)

    def body() -> None:
        with Progress("eval", total=800, unit="answers") as progress:
            clock[0] += 100
            progress.advance(200)

    assert run(body, "--json").stdout == ""
    assert "200 / 800 answers" in terminal.file.getvalue()
    assert run(body, "-q").output == ""


def test_rate_and_time_left_leave_out_what_an_earlier_process_did(clock: list[float]) -> None:
    with Progress("x", total=100, unit="samples", start=40) as progress:
        assert progress.eta_s is None
        clock[0] += 10
        progress.update(60)
        assert progress.rate == pytest.approx(2.0)
        assert progress.eta_s == pytest.approx(20.0)


def test_an_unknown_total_has_no_time_left(clock: list[float]) -> None:
    with Progress("x", unit="rows") as progress:
        clock[0] += 1
        progress.advance(5)
        assert progress.eta_s is None


def test_parts_of_units_and_a_clock_that_starts_with_the_first_of_them_give_a_time_left(clock: list[float]) -> None:
    def body() -> None:
        with Progress("regenerate", total=10, unit="answers") as progress:
            clock[0] += 300
            progress.underway = 0.5
            progress.restart_clock(0.5)
            assert progress.rate == 0
            clock[0] += 50
            # Six answers are half done: 2.5 in 50 s, 7 to go.
            progress.underway = 3
            progress.advance(0)

    (line,) = run(body).stderr.splitlines()
    assert "answers=0/10 rate=0.05/s eta=2m20s" in line


def test_a_name_and_its_figure_stay_in_one_line_of_a_narrow_terminal(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(Output, "err", terminal)

    def body() -> None:
        with Progress("train", total=1378, unit="steps") as progress:
            clock[0] += 90
            fields = {"loss": 6.197, "acc": "0.52/0.49/0.48", "tok/s": 5563, "gradient_norm": "1.30 (clip 0.5)"}
            progress.update(448, **fields)

    run(body)
    written = terminal.file.getvalue()
    lines = [line.rstrip() for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", written)]
    assert max(map(len, lines)) <= 80
    for field in ("448 / 1,378 steps", "3 m 07 s left", "loss 6.197", "acc 0.52/0.49/0.48", "tok/s 5,563"):
        assert any(field in line for line in lines), field

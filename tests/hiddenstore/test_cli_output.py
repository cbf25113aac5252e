"""The printer: numbers, tables, modes."""

import io
import json
import math
import re
import shlex
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from hiddenstore.console import text as terminal
from hiddenstore.console.output import INNER, Output, common_options, json_text, output, swapped_output
from hiddenstore.console.text import Column
from hiddenstore.errors import Kind, StorageError


def run(body: object, *arguments: str) -> Result:
    @click.command("thing")
    @common_options
    def thing() -> None:
        body()  # type: ignore[operator]

    return CliRunner().invoke(thing, arguments)


@given(st.text())
def test_cleaned_text_has_the_same_length_and_no_control_characters(text: str) -> None:
    cleaned = terminal.clean(text)
    assert len(cleaned) == len(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", cleaned)
    assert terminal.clean(cleaned) == cleaned
    assert "\n" not in terminal.clean_line(text)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (terminal.size(0), "0 B"),
        (terminal.size(999), "999 B"),
        (terminal.size(1000), "1 kB"),
        (terminal.size(5.213e12), "5.21 TB"),
        (terminal.size(642e6), "642 MB"),
        (terminal.size(999_600), "1 MB"),
        (terminal.size(5.2e15), "5,200 TB"),
        (terminal.amount(218_400_000), "218.4 M"),
        (terminal.amount(9999), "9,999"),
        (terminal.amount(41_800), "41.8 k"),
        (terminal.amount(3.14159), "3.1"),
        (terminal.amount(999_949), "999.9 k"),
        (terminal.amount(999_999), "1.0 M"),
        (terminal.amount(-999_960_000), "-1.0 G"),
        (terminal.seconds(0.0006), "0.6 ms"),
        (terminal.seconds(72), "1 m 12 s"),
        (terminal.seconds(13_260), "3 h 41 m"),
        (terminal.seconds(200_000), "2 d 07 h"),
        (terminal.percent(0.6131), "61.3 %"),
        (terminal.number(3.4, 3), "3.40"),
        (terminal.number(0.0, 3), "0"),
        (terminal.number(math.nan), "nan"),
        (terminal.plural(1, "sample"), "1 sample"),
        (terminal.plural(2000, "batch"), "2,000 batches"),
        (terminal.spark([0, 1, 4, 8]), " ▁▄█"),
        (terminal.spark([]), ""),
        (terminal.spark([0, math.nan, 4, math.inf, 8]), " ×▄×█"),
        (terminal.spark([math.nan]), "×"),
        (terminal.bar(math.nan, 4), "    "),
        (terminal.bar(math.inf, 4), "████"),
        (terminal.bar(0.5, 4), "██  "),
        (terminal.bar(1e-9, 4), "▏   "),
    ],
)
def test_numbers_read_at_a_glance(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(0, 1), st.integers(1, 40))
def test_bars_have_the_width_asked_for(share: float, width: int) -> None:
    assert len(terminal.bar(share, width)) == width


def test_json_names_its_schema_first_and_holds_plain_values() -> None:
    document = {"path": Path("/x"), "n": np.int64(3), "nan": math.nan, "t": (1, np.float32(0.5)), "a": np.arange(2)}
    result = run(lambda: output().data(document, human="never"), "--json")
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "schema": "hiddenstore.thing/1",
        "path": "/x",
        "n": 3,
        "nan": None,
        "t": [1, 0.5],
        "a": [0, 1],
    }
    assert result.stdout.splitlines()[1] == '  "schema": "hiddenstore.thing/1",'


@given(st.text())
def test_json_text_is_harmless_to_print_and_reads_back(text: str) -> None:
    written = json_text({"t": text})
    assert json.loads(written) == {"t": text}
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", written)


def test_stdout_is_the_answer_and_stderr_everything_else() -> None:
    def body() -> None:
        output().note("a note")
        output().data({"a": 1}, human="the answer")
        output().hint("hiddenstore", "info", "my store")

    human, as_json, quiet = run(body), run(body, "--json"), run(body, "-q")
    assert human.stdout == "the answer\n"
    assert human.stderr == "a note\nnext: hiddenstore info 'my store'\n"
    assert (json.loads(as_json.stdout)["a"], as_json.stderr) == (1, "")
    assert (quiet.stdout, quiet.stderr) == ("the answer\n", "")


def test_quiet_prints_its_own_answer_when_there_is_one() -> None:
    assert run(lambda: output().data({}, human="long", quiet="short"), "-q").stdout == "short\n"
    assert run(lambda: output().data({}, human="long", quiet=""), "-q").stdout == ""
    assert json.loads(run(lambda: output().data({}, human="long", quiet="x"), "-q", "--json").stdout)


def test_warnings_are_shown_in_every_mode() -> None:
    for mode in ((), ("--json",), ("-q",)):
        assert run(lambda: output().warn("careful"), *mode).stderr == "warning: careful\n"


def test_details_are_shown_with_v_only() -> None:
    assert run(lambda: output().detail("d")).stderr == ""
    assert run(lambda: output().detail("d"), "-v").stderr == "d\n"


@pytest.mark.parametrize("columns", ["60", "80", "100", "120"])
def test_tables_fit_the_terminal_and_the_wide_column_gives_way(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    rows = [[f"{i:,}", "sample" * 3, "x" * 200] for i in range(3)]
    result = run(lambda: output().table([">#", "sample", Column("what", wide=True)], rows))
    assert all(len(line) <= int(columns) for line in result.stdout.splitlines())
    assert "samplesamplesample" in result.stdout
    assert result.stdout.count("…") == 3


def test_headings_of_several_words_wrap_before_a_cell_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    result = run(lambda: output().table(["task", ">accepted length", ">same answers"], [["s" * 9, "2.50", "4 of 4"]]))
    assert (
        result.stdout
        == "             accepted     same\n  task         length  answers\n  sssssssss      2.50   4 of 4\n"
    )
    monkeypatch.setenv("COLUMNS", "40")
    result = run(lambda: output().table([">accepted length", ">same answers"], [["2.50", "4 of 4"]]))
    assert result.stdout == "  accepted length  same answers\n             2.50        4 of 4\n"


def test_a_table_of_parts_is_one_table_where_every_cell_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(columns: str) -> str:
        monkeypatch.setenv("COLUMNS", columns)
        return run(lambda: output().table(["task", ">fast"], [["sums", "1.5"]], [[0], [0, 1]])).stdout

    assert shown("11") == "  task fast\n  sums  1.5\n"
    assert shown("10").startswith("  task\n  sums\n")


def test_columns_move_together_before_a_cell_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, expected in (("17", "  layer_1  12  ██\n"), ("16", "  layer_1 12 ██\n")):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(lambda: output().table(["", ">", ""], [["layer_1", "12", "██"]])).stdout == expected


def test_a_table_in_a_file_or_pipe_has_every_cell_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    result = run(lambda: output().table(["a", Column("id", wide=True)], [["x" * 90, "owner/" + "name" * 40]]))
    assert result.stdout.splitlines()[1] == f"  {'x' * 90}  owner/{'name' * 40}"


def test_output_into_a_file_has_no_colours_and_no_blanks_at_the_ends() -> None:
    result = run(lambda: output().table(["a", "b"], [["1", "long cell"], ["22", ""]]))
    assert result.stdout == "  a   b\n  1   long cell\n  22\n"


def test_markup_in_data_is_text() -> None:
    assert run(lambda: output().print("[red]x[/red] :smile:")).stdout == "[red]x[/red] :smile:\n"


def test_a_command_line_folds_at_its_words_as_a_shell_reads_it() -> None:
    words = ["hiddenstore", "train", "a store", "-o", "runs/first", *(f"optim.key{i}=1" for i in range(9))]
    text = terminal.folded(words, 50)
    assert max(map(len, text.splitlines())) <= 50
    assert text.count("\n") > 2
    assert shlex.split(text.removeprefix("$ ").replace("\\\n", " ")) == words
    assert terminal.folded(words, 10_000) == f"$ {shlex.join(words)}"


def test_inside_a_larger_command_nothing_is_said_of_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @common_options
    def outer() -> None:
        with swapped_output("human"):
            output().hint("hiddenstore", "inner")
        output().hint("hiddenstore", "outer")

    assert CliRunner().invoke(outer).stderr == "next: hiddenstore outer\n"
    monkeypatch.setenv(INNER, "1")
    assert CliRunner().invoke(outer).stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_breaks_lines_between_words_but_no_command(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    shown, text, fix = stream(), "words that do not fit " * 5 + "here", "hiddenstore repair " + "store/" * 20
    # Of 80 columns, whatever COLUMNS says, and without colours.
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", shown)
    Output().warn(text)
    Output().error(StorageError(text, kind=Kind.DISK_FULL, hint=fix))
    *lines, last = shown.getvalue().splitlines()
    assert last == f"  fix: {fix}"
    whole = [f"warning: {text}", f"error: {text}  [disk-full]"]
    assert " ".join(lines).split() == " ".join(whole).split()
    assert (lines == whole) == (stream is io.StringIO)
    assert stream is io.StringIO or max(map(len, lines)) <= 80


def test_a_caller_who_puts_another_stream_in_place_of_stderr_is_printed_to_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = Output()
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    out.note("to the first")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    out.note("to the second")
    assert second.getvalue() == "to the second\n"

"""The command group: fast help, errors that say what to do, exit codes, signals and pipes."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hiddenstore.cli import CommandSpec, find_commands, main, usage_error
from hiddenstore.console.output import common_options, output
from hiddenstore.doctor import check_packages
from hiddenstore.errors import (
    CaptureError,
    ConfigError,
    ConflictError,
    CorruptionError,
    FormatError,
    HiddenstoreError,
    InterruptError,
    Kind,
    StorageError,
)
from hiddenstore.testing.builders import make_store

ENVIRONMENT = {**os.environ, "COLUMNS": "80"}


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, **options
    )


@pytest.fixture
def run_action(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command ``act`` whose body is the given function, through ``main``."""

    def run(action: Callable[[], object], *arguments: str) -> Result:
        @click.command()
        @common_options
        def act() -> None:
            action()

        monkeypatch.setattr(sys.modules[__name__], "ACT", act, raising=False)
        spec = CommandSpec("act", "Added", "…", f"{__name__}:ACT")
        commands = {**find_commands(), "act": spec}
        monkeypatch.setattr("hiddenstore.cli.find_commands", lambda: commands)
        return CliRunner().invoke(main, ["act", *arguments])

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_help_lists_every_command_in_its_section_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom hiddenstore.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'zarr', 'transformers', 'numpy', 'pyarrow', 'rich', 'pydantic', 'datasets', 'webdataset'}\n"
        "heavy |= {'httpx2', 'asyncio', 'ssl'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    for section in ("Make:", "Look:", "Care:", "Train:", "System:"):
        assert section in done.stdout
    for name in find_commands():
        assert f"  {name}" in done.stdout


@pytest.mark.parametrize("command", ["info", "ls", "stats"])
def test_metadata_commands_import_neither_torch_nor_zarr_nor_transformers(tmp_path: Path, command: str) -> None:
    store = make_store(tmp_path, samples=3)
    code = (
        "import sys\nfrom hiddenstore.cli import main\n"
        f"try:\n    main([{command!r}, {store.path!r}])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'zarr', 'transformers', 'datasets', 'webdataset', 'matplotlib', 'httpx2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_help_takes_no_more_processor_time_than_python_click_and_three_times_as_much_again() -> None:
    def spent(*words: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *words], capture_output=True, check=True, timeout=60)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    pairs = [(spent("-m", "hiddenstore.cli", "--help"), spent("-c", "import click")) for _ in range(4)]
    assert min(ours for ours, _ in pairs) < 4 * min(bare for _, bare in pairs), pairs


def test_passive_waiting_is_set_before_torch_loads() -> None:
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "OMP_WAIT_POLICY"}
    code = "import hiddenstore.cli, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split() == ["PASSIVE", "False"]


@pytest.mark.parametrize(("typed", "meant"), [("inof", "info"), ("merge", "copy"), ("verfy", "verify"), ("head", "ls")])
def test_an_unknown_command_names_the_one_that_was_meant(typed: str, meant: str) -> None:
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert f"did you mean {meant!r}?" in result.stderr
    assert f"fix: hiddenstore {meant} --help" in result.stderr
    assert result.stdout == ""


def test_without_a_command_the_help_is_printed() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 0
    assert "Start here:" in result.stdout


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(main, ["--version"], prog_name="hiddenstore")
    assert result.stdout == "hiddenstore 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info"], "missing argument 'STORE'"),
        (["info", "x", "--jsn"], "no such option '--jsn'"),
        (["ls", "x", "-n", "many"], "'many' is not a valid integer  ["),
        (["diff", "x", "y", "--tolerance", "much"], "'much' is not a valid float  ["),
        (["copy", "only-one"], "missing argument 'SRC...'"),
    ],
)
def test_usage_errors_exit_2_and_point_to_the_help_of_the_command(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="hiddenstore")
    assert result.exit_code == 2
    assert message in result.stderr
    assert f"fix: hiddenstore {arguments[0]} --help" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HiddenstoreError("m", kind=Kind.INTERNAL), 1),
        (ConfigError("m", kind=Kind.OPTION_INVALID), 2),
        (CorruptionError("m", kind=Kind.FILE_CORRUPT), 3),
        (FormatError("m", kind=Kind.FORMAT_FUTURE), 4),
        (CaptureError("m", kind=Kind.NON_FINITE), 4),
        (StorageError("m", kind=Kind.IO_ERROR), 5),
        (ConflictError("m", kind=Kind.OUTPUT_EXISTS), 6),
        (InterruptError("m", kind=Kind.INTERRUPTED), 75),
    ],
)
def test_each_error_class_has_its_exit_code(
    run_action: Callable[..., Result], error: HiddenstoreError, code: int
) -> None:
    result = run_action(raising(error))
    assert (result.exit_code, result.stderr.splitlines()[0]) == (code, f"error: m  [{error.kind}]")


def test_an_error_says_what_and_the_fix_on_stderr_only(run_action: Callable[..., Result]) -> None:
    result = run_action(
        raising(ConflictError("a ≠ b\n  more [bold]", kind=Kind.OUTPUT_EXISTS, hint="hiddenstore info 'a b'"))
    )
    assert result.stdout == ""
    assert result.stderr == "error: a ≠ b  [output-exists]\n  more [bold]\n  fix: hiddenstore info 'a b'\n"


def test_under_json_an_error_is_one_line_of_json_on_stderr(run_action: Callable[..., Result]) -> None:
    result = run_action(raising(StorageError("no room", kind=Kind.DISK_FULL, hint="rm x")), "--json")
    assert result.exit_code == 5
    assert json.loads(result.stderr) == {
        "schema": "hiddenstore.error/1",
        "kind": "disk-full",
        "message": "no room",
        "fix": "rm x",
        "exit_code": 5,
    }


def test_usage_errors_are_json_too_when_json_was_asked_for() -> None:
    result = CliRunner().invoke(main, ["info", "--json"])
    assert json.loads(result.stderr)["kind"] == "usage"


def test_a_bug_exits_1_and_leaves_its_traceback_in_a_file(
    run_action: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run_action(raising(ValueError("oh\x1b[31m no")))
    (log,) = tmp_path.glob("hiddenstore-error-*.log")
    assert result.exit_code == 1
    assert "this is a bug: ValueError: oh␛[31m no  [internal]" in result.stderr
    assert str(log) in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback (most recent call last)" in log.read_text()
    assert "torch" in log.read_text().splitlines()[1]


def test_what_huggingface_hub_logs_is_left_to_its_own_handler(run_action: Callable[..., Result]) -> None:
    def action() -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("retrying")
        logging.getLogger("another").warning("kept")

    result = run_action(action)
    assert "kept" in result.stderr
    assert "huggingface_hub" not in result.stderr


def test_verbose_prints_the_traceback(run_action: Callable[..., Result]) -> None:
    result = run_action(raising(ConfigError("m", kind=Kind.OPTION_INVALID)), "-v")
    assert "Traceback (most recent call last)" in result.stderr
    assert result.exit_code == 2


def test_a_traceback_repaints_no_terminal_by_what_a_stranger_s_file_says(run_action: Callable[..., Result]) -> None:
    result = run_action(raising(ConfigError("\x1b]0;PWNED\x07\x1b[2J evil", kind=Kind.OPTION_INVALID)), "-v")
    assert "\x1b" not in result.stderr
    assert result.stderr.splitlines()[-1].endswith("ConfigError: ␛]0;PWNED␇␛[2J evil")


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (FileNotFoundError(2, "No such file", "/x"), 2, "path-missing"),
        (PermissionError(13, "Permission denied", "/x"), 5, "permission-denied"),
        (OSError(28, "No space left on device"), 5, "disk-full"),
        (OSError(24, "Too many open files", "/x"), 5, "too-many-open-files"),
        (OSError(23, "Too many open files in system"), 5, "too-many-open-files"),
        (OSError(12, "Cannot allocate memory"), 5, "out-of-memory"),
        (OSError(40, "Too many levels of symbolic links", "/x"), 5, "path-invalid"),
        (MemoryError(), 5, "out-of-memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), 5, "out-of-memory"),
        (RuntimeError("can't start new thread"), 5, "too-many-threads"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 5, "out-of-memory"),
    ],
)
def test_refusals_of_the_system_are_no_bugs(
    run_action: Callable[..., Result], error: Exception, code: int, kind: str
) -> None:
    result = run_action(raising(error))
    assert result.exit_code == code
    assert f"[{kind}]" in result.stderr


def test_an_interrupt_exits_75(run_action: Callable[..., Result]) -> None:
    result = run_action(raising(KeyboardInterrupt()))
    assert result.exit_code == 75
    assert "interrupted" in result.stderr
    assert "fix: run the same command again" in result.stderr


def test_an_interrupt_without_a_hint_says_that_the_same_command_goes_on(run_action: Callable[..., Result]) -> None:
    bare = run_action(raising(InterruptError("stopped", kind=Kind.INTERRUPTED)))
    assert "fix: run the same command again" in bare.stderr
    told = run_action(raising(InterruptError("stopped", kind=Kind.INTERRUPTED, hint="hiddenstore train --resume")))
    assert "fix: hiddenstore train --resume" in told.stderr


def test_sigterm_interrupts_and_the_old_handler_comes_back(run_action: Callable[..., Result]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def action() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    assert run_action(action).exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == before


def test_exit_codes_of_commands_pass_through(run_action: Callable[..., Result]) -> None:
    assert run_action(raising(click.exceptions.Exit(3))).exit_code == 3
    assert run_action(lambda: 7).exit_code == 0


def test_text_with_escape_sequences_cannot_reach_the_terminal(run_action: Callable[..., Result]) -> None:
    def action() -> None:
        output().print("a\x1b]0;title\x07b\u202egnp.exe")
        output().note("\x9b2J")
        output().table(["x"], [["two\nlines\x1b"]])

    result = run_action(action)
    assert not set("\x1b\x07\x9b\u202e") & set(result.output)
    assert "two↵lines␛" in result.stdout


def test_a_closed_pipe_ends_quietly_as_other_tools_do(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=3)
    command = f"{sys.executable} -m hiddenstore.cli ls {store.path} -n 0 --json | true; exit ${{PIPESTATUS[0]}}"
    codes = set()
    for _ in range(2):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
        codes.add(done.returncode)
        assert "Traceback" not in done.stderr
        assert "BrokenPipe" not in done.stderr
    assert codes <= {0, 141}


def test_a_terminal_without_unicode_gets_escapes_instead_of_a_crash(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=2)
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    for command in ("info", "show"):
        done = subprocess.run(
            [sys.executable, "-m", "hiddenstore.cli", command, store.path],
            capture_output=True,
            env=environment,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()


def test_packages_from_two_places_are_refused(tmp_path: Path) -> None:
    stranger = tmp_path / "trainer"
    stranger.mkdir()
    (stranger / "__init__.py").write_text("")
    code = (
        "import hiddenstore, sys; sys.path.insert(0, sys.argv[1])\n"
        "from hiddenstore.cli import main\nmain(['info', 'x'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert done.returncode == 5
    assert "[packages-scattered]" in done.stderr
    assert str(tmp_path) in done.stderr


def test_packages_of_this_installation_share_one_folder() -> None:
    check_packages()


def test_a_usage_error_begins_small_unless_with_the_name_of_an_argument() -> None:
    assert str(usage_error(click.UsageError("No such option: --x."))).startswith("no such option: --x")
    assert str(usage_error(click.UsageError("RUN and --out missing"))).startswith("RUN and --out")

"""What every command promises: help with examples, the common options, few flags."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hiddenstore.cli import ENTRY_POINT_GROUP, OTHER_WORDS, OUR_COMMANDS, SECTIONS, find_commands, main

# Flags a person types daily; --json, -q, -v and --help come on top. More belongs into a config file.
MOST_FLAGS = 10
MORE_FLAGS_ALLOWED = {
    "import": 17,
    "collect": 23,
    "prepare": 16,
    "regenerate": 18,
    "train": 11,
    "eval": 29,
    "decode": 15,
}


def installed_commands() -> dict[str, click.Command]:
    commands = {}
    for name, spec in find_commands().items():
        module, _, attribute = spec.target.partition(":")
        try:
            commands[name] = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
    return commands


COMMANDS = installed_commands()


def test_every_announced_command_can_be_imported() -> None:
    assert set(COMMANDS) == set(find_commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_ends_with_two_examples(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"], prog_name="hiddenstore")
    assert result.exit_code == 0, result.output
    usage, *rest = result.stdout.splitlines()
    assert usage.startswith(f"Usage: hiddenstore {name}")
    examples = [line.split()[1] for line in rest if line.strip().startswith("hiddenstore ")]
    assert len(examples) >= 2, result.stdout
    assert name in examples


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options(name: str) -> None:
    flags = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
    assert {"--json", "-q", "--quiet", "-v", "--verbose"} <= flags


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_has_more_flags_than_a_person_types_daily(name: str) -> None:
    common = {"json", "quiet", "verbose"}
    options = [p.name for p in COMMANDS[name].params if isinstance(p, click.Option) and p.name not in common]
    assert len(options) <= MORE_FLAGS_ALLOWED.get(name, MOST_FLAGS), options


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_says_what_it_does(name: str) -> None:
    silent = [p.name for p in COMMANDS[name].params if isinstance(p, click.Option) and not (p.help or "").strip()]
    assert not silent


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_takes_what_is_no_finite_number(name: str) -> None:
    for parameter in COMMANDS[name].params:
        kinds = parameter.type.types if isinstance(parameter.type, click.Tuple) else [parameter.type]
        for kind in kinds:
            if isinstance(kind, click.types.FloatParamType):
                with pytest.raises(click.BadParameter, match="no finite number"):
                    kind.convert("nan", parameter, None)


def test_every_command_has_a_section_and_a_summary() -> None:
    for spec in find_commands().values():
        assert spec.section in SECTIONS
        assert spec.summary.endswith(".")
        assert len(spec.summary) <= 64


def test_words_of_other_tools_lead_to_commands_that_exist() -> None:
    assert set(OTHER_WORDS.values()) <= OUR_COMMANDS
    assert not set(OTHER_WORDS) & OUR_COMMANDS


def test_a_command_of_another_distribution_is_added_but_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\nshiny = foreign_tool:shiny\ninfo = foreign_tool:info\ncollect = foreign_tool:collect\n"
    )
    (tmp_path / "foreign_tool.py").write_text(
        "import click\n@click.command()\ndef shiny():\n    'Shine.'\n    click.echo('it shines')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    find_commands.cache_clear()
    try:
        found = find_commands()
        assert (found["shiny"].section, found["shiny"].summary) == ("Added", "From foreign.")
        assert found["info"].target == "hiddenstore.cli.look:info"
        assert found["collect"].target == "collectors.cli.collect:collect"
        assert "shiny" in CliRunner().invoke(main, ["--help"]).stdout
        assert CliRunner().invoke(main, ["shiny"]).stdout == "it shines\n"
    finally:
        find_commands.cache_clear()


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hiddenstore", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("hiddenstore ")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("hiddenstore inf", "plain,info"),
        ("hiddenstore train STORE --dr", "plain,--drafter"),
        ("hiddenstore verify my-st", "file,my-st"),
        ("hiddenstore train STORE -o ru", "file,ru"),
        ("hiddenstore copy SRC DST --recipe sa", "plain,safe"),
        ("hiddenstore collect DATA --layers df", "plain,dflash"),
        ("hiddenstore nothing-of-that-na", ""),
    ],
)
def test_a_shell_completes_commands_options_and_paths(words: str, completed: str) -> None:
    typed = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_HIDDENSTORE_COMPLETE": "bash_complete"}
    command = [sys.executable, "-m", "hiddenstore"]
    done = subprocess.run(command, env=os.environ | typed, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == completed


def test_help_says_how_completion_is_switched_on() -> None:
    shown = CliRunner().invoke(main, ["--help"]).stdout
    line = next(line for line in shown.splitlines() if "eval" in line and "source" in line)
    done = subprocess.run(
        ["bash", "-c", f"{line}; complete -p hiddenstore"],
        env=_with_scripts(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "_hiddenstore_completion" in done.stdout, done.stderr


def _with_scripts() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

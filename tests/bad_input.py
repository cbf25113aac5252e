"""Cases of bad input: one command each, and what must hold of its error.

The error names what, where, expected and found; stdout stays empty; and not one byte below the folders it may touch is
another than before.
"""

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from hiddenstore.cli import main
from tests.tiny_world import (
    LAYERS,
    TRAIN,
    World,
    error_of,
    run,
    target_with_template,
    tree,
    write_rows,
)

USAGE, FOUND, MISFIT, STORAGE, CONFLICT = 2, 3, 4, 5, 6

Words = Callable[[World, Path], tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """``words(world, folder)`` is the command, run in ``folder``; ``says`` must all stand in the error.

    ``fix`` is part of the ``fix:`` line; None where no command can help.
    """

    name: str
    words: Words
    exit_code: int
    kind: str
    says: tuple[str, ...]
    fix: str | None = None


def prepare(make_input: Callable[[Path], str] | None = None, *more: str, target: str | None = None) -> Words:
    """``prepare`` of an input made in the case's folder; the world's conversations without one."""

    def words(world: World, folder: Path) -> tuple[str, ...]:
        given = make_input(folder) if make_input else world / "chats.jsonl"
        return ("prepare", given, "-o", "out", "--target", world / (target or "target"), *more)

    return words


def prepare_for(make_target: Callable[[Path], str]) -> Words:
    return lambda world, folder: ("prepare", world / "chats.jsonl", "-o", "out", "--target", make_target(folder))


def collect(*more: str, store: str = "new", target: str = "target") -> Words:
    return lambda world, _: (
        "collect", world / "data", "-o", world / store, "--target", world / target, "--layers", LAYERS, *more
    )  # fmt: skip


def collect_for(make_target: Callable[[Path], str], *more: str) -> Words:
    return lambda world, folder: ("collect", world / "data", "-o", "new", "--target", make_target(folder), *more)


def collect_data(make_data: Callable[[World, Path], str]) -> Words:
    return lambda world, folder: ("collect", make_data(world, folder), "-o", "new", "--target", world / "target")


def train(*more: str, store: str = "store") -> Words:
    return lambda world, _: ("train", world / store, "-o", "new", *TRAIN, *more)


def on(command: str, *more: str) -> Words:
    """A command whose words are names in the world where such a thing exists, else what they say."""
    return lambda world, _: (command, *world.named(more))


def damaged_store(world: World, folder: Path) -> str:
    """A copy of the store whose largest file is cut in half."""
    shutil.copytree(world / "store", folder / "damaged")
    largest = max((folder / "damaged" / "segments").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return str(folder / "damaged")


def damaged_data(world: World, folder: Path) -> str:
    shutil.copytree(world / "data", folder / "damaged")
    part = folder / "damaged" / "part-00000.parquet"
    changed = bytearray(part.read_bytes())
    changed[len(changed) // 2] ^= 1
    part.write_bytes(changed)
    return str(folder / "damaged")


def damaged_run(world: World, folder: Path) -> str:
    shutil.copytree(world / "run", folder / "damaged")
    file = next((folder / "damaged").rglob("drafter.safetensors"))
    os.truncate(file, file.stat().st_size // 2)
    return str(folder / "damaged")


def run_with_config(world: World, folder: Path, content: str) -> str:
    """A copy of the run under other settings."""
    shutil.copytree(world / "run", folder / "changed")
    (folder / "changed" / "config.yaml").write_text(content)
    return str(folder / "changed")


def without_config(folder: Path) -> str:
    (folder / "empty").mkdir()
    return str(folder / "empty")


def rows(*content: object) -> Callable[[Path], str]:
    return lambda folder: write_rows(folder / "rows.jsonl", list(content))


def text(name: str, content: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_text(content)
        return str(folder / name)

    return write


def with_template(template: str | None) -> Callable[[Path], str]:
    return lambda folder: target_with_template(folder / "target", template)


def check(
    case: Case, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run a case in ``folder``, where it writes what it needs before the command starts."""
    monkeypatch.chdir(folder)
    words = case.words(world, folder)
    before, world_before = tree(folder), world_tree(world.root)
    capsys.readouterr()
    assert run(*words) == case.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    message, fix = error_of(printed.err)
    assert f"[{case.kind}]" in message.splitlines()[0]
    assert [part for part in case.says if part not in message] == []
    assert "Traceback" not in printed.err
    if case.fix is not None:
        assert case.fix in fix
    require_runnable(fix)
    assert tree(folder) == before
    assert tree(world.root) == world_before


world_tree = cache(tree)
"""What lay in the world before the first case."""


def require_runnable(fix: str) -> None:
    """A hint that is a command of ours names a command that exists and options it has."""
    if not fix.startswith("hiddenstore "):
        return
    name, *words = shlex.split(fix.partition(";")[0])[1:]
    with click.Context(main) as context:
        command = main.get_command(context, name)
        assert command is not None, fix
        command.make_parser(click.Context(command)).parse_args(words)

"""docs/tensorrt-llm.md against the program: its commands parse, its errors and fixed arguments exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

from collectors.engines.trtllm import AHEAD, DEFAULT_MAX_TOKENS, FIXED_ARGUMENTS
from hiddenstore.cli import main
from hiddenstore.cli.words import WORDS_ONLY
from hiddenstore.errors import Kind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
SOURCES = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "collectors").glob("**/*.py")))


def commands() -> list[list[str]]:
    """The words after ``hiddenstore`` of every command in a fence."""
    found = []
    for fence in PAGE.split("```")[1::2]:
        for line in fence.replace("\\\n", " ").splitlines():
            match = re.search(r"(?:^|\s)(?:-m hiddenstore\.cli|hiddenstore)\s+(\w.*)", line)
            if match and "pip " not in line:
                found.append(shlex.split(match[1].rstrip("& ")))
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_of_the_page_is_one_that_parses(words: list[str], tmp_path: Path) -> None:
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, words[0]
    parent = click.Context(main)
    parent.meta[WORDS_ONLY] = True
    with command.make_context(words[0], words[1:], parent=parent):
        pass


def test_the_page_shows_collect_with_one_gpu_tensor_parallel_data_parallel_and_slurm() -> None:
    collects = [" ".join(words) for words in commands() if words[0] == "collect"]
    assert len(collects) == 5
    assert all("--engine trtllm" in line for line in collects)
    assert len(re.search(r"```\n(#!/bin/bash.*?)```", PAGE, re.DOTALL)[1].replace("\\\n", "").splitlines()) <= 12


@pytest.mark.parametrize(
    "kind", re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \|", PAGE.split("## What goes wrong")[1], re.M)
)
def test_every_error_the_page_explains_is_one_that_can_happen(kind: str) -> None:
    for name in re.findall(r"`([\w-]+)`", kind):
        assert f"Kind.{Kind(name).name}" in SOURCES


def test_the_page_names_every_argument_that_protects_the_states() -> None:
    for name in FIXED_ARGUMENTS:
        assert name in PAGE or name in ("model", "revision", "dtype", "trust_remote_code", "tensor_parallel_size")
    assert f"{DEFAULT_MAX_TOKENS:,}" in PAGE
    assert {1: "one", 2: "two", 3: "three"}[AHEAD] in PAGE

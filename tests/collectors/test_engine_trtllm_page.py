"""docs/tensorrt-llm.md against the program: its errors and fixed arguments exist."""

import re
from pathlib import Path

import pytest

from collectors.engines.trtllm import AHEAD, DEFAULT_MAX_TOKENS, FIXED_ARGUMENTS
from hiddenstore.errors import Kind
from tests.doc_blocks import blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tensorrt-llm.md").read_text(encoding="utf-8")
SOURCES = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "collectors").glob("**/*.py")))


def test_the_page_shows_collect_with_one_gpu_tensor_parallel_data_parallel_and_slurm() -> None:
    collects = [
        " ".join(words)
        for block in blocks(ROOT / "docs" / "tensorrt-llm.md")
        for words in block.commands
        if words[0] == "collect"
    ]
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

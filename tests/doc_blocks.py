"""Blocks of README and docs/: the commands and programs in their fences, and what says how each is tried.

A comment before a fence, or under a page's title for all of its fences, is its note: ``<!-- needs: hub -->`` (or
server, bucket, an engine, time) keeps it from being run here; ``<!-- run by: tests/… -->`` names the test that does.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hiddenstore.cli import main
from hiddenstore.cli.words import WORDS_ONLY
from tests.collectors.tiny import CONFIGS, tiny_tokenizer
from tests.tiny_world import TRAIN

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
TARGETS = ("M", "T", "Qwen/Qwen3-8B", "openai/gpt-oss-120b")
SERVER = re.compile(r"http://localhost:\d+(?:/v1)?")
NEEDS = {"hub", "server", "bucket", "time", "TensorRT-LLM", "vLLM", "llama.cpp", "speculators"}
SHELL = {"", "sh", "bash", "console"}

_NOTE = r"<!-- (?P<how>needs|run by): (?P<what>[^>]+?) -->\n"
_FENCE = re.compile(rf"(?:{_NOTE}\n?)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S)
_OF_PAGE = re.compile(rf"\A# [^\n]*\n\n{_NOTE}")
_COMMAND = re.compile(r"(?:^|\s)(?:-m hiddenstore\.cli|(?<![./\w-])hiddenstore)\s+([a-z].*)")
# What keeps a command small here; the page shows what a person types.
SMALL = {
    "train": TRAIN,
    "run": (
        *(f"drafters.eagle3.settings.{word}" for word in TRAIN),
        *("verify.meaning=false", "decode.count=2", "decode.max-new-tokens=8"),
    ),
    "decode": ("-n", "2", "--max-new-tokens", "8"),
    "regenerate": ("--max-new-tokens", "8", "--max-samples", "6"),
}
# States of random weights mean nothing, which verify would find.
LEFT_OUT = {("verify", "--meaning")}


@dataclass(frozen=True)
class Block:
    """A fence: its page, line and language, its text, and its note (``how`` is empty without one)."""

    page: Path
    line: int
    language: str
    text: str
    how: str
    what: str

    @property
    def commands(self) -> list[list[str]]:
        """The words after ``hiddenstore`` of every command; none in a program or a listing."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        found = (_COMMAND.search(line) for line in lines if "pip " not in line and not line.startswith("#"))
        # A quote may end a script around the command.
        return [shlex.split(match[1].rstrip("& ").removesuffix("'"), comments=True) for match in found if match]

    @property
    def is_tried(self) -> bool:
        return self.language == "python" or bool(self.commands)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fences of a page with something to try."""
    text = page.read_text(encoding="utf-8")
    whole = _OF_PAGE.match(text)
    for match in _FENCE.finditer(text):
        note = match if match["how"] else whole
        how, what = (note["how"], note["what"]) if note else ("", "")
        line = text.count("\n", 0, match.start("indent")) + 1
        block = Block(page, line, match["language"], match["text"], how, what)
        if block.is_tried:
            yield block


def require_parses(words: list[str]) -> None:
    """Raises what the command line raises for these words; nothing that they name is looked for."""
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, words[0]
    parent = click.Context(main)
    parent.meta[WORDS_ONLY] = True
    with command.make_context(words[0], [*words[1:]], parent=parent):
        pass


def small(words: list[str], target: str, server: str, steps: int | None = None) -> list[str]:
    """The words with the tiny target and ``server`` for a page's, small; ``steps`` instead of the usual two."""
    more = list(SMALL.get(words[0], ())) if steps is None else [f"train.max_steps={steps}"]
    if "--data" in words:
        more = [word for word in more if not word.startswith("decode.")]
    if "--drafter" in words:
        more.remove("loss.steps=2")
    own = [
        target if word in TARGETS else SERVER.sub(server, word) for word in words if (words[0], word) not in LEFT_OUT
    ]
    # What follows a bare -- is the engine's.
    end = own.index("--") if "--" in own else len(own)
    return [*own[:end], *more, *own[end:]]


def target_of_eight_layers(folder: Path) -> str:
    """Deep enough for the layers of every drafter, long enough for the pages' samples."""
    config = CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 8, "max_position_embeddings": 8192}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)

"""A tiny world made through the command line: targets, conversations, DATA, a store, a run; and ways to damage it."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenstore.cli import main
from tests.collectors.tiny import save_target, tiny_model, tiny_tokenizer

TRAIN = ("train.max_steps=2", "loss.steps=2", "data.batch_tokens=512", "data.pack_tokens=256", "train.validate_every=0")
LAYERS = "0,1,2"


@dataclass(frozen=True)
class World:
    """A folder of small things that belong together; ``world / "store"`` is the path of one, as text."""

    root: Path

    def __truediv__(self, name: str) -> str:
        return str(self.root / name)

    def named(self, words: Iterable[str]) -> tuple[str, ...]:
        """The words, those that name something here as its path."""
        return tuple(self / word if (self.root / word).exists() else word for word in words)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below ``folder``, hidden ones too: bytes of a file, None of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def age(path: Path, seconds: float) -> None:
    """Have a path and all below it be last written so long ago."""
    for member in [path, *path.rglob("*")]:
        os.utime(member, (time.time() - seconds,) * 2)


def run(*words: str) -> int:
    """The exit code of ``hiddenstore WORDS``, in this process."""
    with pytest.raises(SystemExit) as caught:
        main(list(words), prog_name="hiddenstore")
    return int(caught.value.code or 0)


def error_of(printed: str) -> tuple[str, str]:
    """The error and its ``fix:`` line (empty without one) at the end of what stderr got."""
    _before, found, error = printed.rpartition("error: ")
    assert found, printed
    message, _, fix = error.partition("\n  fix: ")
    return message.strip(), fix.strip()


def make_world(root: Path) -> World:
    """Two targets of one tokenizer, 40 conversations, and what the commands make of them.

    ``data`` and ``store`` have a validation split, ``all_train`` and ``train_store`` have none; ``no_final`` holds no
    final hidden.
    """
    world = World(root)
    save_target(root / "target")
    save_target(root / "other_target", seed=1)
    write_rows(root / "chats.jsonl", [chat(i) for i in range(40)])
    for words in (
        ("prepare", world / "chats.jsonl", "-o", world / "data", "--target", world / "target", "--val", "20%"),
        ("prepare", world / "chats.jsonl", "-o", world / "all_train", "--target", world / "target", "--val", "0"),
        ("collect", world / "data", "-o", world / "store", "--target", world / "target", "--layers", LAYERS),
        ("collect", world / "all_train", "-o", world / "train_store", "--target", world / "target", "--layers", LAYERS),
        (
            "collect",
            world / "data",
            "-o",
            world / "other_store",
            "--target",
            world / "other_target",
            "--layers",
            LAYERS,
        ),
        (
            "collect",
            world / "data",
            "-o",
            world / "no_final",
            "--target",
            world / "target",
            "--layers",
            "0,1",
            "--final",
            "none",
        ),
        ("train", world / "store", "-o", world / "run", *TRAIN),
        ("export", world / "run", "--engine", "vllm", "-o", world / "exported"),
    ):
        assert run(*words, "-q") == 0, words
    return world


def chat(number: int) -> dict[str, Any]:
    question, answer = f"What is {number} and {number}?", f"It is {number + number}, " + "of course " * (number % 4)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[Any]) -> str:
    """JSON lines; a row that is text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def target_with_template(folder: Path, template: str | None) -> str:
    """The world's target under another chat template; no weights."""
    tiny_model("llama").config.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def target_with_nan(folder: Path) -> str:
    """The world's target with one NaN among the weights of its second layer."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def target_with_other_tokenizer(folder: Path) -> str:
    """The world's weights under a tokenizer whose letters have other ids."""
    save_target(folder)
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    words = document["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(document))
    return str(folder)

"""Stores of genuine states for the results: one target's answers captured in every recipe.

Usage: python -m benchmarks.storage.genuine DIR [--target T --conversations FILE --name NAME]; without a target it is
the bundled one, on the first of its own conversations. Needs transformers, which the environment of the peers lacks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from hiddenstore.codecs import RECIPES

SAMPLES = 300


def hiddenstore(*words: str | Path) -> None:
    """Run a command; SystemExit when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "hiddenstore.cli", *map(str, words), "-q"], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"hiddenstore {' '.join(map(str, words))} ended with {done.returncode}")


def capture(folder: Path, name: str, target: str, chats: Path) -> None:
    """A store ``NAME-RECIPE`` per recipe in ``folder``; one that is there already is left as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        hiddenstore("prepare", chats, "-o", data, "--target", target)
        for recipe in RECIPES:
            hiddenstore("collect", data, "-o", folder / f"{name}-{recipe}", "--target", target, "--recipe", recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default=str(TARGET_DIR))
    parser.add_argument("--conversations", type=Path)
    parser.add_argument("--name", default="bundled")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        chats = arguments.conversations or Path(scratch) / "chats.jsonl"
        if arguments.conversations is None:
            lines = (json.dumps(row) for row in islice(conversations(), SAMPLES))
            chats.write_text("\n".join(lines) + "\n", encoding="utf-8")
        capture(arguments.folder, arguments.name, arguments.target, chats)


if __name__ == "__main__":
    main()

"""What the suite counts, for `make reliability`: one result file that its parts add to, a row for each thing tried."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from hiddenstore.testing.suite import WORDS, Tally

ROOT = Path(__file__).parents[2]
Row = dict[str, str | int]


class Figures:
    """Rows by what was tried (``part``) and on what (``variant``), written at once where there is a folder for them.

    ``run``: ``all`` of it, or the ``sample`` that the tests of every day take.
    """

    def __init__(self, folder: Path | None = None, run: str = "sample") -> None:
        self._folder, self._run = folder, run
        self.rows: dict[tuple[str, str], Row] = {}

    def add(self, part: str, variant: str, tally: Tally) -> None:
        """Take in one tally."""
        new: Row = {"part": part, "variant": variant, "run": self._run, "points": 0, **dict.fromkeys(WORDS, 0)}
        row = self.rows.setdefault((part, variant), new)
        row["points"] = int(row["points"]) + tally.points
        for failure in tally.failures:
            word = failure.partition(":")[0]
            row[word] = int(row[word]) + 1
        if self._folder is not None:
            self._save(self._folder)

    def _save(self, folder: Path) -> None:
        """Merge into the result file of this commit and its table."""
        path, document = of_this_commit(folder, "reliability")
        rows = {(row["part"], row["variant"]): row for row in document.get("rows", [])}
        document |= {"machine": _machine(), "rows": [row for _, row in sorted((rows | self.rows).items())]}
        path.write_text(json.dumps(document, indent=1) + "\n")
        path.with_suffix(".md").write_text(_page(document))


def of_this_commit(folder: Path, stem: str) -> tuple[Path, dict[str, Any]]:
    """The newest result file ``<stem>-<date>.json`` of this commit and what it holds, so that a run over midnight stays
    one; else that of today, with ``date`` and ``commit`` alone: what another commit wrote there goes."""
    for path in sorted(folder.glob(f"{stem}-[0-9]*.json"), reverse=True):
        document: dict[str, Any] = json.loads(path.read_text())
        if document.get("commit") == _commit():
            return path, document
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    return folder / f"{stem}-{date}.json", {"date": date, "commit": _commit()}


@cache
def _commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def _page(document: dict) -> str:
    names = ("points", *WORDS)
    total = {name: sum(row[name] for row in document["rows"]) for name in names}
    rows = [*document["rows"], {"part": "**in all**", "variant": "", "run": "", **total}]
    return "\n".join(
        [
            f"# Reliability, {document['date']}",
            "",
            f"Commit {document['commit']}; {document['machine']}. `make reliability` writes this file; with "
            "`PART=tests/reliability/test_damage_sweep.py` it adds one part to it.",
            "",
            "A point is one crash, kill, refused read, damaged byte or file, schedule of writers or mutated document. "
            "Lost, doubled and wrong are samples after the same command has finished the job; silent is damage that "
            "neither reader nor `verify --full` noticed; a traceback is an error that is not one of ours; other is an "
            "error that names something else. A hang ends the run, so a row says that there was none. A run of "
            "`sample` tried what `make test` tries of it, `all` everything.",
            "",
            f"| what was done | to what | run | {' | '.join(names)} |",
            f"|---|---|---|{'---|' * len(names)}",
            *(
                f"| {row['part']} | {row['variant']} | {row['run']} | "
                + " | ".join(f"{row[name]:,}" for name in names)
                + " |"
                for row in rows
            ),
            "",
        ]
    )

"""What the suite counts, for `make reliability`: one result file that its parts add to, a row for each thing tried."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from hiddenstore.testing.suite import WORDS, Tally

ROOT = Path(__file__).parents[2]
Row = dict[str, str | int]


class Figures:
    """Rows by what was tried (``part``) and on what (``variant``); a row that is added again is replaced."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}

    def add(self, part: str, variant: str, tally: Tally) -> None:
        """Take in one tally."""
        row = self.rows.setdefault((part, variant), {"part": part, "variant": variant, "points": 0, **_words()})
        row["points"] = int(row["points"]) + tally.points
        for failure in tally.failures:
            word = failure.partition(":")[0]
            row[word] = int(row[word]) + 1

    def save(self, folder: Path) -> None:
        """Merge into ``reliability-<date>.json`` and its table; rows of another commit go."""
        date, commit = f"{datetime.now(UTC):%Y-%m-%d}", _commit()
        path = folder / f"reliability-{date}.json"
        before = json.loads(path.read_text()) if path.is_file() else {}
        rows = {(row["part"], row["variant"]): row for row in before.get("rows", []) if before["commit"] == commit}
        ordered = [row for _, row in sorted((rows | self.rows).items())]
        document = {"date": date, "commit": commit, "machine": _machine(), "rows": ordered}
        path.write_text(json.dumps(document, indent=1) + "\n")
        path.with_suffix(".md").write_text(_page(document))


def _words() -> Row:
    return dict.fromkeys(WORDS, 0)


def _commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def _page(document: dict) -> str:
    names = ("points", *WORDS)
    total = {name: sum(row[name] for row in document["rows"]) for name in names}
    rows = [*document["rows"], {"part": "**all**", "variant": "", **total}]
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
            "error that names something else. A hang ends the run, so a row says that there was none.",
            "",
            f"| what was done | to what | {' | '.join(names)} |",
            f"|---|---|{'---|' * len(names)}",
            *(
                f"| {row['part']} | {row['variant']} | " + " | ".join(f"{row[name]:,}" for name in names) + " |"
                for row in rows
            ),
            "",
        ]
    )

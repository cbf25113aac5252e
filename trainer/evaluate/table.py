"""What was measured of servers as a table, for a terminal or a report in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.evaluate.server import ALL, Row


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells for a terminal or Markdown; a server's total is left out where it is that of one task."""
    servers = [row["server"] for row in rows]
    listed = [row for row in rows if row["task"] != ALL or servers.count(row["server"]) > 2]
    head = ["task", "draft of", "accepted length", "by position", "tokens/s"]
    cells = [
        [
            row["task"],
            _text(row["draft_len"], "{}"),
            _text(row["accepted_length"], "{:.2f}"),
            " ".join(f"{share:.2f}" for share in row["per_position"]) or "–",
            f"{row['tokens_per_s']:,.1f}",
        ]
        for row in listed
    ]
    if any(row["speedup"] is not None for row in rows):
        head += ["without", "speed-up", "same answers"]
        for line, row in zip(cells, listed, strict=True):
            line += [
                _text(row["baseline_tokens_per_s"], "{:,.1f}"),
                _text(row["speedup"], "{:.2f}x") + spread(row["speedup_rounds"]),
                _text(row["same_as_baseline"], "{}") + f" of {row['answers']}",
            ]
    return head, cells


def parts_of(head: Sequence[str]) -> list[list[int]]:
    """Columns of `table` for a terminal that is too narrow for all: what was accepted, and how fast it was."""
    accepted = [head.index(name) for name in ("accepted length", "by position")]
    return [[0, 1, *accepted], [number for number in range(len(head)) if number not in accepted]]


def markdown(document: Mapping[str, Any]) -> str:
    """The report: what was measured in a line, and the table."""
    head, cells = table(document["rows"])
    how = "greedy" if not document["temperature"] else f"temperature {document['temperature']:g}"
    beside = "; speed-up against the same server without speculation" if document["baseline_server"] else ""
    lines = [
        f"{document['model']} on {document['engine']}, {how}, answers of at most {document['max_new_tokens']} tokens, "
        f"{document['concurrency']} at a time. Accepted length counts the target's own token{beside}.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(line)} |" for line in cells),
    ]
    return "\n".join(lines) + "\n"


def spread(ratios: Sequence[float]) -> str:
    """`` (1.19–1.31)``: least and greatest of several; nothing of one."""
    return f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""


def _text(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)

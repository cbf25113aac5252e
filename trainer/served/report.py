"""Measurements of running servers as rows of a document, and as the Markdown table that goes into a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.served.measure import Measured, total

Row = dict[str, Any]


@dataclass(frozen=True)
class Baseline:
    """The same questions without speculation, by task."""

    found: Mapping[str, Measured]

    @classmethod
    def of(cls, found: Sequence[Measured]) -> "Baseline":
        """The tasks and their total."""
        return cls({one.task: one for one in [*found, total(found)]})


def rows(url: str, found: Sequence[Measured], baseline: Baseline | None) -> list[Row]:
    """A row a task and the total's; several tasks or one, the total is the last."""
    return [_row(url, one, baseline.found[one.task] if baseline else None) for one in [*found, total(found)]]


def _row(url: str, one: Measured, plain: Measured | None) -> Row:
    counts = one.counts
    same = None
    if plain is not None:
        same = sum(a.text == b.text for a, b in zip(one.answers, plain.answers, strict=True))
    return {
        "server": url,
        "task": one.task,
        "draft_len": counts.draft_len if counts else None,
        "questions": one.questions,
        "answers": len(one.answers),
        "answer_tokens": one.tokens,
        "drafts": counts.drafts if counts else None,
        "accepted_length": counts.accepted_length if counts else None,
        "per_position": counts.per_position if counts else [],
        "seconds": one.seconds,
        "tokens_per_s": one.tokens_per_s,
        "baseline_tokens_per_s": plain.tokens_per_s if plain else None,
        "speedup": one.tokens_per_s / plain.tokens_per_s if plain else None,
        "same_as_baseline": same,
        "others_were_served": one.foreign,
    }


def shown(listed: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, as a terminal or Markdown shows them; the totals of a single task are left out."""
    single = {row["server"] for row in listed if sum(other["server"] == row["server"] for other in listed) == 2}
    kept = [row for row in listed if not (row["task"] == "all" and row["server"] in single)]
    has_baseline = any(row["speedup"] is not None for row in listed)
    head = ["task", "draft of", "accepted length", "by position", "tokens/s"]
    cells = [
        [
            row["task"],
            _text(row["draft_len"], "{}"),
            _text(row["accepted_length"], "{:.2f}"),
            " ".join(f"{share:.2f}" for share in row["per_position"]) or "–",
            f"{row['tokens_per_s']:,.1f}",
        ]
        for row in kept
    ]
    if has_baseline:
        head += ["without", "speed-up", "same answers"]
        for line, row in zip(cells, kept, strict=True):
            line += [
                _text(row["baseline_tokens_per_s"], "{:,.1f}"),
                _text(row["speedup"], "{:.2f}x"),
                _text(row["same_as_baseline"], "{}") + f" of {row['answers']}",
            ]
    return head, cells


def markdown(document: Mapping[str, Any]) -> str:
    """The report: what was measured in a line, and the table."""
    head, cells = shown(document["rows"])
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


def _text(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)

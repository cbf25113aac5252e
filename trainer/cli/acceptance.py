"""What `eval` and `decode` share: ``--draft-len``, and how accepted lengths are printed."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trainer.evaluate.acceptance import DraftShape
    from trainer.evaluate.ngram import NgramFloor

LONGEST, WIDEST = 256, 64
"""Far beyond what any engine drafts; a tree costs the square of its nodes."""


class DraftShapes(click.ParamType):
    """``3``, ``1,2,4,8`` or ``5,5x4``: draft lengths, given back in ascending order; ``5x4`` is a tree of 5 levels, 4
    nodes of each growing."""

    name = "n[xw][,…]"

    def convert(
        self, value: "str | tuple[DraftShape, ...]", param: click.Parameter | None, ctx: click.Context | None
    ) -> "tuple[DraftShape, ...]":
        """The shapes."""
        from trainer.evaluate.acceptance import DraftShape

        if isinstance(value, tuple):
            return value
        matches = [re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", item.strip()) for item in value.split(",")]
        shapes = [DraftShape(int(match[1]), int(match[2] or 1)) for match in matches if match]
        if len(shapes) < len(matches):
            self.fail(f"{value!r} should be draft lengths such as 3, 1,2,4,8 or, for a tree, 5x4", param, ctx)
        if len(set(shapes)) < len(shapes):
            self.fail(f"{value!r} names a draft length twice", param, ctx)
        if any(shape.length > LONGEST or shape.width > WIDEST for shape in shapes):
            self.fail(f"{value!r}: a draft has at most {LONGEST} levels, each at most {WIDEST} wide", param, ctx)
        return tuple(sorted(shapes))


draft_len_option = click.option(
    "--draft-len",
    "shapes",
    type=DraftShapes(),
    default="3",
    show_default=True,
    help="Tokens drafted at a time; several make a table, 5x4 drafts a tree.",
)


def floor_members(floor: "NgramFloor | None") -> dict[str, Any]:
    """The n-gram floor as members of a document."""
    return {
        "ngram_accepted_length": floor.accepted_length if floor else None,
        "ngram_order": floor.order if floor else None,
        "ngram_training_tokens": floor.training_tokens if floor else 0,
    }


def acceptance_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Accepted length, by position, beside the n-gram floor."""
    length = document["ngram_accepted_length"]
    floor = "unknown: no training text"
    if length is not None:
        floor = (
            f"{length:.3f}  order {document['ngram_order']} of 1–4, from "
            f"{document['ngram_training_tokens']:,} training tokens"
        )
    return [
        (
            "accepted length",
            f"{document['accepted_length']:.3f}  drafts of {shape_text(document)}, bonus token counted",
        ),
        ("by position", positions_text(document["per_position"])),
        ("n-gram floor", floor),
    ]


def shape_text(row: dict[str, Any]) -> str:
    """``3``, or ``5x4`` for a tree."""
    width = row["tree_width"]
    return f"{row['draft_len']}x{width}" if width > 1 else str(row["draft_len"])


def positions_text(shares: Sequence[float]) -> str:
    """``0.282  0.105  0.004``; a long draft's last positions, which were never accepted, are counted only."""
    reached = max((position for position, share in enumerate(shares, 1) if share > 0), default=0)
    shown = max(reached, 8)
    never = f"  0 at {len(shares) - shown} more" if len(shares) > shown else ""
    return "  ".join(f"{share:.3f}" for share in shares[:shown]) + never

"""``--draft-len 3``, ``--draft-len 1,2,4,8`` or ``--draft-len 5,5x4``, for `eval` and `decode`."""

import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trainer.drafting.acceptance import DraftShape


LONGEST, WIDEST = 256, 64
"""Far beyond what any engine drafts; a tree costs the square of its nodes."""


class DraftShapes(click.ParamType):
    """Comma-separated draft lengths, given back in ascending order; ``5x4`` is a tree of 5 levels, 4 nodes of each
    growing."""

    name = "n[xw][,…]"

    def convert(
        self, value: "str | tuple[DraftShape, ...]", param: click.Parameter | None, ctx: click.Context | None
    ) -> "tuple[DraftShape, ...]":
        """The shapes."""
        from trainer.drafting.acceptance import DraftShape

        if isinstance(value, tuple):
            return value
        parts = [re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", part.strip()) for part in value.split(",")]
        found = [DraftShape(int(part[1]), int(part[2] or 1)) for part in parts if part]
        if len(found) < len(parts):
            self.fail(f"{value!r} should be draft lengths such as 3, 1,2,4,8 or, for a tree, 5x4", param, ctx)
        if len(set(found)) < len(found):
            self.fail(f"{value!r} names a draft length twice", param, ctx)
        if any(shape.length > LONGEST or shape.width > WIDEST for shape in found):
            self.fail(f"{value!r}: a draft has at most {LONGEST} levels, each at most {WIDEST} wide", param, ctx)
        return tuple(sorted(found))


draft_len_option = click.option(
    "--draft-len",
    "shapes",
    type=DraftShapes(),
    default="3",
    show_default=True,
    help="Tokens drafted at a time; several make a table, 5x4 drafts a tree.",
)

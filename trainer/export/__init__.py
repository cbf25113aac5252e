"""Drafters out to engines: a table of what each engine reads, a writer for each drafter, a proof of what was written.

A new engine is a file with an `Engine` and a line in ``ENGINES``; a new drafter is a file with ``files`` and a line in
``WRITERS``, and a row in every engine that reads it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.export.base import Checkpoint, Support
from trainer.export.support import ENGINES, matrix, support

if TYPE_CHECKING:
    from trainer.export.write import ExportedDrafter

__all__ = ["ENGINES", "Checkpoint", "Support", "export", "matrix", "support"]


def export(
    checkpoint: Checkpoint, engine: str, out: Path, dtype: str | None = None, version: str | None = None
) -> "ExportedDrafter":
    """See `trainer.export.write.export`; torch is loaded only now, so that the table can be read without it."""
    from trainer.export.write import export as write

    return write(checkpoint, engine, out, dtype, version)

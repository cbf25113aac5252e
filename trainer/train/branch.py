"""A new run that goes on from an earlier checkpoint of another, which stays as it is."""

import shutil
from pathlib import Path

from hiddenstore.fs.publish import new_folder
from trainer.train import checkpoint
from trainer.train.run_folder import refuse_existing

EXPORTS = "exports"
"""Folder of a run that holds what ``hiddenstore serve`` exported of it."""


def branch(earlier: Path, run: Path) -> None:
    """Make ``run`` what the run of the checkpoint ``earlier`` was when it was saved; a resume drops the metrics that
    came after.

    Raises:
        ConflictError: ``output-exists``: ``run`` holds a run.
        CorruptionError: the checkpoint is damaged. NotFoundError: ``checkpoint-missing``: there is none.
    """
    start = checkpoint.resolve(earlier)
    checkpoint.load(start)
    left_out = shutil.ignore_patterns(checkpoint.FOLDER, EXPORTS, ".*")
    with new_folder(run, lambda path: refuse_existing(path, "give another -o folder")) as folder:
        shutil.copytree(start.parent.parent, folder, ignore=left_out, dirs_exist_ok=True)
        shutil.copytree(start, folder / checkpoint.FOLDER / start.name)
        (folder / checkpoint.FOLDER / checkpoint.LATEST).write_text(f"{start.name}\n", encoding="utf-8")

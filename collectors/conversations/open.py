"""From what a command line or a mix names to sources of rows: files, folders, datasets by name and ``datasets`` ids."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from collectors.conversations.datasets import PRESET, open_named
from collectors.conversations.files import SUFFIXES, open_file
from collectors.conversations.hub import is_saved_dataset, open_dataset
from collectors.conversations.rows import Source
from hiddenstore.errors import ConfigError, Kind


def open_sources(inputs: Sequence[str], dataset_root: str | Path | None = None) -> list[Source]:
    """The sources behind paths, folders, names and ``datasets`` ids, folders in sorted order; see ``open_each``."""
    return [source for sources in open_each(inputs, dataset_root) for source in sources]


def open_each(inputs: Sequence[str], dataset_root: str | Path | None = None) -> list[list[Source]]:
    """The sources of every input in a list of its own; labels tell all files of all inputs apart.

    Raises:
        NotFoundError: ``path-missing``, ``name-unknown``.
        ConfigError: ``input-empty``, ``input-unreadable``, ``input-columns``.
    """
    opened: list[list[Source | Path]] = []
    folders: dict[Path, Path] = {}
    for text in inputs:
        path = Path(text)
        if text.startswith(PRESET):
            opened.append([*open_named(text, dataset_root)])
        elif path.is_dir() and not is_saved_dataset(path):
            files = _files_below(path)
            folders.update(dict.fromkeys(files, path))
            opened.append([*files])
        else:
            opened.append([path if path.is_file() else open_dataset(text)])
    labels = _labels([item for items in opened for item in items if isinstance(item, Path)], folders)
    return [[open_file(item, labels[item]) if isinstance(item, Path) else item for item in items] for items in opened]


def _files_below(folder: Path) -> list[Path]:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name.removesuffix(".gz").endswith(SUFFIXES)
        and not any(name.startswith(".") for name in path.relative_to(folder).parts)
    ]
    if not files:
        raise ConfigError(
            f"{folder} holds no conversation file (looked for {', '.join(SUFFIXES)}, with or without .gz)",
            kind=Kind.INPUT_EMPTY,
        )
    return files


def _labels(paths: list[Path], folders: dict[Path, Path]) -> dict[Path, str]:
    """The shortest tails that tell the paths apart, from their folder on: what lands in ``source`` shows no home."""
    absolute = {path: Path(os.path.abspath(path)) for path in paths}
    depth = {path: 1 + len(path.relative_to(folders[path]).parts) if path in folders else 1 for path in paths}
    while True:
        labels = {path: "/".join(full.parts[-depth[path] :]).lstrip("/") for path, full in absolute.items()}
        shared = Counter(label for label, _ in {(label, absolute[path]) for path, label in labels.items()})
        clashes = [path for path, label in labels.items() if shared[label] > 1]
        if not clashes:
            return labels
        for path in clashes:
            depth[path] += 1

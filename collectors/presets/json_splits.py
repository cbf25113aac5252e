"""Splits that a repository keeps as JSON, read row by row, so that no row has to have the members of another.

``datasets`` makes one table of a split; rows with tool calls, whose arguments and schemas differ, do not fit into one.
"""

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from collectors.conversations import decoded_row
from collectors.rows import Problem, Row, Source
from collectors.sources import Columns, open_file
from hiddenstore.errors import ConfigError

_SPLIT = re.compile(r"(?P<name>[^\[\]+]+)(?:\[(?P<first>\d*):(?P<last>\d*)\])?")
_JSON = tuple(f"{suffix}{packed}" for suffix in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz"))
_SAVED = ("state.json", "dataset_dict.json")


def open_json_split(name: str, config: str | None, split: str, columns: Columns, label: str) -> Source | None:
    """The rows of one split of a dataset id or folder, where all of them lie in JSON files.

    None where they lie elsewhere, where the split is cut by percent or from its end (which takes their number), and
    where the dataset cannot be opened. ``columns(names, where)`` sees the members of the first row.

    Raises:
        ConfigError: ``input-empty`` and what ``columns`` raises.
    """
    match = _SPLIT.fullmatch(split)
    files = _files(name, config, match["name"]) if match else []
    if match is None or not files:
        return None
    sources = [open_file(file, label if len(files) == 1 else f"{label}/{file.name}") for file in files]
    first, last = int(match["first"] or 0), int(match["last"]) if match["last"] else None
    rows = partial(_rows, sources, first, last)
    opening = next(rows(), None)
    if opening is None:
        raise ConfigError(f"{label} is empty", kind="input-empty")
    value = decoded_row(opening)
    if not isinstance(value, Problem):
        columns([*value], label)
    return Source(label, sum(source.size for source in sources), rows)


def _rows(sources: list[Source], first: int, last: int | None) -> Iterator[Row]:
    return islice(chain.from_iterable(source.rows() for source in sources), first, last)


def _files(name: str, config: str | None, split: str) -> list[Path]:
    """The JSON files of a split, on this machine; none where it has others, or where something is wrong with it."""
    import datasets

    if any((Path(name) / file).is_file() for file in _SAVED):
        return []
    try:
        builder = _builder(name, config)
        listed = [str(file) for file in (builder.config.data_files or {}).get(split, [])]
        if not all(file.endswith(_JSON) for file in listed):
            return []
        return [Path(file) for file in datasets.DownloadManager().download(listed)]
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError):
        return []  # The table reader meets the same fault and says what it is.


def _builder(name: str, config: str | None) -> Any:
    """What ``datasets`` knows of a dataset; without a network that is what an earlier run left in the hub's cache."""
    import datasets

    try:
        return datasets.load_dataset_builder(name, config)
    except ConnectionError:
        from huggingface_hub import snapshot_download

        kept = snapshot_download(name, repo_type="dataset", local_files_only=True)
        return datasets.load_dataset_builder(kept, config)

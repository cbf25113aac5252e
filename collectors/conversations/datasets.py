"""Datasets by name, from ``datasets.yaml``: ``preset:NAME``, or ``preset:NAME:SPLIT[slice]`` for one of its splits.

A dataset comes from a copy below ``--preset-root`` where there is one, else through ``datasets`` from its cache or hub.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from collectors.conversations.files import open_file
from collectors.conversations.hub import HubSplit, open_json_split, open_table
from collectors.conversations.parse import decoded_row
from collectors.conversations.rows import Problem, Row, Source
from collectors.conversations.shapes import Shape, leaves_question_out, shape_of
from hiddenstore.errors import ConfigError, Kind, NotFoundError

PRESET = "preset:"
"""What an input that names a dataset of the table begins with."""

_NAME = re.compile(r"([^:]+)(?::(.+))?")
_FILES = (".jsonl", ".json", ".parquet", ".jsonl.gz")


@dataclass(frozen=True)
class NamedDataset:
    """A dataset by name. ``is_multilingual``: variants that ask for another language should leave it alone."""

    name: str
    about: str
    shape: Shape
    splits: tuple[HubSplit, ...]
    is_multilingual: bool = False


@cache
def named_datasets() -> dict[str, NamedDataset]:
    """The table, in its order."""
    table = yaml.safe_load(Path(__file__).with_name("datasets.yaml").read_text(encoding="utf-8"))
    return {
        name: NamedDataset(name, **{**row, "shape": shape_of(row["shape"]), "splits": tuple(_splits(row["splits"]))})
        for name, row in table.items()
    }


def _splits(ids: Any) -> Iterator[HubSplit]:
    """From an id, or lists of them in lists."""
    if isinstance(ids, list):
        for item in ids:
            yield from _splits(item)
    elif split := HubSplit.parse(ids):
        yield replace(split, split=split.split or "train")
    else:
        raise ValueError(f"datasets.yaml: {ids!r} is no name[config]:split")


def find_dataset(name: str) -> NamedDataset:
    """A dataset by name; NotFoundError ``name-unknown`` names the nearest."""
    datasets = named_datasets()
    if name in datasets:
        return datasets[name]
    near = get_close_matches(name, datasets, n=1)
    raise ConfigError(
        f"there is no preset {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
        kind=Kind.NAME_UNKNOWN,
        hint="hiddenstore prepare --list-presets",
    )


def open_named(text: str, root: str | Path | None = None) -> list[Source]:
    """The sources behind ``preset:NAME[:SPLIT]``, one for each of its splits; ``root`` holds local copies.

    Raises:
        NotFoundError: ``name-unknown``, ``path-missing`` (not below ``root``).
        ConfigError: ``dataset-split``, ``input-columns`` and what ``open_table`` raises.
    """
    match = _NAME.fullmatch(text.removeprefix(PRESET))
    name, split = match.groups() if match else (text.removeprefix(PRESET), None)
    dataset = find_dataset(name)
    file = _single_file(root, name)
    if file is not None:
        sources = [open_file(file, name, dataset.shape.select)]
    else:
        sources = [_open(one, dataset.shape, root) for one in _select(dataset, split)]
    return [replace(source, rows=partial(_rows, source, dataset.shape)) for source in sources]


def dataset_rows() -> list[dict[str, Any]]:
    """The table for people and scripts, in its order."""
    return [
        {
            "name": dataset.name,
            "parts": [str(split) for split in dataset.splits],
            "columns": list(dataset.shape.columns),
            "answers": not dataset.shape.is_prompt,
            "multilingual": dataset.is_multilingual,
            "about": dataset.about,
        }
        for dataset in named_datasets().values()
    ]


def _select(dataset: NamedDataset, sliced: str | None) -> tuple[HubSplit, ...]:
    """Its splits, or the one that ``sliced`` names (with a slice, perhaps)."""
    if sliced is None:
        return dataset.splits
    name = re.split(r"[\[+]", sliced)[0]
    splits = tuple(split for split in dataset.splits if split.split == name)
    if not splits and len({(split.name, split.config) for split in dataset.splits}) == 1:
        splits = dataset.splits[:1]  # A split that the table leaves out, such as a test split.
    if splits:
        return tuple(replace(split, split=sliced) for split in splits)
    names = ", ".join(dict.fromkeys(str(split.split) for split in dataset.splits))
    raise ConfigError(
        f"preset {dataset.name} has no split {name!r}; it has {names}",
        kind=Kind.DATASET_SPLIT,
        hint="hiddenstore prepare --list-presets",
    )


def _single_file(root: str | Path | None, name: str) -> Path | None:
    """A file named after the dataset, such as one that somebody exported; it stands for all its splits."""
    if root is None:
        return None
    return next((path for suffix in _FILES if (path := Path(root) / f"{name}{suffix}").is_file()), None)


def _open(split: HubSplit, shape: Shape, root: str | Path | None) -> Source:
    local = split if root is None else _local_copy(split, Path(root))
    source = open_json_split(local, shape.select, str(split))
    return source or open_table(local, shape.select, split.name)


def _local_copy(split: HubSplit, root: Path) -> HubSplit:
    paths = [root / split.name, root / split.name.replace("/", "--"), root / split.name.rpartition("/")[2]]
    folder = next((path for path in paths if path.is_dir()), None)
    if folder is None:
        names = ", ".join(str(path.relative_to(root)) for path in paths)
        raise NotFoundError(
            f"{split.name} is not below {root} (looked for {names})",
            kind=Kind.PATH_MISSING,
            hint=f"hf download {split.name} --repo-type dataset --local-dir {root / split.name}",
        )
    if split.config is not None and not (folder / "README.md").is_file() and (folder / split.config).is_dir():
        # Without its card nothing else says which files a config has.
        return HubSplit(str(folder / split.config), None, split.split)
    return replace(split, name=str(folder))


def _rows(source: Source, shape: Shape) -> Iterator[Row]:
    for row in source.rows():
        yield row if isinstance(row.payload, Problem) else replace(row, payload=_read(row, shape))


def _read(row: Row, shape: Shape) -> Any:
    value = decoded_row(row)
    if isinstance(value, Problem):
        return value
    try:
        shaped = shape.read(value)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        detail = f"a row of this preset holds {', '.join(shape.columns)}: {type(error).__name__} {error}"
        return Problem(row.location, "preset-row", detail)
    if leaves_question_out(shaped["messages"]):
        detail = "the publisher left the question out; it has to be put back from the set that it came from"
        return Problem(row.location, "question-left-out", detail)
    return shaped

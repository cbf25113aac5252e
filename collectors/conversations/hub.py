"""Rows of a ``datasets`` id or of a folder saved by ``datasets``: ``name[config]:split[slice]``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

from collectors.conversations.files import open_file, rows_within
from hiddenstore.conversation import (
    IMAGE_KEYS,
    TABLE_BATCH_ROWS,
    ColumnFilter,
    Problem,
    Row,
    Source,
    conversation_columns,
    decoded_row,
)
from hiddenstore.errors import ConfigError, Kind, NotFoundError, StorageError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.fs.publish import existing_part
from hiddenstore.targets.folder import first_line

_PART = r"(?:\[(?P<config>[^\[\]]+)\])?(?::(?P<split>.+))?"
_SLICED = re.compile(r"(?P<name>[^\[\]+]+)(?:\[(?P<first>\d*):(?P<last>\d*)\])?")
_LOOKS_LIKE_A_FILE = re.compile(r"^[./~]|\.(jsonl|ndjson|json|parquet|gz|csv|txt|arrow)$")
_JSON = tuple(f"{suffix}{packed}" for suffix in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz"))


@dataclass(frozen=True)
class HubSplit:
    """One split of one config of a dataset id or folder; ``split`` may be sliced, None is its only one or train."""

    name: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str, name: str | None = None) -> "HubSplit | None":
        """From ``name[config]:split[slice]``, where ``name`` is this one; None when ``text`` is nothing of the kind."""
        named = r"[^\[\]:]+" if name is None else re.escape(name)
        match = re.fullmatch(f"(?P<name>{named}){_PART}", text)
        return cls(**match.groupdict()) if match else None

    def __str__(self) -> str:
        return f"{self.name}{f'[{self.config}]' if self.config else ''}:{self.split}"


def parse_cut(text: str) -> tuple[str, slice] | None:
    """A split and which of its rows, from ``split[FIRST:LAST]`` or ``split``; None where it is cut in another way."""
    match = _SLICED.fullmatch(text)
    if match is None:
        return None
    return match["name"], slice(int(match["first"] or 0), int(match["last"]) if match["last"] else None)


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``datasets`` itself saved this folder (``save_to_disk``)."""
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def open_dataset(text: str) -> Source:
    """The split that ``text`` names; it is downloaded (into the cache of ``datasets``) where it is not local yet.
    Raises NotFoundError: ``path-missing``, neither a path nor a dataset; ConfigError: ``dataset-spec``, rows of a file
    or a config of a saved folder too, ``dataset-split`` or ``input-unreadable``; StorageError:
    ``dataset-unreachable``."""
    split = HubSplit.parse(text, existing_part(text))
    name = split.name if split else text
    hint = f"hiddenstore prepare {quote(f'{name}:train[:1000]')} -o DATA --target T"
    if Path(name).is_file():
        raise ConfigError(
            f"{text} chooses no rows of a file: expected {name}, or {name}:train[FIRST:LAST] with rows counted from 0",
            kind=Kind.DATASET_SPEC,
            hint=hint,
        )
    if split is not None and split.config is not None and is_saved_dataset(Path(name)):
        raise ConfigError(
            f"{text}: a folder saved by datasets has no config {split.config!r}: expected {name}, {name}:SPLIT or "
            f"{name}:SPLIT[FIRST:LAST] with rows counted from 0",
            kind=Kind.DATASET_SPEC,
            hint=hint,
        )
    if _LOOKS_LIKE_A_FILE.search(name) and not Path(name).exists():
        raise NotFoundError(f"{name} does not exist", kind=Kind.PATH_MISSING)
    if split is None:
        raise ConfigError(
            f"{text!r} is neither a file nor a dataset written name[config]:split[slice]",
            kind=Kind.DATASET_SPEC,
            hint="hiddenstore prepare 'name[config]:train[:1000]' -o DATA --target T",
        )
    return open_table(split)


def open_table(split: HubSplit, columns: ColumnFilter = conversation_columns, label: str | None = None) -> Source:
    """One split as ``datasets`` makes a table of it; ``label`` names it in locations. Raises as ``open_dataset``."""
    table = _load(split)
    title = str(replace(split, split=split.split or table.split))
    if len(table) == 0:
        raise ConfigError(f"{title} is empty", kind=Kind.INPUT_EMPTY)
    table = table.select_columns(columns(table.column_names, title))
    label = label or (Path(split.name).name if Path(split.name).exists() else split.name)
    label = str(HubSplit(label, split.config, str(table.split)))
    return Source(label, len(table), partial(_table_rows, table, label), len(table))


def open_json_split(split: HubSplit, columns: ColumnFilter, label: str) -> Source | None:
    """The rows of one split, read row by row, where all of them lie in JSON files; None where they do not.

    Rows with tool calls, whose arguments and schemas differ, do not fit into the one table that ``datasets`` makes.
    None too where the split is cut by percent or from its end. Raises what ``columns`` raises.
    """
    name_and_cut = parse_cut(split.split or "")
    files = _json_files(split, name_and_cut[0]) if name_and_cut else []
    if name_and_cut is None or not files:
        return None
    sources = [open_file(file, label if len(files) == 1 else f"{label}/{file.name}") for file in files]
    size = sum(source.size for source in sources)
    rows = Source(label, size, lambda: chain.from_iterable(source.rows() for source in sources))
    source = rows_within(rows, name_and_cut[1])
    row = next(source.rows(), None)
    if row is None:
        raise ConfigError(f"{label} is empty", kind=Kind.INPUT_EMPTY)
    value = decoded_row(row)
    if not isinstance(value, Problem):
        columns([*value], label)
    return source


def _table_rows(table: Any, label: str) -> Iterator[Row]:
    batches = table.with_format("arrow").iter(batch_size=TABLE_BATCH_ROWS)
    for number, value in enumerate((value for batch in batches for value in batch.to_pylist()), start=1):
        # Of these columns only whether they hold anything matters, and decoding would need Pillow.
        images = {name: value.pop(name) for name in IMAGE_KEYS if name in value}
        # datasets 5 keeps objects of unlike members, such as turns with and without tool calls, as JSON text.
        row = table.features.decode_example(value)
        cells = {name: _without_absent(item, table.features[name]) for name, item in row.items()}
        yield Row(f"{label}:{number}", cells | images, 1)


def _without_absent(value: Any, feature: Any) -> Any:
    """A table gives every member of a struct to every row; those that were absent come back as None. A null of JSON
    text was written there."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _without_absent(item, feature[key]) for key, item in value.items() if item is not None}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return [_without_absent(item, inner) for item in value] if inner and isinstance(value, list) else value


def _load(split: HubSplit) -> Any:
    import datasets

    from hiddenstore.servers.hub_session import bound_hub_requests, http_errors

    bound_hub_requests()
    name = split.name
    try:
        if is_saved_dataset(Path(name)):
            return _saved_split(datasets.load_from_disk(name), split)
        selection = split.split or _only_split(datasets.get_dataset_split_names(name, split.config), name)
        return datasets.load_dataset(name, split.config, split=selection)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise NotFoundError(
            f"{name} is neither a path nor a dataset that can be found: {first_line(error)}", kind=Kind.PATH_MISSING
        ) from error
    except (ConfigError, NotFoundError):
        raise  # They are ValueError and KeyError too.
    except http_errors(ConnectionError) as error:
        raise StorageError(
            f"dataset {name} is not on this machine and its hub cannot be reached: {first_line(error)}",
            kind=Kind.DATASET_UNREACHABLE,
            hint="run again with a network, or download it first and give its folder",
        ) from error
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise_refusal(error, f"dataset {name}")
        raise ConfigError(
            f"dataset {name} cannot be loaded: {first_line(error)}",
            kind=Kind.INPUT_UNREADABLE,
            hint=f"python -c {quote(f'import datasets; print(datasets.get_dataset_config_names({name!r}))')}",
        ) from error


def _saved_split(saved: Any, split: HubSplit) -> Any:
    import datasets

    if isinstance(saved, datasets.Dataset):
        saved = {str(saved.split or "train"): saved}
    sizes = {name: len(table) for name, table in saved.items()}
    instruction = datasets.ReadInstruction.from_spec(split.split or _only_split(list(saved), split.name))
    tables = [
        saved[piece.splitname].select(range(piece.from_ or 0, sizes[piece.splitname] if piece.to is None else piece.to))
        for piece in instruction.to_absolute(sizes)
    ]
    return tables[0] if len(tables) == 1 else datasets.concatenate_datasets(tables)


def _only_split(names: list[str], dataset: str) -> str:
    if len(names) == 1 or "train" in names:
        return names[0] if len(names) == 1 else "train"
    raise ConfigError(
        f"dataset {dataset} has several splits: {', '.join(names)}",
        kind=Kind.DATASET_SPLIT,
        hint=f"hiddenstore prepare {quote(f'{dataset}:{names[0]}')} -o DATA --target T",
    )


def _json_files(split: HubSplit, split_name: str) -> list[Path]:
    """The JSON files of a split, on this machine; none where it has others, or where something is wrong with it."""
    import datasets

    from hiddenstore.servers.hub_session import bound_hub_requests, http_errors

    if is_saved_dataset(Path(split.name)):
        return []
    bound_hub_requests()
    try:
        builder = _builder(split)
        files = [str(file) for file in (builder.config.data_files or {}).get(split_name, [])]
        if not all(file.endswith(_JSON) for file in files):
            return []
        return [Path(file) for file in datasets.DownloadManager().download(files)]
    except http_errors(OSError, ValueError, KeyError, datasets.exceptions.DatasetsError):
        return []  # The table reader meets the same fault and says what it is.


def _builder(split: HubSplit) -> Any:
    """What ``datasets`` knows of a dataset; without a network that is what an earlier run left in the hub's cache."""
    import datasets

    try:
        return datasets.load_dataset_builder(split.name, split.config)
    except ConnectionError:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(split.name, repo_type="dataset", local_files_only=True)
        return datasets.load_dataset_builder(folder, split.config)

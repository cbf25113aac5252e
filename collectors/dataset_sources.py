"""Rows of a ``datasets`` id or of a folder saved by ``datasets``: ``name[config]:split[slice]``."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from collectors.rows import TABLE_BATCH_ROWS, Row, Source, wanted_columns
from hiddenstore.errors import ConfigError, NotFoundError, StorageError

_SPEC = re.compile(r"(?P<name>[^\[\]:]+)(?:\[(?P<config>[^\[\]]+)\])?(?::(?P<split>.+))?")
_LOOKS_LIKE_A_FILE = re.compile(r"^[./~]|\.(jsonl|ndjson|json|parquet|gz|csv|txt|arrow)$")


def open_dataset(text: str) -> Source:
    """The split that ``text`` names; it is downloaded (into the cache of ``datasets``) where it is not local yet.

    Raises:
        NotFoundError: ``input-missing``, neither a path nor a dataset.
        ConfigError: ``dataset-spec-invalid``, ``dataset-split`` or ``dataset-unreadable``.
        StorageError: ``dataset-unreachable``.
    """
    match = _SPEC.fullmatch(text)
    name = match["name"] if match else text
    if _LOOKS_LIKE_A_FILE.search(name) and not Path(name).exists():
        raise NotFoundError(f"{name} does not exist", kind="input-missing")
    if match is None:
        raise ConfigError(
            f"{text!r} is neither a file nor a dataset written name[config]:split[slice]",
            kind="dataset-spec-invalid",
            hint="hiddenstore prepare 'name[config]:train[:1000]' -o DATA --target T",
        )
    return open_table(name, match["config"], match["split"])


def open_table(
    name: str,
    config: str | None,
    split: str | None,
    columns: Callable[[Sequence[str], str], list[str]] = wanted_columns,
    label: str | None = None,
) -> Source:
    """One split of a dataset id or folder; ``columns(names, where)`` says which of its columns to read.

    ``label`` stands for the name in places. Raises as ``open_dataset``.
    """
    table = _load(name, config, split)
    where = f"{name}{f'[{config}]' if config else ''}:{split or table.split}"
    if len(table) == 0:
        raise ConfigError(f"{where} is empty", kind="input-empty")
    wanted = columns(table.column_names, where)
    label = label or (Path(name).name if Path(name).exists() else name)
    label = f"{label}:{table.split}" if config is None else f"{label}[{config}]:{table.split}"
    return Source(label, len(table), partial(_rows, table.select_columns(wanted), label), len(table))


def _rows(table: Any, label: str) -> Iterator[Row]:
    number = 0
    for batch in table.with_format("arrow").iter(batch_size=TABLE_BATCH_ROWS):
        for value in batch.to_pylist():
            number += 1
            # datasets 5 keeps objects of unlike members, such as turns with and without tool calls, as JSON text.
            yield Row(f"{label}:{number}", table.features.decode_example(value), 1)


def _load(name: str, config: str | None, split: str | None) -> Any:
    import datasets

    saved = Path(name)
    try:
        if saved.is_dir() and any((saved / file).is_file() for file in ("state.json", "dataset_dict.json")):
            return _saved_split(datasets.load_from_disk(name), name, split)
        wanted = split or _only_split(datasets.get_dataset_split_names(name, config), name)
        return datasets.load_dataset(name, config, split=wanted)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise NotFoundError(
            f"{name} is neither a path nor a dataset that can be found: {_first_line(error)}", kind="input-missing"
        ) from error
    except (ConfigError, NotFoundError):
        raise
    except ConnectionError as error:
        raise StorageError(
            f"dataset {name} is not on this machine and its hub cannot be reached: {_first_line(error)}",
            kind="dataset-unreachable",
            hint="run again with a network, or download it first and give its folder",
        ) from error
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"dataset {name} cannot be loaded: {_first_line(error)}",
            kind="dataset-unreadable",
            hint=f"python -c \"import datasets; print(datasets.get_dataset_config_names('{name}'))\"",
        ) from error


def _saved_split(saved: Any, name: str, split: str | None) -> Any:
    import datasets

    if isinstance(saved, datasets.Dataset):
        saved = {str(saved.split or "train"): saved}
    wanted = split or _only_split(list(saved), name)
    sizes = {key: len(table) for key, table in saved.items()}
    parts = [
        saved[piece.splitname].select(range(piece.from_ or 0, sizes[piece.splitname] if piece.to is None else piece.to))
        for piece in datasets.ReadInstruction.from_spec(wanted).to_absolute(sizes)
    ]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _only_split(names: list[str], dataset: str) -> str:
    if len(names) == 1:
        return names[0]
    if "train" in names:
        return "train"
    raise ConfigError(
        f"dataset {dataset} has several splits: {', '.join(names)}",
        kind="dataset-split",
        hint=f"hiddenstore prepare '{dataset}:{names[0]}' -o DATA --target T",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

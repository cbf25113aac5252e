"""Rows of conversation files, folders and ``datasets`` ids, one at a time, as they lie in the source.

Nothing is parsed beyond what finding the next row takes, so that worker processes can do the rest. Memory is bounded by
one row (at most ``MAX_ROW_BYTES``) or one small parquet batch.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from collectors.byte_streams import MAX_ROW_BYTES, ArrayScanner, ByteStream, unreadable
from collectors.rows import TABLE_BATCH_ROWS, Problem, Row, Source, wanted_columns
from hiddenstore.errors import ConfigError, StorageError

_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (*_LINES, ".json", ".parquet")
_SPACE = b" \t\r\n"

PRESET = "preset:"
"""What an input that names a preset begins with."""

Columns = Callable[[Sequence[str], str], list[str]]
"""Names of a table and where it is → the columns to read."""


def open_sources(inputs: Sequence[str], preset_root: str | Path | None = None) -> list[Source]:
    """The sources behind paths, folders, presets and ``datasets`` ids, folders in sorted order; see ``open_each``."""
    return [source for sources in open_each(inputs, preset_root) for source in sources]


def open_each(inputs: Sequence[str], preset_root: str | Path | None = None) -> list[list[Source]]:
    """The sources of every input in a list of its own; labels tell all files of all inputs apart.

    Raises:
        NotFoundError: ``input-missing``, ``preset-unknown`` or ``preset-missing``.
        ConfigError: ``input-empty``, ``input-unreadable``, ``input-no-messages`` or ``input-no-files``.
    """
    found: list[list[Source | Path]] = []
    roots: dict[Path, Path] = {}
    for text in inputs:
        path = Path(text)
        if text.startswith(PRESET):
            from collectors.presets.opening import open_preset

            found.append([*open_preset(text, preset_root)])
        elif path.is_dir() and not _is_saved_dataset(path):
            files = _files_below(path)
            roots.update(dict.fromkeys(files, path))
            found.append([*files])
        elif path.is_file():
            found.append([path])
        else:
            from collectors.dataset_sources import open_dataset

            found.append([open_dataset(text)])
    labels = _labels([item for items in found for item in items if isinstance(item, Path)], roots)
    return [[item if isinstance(item, Source) else open_file(item, labels[item]) for item in items] for items in found]


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _files_below(folder: Path) -> list[Path]:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name.removesuffix(".gz").endswith(_SUFFIXES)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise ConfigError(
            f"{folder} holds no conversation file (looked for {', '.join(_SUFFIXES)}, with or without .gz)",
            kind="input-no-files",
        )
    return files


def _labels(paths: list[Path], roots: dict[Path, Path]) -> dict[Path, str]:
    """The shortest tails that tell the paths apart, from their folder on: what lands in ``source`` shows no home."""
    distinct = {path: Path(os.path.abspath(path)) for path in paths}
    depth = {path: 1 + len(path.relative_to(roots[path]).parts) if path in roots else 1 for path in paths}
    while True:
        labels = {path: "/".join(whole.parts[-depth[path] :]).lstrip("/") for path, whole in distinct.items()}
        taken = Counter({(label, distinct[path]) for path, label in labels.items()})
        shared = Counter(label for label, _ in taken)
        clashes = [path for path, label in labels.items() if shared[label] > 1]
        if not clashes:
            return labels
        for path in clashes:
            depth[path] += 1


def open_file(path: Path, label: str, columns: Columns = wanted_columns) -> Source:
    """The source behind one JSON lines, JSON or parquet file; ``columns`` says which of a table to read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", kind="input-unreadable") from error
    if size == 0:
        raise ConfigError(f"{path} is empty", kind="input-empty")
    if magic == b"PAR1":
        return _open_parquet(path, label, columns)
    name = path.name.removesuffix(".gz")
    if not name.endswith((*_LINES, ".json")) and _first_byte(path) not in (b"{", b"["):
        raise ConfigError(
            f"{path} is neither JSON nor parquet (expected {', '.join(_SUFFIXES)}, with or without .gz)",
            kind="input-unreadable",
        )
    is_array = not name.endswith(_LINES) and _first_byte(path) == b"["
    return Source(label, size, partial(_array_rows if is_array else _line_rows, path, label))


def _first_byte(path: Path) -> bytes:
    with ByteStream(path) as stream:
        text = b""
        while not text:
            chunk = stream.chunk(4096)
            if not chunk:
                return b""
            text = chunk.removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)
    return text[:1]


def _line_rows(path: Path, label: str) -> Iterator[Row]:
    with ByteStream(path) as stream:
        number = 0
        while line := stream.line(MAX_ROW_BYTES):
            number += 1
            place = f"{label}:{number}"
            length = len(line)
            payload: bytes | Problem = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if length == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := stream.line(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    length += len(rest)
                payload = Problem(place, "row-too-large", f"a row may have {MAX_ROW_BYTES >> 20} MiB")
            elif not line.strip(_SPACE):
                continue
            yield Row(place, payload, stream.taken(length))


def _array_rows(path: Path, label: str) -> Iterator[Row]:
    """Elements of one JSON array, decoded as they arrive; ``place`` names the line an element starts at."""
    with ByteStream(path) as stream:
        scanner = ArrayScanner(stream)
        for line, value in scanner.elements():
            yield Row(f"{label}:{line}", value, stream.taken(scanner.consumed))


def _open_parquet(path: Path, label: str, wanted: Columns) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        unreadable(path, error)
    if rows == 0:
        raise ConfigError(f"{path} is empty", kind="input-empty")
    columns = wanted(names, str(path))
    return Source(label, path.stat().st_size, partial(_parquet_rows, path, label, columns), rows)


def _parquet_rows(path: Path, label: str, columns: list[str]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            size = path.stat().st_size // max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=TABLE_BATCH_ROWS, columns=columns):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{label}:{number}", value, size)
    except (pa.ArrowException, OSError) as error:
        unreadable(path, error)

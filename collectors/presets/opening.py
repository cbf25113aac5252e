"""Presets as sources of rows: ``preset:NAME``, or ``preset:NAME:SPLIT[slice]`` for one of its splits.

A preset comes from a copy below ``--preset-root`` where there is one, else through ``datasets`` from its cache or hub.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from collectors.conversations import decoded_row
from collectors.dataset_sources import open_table
from collectors.presets.json_splits import open_json_split
from collectors.presets.shapes import Shape, leaves_question_out
from collectors.presets.table import PRESETS, Part, Preset
from collectors.rows import Problem, Row, Source
from collectors.sources import PRESET, open_file
from hiddenstore.errors import ConfigError, NotFoundError

_SPEC = re.compile(r"preset:(?P<name>[^:]+)(?::(?P<split>.+))?")
_FILES = (".jsonl", ".json", ".parquet", ".jsonl.gz")


def open_preset(text: str, root: str | Path | None = None) -> list[Source]:
    """The sources behind ``preset:NAME[:SPLIT]``, one for each of its parts; ``root`` holds local copies.

    Raises:
        NotFoundError: ``preset-unknown``, ``preset-missing`` (not below ``root``).
        ConfigError: ``preset-split``, ``preset-columns`` and what ``open_table`` raises.
    """
    match = _SPEC.fullmatch(text)
    name = match["name"] if match else text.removeprefix(PRESET)
    preset = find_preset(name)
    split = match["split"] if match else None
    whole = _single_file(root, name)
    if whole is not None:
        return [_shaped(open_file(whole, name, preset.shape.wanted), preset.shape)]
    return [_shaped(_open(part, preset.shape, root), preset.shape) for part in _parts(name, preset, split)]


def find_preset(name: str) -> Preset:
    """A preset by name; NotFoundError ``preset-unknown`` names the nearest."""
    if name in PRESETS:
        return PRESETS[name]
    near = get_close_matches(name, PRESETS, n=1)
    raise NotFoundError(
        f"there is no preset {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
        kind="preset-unknown",
        hint="hiddenstore prepare --list-presets",
    )


def _parts(name: str, preset: Preset, split: str | None) -> tuple[Part, ...]:
    if split is None:
        return preset.parts
    wanted = re.split(r"[\[+]", split)[0]
    known = tuple(part for part in preset.parts if part.split == wanted)
    if known:
        return tuple(replace(part, split=split) for part in known)
    places = {(part.hub, part.config) for part in preset.parts}
    if len(places) == 1:
        # A split the preset leaves out, such as a test split.
        return (replace(preset.parts[0], split=split),)
    splits = ", ".join(dict.fromkeys(part.split for part in preset.parts))
    raise ConfigError(
        f"preset {name} has no split {wanted!r}; it has {splits}",
        kind="preset-split",
        hint="hiddenstore prepare --list-presets",
    )


def _single_file(root: str | Path | None, name: str) -> Path | None:
    """A file named after the preset, such as one that somebody exported; it stands for all its parts."""
    if root is None:
        return None
    return next((path for suffix in _FILES if (path := Path(root) / f"{name}{suffix}").is_file()), None)


def _open(part: Part, shape: Shape, root: str | Path | None) -> Source:
    name, config = part.hub, part.config
    if root is not None:
        folder = _local_copy(part, Path(root))
        if config is not None and not (folder / "README.md").is_file() and (folder / config).is_dir():
            folder, config = folder / config, None  # Without its card nothing else says which files a config has.
        name = str(folder)
    rows = open_json_split(name, config, part.split, shape.wanted, str(part))
    return rows or open_table(name, config, part.split, shape.wanted, label=part.hub)


def _local_copy(part: Part, root: Path) -> Path:
    tried = [root / part.hub, root / part.hub.replace("/", "--"), root / part.hub.rpartition("/")[2]]
    found = next((path for path in tried if path.is_dir()), None)
    if found is None:
        raise NotFoundError(
            f"{part.hub} is not below {root} (looked for {', '.join(str(path.relative_to(root)) for path in tried)})",
            kind="preset-missing",
            hint=f"hf download {part.hub} --repo-type dataset --local-dir {root / part.hub}",
        )
    return found


def _shaped(source: Source, shape: Shape) -> Source:
    return replace(source, rows=partial(_rows, source, shape))


def _rows(source: Source, shape: Shape) -> Iterator[Row]:
    for row in source.rows():
        yield row if isinstance(row.payload, Problem) else replace(row, payload=_read(row, shape))


def _read(row: Row, shape: Shape) -> Any:
    value = decoded_row(row)
    if isinstance(value, Problem):
        return value
    try:
        found = shape.read(value)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        detail = f"a row of this preset holds {', '.join(shape.columns)}: {type(error).__name__} {error}"
        return Problem(row.place, "preset-row", detail)
    if leaves_question_out(found["messages"]):
        detail = "the publisher left the question out; it has to be put back from the set that it came from"
        return Problem(row.place, "question-left-out", detail)
    return found

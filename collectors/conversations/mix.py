"""Sources of rows: files, folders, datasets by name and ids of ``datasets``, as a command line or a mix names them.

The rows a mix takes of a source are those whose keyed hash is smallest: the same seed takes the same rows, and a larger
cap only adds to them.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from collectors.conversations.datasets import DATASET, find_dataset, open_named
from collectors.conversations.files import SUFFIXES, open_file, rows_within
from collectors.conversations.hub import is_saved_dataset, open_dataset
from hiddenstore.console.output import output
from hiddenstore.console.text import plural
from hiddenstore.conversation import Row, Source
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.fs.publish import tree_files
from hiddenstore.settings import load

_FILE_SLICE = re.compile(r"(?P<path>.+?)(?::train)?:?\[(?P<first>\d*):(?P<last>\d*)\]")
# What ``datasets`` writes about a data set, and passes over among its files (its data_files.py).
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
# Of published folders and of those that jobs write: cards, licences, marks, and images that rows name.
_BESIDE_ROWS = re.compile(r"_[^.]*|licen[cs]e.*|.*\.(md|png|jpe?g|gif|webp|bmp)")
_MIXES = Path(__file__).with_name("mixes")


def open_sources(inputs: Sequence[str]) -> list[Source]:
    """The sources behind paths, folders, names and ``datasets`` ids, folders in sorted order; see ``open_each``."""
    return [source for sources in open_each(inputs) for source in sources]


def open_each(inputs: Sequence[str], dataset_root: str | Path | None = None) -> list[list[Source]]:
    """The sources of every input in a list of its own; labels tell all files of all inputs apart. A file of a
    folder may hold no row. Raises NotFoundError, ConfigError: as the readers, and ``input-empty``: nothing of an input
    holds a row."""
    opened: list[list[Source | Path]] = []
    folders: dict[Path, Path] = {}
    slices: list[slice | None] = []
    for text in inputs:
        path, cut = _sliced(text)
        slices.append(cut)
        if text.startswith(DATASET):
            opened.append([*open_named(text, dataset_root)])
        elif path.is_dir() and not is_saved_dataset(path):
            files = _files_below(path)
            folders.update(dict.fromkeys(files, path))
            opened.append([*files])
        elif text == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            problem = f"{text} is a pipe or a device; rows are read more than once, so they must be in a file"
            raise ConfigError(problem, kind=Kind.INPUT_UNREADABLE, hint="cat > chats.jsonl, then prepare that")
        else:
            opened.append([path if path.is_file() else open_dataset(text)])
    labels = _labels([item for items in opened for item in items if isinstance(item, Path)], folders)
    sources: list[list[Source]] = []
    for text, items, cut in zip(inputs, opened, slices, strict=True):
        of_input = [open_file(item, labels[item]) if isinstance(item, Path) else item for item in items]
        sources.append(of_input if cut is None else [rows_within(of_input[0], cut)])
        if not any(map(_has_row, sources[-1])):
            raise ConfigError(f"{text} holds no row", kind=Kind.INPUT_EMPTY)
    return sources


def _has_row(source: Source) -> bool:
    return next(source.rows(), None) is not None if source.count is None else source.count > 0


def _sliced(text: str) -> tuple[Path, slice | None]:
    """The path of an input, and of a local file the rows that ``FILE:train[FIRST:LAST]`` chooses."""
    match = None if Path(text).exists() else _FILE_SLICE.fullmatch(text)
    if match is None or not Path(match["path"]).is_file():
        return Path(text), None
    first, last = (int(match[name]) if match[name] else None for name in ("first", "last"))
    return Path(match["path"]), slice(first or 0, last)


def _files_below(folder: Path) -> list[Path]:
    """Its conversation files; which others may hold rows is said, since each is lost to whoever thinks it read."""
    files: list[Path] = []
    others: list[Path] = []
    for path in sorted(tree_files(folder)):
        name = path.name.lower()
        if name in _DESCRIPTIONS or any(step.startswith(".") for step in path.relative_to(folder).parts):
            continue
        if name.removesuffix(".gz").endswith(SUFFIXES):
            files.append(path)
        elif not _BESIDE_ROWS.fullmatch(name):
            others.append(path)
    kinds = f"{', '.join(SUFFIXES)}, with or without .gz"
    if not files:
        raise ConfigError(f"{folder} holds no conversation file (looked for {kinds})", kind=Kind.INPUT_EMPTY)
    if others:
        first = {path.suffix: str(path.relative_to(folder)) for path in reversed(others)}
        names = ", ".join(sorted(first.values())[:5])
        output().warn(f"{folder}: {plural(len(others), 'file')} left out, such as {names} (rows are read of {kinds})")
    return files


def _labels(paths: list[Path], folders: dict[Path, Path]) -> dict[Path, str]:
    """The shortest tails that tell the paths apart, from their folder on: what lands in ``source`` shows no home."""
    absolute = {path: Path(os.path.abspath(path)) for path in paths}
    depth = {path: 1 + len(path.relative_to(folders[path]).parts) if path in folders else 1 for path in paths}
    while True:
        labels = {path: _text("/".join(full.parts[-depth[path] :]).lstrip("/")) for path, full in absolute.items()}
        # As text, for a name may be what the bytes of another are escaped as: nothing tells those apart.
        shared = Counter(label for label, _ in {(label, _text(str(absolute[path]))) for path, label in labels.items()})
        clashes = [path for path, label in labels.items() if shared[label] > 1]
        if not clashes:
            return labels
        for path in clashes:
            depth[path] += 1


def _text(name: str) -> str:
    """A name as Unicode: bytes of it that are none, which parquet cannot hold, are escaped."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MixSource(_Settings):
    """One source: exactly one of ``dataset``, ``file`` (or folder) and ``hub`` (``name[config]:split[slice]``).

    ``dataset`` is one of the table, by name; ``split`` chooses one split of it or of ``hub``. ``cap`` is the most rows
    taken of each split or file; ``weight`` the share of the mix relative to the other weights. ``augment`` False: no
    variants of its prompts.
    """

    dataset: str | None = None
    file: str | None = None
    hub: str | None = None
    split: str | None = None
    cap: int | None = Field(default=None, ge=1)
    weight: float | None = Field(default=None, gt=0)
    augment: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "MixSource":
        given = [name for name in ("dataset", "file", "hub") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a source is one of dataset, file or hub, found {' and '.join(given) or 'none'}")
        if self.split is not None and self.file is not None:
            raise ValueError("a file has no split")
        return self

    @property
    def text(self) -> str:
        """The source as the command line writes it."""
        name = f"{DATASET}{self.dataset}" if self.dataset is not None else self.file or self.hub
        return f"{name}:{self.split}" if self.split is not None else str(name)


class Mix(_Settings):
    """``sources`` in the order their rows come; with weights the mix has ``rows`` rows, by default as many as it can.

    Either every source has a weight or none has: what would half of everything else be?
    """

    sources: tuple[MixSource, ...] = Field(min_length=1)
    seed: int = 0
    rows: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _all_have_weights_or_none(self) -> "Mix":
        weighted = sum(source.weight is not None for source in self.sources)
        if weighted not in (0, len(self.sources)):
            raise ValueError(f"{weighted} of {len(self.sources)} sources have a weight; give all of them one, or none")
        if self.rows is not None and not weighted:
            raise ValueError("rows needs a weight for every source; a cap limits a source alone")
        return self


@dataclass(frozen=True)
class MixedSource:
    """A source whose ``rows`` are those the mix takes, none where its share is less than one. ``available`` is None
    where nothing had to be counted."""

    source: Source
    entry: MixSource
    available: int | None = None

    @property
    def is_augmented(self) -> bool:
        """Whether variants of its prompts are asked for; a dataset in many languages says no by itself."""
        if self.entry.augment is not None:
            return self.entry.augment
        return self.entry.dataset is None or not find_dataset(self.entry.dataset).is_multilingual


def read_mix(path: str | Path) -> Mix:
    """A mix from YAML, or one of those shipped by its name; ConfigError lists every problem, NotFoundError
    ``path-missing``."""
    if str(path) in mix_names() and not Path(path).is_file():
        path = _MIXES / f"{path}.yaml"
    mix, folder = load(Mix, path), Path(path).parent
    # A file is named relative to the mix, so that both can move together.
    sources = tuple(
        source if source.file is None else source.model_copy(update={"file": str(folder / source.file)})
        for source in mix.sources
    )
    return mix.model_copy(update={"sources": sources})


def mix_names() -> list[str]:
    """The mixes that are shipped."""
    return sorted(file.stem for file in _MIXES.glob("*.yaml"))


def open_inputs(inputs: Sequence[str] | Mix, dataset_root: str | Path | None = None) -> list[MixedSource]:
    """Every source of the inputs, whole, or what the mix takes of it. Raises ConfigError: ``input-missing``,
    ``input-empty``, ``mix-too-large``; and what ``open_each`` raises."""
    if isinstance(inputs, Mix):
        opened = open_each([entry.text for entry in inputs.sources], dataset_root)
        entries = list(zip(inputs.sources, opened, strict=True))
        return _weighted(inputs, entries) if inputs.sources[0].weight is not None else _capped(inputs, entries)
    if not inputs:
        raise ConfigError("no input given", kind=Kind.INPUT_EMPTY, hint="hiddenstore prepare INPUT… -o DATA --target T")
    mixed: list[MixedSource] = []
    for text, sources in zip(inputs, open_each(inputs, dataset_root), strict=True):
        name = text.removeprefix(DATASET).partition(":")[0]
        entry = MixSource(dataset=name) if text.startswith(DATASET) else MixSource(file=text)
        mixed += [MixedSource(source, entry) for source in sources]
    return mixed


def resolved(mix: Mix, sources: Sequence[MixedSource]) -> dict[str, Any]:
    """The mix with one entry for each split or file that was opened and how many rows it gives, as YAML can hold it."""
    entries = []
    for mixed in sources:
        rows = mixed.available if mixed.source.count is None else mixed.source.count
        entry = {"source": mixed.source.label, "available": mixed.available, "rows": rows}
        entries.append(entry | mixed.entry.model_dump(exclude_none=True))
    return {"seed": mix.seed, "sources": entries}


def _capped(mix: Mix, entries: Sequence[tuple[MixSource, list[Source]]]) -> list[MixedSource]:
    return [
        MixedSource(source, entry, source.count)
        if entry.cap is None
        else _sampled(source, entry, _count(source), entry.cap, mix.seed)
        for entry, sources in entries
        for source in sources
    ]


def _weighted(mix: Mix, entries: Sequence[tuple[MixSource, list[Source]]]) -> list[MixedSource]:
    available = [[_count(source) for source in sources] for _, sources in entries]
    usable = [
        [min(count, entry.cap or count) for count in counts]
        for (entry, _), counts in zip(entries, available, strict=True)
    ]
    weights = [float(entry.weight or 0) for entry, _ in entries]
    total = sum(weights)
    rows_per_weight = min(sum(counts) / weight for counts, weight in zip(usable, weights, strict=True))
    # 1e-9 because the shares of whole rows are whole numbers.
    most = int(rows_per_weight * total + 1e-9)
    if mix.rows is not None and mix.rows > most:
        entry, counts, weight = min(
            ((entry, counts, weight) for (entry, _), counts, weight in zip(entries, usable, weights, strict=True)),
            key=lambda item: sum(item[1]) / item[2],
        )
        raise ConfigError(
            f"a mix of {mix.rows:,} rows needs {mix.rows * weight / total:,.0f} of {entry.text}, "
            f"which gives {sum(counts):,}",
            kind=Kind.MIX_TOO_LARGE,
            hint=f"rows: {most}, a smaller weight for it, or no rows at all",
        )
    shares = [rows_per_weight * weight for weight in weights]
    if mix.rows is not None:
        shares = _whole([mix.rows * weight / total for weight in weights], mix.rows)
    mixed = []
    for (entry, sources), counts, limits, share in zip(entries, available, usable, shares, strict=True):
        rows = int(share + 1e-9)
        if not rows:
            raise ConfigError(f"the weight of {entry.text} leaves it without a row", kind=Kind.INPUT_EMPTY)
        # Over the splits of one source in proportion to what they have.
        bounds = [end * rows // sum(limits) for end in accumulate(limits, initial=0)]
        for source, count, (start, end) in zip(sources, counts, pairwise(bounds), strict=True):
            mixed.append(_sampled(source, entry, count, end - start, mix.seed))
    return mixed


def _whole(shares: Sequence[float], rows: int) -> list[float]:
    """Shares as whole numbers of rows that come to ``rows`` together: what is left of them goes to those that rounding
    down took most of, of equals the first; never to one that has less than a row."""
    whole = [float(int(share + 1e-9)) for share in shares]
    for index in sorted(range(len(shares)), key=lambda index: whole[index] - shares[index])[: rows - int(sum(whole))]:
        whole[index] += whole[index] > 0
    return whole


def _count(source: Source) -> int:
    return source.count if source.count is not None else sum(1 for _ in source.rows())


def _sampled(source: Source, entry: MixSource, available: int, rows: int, seed: int) -> MixedSource:
    if rows >= available:
        return MixedSource(source, entry, available)

    def rank(number: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{source.label}/{number}".encode(), digest_size=8).digest()

    sample = frozenset(sorted(range(available), key=rank)[:rows])
    size = source.size * rows // available if source.size else 0

    def sampled() -> Iterator[Row]:
        return (row for number, row in enumerate(source.rows()) if number in sample)

    return MixedSource(replace(source, rows=sampled, count=rows, size=size), entry, available)

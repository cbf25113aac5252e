"""Mixes: which rows of which sources become data, from a YAML file or from the inputs of a command line.

The rows a mix takes of a source are those whose keyed hash is smallest: the same seed takes the same rows, and a larger
cap only adds to them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from collectors.presets.opening import find_preset
from collectors.rows import Row, Source
from collectors.sources import PRESET, open_each
from hiddenstore.errors import ConfigError


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MixSource(_Settings):
    """One source: exactly one of ``preset``, ``file`` (or folder) and ``dataset`` (``name[config]:split[slice]``).

    ``split`` chooses one split of a preset or dataset. ``cap`` is the most rows taken of each split or file; ``weight``
    the share of the mix relative to the other weights. ``augment`` False: no variants of its prompts.
    """

    preset: str | None = None
    file: str | None = None
    dataset: str | None = None
    split: str | None = None
    cap: int | None = Field(default=None, ge=1)
    weight: float | None = Field(default=None, gt=0)
    augment: bool | None = None

    @model_validator(mode="after")
    def _one_place(self) -> "MixSource":
        given = [name for name in ("preset", "file", "dataset") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a source is one of preset, file or dataset, found {' and '.join(given) or 'none'}")
        if self.split is not None and self.file is not None:
            raise ValueError("a file has no split")
        return self

    @property
    def text(self) -> str:
        """The source as the command line writes it."""
        name = f"{PRESET}{self.preset}" if self.preset is not None else self.file or self.dataset
        return f"{name}:{self.split}" if self.split is not None else str(name)


class Mix(_Settings):
    """``sources`` in the order their rows come; with weights the mix has ``rows`` rows, by default as many as it can.

    Either every source has a weight or none has: what would half of everything else be?
    """

    sources: tuple[MixSource, ...] = Field(min_length=1)
    seed: int = 0
    rows: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _all_or_none(self) -> "Mix":
        weighted = sum(source.weight is not None for source in self.sources)
        if weighted not in (0, len(self.sources)):
            raise ValueError(f"{weighted} of {len(self.sources)} sources have a weight; give all of them one, or none")
        if self.rows is not None and not weighted:
            raise ValueError("rows needs a weight for every source; a cap limits a source alone")
        return self


@dataclass(frozen=True)
class MixedSource:
    """A source whose ``rows`` are those the mix takes. ``available`` is None where nothing had to be counted."""

    source: Source
    entry: MixSource
    available: int | None = None

    @property
    def is_augmented(self) -> bool:
        """Whether variants of its prompts are asked for; a preset in many languages says no by itself."""
        if self.entry.augment is not None:
            return self.entry.augment
        return self.entry.preset is None or not find_preset(self.entry.preset).is_multilingual


def read_mix(path: str | Path) -> Mix:
    """A mix from YAML; ConfigError lists every problem, NotFoundError ``config-missing``."""
    from hiddenstore.config import load

    mix = load(Mix, path)
    folder = Path(path).parent
    return mix.model_copy(update={"sources": tuple(_beside(source, folder) for source in mix.sources)})


def _beside(source: MixSource, folder: Path) -> MixSource:
    """A file is named relative to the mix, so that both can move together."""
    return source if source.file is None else source.model_copy(update={"file": str(folder / source.file)})


def open_inputs(inputs: Sequence[str] | Mix, preset_root: str | Path | None = None) -> list[MixedSource]:
    """Every source of the inputs, whole, or what the mix takes of it.

    Raises:
        ConfigError: ``input-missing`` without any input, ``mix-empty`` when weights leave a source without a row, and
            what ``open_each`` raises.
    """
    if isinstance(inputs, Mix):
        opened = open_each([entry.text for entry in inputs.sources], preset_root)
        entries = list(zip(inputs.sources, opened, strict=True))
        return _weighted(inputs, entries) if inputs.sources[0].weight is not None else _capped(inputs, entries)
    if not inputs:
        raise ConfigError("no input given", kind="input-missing", hint="hiddenstore prepare INPUT… -o DATA --target T")
    found: list[MixedSource] = []
    for text, sources in zip(inputs, open_each(inputs, preset_root), strict=True):
        name = text.removeprefix(PRESET).partition(":")[0]
        entry = MixSource(preset=name) if text.startswith(PRESET) else MixSource(file=text)
        found += [MixedSource(source, entry) for source in sources]
    return found


def _capped(mix: Mix, entries: Sequence[tuple[MixSource, list[Source]]]) -> list[MixedSource]:
    found = []
    for entry, sources in entries:
        for source in sources:
            if entry.cap is None:
                found.append(MixedSource(source, entry, source.count))
            else:
                available = _counted(source)
                found.append(_part(source, entry, available, min(entry.cap, available), mix.seed))
    return found


def _weighted(mix: Mix, entries: Sequence[tuple[MixSource, list[Source]]]) -> list[MixedSource]:
    available = [[_counted(source) for source in sources] for _, sources in entries]
    usable = [
        [min(count, entry.cap or count) for count in counts]
        for (entry, _), counts in zip(entries, available, strict=True)
    ]
    weights = [float(entry.weight or 0) for entry, _ in entries]
    total = sum(weights)
    # Rows for each unit of weight; 1e-9 because the shares of whole rows are whole numbers.
    each = min(sum(counts) / weight for counts, weight in zip(usable, weights, strict=True))
    most = int(each * total + 1e-9)
    if mix.rows is not None and mix.rows > most:
        short = min(zip(entries, usable, weights, strict=True), key=lambda item: sum(item[1]) / item[2])
        raise ConfigError(
            f"a mix of {mix.rows:,} rows needs {mix.rows * short[2] / total:,.0f} of {short[0][0].text}, "
            f"which gives {sum(short[1]):,}",
            kind="mix-too-large",
            hint=f"rows: {most}, a smaller weight for it, or no rows at all",
        )
    if mix.rows is not None:
        each = mix.rows / total
    found = []
    for (entry, sources), counts, usables, weight in zip(entries, available, usable, weights, strict=True):
        wanted = int(each * weight + 1e-9)
        if not wanted:
            raise ConfigError(f"the weight of {entry.text} leaves it without a row", kind="mix-empty")
        for source, count, take in zip(sources, counts, _shared(usables, wanted), strict=True):
            found.append(_part(source, entry, count, take, mix.seed))
    return found


def _shared(usable: Sequence[int], wanted: int) -> list[int]:
    """``wanted`` rows over the splits of one source, in proportion to what they have."""
    total, before = sum(usable), 0
    shares = []
    for count in usable:
        shares.append((before + count) * wanted // total - before * wanted // total)
        before += count
    return shares


def _counted(source: Source) -> int:
    return source.count if source.count is not None else sum(1 for _ in source.rows())


def _part(source: Source, entry: MixSource, available: int, take: int, seed: int) -> MixedSource:
    if take >= available:
        return MixedSource(source, entry, available)
    chosen = _chosen(f"{seed}/{source.label}", available, take)
    size = source.size * take // available if source.size else 0
    rows = partial(_some_rows, source, chosen)
    return MixedSource(replace(source, rows=rows, count=take, size=size), entry, available)


def _chosen(key: str, available: int, take: int) -> frozenset[int]:
    def rank(number: int) -> bytes:
        return hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()

    return frozenset(sorted(range(available), key=rank)[:take])


def _some_rows(source: Source, chosen: frozenset[int]) -> Iterator[Row]:
    for number, row in enumerate(source.rows()):
        if number in chosen:
            yield row


def resolved(mix: Mix, sources: Sequence[MixedSource]) -> dict[str, Any]:
    """The mix with one entry for each split or file that was opened and how many rows it gives, as YAML can hold it."""
    listed = [
        {"source": mixed.source.label, "available": mixed.available, "rows": mixed.source.count or mixed.available}
        | mixed.entry.model_dump(exclude_none=True)
        for mixed in sources
    ]
    return {"seed": mix.seed, "sources": listed}

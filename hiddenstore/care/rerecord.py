"""A commit record that cannot be read is made again from a segment whose content proves itself.

A sample proves itself when its tokens, mask and images have the digest that is its id, its final rows are those of its
mask and every chunk passes its crc32c. Which samples a unit has is known from the input, or from an older record; their
images from an older record alone.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from hiddenstore.commit import Commit, read_commit
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, drop_caches, twice
from hiddenstore.files.digests import Digest, TreeDigest
from hiddenstore.files.documents import read_bounded
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.file import live_indexes
from hiddenstore.records import final_row_positions, sample_id
from hiddenstore.segments import CONTAINERS
from hiddenstore.segments.segment import SegmentReader
from hiddenstore.store import Store
from schemas.capture import FinalMode
from schemas.manifest import CommitRecord, Engine, FileEntry, ImageEntry, Reject, SampleEntry, Split

UNKNOWN = Engine(name="unknown", version="unknown")
BLOCK_BYTES = 8 << 20

_SEVERAL_ENGINES = '"recaptured":['
_ID = re.compile(r'"id":"([A-Za-z0-9_-]{1,64})"')


@dataclass(frozen=True)
class Expected:
    """One sample that a unit should have."""

    id: str
    tokens: int
    split: Split
    images: tuple[ImageEntry, ...] = ()


@dataclass(frozen=True)
class UnitFacts:
    """What is known of a unit without its record; ``rejects`` are those of an older record."""

    unit: str
    input: str
    samples: tuple[Expected, ...]
    rejects: tuple[Reject, ...]
    engine: Engine


@dataclass(frozen=True)
class ProvenUnit:
    """The record that a segment proves, and indices of its samples that prove themselves."""

    record: CommitRecord
    intact: tuple[int, ...]


def damaged_text(fs: Filesystem, name: str) -> str:
    """What can be made out of a damaged record: a hint, never believed without proof."""
    return read_bounded(fs, f"{layout.COMMITS_DIR}/{name}").decode("latin-1")


def named_samples(fs: Filesystem, name: str, text: str) -> list[str]:
    """Ids of the samples that a damaged record held, as an index names them, else as its ``text`` does; not proven."""
    for file in live_indexes(fs):
        if name in file.header.records:
            with suppress(*DAMAGE):
                table = file.read(["record"])
                return table.ids.take(table.record == file.header.records.index(name))[:]
    return list(dict.fromkeys(_ID.findall(text.rpartition('"samples":[')[2])))


def unit_facts(store: Store, unit: str, text: str) -> UnitFacts | None:
    """What the inputs and older records say of a unit; None where nothing does.

    Its engine is that of an older record, else the one that all other units of the input name; ``UNKNOWN`` where there
    is none, or the damaged record's ``text`` speaks of several.
    """
    older = _older_record(store.fs, unit)
    rejects = () if older is None else older.rejects
    engine = None if older is None else older.engine
    images = {} if older is None else {entry.id: entry.images for entry in older.samples}
    if _SEVERAL_ENGINES in text or (older is not None and older.recaptured):
        engine = UNKNOWN
    for digest, registered in store.inputs().items():
        try:
            table = twice(store.fs, partial(getattr, registered, "table"), layout.input_path(digest))
        except DAMAGE:
            continue  # an older record may know the unit
        rows = [row for row in table.to_pylist() if row["unit"] == unit]
        if rows:
            named = ((row["sample_id"], row["tokens"], row["split"]) for row in rows)
            samples = tuple(Expected(name, tokens, split, images.get(name, ())) for name, tokens, split in named)
            return UnitFacts(unit, digest, samples, rejects, engine or _engine(store, digest))
    if older is None:
        return None
    samples = tuple(Expected(entry.id, entry.tokens, entry.split, entry.images) for entry in older.samples)
    return UnitFacts(unit, older.input, samples, rejects, engine or UNKNOWN)


def proven_unit(store: Store, facts: UnitFacts, text: str) -> ProvenUnit | None:
    """The segment of a unit that proves most samples; of equals the one that the damaged record's ``text`` names."""
    best: ProvenUnit | None = None
    for segment in sorted(_segments(store.fs, facts.unit), key=lambda segment: segment not in text):
        files = tuple(_files(store.fs, segment))
        for samples in _guesses(store, facts, segment, files, text):
            proven = _proven(store, facts, segment, files, samples)
            if proven is not None and len(proven.intact) > len(best.intact if best else ()):
                best = proven
        if best is not None and len(best.intact) == len(best.record.samples):
            break
    return best


def _engine(store: Store, digest: str) -> Engine:
    engines = [record.engine for record in store.commits() if record.input == digest]
    return engines[0] if engines and all(engine == engines[0] for engine in engines) else UNKNOWN


def _older_record(fs: Filesystem, unit: str) -> CommitRecord | None:
    """The record of the highest revision that can be read."""
    readable: dict[int, Commit] = {}
    for name in fs.list(layout.COMMITS_DIR):
        parsed = layout.parse_commit(name)
        if parsed is not None and parsed.unit == unit:
            try:
                readable[parsed.revision] = read_commit(fs, name)
            except DAMAGE:
                continue
    return readable[max(readable)].record if readable else None


def _segments(fs: Filesystem, unit: str) -> list[str]:
    names = fs.list(layout.SEGMENTS_DIR)
    return [
        f"{layout.SEGMENTS_DIR}/{name}"
        for name in names
        if unit in {claim.unit for claim in layout.segment_claims(name)}
    ]


def _guesses(
    store: Store, facts: UnitFacts, segment: str, files: tuple[FileEntry, ...], text: str
) -> Iterator[tuple[Expected, ...]]:
    """Which samples a segment may hold: those that its tokens spell, else those that the damaged record's text does
    not list among its rejects."""
    spelt = _spelt(store, facts, segment, files)
    if spelt:
        yield spelt
        return
    _, _, listed = text.partition('"rejects":[')
    rejected = {*_ID.findall(listed.partition('"samples":[')[0]), *(reject.id for reject in facts.rejects)}
    stored = tuple(sample for sample in facts.samples if sample.id not in rejected)
    if stored:
        yield stored


def _spelt(store: Store, facts: UnitFacts, segment: str, files: tuple[FileEntry, ...]) -> tuple[Expected, ...]:
    """The samples whose tokens and masks lie end to end in a segment; none where others do, or it cannot be read."""
    try:
        lengths = CONTAINERS[store.manifest.container].token_runs(store.fs, segment)
        runs = [Expected(f"run-{number}", length, "train") for number, length in enumerate(lengths)]
        entries = _entries(runs, [None] * len(runs), store.capture.final)
        reader = store.open_unit(_record(facts, segment, files, entries))
        tokens, masks = zip(*(reader.tokens(index, is_counted=False) for index in range(len(runs))), strict=True)
    except (*DAMAGE, ValueError):
        return ()
    input_ids, mask = np.concatenate(tokens), np.concatenate(masks)
    stored, start = [], 0
    for sample in facts.samples:
        rows = slice(start, start + sample.tokens)
        if sample_id(input_ids[rows], mask[rows], sample.images) == sample.id:
            stored.append(sample)
            start = rows.stop
    return tuple(stored) if start == len(input_ids) else ()


def _files(fs: Filesystem, folder: str, below: str = "") -> Iterator[FileEntry]:
    for name in fs.list(f"{folder}/{below}".rstrip("/")):
        path = f"{below}{name}"
        size = fs.size(f"{folder}/{path}")
        if size is None:
            yield from _files(fs, folder, f"{path}/")
            continue
        # As writers name them: documents by sha256, arrays and tars by their tree.
        is_document = path.endswith(".json")
        digest: Digest = hashlib.sha256() if is_document else TreeDigest()
        for offset in range(0, size, BLOCK_BYTES):
            digest.update(fs.read_range(f"{folder}/{path}", offset, min(BLOCK_BYTES, size - offset)))
        yield FileEntry(path=path, size=size, **{"sha256" if is_document else "tree": digest.hexdigest()})


def _proven(
    store: Store, facts: UnitFacts, segment: str, files: tuple[FileEntry, ...], samples: Sequence[Expected]
) -> ProvenUnit | None:
    first = _look(store, facts, segment, files, samples)
    if first is not None and len(first.intact) == len(samples):
        return first
    drop_caches(store.fs, [f"{segment}/{file.path}" for file in files])
    return _look(store, facts, segment, files, samples)


def _look(
    store: Store, facts: UnitFacts, segment: str, files: tuple[FileEntry, ...], samples: Sequence[Expected]
) -> ProvenUnit | None:
    """Tokens first: they give the masks, and those the final rows that everything else is read by."""

    final = store.capture.final
    entries = _entries(samples, [None] * len(samples), final)
    reader = store.open_unit(_record(facts, segment, files, entries))
    tokens = [_tokens(reader, index) for index in range(len(samples))]
    # What does not prove itself still says where the final rows of the next begin.
    masks = [None if pair is None else pair[1] for pair in tokens]
    proven = _record(facts, segment, files, _entries(samples, masks, final))
    reader = store.open_unit(proven)
    intact = [
        index
        for index, (sample, pair) in enumerate(zip(samples, tokens, strict=True))
        if pair is not None and sample_id(*pair, sample.images) == sample.id and _reads(reader, index, pair[1])
    ]
    return ProvenUnit(proven, tuple(intact)) if intact else None


def _record(
    facts: UnitFacts, segment: str, files: tuple[FileEntry, ...], entries: tuple[SampleEntry, ...]
) -> CommitRecord:
    return CommitRecord(
        unit=facts.unit, input=facts.input, segment=segment, engine=facts.engine, files=files, samples=entries
    )


def _entries(
    samples: Sequence[Expected], masks: Sequence[np.ndarray | None], final: FinalMode
) -> tuple[SampleEntry, ...]:
    entries: list[SampleEntry] = []
    start = final_start = 0
    for sample, mask in zip(samples, masks, strict=True):
        entry = SampleEntry(
            id=sample.id,
            split=sample.split,
            start=start,
            tokens=sample.tokens,
            supervised=0 if mask is None else int(mask.sum()),
            final_start=final_start,
            final_rows=0 if mask is None else len(final_row_positions(mask, final)),
            images=sample.images,
        )
        entries.append(entry)
        start, final_start = start + entry.tokens, final_start + entry.final_rows
    return tuple(entries)


def _tokens(reader: SegmentReader, index: int) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        return reader.tokens(index, is_counted=False)
    except DAMAGE:
        return None


def _reads(reader: SegmentReader, index: int, mask: np.ndarray) -> bool:
    try:
        reader.sample(index)
        *_, final_rows = reader.read_encoded(index)
    except DAMAGE:
        return False
    return np.array_equal(final_rows, final_row_positions(mask, reader.capture.final))

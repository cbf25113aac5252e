"""Does stock software read what our reader reads: zarr-python, or webdataset with numpy and numcodecs.

Compared as stored, array by array: codes, small arrays of the codecs, tokens, mask, turns, positions of final rows.
"""

import io
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, raise_refusal
from hiddenstore.segments.base import AUX, FINAL_ROWS, INPUT_IDS, LOSS_MASK, SPANS, FieldGroup, groups_of
from hiddenstore.segments.rows import ends_of
from hiddenstore.segments.segment import SegmentReader
from hiddenstore.segments.tar_members import TAR, UNIT_PREFIX
from hiddenstore.segments.zarr_shared import SHARED_ROWS
from hiddenstore.store import Store
from hiddenstore.verify.report import Advance, Finding, Report
from schemas.manifest import CommitRecord

Arrays = Mapping[str, np.ndarray]

_NUMPY = ".npy"


def check_stock(store: Store, report: Report, advance: Advance) -> None:
    """Add a finding ``stock-differs`` for every array of a unit that stock software reads otherwise, or not at all.

    ``advance`` is told each sample compared; ``report.stock_samples`` counts them.
    """
    stock = _STOCK.get(store.manifest.container)
    if stock is None:
        detail = f"no stock software is known that reads the container {store.manifest.container!r}"
        report.notes.append(Finding("stock-undecided", layout.STORE_JSON, (), detail))
        return
    for record in store.commits():
        if not record.files:
            continue
        differing: dict[tuple[str, str], list[str]] = defaultdict(list)
        reader, samples = store.open_unit(record), stock(store, record)
        for index, entry in enumerate(record.samples):
            try:
                name, their_arrays = next(samples)
            except Exception as error:  # noqa: BLE001 - whatever stock software raises is what is to be found
                raise_refusal(error, f"{store.path}/{record.segment}")
                rest = tuple(sample.id for sample in record.samples[index:])
                reason = f"{type(error).__name__} {error}".rstrip()
                detail = f"stock software cannot read {len(rest)} of {len(record.samples)} samples: {reason}"
                report.findings.append(Finding("stock-differs", record.segment, rest, detail))
                break
            try:
                our_arrays = _our_arrays(reader, index)
            except DAMAGE as error:
                report.findings.append(Finding.of(error, record.segment, (entry.id,)))
                continue
            if name != entry.id:
                differing["", f"reads {name} where sample {entry.id} is due"].append(entry.id)
            for array, what in _differences(our_arrays, their_arrays):
                differing[array, what].append(entry.id)
            report.stock_samples += 1
            advance(1)
        else:
            report.findings += _further(store, record, samples)
        for (array, what), names in differing.items():
            path = f"{record.segment}/{array}".rstrip("/")
            report.findings.append(Finding("stock-differs", path, tuple(names), f"stock software {what}"))


def _further(store: Store, record: CommitRecord, samples: Iterator[tuple[str, Arrays]]) -> Iterator[Finding]:
    """Samples that stock software reads behind those of a unit."""
    try:
        for name, _ in samples:
            detail = f"stock software reads sample {name}, which is not of this unit"
            yield Finding("stock-differs", record.segment, (), detail)
    except Exception as error:  # noqa: BLE001 - as above
        raise_refusal(error, f"{store.path}/{record.segment}")
        detail = f"stock software cannot read what lies behind the samples: {type(error).__name__} {error}".rstrip()
        yield Finding("stock-differs", record.segment, (), detail)


def _differences(ours: Arrays, theirs: Arrays) -> Iterator[tuple[str, str]]:
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield name, "has no such array" if name in ours else "has an array that the store does not"
    for name in sorted(ours.keys() & theirs.keys()):
        our, their = ours[name], theirs[name]
        if (our.dtype, our.shape) != (their.dtype, their.shape):
            yield name, f"reads {their.dtype} {list(their.shape)}, not {our.dtype} {list(our.shape)}"
        elif not np.array_equal(our, their):
            yield name, "reads other values"


def _our_arrays(reader: SegmentReader, index: int) -> Arrays:
    """One sample as our reader gives it."""
    sample, (aux, final, final_rows) = reader.sample(index), reader.read_encoded(index)
    arrays = {INPUT_IDS: sample.input_ids, LOSS_MASK: sample.loss_mask, SPANS: sample.spans}
    if reader.capture.final != "none":
        arrays[FINAL_ROWS] = final_rows
    for group, encoded in zip(groups_of(reader.capture), (aux, final), strict=True):
        fine = group.fine_rows(sample.loss_mask, [sample.tokens])
        stored = (next(group.stored([codes.numpy()], fine)) for codes in encoded.codes)
        arrays |= dict(zip(group.fields, stored, strict=False))
        arrays |= {f"{group.name}_{name}": values for name, values in encoded.small.items()}
    return arrays


def _zarr_samples(store: Store, record: CommitRecord) -> Iterator[tuple[str, Arrays]]:
    """The samples of a unit as slices of the arrays that zarr-python reads."""
    import zarr

    with store.fs.local_copy(record.segment) as folder:
        arrays = {name: np.asarray(array[...]) for name, array in zarr.open_group(folder, mode="r").arrays()}
    lengths = [entry.tokens for entry in record.samples]
    places = _places(record, arrays.pop(SHARED_ROWS, None))
    for number, entry in enumerate(record.samples):
        tokens = slice(entry.start, entry.start + entry.tokens)
        sample = {**arrays, INPUT_IDS: arrays[INPUT_IDS][tokens], LOSS_MASK: arrays[LOSS_MASK][tokens]}
        sample[SPANS] = arrays[SPANS][arrays[SPANS][:, 0] == number, 1:]
        if store.capture.final != "none":
            sample[FINAL_ROWS] = arrays[FINAL_ROWS][entry.final_start : entry.final_start + entry.final_rows]
        for group in groups_of(store.capture):
            if group.fields:
                fine = group.fine_rows(arrays[LOSS_MASK], lengths)
                rows = places[entry.id] if group.name == AUX else np.array(group.rows_of(entry), dtype=np.int64)
                standing = None if fine is None else fine[np.unique(np.concatenate(list(places.values())), True)[1]]
                sample |= _zarr_group(group, arrays, rows, standing)
        yield entry.id, sample


def _places(record: CommitRecord, shared: np.ndarray | None) -> dict[str, np.ndarray]:
    """The row of the aux arrays that each token of a sample has, int64 [t], restated from docs/format.md."""
    places: dict[str, np.ndarray] = {}
    free = 0
    for number, entry in enumerate(record.samples):
        owner, rows = (0, 0) if shared is None else shared[number].tolist()
        numbers = np.arange(free, free + entry.tokens - rows)
        places[entry.id] = np.concatenate([places[record.samples[owner].id][:rows], numbers]) if rows else numbers
        free += len(numbers)
    return places


def _zarr_group(group: FieldGroup, arrays: Arrays, rows: np.ndarray, fine: np.ndarray | None) -> dict[str, np.ndarray]:
    """Codes and small arrays of some rows, ``fine``: the classes of all of them; raw rows are counted in the sample."""
    if group.masked is None or fine is None:
        part = {name: arrays[name][rows] for name in group.fields}
    else:
        ends = ends_of(group.masked.pieces(fine))
        pieces = np.concatenate([np.arange(ends[row], ends[row + 1]) for row in rows])
        part = {name: arrays[name][pieces] for name in group.fields}
    for name, spec in group.codec.small.items():
        array = arrays[f"{group.name}_{name}"]
        if "T" in spec.axes:
            array = np.take(array, rows, axis=spec.axes.index("T"))
        part[f"{group.name}_{name}"] = array
    if RAW_INDEX in group.codec.small:
        index = arrays[f"{group.name}_{RAW_INDEX}"]
        inside = np.isin(index[:, 1], rows)
        part[f"{group.name}_{RAW_INDEX}"] = index[inside].copy()
        part[f"{group.name}_{RAW_INDEX}"][:, 1] = np.searchsorted(rows, index[inside][:, 1])
        part[f"{group.name}_{RAW_ROWS}"] = arrays[f"{group.name}_{RAW_ROWS}"][inside]
    return part


def _tar_samples(store: Store, record: CommitRecord) -> Iterator[tuple[str, Arrays]]:
    """The samples of a unit as webdataset iterates them, with the arrays that they share."""
    import webdataset

    width, shared = store.capture.target.hidden_size, {}
    with store.fs.local_copy(f"{record.segment}/{TAR}") as path:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.startswith(UNIT_PREFIX) and member.name.endswith(_NUMPY):
                    data = tar.extractfile(member)
                    assert data is not None
                    shared[member.name.removeprefix(UNIT_PREFIX).removesuffix(_NUMPY)] = _array(data.read())
        for sample in webdataset.WebDataset([str(path)], shardshuffle=False):
            fields: dict[str, Any] = {name: data for name, data in sample.items() if not name.startswith("__")}
            arrays = {
                name.rpartition(".")[0]: _array(data) if name.endswith(_NUMPY) else _unblosc(data, width)
                for name, data in fields.items()
            }
            yield sample["__key__"], {**shared, **arrays}


_STOCK: dict[str, Callable[[Store, CommitRecord], Iterator[tuple[str, Arrays]]]] = {
    "zarr": _zarr_samples,
    "zarr-shared": _zarr_samples,
    "webdataset": _tar_samples,
}


def _array(data: bytes) -> np.ndarray:
    array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _unblosc(data: bytes, width: int) -> np.ndarray:
    """Blosc buffers end to end, each with its length in bytes 12 to 15, as uint16 [rows, width]."""
    from numcodecs import blosc

    decoded = []
    while data:
        size = int.from_bytes(data[12:16], "little")
        decoded.append(blosc.decompress(data[:size]))
        data = data[size:] if size else b""
    return np.frombuffer(b"".join(decoded), dtype="<u2").reshape(-1, width)

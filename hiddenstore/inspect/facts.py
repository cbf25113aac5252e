"""What a store says about itself: the documents behind ``info``, ``ls`` and ``stats``. Metadata only, no torch.

Every function returns plain values, ready for JSON: counts, bytes, and rms = sqrt(mean over channels of h²).
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE
from hiddenstore.files.documents import load
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import saved_snapshots
from hiddenstore.index.table import SPLITS, SampleTable
from hiddenstore.store import Store
from hiddenstore.targets.gguf import RECORD_FILE, forms_text
from schemas.advice import Advice
from schemas.capture import FINAL, CaptureSpec
from schemas.layers import field_name
from schemas.manifest import CommitRecord, LayerStats

BYTES_PER_VALUE = 2
CONFIG_FILE = "config.json"
HISTOGRAM_BINS = 12
_NAMED_ROWS = {"final_rows": "final_rows", "samples.tar": "tar of all fields", "index.json": "index of the tar"}
_OTHER_ROWS = ("scales", "raw rows", "tokens and index", *_NAMED_ROWS.values())
_QUANTILES = (0.5, 0.95)


def info(store: "Store") -> dict[str, Any]:
    """What the store holds, as one document; the members of ``hiddenstore.info/1``."""
    table, capture = store.catalog.table, store.capture
    tokens = int(table.tokens.sum(dtype=np.int64))
    rejects: Counter[str] = Counter()
    units: Counter[str] = Counter()
    segments = with_images = 0
    for record in store.commits():
        with_images += sum(bool(entry.images) for entry in record.samples) if capture.images else 0
        rejects.update(reject.reason for reject in record.rejects)
        units.update(_engines(record))
        segments += bool(record.files)
    engines = [{**json.loads(engine), "units": count} for engine, count in units.most_common()]
    return {
        "path": store.path,
        "format": store.manifest.format,
        "container": store.manifest.container,
        "samples": len(table),
        "tokens": tokens,
        "supervised_tokens": int(table.supervised.sum(dtype=np.int64)),
        "samples_with_images": with_images,
        "splits": {split: len(rows) for split, rows in _splits(table)},
        "lengths": length_summary(table.tokens),
        "units": len(store.catalog),
        "segments": segments,
        "inputs": sum(layout.parse_input(name) is not None for name in store.fs.list(layout.INPUTS_DIR)),
        "snapshots": saved_snapshots(store.fs),
        "duplicates": store.duplicates,
        "damaged_commits": [error.message for error in store.damaged],
        **stored_bytes(store),
        "bytes_raw": tokens * raw_bytes_per_token(capture),
        "recipe": store.manifest.recipe,
        "codecs": capture.codecs.model_dump(),
        "states": capture.states or dict.fromkeys(capture.fields, "stored"),
        "layers": list(capture.aux_layers),
        "final": capture.final,
        "final_norm": capture.final_norm,
        "hidden_size": capture.target.hidden_size,
        "state_dtype": capture.state_dtype,
        "target": capture.target.model_dump(),
        "quantisation": quantisation(store),
        "engine": engines[0] if engines else None,
        "engines": engines,
        "rejects": sum(rejects.values()),
        "rejects_by_reason": dict(rejects.most_common()),
        "advice": _advice(store),
    }


def quantisation(store: "Store") -> str | None:
    """How the target's weights were quantised, as its files under ``target/`` say; None where they say nothing, or
    cannot be read, which verify names."""
    names = {file.path for file in store.manifest.target_files}
    try:
        if RECORD_FILE in names:
            return f"GGUF of {forms_text(json.loads(store.target_file(RECORD_FILE))['tensors'])}"
        config = json.loads(store.target_file(CONFIG_FILE)) if CONFIG_FILE in names else {}
        said = config.get("quantization_config") or {}
        return " ".join(str(said[key]) for key in ("quant_method", "quant_algo") if said.get(key)) or None
    except (*DAMAGE, ValueError, TypeError, KeyError, AttributeError):
        return None


def stored_bytes(store: "Store") -> dict[str, int]:
    """``bytes_stored`` of committed segments, ``bytes_target`` of the target's files, ``bytes_calibration`` of all in
    that folder, and ``bytes_on_disk``: these and the inputs; records and indexes, a few bytes a sample, are not asked
    for their size."""
    inputs = (f"{layout.INPUTS_DIR}/{name}" for name in store.fs.list(layout.INPUTS_DIR))
    calibration = (f"{layout.CALIBRATION_DIR}/{name}" for name in store.fs.list(layout.CALIBRATION_DIR))
    sizes = {
        "bytes_stored": store.totals["bytes_stored"],
        "bytes_target": sum(file.size for file in store.manifest.target_files),
        "bytes_calibration": sum(store.fs.size(path) or 0 for path in calibration),
    }
    return sizes | {"bytes_on_disk": sum(sizes.values()) + sum(store.fs.size(path) or 0 for path in inputs)}


def _advice(store: "Store") -> dict[str, Any] | None:
    """The latest advice without what only a measuring person wants; None where ``advise`` never ran."""
    try:
        advice = read_advice(store.fs)
    except DAMAGE:
        return None  # verify names it; the rest of the store is as good as before
    if advice is None:
        return None
    rows = [
        row.model_dump(include={"recipe", "bytes_per_token", "kl", "overlap", "channel_error", "chosen"})
        for row in advice.rows
    ]
    return {"chosen": advice.chosen, "rows": rows, "paired": [row.model_dump(mode="json") for row in advice.paired]}


def advice_numbers(fs: Filesystem) -> list[int]:
    """The numbers of the advice a store holds, ascending."""
    return sorted(number for name in fs.list(layout.ADVICE_DIR) if (number := layout.parse_advice(name)) is not None)


def read_advice(fs: Filesystem, number: int | None = None) -> Advice | None:
    """One advice, the latest by default; None when a store has none; CorruptionError when it is damaged."""
    if number is None:
        number = max(advice_numbers(fs), default=0)
    return None if number == 0 else load(fs, layout.advice_path(number), Advice)


def raw_bytes_per_token(capture: CaptureSpec) -> int:
    """Bytes of one token as plain bf16: every captured layer, and the final hidden when any of it is held."""
    arrays = len(capture.aux_layers) + (capture.final != "none")
    return arrays * capture.target.hidden_size * BYTES_PER_VALUE


def _splits(table: SampleTable) -> Iterator[tuple[str, np.ndarray]]:
    """Every split that has samples, and their rows."""
    for number, split in enumerate(SPLITS):
        if len(rows := np.flatnonzero(table.split == number)):
            yield split, rows


def length_summary(lengths: np.ndarray) -> dict[str, Any]:
    """Quantiles of sample lengths in tokens, and a histogram of ``HISTOGRAM_BINS`` equal bins from 0 to the longest."""
    if not len(lengths):
        return {"min": 0, "p50": 0, "p95": 0, "max": 0, "histogram": {"edges": [], "counts": []}}
    ordered = np.sort(lengths)
    p50, p95 = (int(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) for q in _QUANTILES)
    longest = int(ordered[-1])
    width = max(1, -(-longest // HISTOGRAM_BINS))
    bins = min(HISTOGRAM_BINS, -(-longest // width))
    counts = np.bincount(np.minimum(bins - 1, (ordered - 1) // width), minlength=bins)
    histogram = {"edges": [width * i for i in range(bins + 1)], "counts": counts.tolist()}
    return {"min": int(ordered[0]), "p50": p50, "p95": p95, "max": longest, "histogram": histogram}


def stats(store: "Store") -> dict[str, Any]:
    """Counts and lengths per split, norms per layer over all commits, bytes per field, rejects."""
    table, sizes, rejects = store.catalog.table, Counter[str](), Counter[str]()
    stored = [*map(field_name, store.capture.stored_layers), *([FINAL] if store.capture.stores_final else [])]
    layers: dict[str, list[LayerStats]] = {field: [] for field in stored}
    for record in store.commits():
        sizes.update(_sizes(record, store.capture.fields))
        rejects.update(reject.reason for reject in record.rejects)
        for field in layers.keys() & record.stats.keys():
            layers[field].append(record.stats[field])
    return {
        "path": store.path,
        "samples": len(table),
        "splits": {split: _split_summary(table, rows) for split, rows in _splits(table)},
        "lengths": length_summary(table.tokens),
        "supervised": length_summary(table.supervised[table.supervised > 0]),
        "layers": [{"field": field, **_merged(units)} for field, units in layers.items()],
        "bytes": {name: sizes[name] for name in (*store.capture.fields, *_OTHER_ROWS) if name in sizes},
        "rejects": dict(rejects.most_common()),
    }


def _engines(record: CommitRecord) -> Iterator[str]:
    return (engine.model_dump_json() for engine in (record.engine, *(part.engine for part in record.recaptured)))


def _split_summary(table: SampleTable, rows: np.ndarray) -> dict[str, Any]:
    tokens = int(table.tokens[rows].sum(dtype=np.int64))
    supervised = int(table.supervised[rows].sum(dtype=np.int64))
    return {
        "samples": len(rows),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens if tokens else 0.0,
        "longest": int(table.tokens[rows].max()),
    }


def _merged(stats: Sequence[LayerStats]) -> dict[str, Any]:
    """Statistics of several units as one; the median is the median of the units' medians, weighted by their rows."""
    rows = sum(unit.rows for unit in stats)
    if rows == 0:
        return {"rows": 0, "rms_mean": None, "rms_median": None, "rms_max": None, "abs_max": None, "raw_rows": 0}
    by_median = sorted((unit.rms_median, unit.rows) for unit in stats)
    half_way = bisect_left(list(accumulate(count for _, count in by_median)), rows / 2)
    return {
        "rows": rows,
        "rms_mean": sum(unit.rms_mean * unit.rows for unit in stats) / rows,
        "rms_median": by_median[half_way][0],
        "rms_max": max(unit.rms_max for unit in stats),
        "abs_max": max(unit.abs_max for unit in stats),
        "raw_rows": sum(unit.raw_rows for unit in stats),
    }


def _sizes(record: CommitRecord, fields: Sequence[str]) -> Counter[str]:
    """Bytes on disk by field: the layer or final array, what the codecs keep beside them, the places of the final rows,
    tokens and the rest. A tar holds all of it: how it divides, only its index says, which is as long as the samples are
    many."""
    sizes = Counter[str]()
    for file in record.files:
        name = file.path.split("/", 1)[0]
        sizes[name if name in fields else _row_of(name)] += file.size
    return sizes


def _row_of(name: str) -> str:
    """Where the bytes of a file or array that is no field are counted."""
    if name in _NAMED_ROWS:
        return _NAMED_ROWS[name]
    if not name.startswith(("aux_", "final_")):
        return "tokens and index"
    return "raw rows" if name.endswith(("_raw_index", "_raw_rows")) else "scales"

"""Writing one unit as an immutable Zarr v3 group: one code array per captured field, small arrays beside them.

Samples lie end to end along the token axis. ``encode_records`` does the arithmetic, on the device the states are on;
``write_encoded`` the files; ``write_segment`` both. Equal records give equal bytes.

Shapes: L aux layers, T tokens of the unit, t tokens of one sample, R final rows of the unit, r of one sample, D width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import Codec, Encoded, get_codec
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS
from hiddenstore.fs import Filesystem
from hiddenstore.records import Record
from hiddenstore.zarr_write import ArraySpec, write_array, write_group
from schemas import FINAL, FORMAT_VERSION, CaptureSpec, FileEntry, LayerStats, SampleEntry

AUX = "aux"
INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
SPANS = "spans"
FINAL_ROWS = "final_rows"

_RAW_CHUNK_BYTES = 1 << 14
_STATS_ELEMENTS = 1 << 18
_AXES = {"L": "layer", "T": "token", "D": "channel", "N": "raw_row", "2": "layer_and_row"}


@dataclass(frozen=True)
class SegmentWritten:
    """What the commit record of a unit says about its segment; file paths are relative to the segment folder."""

    files: tuple[FileEntry, ...]
    samples: tuple[SampleEntry, ...]
    stats: dict[str, LayerStats]


@dataclass(frozen=True, eq=False)
class EncodedUnit:
    """A unit ready to be written.

    input_ids int32 [T]; loss_mask uint8 [T]; spans int32 [n, 4] of (sample, role, start, end), start and end counted in
    the sample; final_rows int32 [R], token positions counted in the sample.
    """

    unit: str
    samples: tuple[SampleEntry, ...]
    input_ids: np.ndarray
    loss_mask: np.ndarray
    spans: np.ndarray
    final_rows: np.ndarray
    aux: Encoded
    final: Encoded
    stats: dict[str, LayerStats]


def write_segment(
    fs: Filesystem, path: str, unit: str, records: Sequence[Record], capture: CaptureSpec
) -> SegmentWritten:
    """Encode and write one unit under the folder ``path``; files and folders are durable when it returns."""
    return write_encoded(fs, path, encode_records(unit, records, capture), capture)


def encode_records(unit: str, records: Sequence[Record], capture: CaptureSpec) -> EncodedUnit:
    """Stack the records of one unit and run the store's codecs over them, layer by layer.

    Raises:
        ValueError: a record's shapes or types are not those of the capture.
    """
    for record in records:
        _check_record(record, capture)
    stats: dict[str, LayerStats] = {}
    width = capture.target.hidden_size
    layers = ([record.aux[k] for record in records] for k in range(len(capture.aux_layers)))
    aux = _encode(get_codec(capture.codecs.aux), capture.aux_fields, layers, width, stats)
    final = Encoded([])
    if capture.final != "none":
        rows = [record.final for record in records]
        final = _encode(get_codec(capture.codecs.final), [FINAL], [rows], width, stats)
    return EncodedUnit(
        unit=unit,
        samples=tuple(_sample_entries(records)),
        input_ids=_ends_meet([record.sample.input_ids for record in records], "int32", (0,)),
        loss_mask=_ends_meet([record.sample.loss_mask for record in records], "uint8", (0,)),
        spans=_ends_meet([_numbered(i, record.sample.spans) for i, record in enumerate(records)], "int32", (0, 4)),
        final_rows=_ends_meet([record.final_rows for record in records], "int32", (0,)),
        aux=aux,
        final=final,
        stats=stats,
    )


def write_encoded(fs: Filesystem, path: str, encoded: EncodedUnit, capture: CaptureSpec) -> SegmentWritten:
    """Write an encoded unit under the new folder ``path``; files and folders are durable when it returns."""
    files = [write_group(fs, path, _group_attributes(encoded.unit, capture))]
    groups = [(AUX, capture.aux_fields, encoded.aux, get_codec(capture.codecs.aux))]
    if capture.final != "none":
        groups.append((FINAL, [FINAL], encoded.final, get_codec(capture.codecs.final)))
    plain = [
        (INPUT_IDS, ("token",), encoded.input_ids),
        (LOSS_MASK, ("token",), encoded.loss_mask),
        (SPANS, ("span", "sample_role_start_end"), encoded.spans),
    ]
    if capture.final != "none":
        plain.append((FINAL_ROWS, ("final_row",), encoded.final_rows))
    for name, dimensions, values in plain:
        files += write_array(fs, path, name, ArraySpec(values.shape, str(values.dtype), dimensions), values)
    for group, fields, part, codec in groups:
        for name, codes in zip(fields, part.codes, strict=True):
            values = codes.cpu().numpy()
            files += write_array(fs, path, name, _code_spec(codec, values.shape, name), values)
        for name, values in part.small.items():
            files += write_array(fs, path, f"{group}_{name}", _small_spec(codec, name, values.shape), values)
    fs.sync_folder(path)
    return SegmentWritten(tuple(sorted(files, key=lambda file: file.path)), encoded.samples, encoded.stats)


def row_norms(states: Tensor) -> tuple[np.ndarray, float]:
    """Root mean square of each finite row of bfloat16 [T, D], float64, and the largest |value| in those rows."""
    tokens, width = states.shape
    step = max(1, _STATS_ELEMENTS // max(1, width)) if states.device.type == "cpu" else max(1, tokens)
    norms, peaks = torch.empty(tokens, device=states.device), torch.empty(tokens, device=states.device)
    for start in range(0, tokens, step):
        block = states[start : start + step].float()
        torch.linalg.vector_norm(block, dim=1, out=norms[start : start + step])
        torch.amax(block.abs_(), dim=1, out=peaks[start : start + step])
    finite = torch.isfinite(peaks)
    for row in torch.nonzero(finite & ~torch.isfinite(norms)).flatten().tolist():
        # The squares of float32 overflow above 1.8e19; the norm itself does too above 3.4e38.
        norms[row] = min(float(states[row].double().norm()), float(np.finfo(np.float32).max))
    rms = norms[finite].cpu().numpy().astype(np.float64) / width**0.5
    return rms, float(peaks[finite].max()) if len(rms) else 0.0


def _encode(
    codec: Codec, fields: Sequence[str], layers: Iterable[Sequence[Tensor]], width: int, stats: dict[str, LayerStats]
) -> Encoded:
    """Encode layers given as the parts of their samples, one layer in memory at a time, and measure them."""
    measured: list[tuple[int, np.ndarray, float]] = []

    def watched() -> Iterator[Tensor]:
        reused: Tensor | None = None
        for parts in layers:
            layer = _joined(parts, width, reused)
            # The codes of a verbatim codec are the layer's own memory; the others are done with it.
            reused = layer if codec.small else None
            measured.append((layer.shape[0], *row_norms(layer)))
            yield layer

    encoded = codec.encode(watched())
    raw = encoded.small[RAW_INDEX][:, 0] if RAW_INDEX in encoded.small else np.zeros(0, dtype=np.int32)
    for index, (name, (rows, rms, peak)) in enumerate(zip(fields, measured, strict=True)):
        held = len(rms) > 0
        stats[name] = LayerStats(
            rows=rows,
            rms_mean=float(rms.mean()) if held else 0.0,
            rms_median=float(np.median(rms)) if held else 0.0,
            rms_max=float(rms.max()) if held else 0.0,
            abs_max=peak,
            raw_rows=int((raw == index).sum()),
        )
    return encoded


def _check_record(record: Record, capture: CaptureSpec) -> None:
    sample, width = record.sample, capture.target.hidden_size
    rows = len(record.final_rows)
    wanted = {
        "loss_mask": (sample.loss_mask.shape, (sample.tokens,)),
        "spans": (sample.spans.shape, (len(sample.spans), 3)),
        "aux": (tuple(record.aux.shape), (len(capture.aux_layers), sample.tokens, width)),
        "final": (tuple(record.final.shape), (rows, width)),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ValueError(f"sample {sample.id}: {name} has shape {list(found)}, expected {list(expected)}")
    for name, states in (("aux", record.aux), ("final", record.final)):
        if states.dtype != torch.bfloat16:
            raise ValueError(f"sample {sample.id}: {name} is {states.dtype}, expected torch.bfloat16")
    held = record.final_rows
    if rows and (capture.final == "none" or held[0] < 0 or held[-1] >= sample.tokens or (np.diff(held) <= 0).any()):
        raise ValueError(f"sample {sample.id}: final_rows are not ascending positions of {sample.tokens} tokens")


def _sample_entries(records: Sequence[Record]) -> Iterator[SampleEntry]:
    start = final_start = 0
    for record in records:
        sample = record.sample
        yield SampleEntry(
            id=sample.id,
            split="validation" if sample.split == "validation" else "train",
            start=start,
            tokens=sample.tokens,
            supervised=sample.supervised,
            final_start=final_start,
            final_rows=len(record.final_rows),
        )
        start += sample.tokens
        final_start += len(record.final_rows)


def _joined(parts: Sequence[Tensor], width: int, out: Tensor | None) -> Tensor:
    """[T, D] of parts [t, D]; fresh memory of this size costs as much as the copy, so ``out`` is reused."""
    if not parts:
        return torch.empty((0, width), dtype=torch.bfloat16)
    return torch.cat(list(parts), out=out)


def _ends_meet(parts: Sequence[np.ndarray], dtype: str, empty: tuple[int, ...]) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(empty, dtype=dtype)


def _numbered(index: int, spans: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full((len(spans), 1), index, dtype=np.int32), spans], axis=1)


def _group_attributes(unit: str, capture: CaptureSpec) -> dict[str, object]:
    return {
        "format": FORMAT_VERSION,
        "unit": unit,
        "layers": list(capture.aux_layers),
        "final": capture.final,
        "final_norm": capture.final_norm,
        "hs_dtype": capture.state_dtype,
        "codecs": {"aux": capture.codecs.aux, "final": capture.codecs.final},
        "formulas": {
            "aux": get_codec(capture.codecs.aux).formula,
            "final": get_codec(capture.codecs.final).formula,
        },
    }


def _code_spec(codec: Codec, shape: tuple[int, ...], name: str) -> ArraySpec:
    attributes = {"codec": codec.name, "formula": codec.formula}
    if codec.exact:
        attributes["hs_dtype"] = "bfloat16"
    chunk_rows = min(codec.chunk_tokens(shape[1]), max(1, shape[0]))
    dimensions = ("final_row" if name == FINAL else "token", "channel")
    return ArraySpec(shape, codec.code_dtype, dimensions, chunk_rows, codec.compressed, attributes)


def _small_spec(codec: Codec, name: str, shape: tuple[int, ...]) -> ArraySpec:
    field = codec.small[name]
    chunk_rows = None
    if name == RAW_ROWS:
        chunk_rows = max(1, min(_RAW_CHUNK_BYTES // (2 * shape[1]), shape[0]))
    dimensions = tuple(_AXES[axis] for axis in field.axes)
    attributes = {"hs_dtype": "bfloat16"} if field.bf16 else {}
    return ArraySpec(shape, field.dtype, dimensions, chunk_rows, False, attributes)

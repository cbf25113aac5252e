"""The arithmetic of writing one unit: records through the store's codecs, on the states' own device.

Samples lie end to end along the token axis. Equal records give equal bytes.

Shapes: L aux layers, T tokens of the unit, t tokens of one sample, R final rows of the unit, r of one sample, D width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_codec, get_layout
from hiddenstore.codecs.affine import AffineCodec
from hiddenstore.codecs.base import RAW_INDEX, Codec, EncodedLayers, MaskedCodec, bits_to_numpy
from hiddenstore.codecs.compiled import cpu_kernels, in_blocks
from hiddenstore.codecs.topk import pack_rows
from hiddenstore.commit import SAMPLE_ID
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.index.table import SPLITS
from hiddenstore.records import Record, final_row_positions, mask_fault, spans_fault, tokens_fault
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.prefixes import Parts, with_one_prefix
from schemas import FINAL, CaptureSpec, LayerStats, SampleEntry, field_name

_STATS_ELEMENTS = 1 << 19
# More than what float32 loses of the norm of a row.
_NORM_MARGIN = 1.001
# Of rows this short the squares are nothing in float32, or nearly; those of rows above 1.8e19 are infinite.
_SQUARES_VANISH = 1e-18
_FEW_ROWS = 16
# Smaller samples cost more in calls than in being joined.
_JOINED_ELEMENTS = 1 << 16


def encode_records(
    unit: str,
    records: Sequence[Record],
    capture: CaptureSpec,
    joins: EncodedUnit | None = None,
    one_prefix: bool = False,
) -> EncodedUnit:
    """Run the store's codecs over the records of one unit, layer by layer.

    ``joins`` is the unit that these samples become part of: they are encoded by its channel statistics. With
    ``one_prefix`` what samples begin alike with gets the codes of the first of them, for a container that keeps it
    once.

    The codes of ``bf16`` and ``lossless`` may be views of the records: their memory must not change before they are
    written. Raises ConfigError: ``record-invalid``: a record is not what capture and format allow, or a sample is there
    twice."""
    for record in records:
        _check_record(record, capture)
    ids = [record.sample.id for record in records]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ConfigError(f"sample {twice} is in unit {unit} twice", kind=Kind.RECORD_INVALID)
    stats: dict[str, LayerStats] = {}
    width = capture.target.hidden_size
    slots = [capture.aux_layers.index(layer) for layer in capture.stored_layers]
    layout = get_layout(capture.codecs.aux)
    whole: list[Parts] = [[(number, 0, record.sample.tokens)] for number, record in enumerate(records)]
    parts = with_one_prefix(records, slots, layout) if one_prefix else whole
    layers = ([records[number].aux[k, start:stop] for of in parts for number, start, stop in of] for k in slots)
    shared = ({}, {}) if joins is None else (joins.aux.small, joins.final.small)
    names = [field_name(layer) for layer in capture.stored_layers]
    loss_mask = _joined([record.sample.loss_mask for record in records], "uint8", (0,))
    codec, fine = get_codec(capture.codecs.aux), None
    if isinstance(codec, MaskedCodec):
        fine = codec.fine_rows(loss_mask, [record.sample.tokens for record in records])
    aux = _encode(codec, _options(codec, shared[0], fine), _Fields(names, width, layers), stats)
    final = EncodedLayers([])
    if capture.holds_topk:
        packed = pack_rows([record.topk for record in records if record.topk is not None], capture.topk)
        final = EncodedLayers([[codes] for codes in packed.codes])
    elif capture.stores_final:
        codec, rows = get_codec(capture.codecs.final), [record.final for record in records]
        final = _encode(codec, _options(codec, shared[1]), _Fields([FINAL], width, [rows]), stats)
    return EncodedUnit(
        unit=unit,
        samples=tuple(_sample_entries(records)),
        input_ids=_joined([record.sample.input_ids for record in records], "int32", (0,)),
        loss_mask=loss_mask,
        spans=_joined([np.insert(record.sample.spans, 0, i, 1) for i, record in enumerate(records)], "int32", (0, 4)),
        final_rows=_joined([record.final_rows for record in records], "int32", (0,)),
        aux=aux,
        final=final,
        stats=stats,
    )


class RowStats:
    """Statistics of the rows of one field, gathered block by block."""

    def __init__(self) -> None:
        self._norms: list[np.ndarray] = []
        self._rows, self.peak = 0, 0.0

    @property
    def norms(self) -> np.ndarray:
        """Root mean square of each finite row, float64."""
        return np.concatenate(self._norms) if self._norms else np.zeros(0)

    def add(self, values: Tensor) -> None:
        """Rows of bfloat16 as float32 [m, D]."""
        norms = _exact(values, torch.linalg.vector_norm(values, dim=1).cpu().numpy())
        # A few hundred numbers: by calls of torch they would take as long as all the rest.
        finite = np.isfinite(norms)
        kept = values if finite.all() else values[torch.from_numpy(finite)]
        self._keep(norms[finite], values.shape[1], len(values), self._peak_of(kept, norms[finite]))

    def add_norms(self, rows: Tensor, norms: np.ndarray, largest: int) -> None:
        """Rows bfloat16 [t, D] on the CPU, the norm float32 [t] of each, and the bits of the largest |value|."""
        exact = _exact(rows, norms)
        finite = np.isfinite(exact)
        peak = float(np.uint32(largest << 16).view(np.float32))
        if not finite.all():
            peak = _peak(rows[torch.from_numpy(finite)])
        self._keep(exact[finite], rows.shape[1], len(rows), peak)

    def _keep(self, norms: np.ndarray, width: int, rows: int, peak: float) -> None:
        self._norms.append(norms / width**0.5)
        self._rows += rows
        self.peak = max(self.peak, peak)

    def _peak_of(self, values: Tensor, norms: np.ndarray) -> float:
        """The largest |value| of rows float32 [m, D] of these norms float64 [m], or that of the rows before, which is
        larger: no value is larger than its row is long, and behind a first token, which most models make huge, few rows
        are that long."""
        suspects = np.flatnonzero(norms * _NORM_MARGIN > self.peak)
        if not len(suspects):
            return self.peak
        return _peak(values if len(suspects) > len(norms) // _FEW_ROWS else values[suspects])

    def measure(self, states: Tensor) -> None:
        """Rows bfloat16 [T, D] of which nobody needs the float32 values."""
        if not len(states):
            return
        tokens, width = states.shape
        is_ours = states.device.type == "cpu" and states.dtype == torch.bfloat16
        kernels = cpu_kernels(states.numel()) if is_ours else None
        if kernels is not None:
            bits, norms = bits_to_numpy(states), np.empty(tokens, dtype=np.float32)
            found = in_blocks([tokens], width, lambda _, rows: int(kernels.measure(bits[rows], norms[rows])))
            for _, rows, largest in found:
                self.add_norms(states[rows], norms[rows], largest)
            return
        step = max(1, _STATS_ELEMENTS // max(1, width)) if states.device.type == "cpu" else tokens
        scratch = torch.empty((min(step, tokens), width), dtype=torch.float32, device=states.device)
        for block in states.split(step):
            self.add(scratch[: len(block)].copy_(block))

    def summary(self) -> LayerStats:
        """What a commit record says of them."""
        rms = self.norms
        return LayerStats(
            rows=self._rows,
            rms_mean=float(rms.mean()) if len(rms) else 0.0,
            rms_median=float(np.median(rms)) if len(rms) else 0.0,
            rms_max=float(rms.max(initial=0.0)),
            abs_max=self.peak,
        )


def _exact(rows: Tensor, norms: np.ndarray) -> np.ndarray:
    """Norms float64 [m] of rows [m, D] by those in ``norms`` float32 [m]; not finite where a row is not."""
    exact = norms.astype(np.float64)
    odd = np.flatnonzero(~((norms > _SQUARES_VANISH) & (norms < np.inf)))
    if len(odd):
        odd = odd[(rows[odd] != 0).any(dim=1).cpu().numpy()]
        exact[odd] = np.linalg.norm(rows[odd].double().cpu().numpy(), axis=1)
    return exact


def _peak(rows: Tensor) -> float:
    """Largest |value| of [n, D]."""
    if not rows.numel():
        return 0.0
    low, high = rows.aminmax()
    return max(float(high), -float(low))


def layer_stats(blocks: Sequence[Tensor]) -> LayerStats:
    """Row norms of one field given as bfloat16 blocks [t, D]."""
    stats = RowStats()
    for block in blocks:
        stats.measure(block)
    return stats.summary()


def with_raw_rows(stats: Mapping[str, LayerStats], encoded: EncodedLayers) -> dict[str, LayerStats]:
    """Statistics of the fields of a group, in the order of its layers, with how many rows are stored raw."""
    layers = encoded.small[RAW_INDEX][:, 0] if RAW_INDEX in encoded.small else np.zeros(0, dtype=np.int32)
    counts = np.bincount(layers, minlength=len(stats)).tolist()
    return {
        name: field.model_copy(update={"raw_rows": rows})
        for (name, field), rows in zip(stats.items(), counts, strict=True)
    }


def _options(codec: Codec, shared: Mapping[str, np.ndarray], fine: np.ndarray | None = None) -> dict[str, Any]:
    """How layers are encoded: by their own statistics, or by those of the unit they join where the codec has any; and
    by the classes of their rows bool [T], where it has some."""
    has_shared = any(not {"T", "N"} & set(spec.axes) for spec in codec.small.values())
    options: dict[str, Any] = {"shared": shared} if shared and has_shared else {}
    return options if fine is None else {**options, "fine": fine}


@dataclass(frozen=True)
class _Fields:
    """Fields of one group: their names, D, and per layer the states of its samples."""

    names: Sequence[str]
    width: int
    layers: Iterable[Sequence[Tensor]]


def _encode(codec: Codec, options: Mapping[str, Any], fields: _Fields, stats: dict[str, LayerStats]) -> EncodedLayers:
    """Encode layers and measure them, where the codec makes float32 of them by these."""
    measured: list[RowStats] = []
    gives_values = isinstance(codec, AffineCodec)

    def layers() -> Iterator[Sequence[Tensor]]:
        for samples in fields.layers:
            measured.append(RowStats())
            blocks = _blocks(samples, fields.width)
            for block in () if gives_values else blocks:
                measured[-1].measure(block)
            yield blocks

    if gives_values:
        options = {**options, "seen": measured}
    encoded = codec.encode_layers(layers(), **options)
    found = (one.summary() for one in measured)
    stats.update(with_raw_rows(dict(zip(fields.names, found, strict=True)), encoded))
    return encoded


def _check_record(record: Record, capture: CaptureSpec) -> None:
    fault = _states_fault(record, capture) or _sample_fault(record, capture)
    if fault is not None:
        raise ConfigError(f"sample {record.sample.id}: {fault}", kind=Kind.RECORD_INVALID)


def _states_fault(record: Record, capture: CaptureSpec) -> str | None:
    """What is wrong with the shapes and types of a record, in words, or None."""
    sample, width, positions = record.sample, capture.target.hidden_size, record.final_rows
    shapes = {
        "input_ids": (sample.input_ids.shape, (sample.tokens,)),
        "loss_mask": (sample.loss_mask.shape, (sample.tokens,)),
        "spans": (sample.spans.shape, (len(sample.spans), 3)),
        "aux": (tuple(record.aux.shape), (len(capture.aux_layers), sample.tokens, width)),
        "final": (tuple(record.final.shape), (0 if capture.holds_topk else len(positions), width)),
    }
    if capture.holds_topk:
        topk_shape = (0, 0) if record.topk is None else tuple(record.topk.ids.shape)
        shapes["top tokens"] = (topk_shape, (len(positions), capture.topk))
    for name, (shape, expected) in shapes.items():
        if shape != expected:
            return f"{name} has shape {list(shape)}, expected {list(expected)}"
    for name, states in (("aux", record.aux), ("final", record.final)):
        if states.dtype != torch.bfloat16:
            return f"{name} is {states.dtype}, expected torch.bfloat16"
    return None


def _sample_fault(record: Record, capture: CaptureSpec) -> str | None:
    """What readers or `verify --meaning` would refuse of a sample that is stored like that, in words, or None."""
    sample, named = record.sample, ("input_ids", "loss_mask", "spans", "final_rows")
    arrays = sample.input_ids, sample.loss_mask, sample.spans, record.final_rows
    ids, mask, spans, rows = (np.asarray(array) for array in arrays)
    if not SAMPLE_ID.fullmatch(sample.id):
        return "its id is not 1 to 64 letters, digits, - and _"
    if sample.split not in SPLITS:
        return f"its split is {sample.split!r}, expected one of {', '.join(SPLITS)}"
    if not sample.tokens:
        return "it has no token"
    for name, array in zip(named, (ids, mask, spans, rows), strict=True):
        if len(array) and array.dtype.kind not in "biu":
            return f"{name} is {array.dtype}, expected whole numbers"
    faults = tokens_fault(ids, capture.target.vocab_size), mask_fault(mask, None), spans_fault(spans, sample.tokens)
    for name, fault in zip(named, faults, strict=False):
        if fault is not None:
            return f"{name} is not what the format allows: {fault}"
    expected = final_row_positions(mask, capture.final)
    if np.array_equal(rows, expected):
        return None
    texts = [f"{array[:4].tolist()} … ({len(array)})" for array in (rows, expected)]
    return f"final_rows is {texts[0]}, expected final_row_positions(loss_mask, {capture.final!r}) = {texts[1]}"


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
            images=sample.images,
        )
        start += sample.tokens
        final_start += len(record.final_rows)


def _blocks(samples: Sequence[Tensor], width: int) -> Sequence[Tensor]:
    """[t, D] of each sample, joined where that costs less than a call for each: on a GPU, or when they are small."""
    if not samples:
        return [torch.empty((0, width), dtype=torch.bfloat16)]
    small = sum(states.numel() for states in samples) < _JOINED_ELEMENTS * len(samples)
    return [torch.cat(list(samples))] if small or samples[0].is_cuda else samples


def _joined(arrays: Sequence[np.ndarray], dtype: str, empty: tuple[int, ...]) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(empty, dtype=dtype)

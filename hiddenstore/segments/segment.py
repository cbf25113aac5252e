"""One unit on disk: ``write_encoded`` makes it, ``SegmentReader`` gives back any sample of it, whatever its container.

Shapes: L layers asked for, t tokens of one sample, r final rows of one sample, D width.
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import Encoded
from hiddenstore.codecs.memory import fresh
from hiddenstore.codecs.topk import unpack_rows
from hiddenstore.errors import ConfigError, CorruptionError, FormatError, HiddenstoreError, Kind, NotFoundError
from hiddenstore.files.layout import TARGET_DIR
from hiddenstore.fs.seam import Filesystem
from hiddenstore.records import Record, Sample, mask_fault, spans_fault, tokens_fault
from hiddenstore.segments import CONTAINERS
from hiddenstore.segments.base import (
    FINAL_ROWS,
    INPUT_IDS,
    LOSS_MASK,
    SPANS,
    EncodedUnit,
    groups_of,
    rows_fault,
    top_tokens_fault,
)
from hiddenstore.segments.files import CHUNK_CORRUPT
from hiddenstore.segments.many import (
    MANY_BYTES,
    UNITS_TOGETHER,
    ManyContainer,
    NotTogetherError,
    Samples,
    decode_states,
    mixes,
    sample_places,
    samples_of,
)
from hiddenstore.segments.rows import ends_of
from schemas import FINAL, CaptureSpec, CommitRecord, FileEntry, SampleEntry

_LOST = CorruptionError, NotFoundError


def write_encoded(
    fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec, container: str = "zarr"
) -> tuple[FileEntry, ...]:
    """Write a unit under the new folder ``path``; files and folders are durable when it returns.

    The entries are relative to ``path`` and sorted.
    """
    files = CONTAINERS[container].write(fs, path, unit, capture)
    fs.sync_folder(path)
    return tuple(sorted(files, key=lambda file: file.path))


class SegmentReader:
    """Random access to the samples of one committed unit. Opening reads nothing; safe to use from many threads.

    Raises from every read:
        CorruptionError: a file is missing, has another size or fails a checksum; it names the file and the samples.
        FormatError: ``array-invalid``: an array is whole but not what the capture says, or the format allows;
            ``token-range``: a token is outside the vocabulary.
    """

    def __init__(
        self,
        fs: Filesystem,
        path: str,
        record: CommitRecord,
        capture: CaptureSpec,
        container: str = "zarr",
    ) -> None:
        self.fs, self.path, self.record, self.capture = fs, path, record, capture
        self._aux, self._final = groups_of(capture)
        self.container = CONTAINERS[container]
        self._unit = self.container.open(fs, path, record, capture)

    def __len__(self) -> int:
        return len(self.record.samples)

    def sample(self, index: int) -> Sample:
        """Tokens, mask and spans of the ``index``-th sample."""
        entry = self.record.samples[index]
        input_ids, loss_mask = self.tokens(index)
        try:
            (spans,) = self._unit.plain([SPANS], index)
        except _LOST as error:
            raise self._with_samples(error, entry) from error
        self._require(SPANS, entry, spans_fault(spans, entry.tokens))
        return Sample(entry.id, input_ids, loss_mask, spans, entry.split, images=entry.images)

    def tokens(self, index: int, is_counted: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """The ``index``-th sample's tokens int32 [t] and mask uint8 [t] alone; ``is_counted`` False where the record is
        a guess that does not know yet how many tokens are supervised."""
        entry = self.record.samples[index]
        try:
            input_ids, loss_mask = self._unit.plain([INPUT_IDS, LOSS_MASK], index)
        except _LOST as error:
            raise self._with_samples(error, entry) from error
        self._require(INPUT_IDS, entry, tokens_fault(input_ids, self.capture.target.vocab_size), Kind.TOKEN_RANGE)
        self._require(LOSS_MASK, entry, mask_fault(loss_mask, entry.supervised if is_counted else None))
        return input_ids, loss_mask

    def final_rows(self, index: int) -> np.ndarray:
        """The token positions of the ``index``-th sample's final rows: int32 [r], ascending."""
        try:
            return self._final_rows(index, True)
        except _LOST as error:
            raise self._with_samples(error, self.record.samples[index]) from error

    def read(self, index: int, layers: Sequence[int] | None = None, final: bool = True) -> Record:
        """One sample with its states decoded: aux bf16 [L, t, D] in the order of ``layers`` (default: all stored).

        With ``final`` False, or in a store without it, final is [0, D] and final_rows [0]. A store of top tokens gives
        them as ``topk``, and final is [0, D], as it is where it is rebuilt: ``hiddenstore.targets.rebuild``.
        """
        entry = self.record.samples[index]
        width = self.capture.target.hidden_size
        rows = entry.final_rows if self.capture.stores_final else 0
        depth = len(self.capture.stored_layers if layers is None else layers)
        aux = fresh((depth, entry.tokens, width), torch.bfloat16)
        return self.read_into(index, aux, fresh((rows, width), torch.bfloat16) if final else None, layers)

    def read_into(self, index: int, aux: Tensor, final: Tensor | None, layers: Sequence[int] | None = None) -> Record:
        """The same record decoded into aux bf16 [L, t, D] and final bf16 [r, D], each layer contiguous.

        Without ``final`` the record has no final rows. Where no final hidden is stored it is [0, D].
        """
        positions, finals = self._positions(layers), self._finals(final is not None)
        hidden = aux.new_empty((0, aux.shape[-1])) if final is None else final
        topk = None
        sample = self.sample(index)
        try:
            self._unit.decode(self._aux, index, positions, aux)
            if finals and self.capture.holds_topk:
                topk = unpack_rows(self._final_codes(index, finals))
            elif finals:
                self._unit.decode(self._final, index, finals, hidden[None])
            return Record(sample, aux, hidden, self._final_rows(index, final is not None), topk)
        except _LOST as error:
            raise self._with_samples(error, self.record.samples[index]) from error

    def lengths(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and final rows int64 [S] of samples, by the record."""
        return self._places[indices, 1], self._places[indices, 3]

    def pieces(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Samples at int64 [S], ascending, in pieces of at most ``MANY_BYTES`` of decoded states, larger samples alone;
        and the bytes of each piece."""
        layers, width = len(self.capture.aux_layers), self.capture.target.hidden_size
        ends = ends_of(self._places[indices, 1] * (2 * width * (layers + 1)))
        # A sample that crosses a border is a piece of its own, and so is every large one.
        blocks = ends // MANY_BYTES
        cuts = np.flatnonzero(np.diff(blocks[:-1]) | np.diff(blocks[1:])) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(indices)]):
            yield indices[low:high], int(ends[high] - ends[low])

    @cached_property
    def _places(self) -> np.ndarray:
        return sample_places(self.record)

    def read_encoded(
        self,
        index: int,
        layers: Sequence[int] | None = None,
        final: bool = True,
        out: tuple[Collection[np.ndarray], Collection[np.ndarray]] | None = None,
    ) -> tuple[Encoded, Encoded, np.ndarray]:
        """The same still encoded, to be moved and decoded on another device: aux, final and final_rows int32 [r].

        ``get_codec(capture.codecs.aux).decode(aux)`` gives bf16 [L, t, D], the final codec's [1, r, D] (for top tokens
        ``unpack_rows``); without final, the final part has no codes. ``out``: arrays [t, C] of
        the layers and [r, C] of the final to read the codes into, which are the memory of what is returned.
        """
        finals = self._finals(final)
        aux_out, final_out = (None, None) if out is None else out
        try:
            return (
                self._unit.encoded(self._aux, index, self._positions(layers), aux_out),
                self._final_codes(index, finals, final_out),
                self._final_rows(index, final),
            )
        except _LOST as error:
            raise self._with_samples(error, self.record.samples[index]) from error

    def _positions(self, layers: Sequence[int] | None) -> list[int]:
        stored = self.capture.stored_layers
        if layers is None:
            return list(range(len(stored)))
        self.require_layers(layers, stored)
        return [stored.index(layer) for layer in layers]

    def require_layers(self, layers: Sequence[int], held: Sequence[int] | None = None) -> None:
        """Refuse layers that are not ``held`` (None: stored or rebuilt): ConfigError ``layer-missing``."""
        held = self.capture.aux_layers if held is None else held
        missing = [layer for layer in layers if layer not in held]
        if missing:
            raise ConfigError(f"layers {missing} are not held, only {list(held)}", kind=Kind.LAYER_MISSING)

    def _finals(self, final: bool) -> list[int]:
        """Positions in the group of what is stored at the final rows: one or none."""
        return list(range(len(self._final.fields))) if final else []

    def _final_rows(self, index: int, final: bool) -> np.ndarray:
        if not final or self.capture.final == "none":
            return np.zeros(0, dtype=np.int32)
        entry, (final_rows,) = self.record.samples[index], self._unit.plain([FINAL_ROWS], index)
        self._require(FINAL_ROWS, entry, rows_fault(final_rows, entry.tokens))
        return final_rows

    def _final_codes(self, index: int, finals: Sequence[int], out: Collection[np.ndarray] | None = None) -> Encoded:
        encoded = self._unit.encoded(self._final, index, finals, out)
        if finals and self.capture.holds_topk:
            topk, entry = unpack_rows(encoded), self.record.samples[index]
            ids = topk.ids.numpy().reshape(-1)
            self._require(FINAL, entry, tokens_fault(ids, self.capture.target.vocab_size), Kind.TOKEN_RANGE)
            self._require(FINAL, entry, top_tokens_fault(topk))
        return encoded

    def _require(self, name: str, entry: SampleEntry, fault: str | None, kind: Kind = Kind.ARRAY_INVALID) -> None:
        if fault is not None:
            raise FormatError(
                f"{self.fs.root}/{self.path}/{name} is not what the format allows: {fault} (sample {entry.id})",
                kind=kind,
            )

    def _with_samples(self, error: CorruptionError | NotFoundError, entry: SampleEntry) -> CorruptionError:
        """The error with the samples that cannot be read: this one for a chunk, all of the unit for the rest."""
        if isinstance(error, NotFoundError):
            error = CorruptionError(f"{error.message}, but unit {self.record.unit} needs it", kind=Kind.FILE_MISSING)
        # A damaged file of the target costs no sample: with another copy of it all are read.
        if error.samples or error.path.startswith(f"{TARGET_DIR}/"):
            return error
        samples: tuple[str, ...] = (entry.id,)
        what = f"sample {entry.id}"
        if error.kind != CHUNK_CORRUPT:
            samples = tuple(sample.id for sample in self.record.samples)
            what = f"all {len(samples)} samples"
        return CorruptionError(
            f"{error.message} ({what} of unit {self.record.unit})",
            kind=error.kind,
            hint=shlex.join(["hiddenstore", "repair", self.fs.root]),
            path=error.path,
            samples=samples,
        )


def read_together(
    parts: Sequence[tuple[SegmentReader, np.ndarray]],
    aux: Tensor,
    final: Tensor | None,
    layers: Sequence[int] | None = None,
) -> Samples | None:
    """Samples of units of one store, each at int64 [S], ascending, end to end into aux bf16 [L, T, D] and final bf16
    [R, D] (None: without final rows).

    None where they have to be read one by one: the container reads no more, they hold top tokens or lack states that
    are rebuilt, or something is wrong with one of them, which the reading of that sample then names.
    """
    first = parts[0][0]
    container, capture = first.container, first.capture
    if not isinstance(container, ManyContainer) or capture.states or (final is not None and capture.holds_topk):
        return None
    groups = [(first._aux, first._positions(layers)), (first._final, first._finals(final is not None))]
    if len(parts) > 1 and not all(mixes(group.states) for group, wanted in groups if wanted):
        return None
    try:
        plain, states = container.read_many([(reader._unit, indices) for reader, indices in parts], groups)
        places = np.concatenate([reader._places[indices] for reader, indices in parts])
        samples = samples_of(plain, places, capture.target.vocab_size)
        outs = [aux, aux[:0] if final is None else final[None]]
        for (group, _), mixed, out in zip(groups, states, outs, strict=True):
            if mixed is not None:
                decode_states(group.states, mixed, out)
    except (NotTogetherError, CorruptionError, FormatError, NotFoundError):
        return None
    return samples


Part = tuple[SegmentReader, np.ndarray]
"""Samples of a unit: int64 [S], ascending."""


def read_records(units: Iterable[Part]) -> Iterator[Record]:
    """What ``SegmentReader.read`` gives of samples of units of one store, read as many at once as are small. Where a
    unit cannot be opened, the samples before it are given first."""
    for parts in _small_together(units):
        yield from _records_of(parts)


def _small_together(units: Iterable[Part]) -> Iterator[list[Part]]:
    parts: list[Part] = []
    room = MANY_BYTES
    try:
        for reader, indices in units:
            for piece, size in reader.pieces(indices):
                # Samples that share arrays are one read by themselves: joining those of several units is dearer.
                is_full = size > room or len(parts) == UNITS_TOGETHER or not reader.container.samples_apart
                if parts and is_full:
                    yield parts
                    parts, room = [], MANY_BYTES
                parts.append((reader, piece))
                room -= size
    except HiddenstoreError:
        if parts:
            yield parts
        raise
    if parts:
        yield parts


def _records_of(parts: Sequence[Part]) -> Iterator[Record]:
    first, indices = parts[0]
    lengths, rows = (np.concatenate(column) for column in zip(*(r.lengths(part) for r, part in parts), strict=True))
    if len(lengths) > 1:
        width, layers = first.capture.target.hidden_size, len(first.capture.aux_layers)
        aux = torch.empty((layers, int(lengths.sum()), width), dtype=torch.bfloat16, device="cpu")
        final_rows = int(rows.sum()) * first.capture.holds_final_hidden
        final = torch.empty((final_rows, width), dtype=torch.bfloat16, device="cpu")
        many = read_together(parts, aux, final)
        if many is not None:
            yield from _cut(parts, many, aux, final)
            return
    if len(parts) > 1:
        for part in parts:
            yield from _records_of([part])
    else:
        yield from map(first.read, indices.tolist())


def _cut(parts: Sequence[Part], many: Samples, aux: Tensor, final: Tensor) -> Iterator[Record]:
    """Records of samples that lie end to end, each with memory of its own."""
    entries = [reader.record.samples[index] for reader, indices in parts for index in indices.tolist()]
    starts, rows = many.tokens.tolist(), many.rows.tolist()
    states = [part.clone() for part in aux.split(np.diff(many.tokens).tolist(), dim=1)]
    hidden = [part.clone() for part in final.split(np.diff(many.rows).tolist())]
    spans = np.searchsorted(many.spans[:, 0], np.arange(len(entries) + 1)).tolist()
    for number, entry in enumerate(entries):
        tokens, finals = slice(starts[number], starts[number + 1]), slice(rows[number], rows[number + 1])
        sample = Sample(
            id=entry.id,
            input_ids=many.input_ids[tokens].copy(),
            loss_mask=many.loss_mask[tokens].copy(),
            spans=many.spans[spans[number] : spans[number + 1], 1:].copy(),
            split=entry.split,
            images=entry.images,
        )
        yield Record(sample, states[number], hidden[number], many.final_rows[finals].copy())

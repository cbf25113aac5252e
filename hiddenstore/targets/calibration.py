"""The calibration slice: a few thousand tokens of a capture kept as raw bf16, so that any recipe can be judged on them.

Two files: the states under a name made of their digest, then the sealed document that names them. Whoever publishes the
document first has made the slice; states that no document names are garbage.

Shapes: L aux layers, T tokens of the slice, R of them with a final hidden, D target width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hiddenstore.errors import CorruptionError, Kind
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE
from hiddenstore.files.documents import load, seal, sha256_hex
from hiddenstore.fs.seam import Filesystem
from hiddenstore.records import Record
from schemas.advice import CalibrationSlice, SliceSample
from schemas.capture import FINAL, CaptureSpec

if TYPE_CHECKING:
    from torch import Tensor

SLICE_PATH = f"{layout.CALIBRATION_DIR}/slice.json"
MOST_TOKENS = 4096
MOST_BYTES = 64_000_000


@dataclass(frozen=True, eq=False)
class Slice:
    """aux bfloat16 [L, T, D], layers ascending; final bfloat16 [R, D]; samples end to end."""

    samples: tuple[SliceSample, ...]
    aux: "Tensor"
    final: "Tensor"

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


def slice_tokens(capture: CaptureSpec) -> int:
    """Tokens of a slice: 4,096, fewer where every layer and the final hidden of that many exceed 64 MB."""
    per_token = 2 * capture.target.hidden_size * (len(capture.aux_layers) + (capture.final != "none"))
    return max(1, min(MOST_TOKENS, MOST_BYTES // per_token))


def take_slice(records: Iterable[Record], capture: CaptureSpec, from_first: bool = False) -> Slice | None:
    """The first records as far as the budget goes, with their final hiddens; None without a record.

    The record that does not fit gives what room is left, up to its last final row, and ends the slice; of a capture
    that rebuilds states, or ``from_first``, what room is left from its first token on, which alone can be rebuilt.
    """
    import torch

    left = slice_tokens(capture)
    samples: list[SliceSample] = []
    aux: list[Tensor] = []
    final: list[Tensor] = []
    for record in records:
        window, rows = _window(record, left, from_first or bool(capture.states))
        samples.append(SliceSample(id=record.sample.id, start=window.start, tokens=len(window), final_rows=len(rows)))
        aux.append(record.aux[:, window.start : window.stop])
        final.append(record.final[rows.start : rows.stop])
        left -= len(window)
        if left == 0:
            break
    if not samples:
        return None
    return Slice(tuple(samples), torch.cat(aux, dim=1).cpu(), torch.cat(final).cpu())


def write_slice(fs: Filesystem, states: Slice, capture: CaptureSpec) -> bool:
    """Publish a slice; False when the store has one already."""
    from safetensors.torch import save

    if fs.size(SLICE_PATH) is not None:
        return False
    tensors = {name: states.aux[index].contiguous() for index, name in enumerate(capture.aux_fields)}
    if capture.final != "none":
        tensors[FINAL] = states.final.contiguous()
    data = bytes(save(tensors))
    document = CalibrationSlice(
        fields=tuple(tensors), samples=states.samples, file_sha256=sha256_hex(data), size=len(data)
    )
    return _publish(fs, document, data)


def read_slice(fs: Filesystem, capture: CaptureSpec) -> Slice | None:
    """The slice of a store, None when it has none. Raises CorruptionError: ``document-corrupt``, or
    ``calibration-corrupt``: the states are not those the document names."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    document = slice_document(fs)
    if document is None:
        return None
    path = layout.slice_path(document.file_sha256)
    try:
        tensors = load_tensors(slice_bytes(fs, document))
    except SafetensorError as error:
        raise _corrupt(fs, path, str(error)) from error
    width, final = capture.target.hidden_size, tensors.get(FINAL)
    expected = dict.fromkeys(capture.aux_fields, (document.tokens, width))
    if capture.final != "none":
        expected[FINAL] = (document.final_rows, width)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != expected or any(tensor.dtype != torch.bfloat16 for tensor in tensors.values()):
        raise _corrupt(fs, path, f"expected bf16 {expected}, found {shapes}")
    aux = [tensors[name] for name in capture.aux_fields]
    return Slice(
        document.samples,
        torch.stack(aux) if aux else torch.empty((0, document.tokens, width), dtype=torch.bfloat16),
        torch.empty((0, width), dtype=torch.bfloat16) if final is None else final,
    )


def slice_document(fs: Filesystem) -> CalibrationSlice | None:
    """``calibration/slice.json``, None when there is none; CorruptionError when it is damaged."""
    return None if fs.size(SLICE_PATH) is None else load(fs, SLICE_PATH, CalibrationSlice)


def slice_bytes(fs: Filesystem, document: CalibrationSlice) -> bytes:
    """The file a slice document names, checked; CorruptionError ``calibration-corrupt``."""
    path = layout.slice_path(document.file_sha256)
    size = fs.size(path)
    if size != document.size:
        stored = "no file" if size is None else f"{size:,}"
        raise _corrupt(fs, path, f"expected {document.size:,} bytes, found {stored}")
    data = fs.read(path)
    if sha256_hex(data) != document.file_sha256:
        raise _corrupt(fs, path, f"expected sha256 {document.file_sha256}, found {sha256_hex(data)}")
    return data


def copy_slice(source: Filesystem, destination: Filesystem) -> bool:
    """Bring the slice of one store into another of the same capture; False when there is nothing to bring."""
    document = slice_document(source)
    if document is None or destination.size(SLICE_PATH) is not None:
        return False
    return _publish(destination, document, slice_bytes(source, document))


def unnamed_slices(fs: Filesystem) -> Iterator[str]:
    """Paths of slice states that the slice document does not name: a writer died, or lost to another."""
    try:
        document = slice_document(fs)
    except DAMAGE:
        return  # a document that cannot be read may name any of them
    named = None if document is None else layout.slice_path(document.file_sha256)
    paths = (f"{layout.CALIBRATION_DIR}/{name}" for name in fs.list(layout.CALIBRATION_DIR) if layout.is_slice(name))
    yield from (path for path in paths if path != named)


def _publish(fs: Filesystem, document: CalibrationSlice, data: bytes) -> bool:
    fs.put_if_absent(layout.slice_path(document.file_sha256), data)
    return fs.put_if_absent(SLICE_PATH, seal(document))


def _window(record: Record, left: int, is_rebuilt: bool) -> tuple[range, range]:
    """Tokens of a record that go into a slice with room for ``left``, and indices of the final rows among them."""
    tokens, rows = record.sample.tokens, record.final_rows
    last = int(rows[-1]) + 1 if len(rows) else tokens
    end = min(tokens, left) if tokens <= left or is_rebuilt else max(last, left)
    start = max(0, end - left)
    first, stop = np.searchsorted(rows, [start, end])
    return range(start, end), range(int(first), int(stop))


def _corrupt(fs: Filesystem, path: str, reason: str) -> CorruptionError:
    return CorruptionError(f"{fs.root}/{path} is damaged: {reason}", kind=Kind.CALIBRATION_CORRUPT, path=path)

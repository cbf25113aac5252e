"""hiddenstore behind the same calls as its peers, and stock Zarr readers on the arrays it wrote.

Stores here hold the final hidden of every token, so that every format reads the same states.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.storage.peers import Format, Samples
from benchmarks.storage.states import loss_mask
from hiddenstore import zarr_read
from hiddenstore.data.buffers import Buffers
from hiddenstore.data.fill import Decoded, Filler, SampleSlot, StillEncoded, places_of
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.segment import encode_records, write_encoded
from hiddenstore.store import Store
from hiddenstore.testing import builders
from hiddenstore.writer import create_store, write_unit
from schemas.capture import FINAL, CaptureSpec, FinalMode
from schemas.layers import field_name

AUX_LAYERS = (1, 3, 5)
UNIT_BYTES = 512_000_000
UNIT_TOKENS = 32_768


def make_sample(index: int, tokens: int) -> Sample:
    """A sample that no other has the id of; 60 % of it supervised."""
    ids = np.random.default_rng(index).integers(0, builders.VOCAB, tokens).astype(np.int32)
    ids[:4] = np.frombuffer(np.int64(index).tobytes(), np.uint16) % builders.VOCAB
    mask = loss_mask(tokens)
    spans = np.array([[2, int(mask.argmax()), tokens]], np.int32)
    return Sample(sample_id(ids, mask), ids, mask, spans, "train", f"synthetic:{index}")


def make_record(index: int, states: torch.Tensor, capture: CaptureSpec) -> Record:
    """States bf16 [L, t, D], the last layer the final hidden, as this capture holds them."""
    from hiddenstore.codecs.topk import with_top_tokens
    from hiddenstore.head import HeadBundle

    sample = make_sample(index, states.shape[1])
    rows = final_row_positions(sample.loss_mask, capture.final)
    final = states[-1] if len(rows) == states.shape[1] else states[-1][torch.from_numpy(rows).long()]
    record = Record(sample, states[:-1], final, rows)
    if not capture.holds_topk:
        return record
    files = builders.target_files(states.shape[2])
    return with_top_tokens(record, HeadBundle.from_bytes(files["head.safetensors"], builders.HEAD), capture)


def units(lengths: Sequence[int], width: int, layers: int) -> Iterator[range]:
    """Consecutive samples of at most 512 MB of bf16 or 32,768 tokens."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        full = tokens + length > min(UNIT_TOKENS, UNIT_BYTES // (2 * width * layers))
        if full and index > start:
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    yield range(start, len(lengths))


def write_store(
    folder: Path, recipe: str, samples: Samples, lengths: Sequence[int], width: int, final: FinalMode = "all"
) -> Store:
    """A committed store of these samples."""
    capture = builders.capture_spec(AUX_LAYERS, width, recipe, final)
    store = create_store(folder / "store", capture, builders.HEAD, recipe, builders.target_files(width))
    source = enumerate(samples())
    for number, unit in enumerate(units(lengths, width, len(AUX_LAYERS) + 1)):
        states = (next(source) for _ in unit)
        records = [make_record(i, torch.from_numpy(bits).view(torch.bfloat16), capture) for i, bits in states]
        write_unit(store, f"unit-{number:06d}", "i" * 64, records, (), builders.ENGINE)
    return Store.open(folder / "store")


class Ours(Format):
    """``Store.read_into``: every chunk checked, decoded straight into place."""

    recipe = "raw"
    checked = True

    def write(self, samples: Samples) -> None:
        write_store(self.folder, self.recipe, samples, [shape[1] for shape in self.shapes], self.shapes[0][2])

    def open(self) -> None:
        zarr_read.CHECK_CHUNKS = self.checked
        self.store = Store.open(self.folder / "store")
        self.ids = self.store.sample_ids

    def read(self, index: int, out: np.ndarray) -> None:
        states = torch.from_numpy(out).view(torch.bfloat16)
        self.store.read_into(self.ids[index], states[:-1], states[-1])

    def read_layer(self, index: int, layer: int, out: np.ndarray) -> None:
        self.store.read_into(
            self.ids[index], torch.from_numpy(out).view(torch.bfloat16)[None], None, [AUX_LAYERS[layer]]
        )


class OursUnchecked(Ours):
    checked = False


class OursLossless(Ours):
    recipe = "lossless"


class OursPack(Ours):
    """One sample a pack, in buffers that are used again: as ``TokenBatches`` fills them for a device."""

    kind: type[Any] = StillEncoded

    def open(self) -> None:
        super().open()
        self.filler: Filler = self.kind(self.store, AUX_LAYERS, True)
        self.buffers = Buffers(1 << 30)
        self.slots = {entry.id: SampleSlot(entry.id, entry.tokens, entry.final_rows) for _, entry in self.store.entries}

    def read(self, index: int, out: np.ndarray) -> None:
        slots = [self.slots[self.ids[index]]]
        pack = self.filler.empty(slots, self.buffers)
        self.filler.fill(pack, places_of(slots)[0])


class SafePacked(OursPack):
    recipe = "safe"


class CompactPacked(OursPack):
    recipe = "compact"


class SafeDecoded(OursPack):
    recipe, kind = "safe", Decoded


class CompactDecoded(OursPack):
    recipe, kind = "compact", Decoded


class RawSegment(Ours):
    """Writing the files of a unit alone: chunks, checksums, sha256, fsync; the states are encoded before."""

    def write(self, samples: Samples) -> None:
        for number, encoded in enumerate(self.encoded):
            write_encoded(self.fs, f"segments/u-{number}", encoded, self.capture)

    def prepare(self, samples: Samples) -> None:
        """What ``write`` is not to pay for."""
        from hiddenstore.fs_local import LocalFilesystem

        self.fs = LocalFilesystem(self.folder)
        self.capture = builders.capture_spec(AUX_LAYERS, self.shapes[0][2], self.recipe, "all")
        source = list(samples())
        self.encoded = []
        for unit in units([shape[1] for shape in self.shapes], self.shapes[0][2], len(AUX_LAYERS) + 1):
            records = [make_record(i, torch.from_numpy(source[i]).view(torch.bfloat16), self.capture) for i in unit]
            self.encoded.append(encode_records("u", records, self.capture))


class Safe(Ours):
    recipe = "safe"


class Compact(Ours):
    recipe = "compact"


class StockZarr(Format):
    """zarr-python on the arrays of our store, into place; lossless arrays too."""

    pipeline: str | None = None

    def open(self) -> None:
        import zarr

        if self.pipeline:
            zarr.config.set({"codec_pipeline.path": self.pipeline})
        store = Store.open(self.folder / "store")
        self.arrays, self.rows = [], []
        for record, entry in store.entries:
            names = [*(field_name(layer) for layer in AUX_LAYERS), FINAL]
            self.rows.append(range(entry.start, entry.start + entry.tokens))
            self.arrays.append([self.array(self.folder / "store" / record.segment / name) for name in names])

    def array(self, path: Path) -> Any:
        import zarr

        self.known: dict[Path, Any] = getattr(self, "known", {})
        if path not in self.known:
            self.known[path] = zarr.open_array(str(path), mode="r")
        return self.known[path]

    def read(self, index: int, out: np.ndarray) -> None:
        from zarr.core.buffer import default_buffer_prototype

        rows, buffer = self.rows[index], default_buffer_prototype().nd_buffer
        for array, place in zip(self.arrays[index], out, strict=True):
            array.get_basic_selection(slice(rows.start, rows.stop), out=buffer.from_numpy_array(place))


class StockZarrs(StockZarr):
    pipeline = "zarrs.ZarrsCodecPipeline"


class StockTensorstore(StockZarr):
    """tensorstore on the same arrays, into place."""

    def array(self, path: Path) -> Any:
        import tensorstore

        self.known = getattr(self, "known", {})
        if path not in self.known:
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
            self.known[path] = tensorstore.open(spec, read=True, open=True).result()
        return self.known[path]

    def read(self, index: int, out: np.ndarray) -> None:
        import tensorstore

        rows = self.rows[index]
        copies = [
            tensorstore.array(place).write(array[rows.start : rows.stop])
            for array, place in zip(self.arrays[index], out, strict=True)
        ]
        for copy in copies:
            copy.result()

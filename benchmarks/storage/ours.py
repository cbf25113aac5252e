"""hiddenstore behind the same calls as its peers, and stock Zarr readers on the arrays it wrote.

Stores here hold the final hidden of every token, so that every format reads the same states.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file, save

from benchmarks.storage import cold
from benchmarks.storage.formats import Format, SampleFormat, Samples, Shapes
from benchmarks.storage.states import RawStates, loss_mask, synthetic_bits
from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.codecs import CODECS, get_codec
from hiddenstore.codecs.affine import AffineCodec
from hiddenstore.codecs.base import Encoded
from hiddenstore.codecs.fitted import fit, is_unfitted
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.data.packed import Buffers, small_on
from hiddenstore.data.read import DecodedFiller, EncodedFiller, Filler, SampleSlot, packed_samples
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.segments import files, zarr_arrays
from hiddenstore.segments.encode import encode_records
from hiddenstore.store import Store
from hiddenstore.targets.head import HEAD_FILE, HeadBundle
from hiddenstore.testing import builders
from hiddenstore.writer import create_store, write_unit
from schemas.capture import FINAL, CaptureSpec, FinalMode
from schemas.layers import field_name

AUX_LAYERS = (1, 3, 5)
BUNDLED_TARGET = Path(__file__).parents[2] / "collectors" / "demo" / "target"
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
    folder: Path,
    recipe: str,
    samples: Iterable[np.ndarray],
    lengths: Sequence[int],
    width: int,
    final: FinalMode = "all",
) -> Store:
    """A committed store of these samples."""
    capture, files = builders.capture_spec(AUX_LAYERS, width, recipe, final), builders.target_files(width)
    if is_unfitted(capture):
        samples = list(samples)
        slots = [capture.aux_layers.index(layer) for layer in capture.stored_layers]
        capture, fitted = fit(capture, (torch.from_numpy(bits).view(torch.bfloat16)[slots] for bits in samples))
        files |= fitted
    store = create_store(folder / "store", capture, builders.HEAD, recipe, files)
    source = enumerate(samples)
    for number, unit in enumerate(units(lengths, width, len(AUX_LAYERS) + 1)):
        states = (next(source) for _ in unit)
        records = [make_record(i, torch.from_numpy(bits).view(torch.bfloat16), capture) for i, bits in states]
        write_unit(store, f"unit-{number:06d}", "ab" * 32, records, (), builders.ENGINE)
    return Store.open(folder / "store")


class Ours(SampleFormat):
    """``Store.read_into``: every chunk checked unless told not to, decoded straight into place."""

    def __init__(self, folder: Path, shapes: Shapes, recipe: str = "raw", checked: bool = True) -> None:
        super().__init__(folder, shapes)
        self.recipe, self.checked = recipe, checked

    def write(self, samples: Samples) -> None:
        write_store(self.folder, self.recipe, samples(), [shape[1] for shape in self.shapes], self.shapes[0][2])

    def open(self) -> None:
        zarr_arrays.CHECK_CHUNKS = self.checked
        self.store = Store.open(self.folder / "store")
        self.ids = self.store.sample_ids

    def read(self, index: int, out: np.ndarray) -> None:
        states = torch.from_numpy(out).view(torch.bfloat16)
        self.store.read_into(self.ids[index], states[:-1], states[-1])

    def read_layer(self, index: int, layer: int, out: np.ndarray) -> None:
        """One layer of a sample into ``out`` [t, D]."""
        self.store.read_into(
            self.ids[index], torch.from_numpy(out).view(torch.bfloat16)[None], None, [AUX_LAYERS[layer]]
        )


class OursWithoutChecks(Ours):
    """The same write without crc32c of chunks and digests of files: no reader that checks would take its store."""

    def write(self, samples: Samples) -> None:
        with (
            patch.object(files.TreeDigest, "update", lambda *_: 0),
            patch.object(files.TreeDigest, "hexdigest", lambda _: "0" * 64),
            patch.object(files, "sha256_hex", lambda _: "0" * 64),
            patch.object(files, "combine_crc32c", lambda *_: 0),
            patch.object(zarr_arrays, "crc32c", lambda _: 0),
        ):
            super().write(samples)


class OursPack(Ours):
    """One sample a pack, in buffers that are used again: as ``TokenBatches`` fills them for a device."""

    def __init__(self, folder: Path, shapes: Shapes, recipe: str, filler: type[Any]) -> None:
        super().__init__(folder, shapes, recipe)
        self.make_filler = filler

    def open(self) -> None:
        super().open()
        self.filler: Filler = self.make_filler(self.store, AUX_LAYERS, True)
        self.buffers = Buffers(1 << 30)
        self.slots = {entry.id: SampleSlot(entry.id, entry.tokens, entry.final_rows) for _, entry in self.store.entries}

    def read(self, index: int, out: np.ndarray) -> None:
        slots = [self.slots[self.ids[index]]]
        pack = self.filler.empty(slots, self.buffers)
        self.filler.fill(pack, packed_samples(slots)[0])


class Copies(Format):
    """``hiddenstore copy`` of a raw store of synthetic states, whose head is that of the bundled target."""

    def __init__(self, folder: Path, shapes: Shapes, recipe: str) -> None:
        super().__init__(folder, shapes)
        self.recipe = recipe

    def open(self) -> None:
        lengths, width = [shape[1] for shape in self.shapes], self.shapes[0][2]
        tensors = load_file(BUNDLED_TARGET / "model.safetensors")
        head = {"embed_tokens": tensors["model.embed_tokens.weight"], "norm_weight": tensors["model.norm.weight"]}
        capture = builders.capture_spec(AUX_LAYERS, width, "raw", "supervised")
        target = capture.target.model_copy(update={"vocab_size": len(head["embed_tokens"])})
        capture, spec = capture.model_copy(update={"target": target}), builders.HEAD.model_copy(update={"tied": True})
        files = {**builders.target_files(width), HEAD_FILE: save(head)}
        store = create_store(self.folder / "store", capture, spec, "raw", files)
        states = (torch.from_numpy(bits).view(torch.bfloat16) for bits in synthetic_bits(lengths, width))
        records = [make_record(index, sample, capture) for index, sample in enumerate(states)]
        write_unit(store, "unit-000000", "ab" * 32, records, (), builders.ENGINE)
        cold.warm(self.folder)
        self.store = Store.open(self.folder / "store")

    def copy(self) -> None:
        run_copy(open_copy([self.store], self.folder / "copy", self.recipe))

    def drop(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.folder / "copy")


class Codec:
    """One codec in memory on a device, over samples uint16 [L, t, D], decoded as one pack of them is; a codec that is
    fitted, to these samples."""

    def __init__(self, name: str, samples: Iterable[np.ndarray], device: torch.device) -> None:
        self.device = device
        self.states = [torch.from_numpy(bits).view(torch.bfloat16).to(device) for bits in samples]
        layers, width = range(len(self.states[0])), self.states[0].shape[2]
        codecs = name if name in CODECS else f"aux={name},final=q8"
        self.capture = builders.capture_spec(layers, width, codecs, "none")
        if is_unfitted(self.capture):
            self.capture, _ = fit(self.capture, self.states)
        self.codec = get_codec(self.capture.codecs.aux)
        self.records = [self._record(index, states) for index, states in enumerate(self.states)]
        encoded = [self.codec.encode(states) for states in self.states]
        self.small = small_on([one.small for one in encoded], device)
        self.codes = torch.cat([torch.stack(list(one.codes)) for one in encoded], 1).to(device)
        stops = list(accumulate(states.shape[1] for states in self.states))
        self.rows = [slice(*ends) for ends in pairwise([0, *stops])]
        self.out = torch.zeros(layers.stop, stops[-1], width, dtype=torch.bfloat16, device=device)

    def encode(self) -> None:
        """As a unit is: its samples layer by layer, with the statistics that its commit record holds."""
        encode_records("unit", self.records, self.capture)
        self._finish()

    def decode(self) -> None:
        if isinstance(self.codec, AffineCodec):
            self.codec.decode_pack(self.codes, self.rows, self.small, self.out)
        else:
            self.codec.decode(Encoded(list(self.codes)), self.out)
        self._finish()

    @staticmethod
    def _record(index: int, states: torch.Tensor) -> Record:
        return Record(make_sample(index, states.shape[1]), states, states[0, :0], np.zeros(0, np.int32))

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class StockZarr(SampleFormat):
    """zarr-python on the arrays of our store, into place; lossless arrays too. ``pipeline``: of other codecs."""

    def __init__(self, folder: Path, shapes: Shapes, pipeline: str | None = None) -> None:
        super().__init__(folder, shapes)
        self.pipeline = pipeline

    def open(self) -> None:
        import zarr

        if self.pipeline:
            zarr.config.set({"codec_pipeline.path": self.pipeline})
        store = Store.open(self.folder / "store")
        self.opened: dict[str, list[Any]] = {}
        self.samples = [(record.segment, entry.start, entry.start + entry.tokens) for record, entry in store.entries]
        names = [*(field_name(layer) for layer in AUX_LAYERS), FINAL]
        for segment in {segment for segment, _, _ in self.samples}:
            self.opened[segment] = [self.array(self.folder / "store" / segment / name) for name in names]

    def array(self, path: Path) -> Any:
        import zarr

        return zarr.open_array(str(path), mode="r")

    def read(self, index: int, out: np.ndarray) -> None:
        from zarr.core.buffer import default_buffer_prototype

        buffer, (segment, start, stop) = default_buffer_prototype().nd_buffer, self.samples[index]
        for array, layer in zip(self.opened[segment], out, strict=True):
            array.get_basic_selection(slice(start, stop), out=buffer.from_numpy_array(layer))


class StockTensorstore(StockZarr):
    """tensorstore on the same arrays, into place."""

    def array(self, path: Path) -> Any:
        import tensorstore

        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
        return tensorstore.open(spec, read=True, open=True).result()

    def read(self, index: int, out: np.ndarray) -> None:
        import tensorstore

        segment, start, stop = self.samples[index]
        pairs = zip(self.opened[segment], out, strict=True)
        copies = [tensorstore.array(layer).write(array[start:stop]) for array, layer in pairs]
        for copy in copies:
            copy.result()


FORMATS: dict[str, Callable[[Path, Shapes], Any]] = {
    "Ours": Ours,
    "OursUnchecked": partial(Ours, checked=False),
    "OursWithoutChecks": OursWithoutChecks,
    "SafeWithoutChecks": partial(OursWithoutChecks, recipe="safe"),
    "OursLossless": partial(Ours, recipe="lossless"),
    "Safe": partial(Ours, recipe="safe"),
    "Compact": partial(Ours, recipe="compact"),
    "RawPacked": partial(OursPack, recipe="raw", filler=DecodedFiller),
    "SafePacked": partial(OursPack, recipe="safe", filler=EncodedFiller),
    "CompactPacked": partial(OursPack, recipe="compact", filler=EncodedFiller),
    "SafeDecoded": partial(OursPack, recipe="safe", filler=DecodedFiller),
    "CompactDecoded": partial(OursPack, recipe="compact", filler=DecodedFiller),
    "CopyCompact": partial(Copies, recipe="compact"),
    "CopyTiny": partial(Copies, recipe="tiny"),
    "StockZarr": StockZarr,
    "StockZarrs": partial(StockZarr, pipeline="zarrs.ZarrsCodecPipeline"),
    "StockTensorstore": StockTensorstore,
}


def recipe_sizes(raw: RawStates, folder: Path, count: int) -> list[dict[str, Any]]:
    """Bytes a token of the first ``count`` samples as one unit of each recipe, everything on disk counted."""
    from hiddenstore.codecs.recipes import RECIPES

    lengths, rows = raw.lengths[:count], []
    for recipe in RECIPES:
        row: dict[str, Any] = {"recipe": recipe, "tokens": sum(lengths)}
        for final in ("all", "supervised"):
            samples = (raw.sample(index) for index in range(count))
            store = write_store(folder / f"{recipe}-{final}", recipe, samples, lengths, raw.width, final)  # type: ignore[arg-type]
            row[final] = sum(record.bytes_stored for record in store.commits()) / sum(lengths)
        rows.append(row)
    return rows

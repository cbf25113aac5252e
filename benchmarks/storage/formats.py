"""The formats others use, each behind the same four calls: write samples, open, read one, read them in order.

A sample is uint16 [L, t, D], the bits of bf16 states; every read ends in memory of the caller, as a pack is filled.
Peers are imported where they are used: a worker process imports one of them.
"""

import importlib.machinery
import os
import shutil
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from awscrt.checksums import crc32c

CHECKED_BYTES = 1 << 19
Samples = Callable[[], Iterator[np.ndarray]]
Shapes = Sequence[tuple[int, int, int]]
"""Of each sample: layers, tokens, width."""


class Format:
    """Samples in a folder, or none: by itself it is the format of what has no files, a codec alone.

    ``shuffles``: whether a sample can be read without those before it. What can be written has ``write(samples)``, for
    a folder that exists and is empty; what can be read has ``read_all``.
    """

    shuffles = True

    def __init__(self, folder: Path, shapes: Shapes) -> None:
        self.folder, self.shapes = folder, shapes

    def open(self) -> None:
        """Whatever a reader does once."""


class SampleFormat(Format, ABC):
    """A format whose samples are read one by one."""

    @abstractmethod
    def read(self, index: int, out: np.ndarray) -> None:
        """One sample into ``out`` [L, t, D]."""

    def read_all(self, out_of: Callable[[int], np.ndarray]) -> None:
        """Every sample in stored order, the ``index``-th into ``out_of(index)``."""
        for index in range(len(self.shapes)):
            self.read(index, out_of(index))


class Preadv(SampleFormat):
    """The raw file and one system call a sample: what no format can beat by much."""

    def open(self) -> None:
        self._file = os.open(self.folder / "raw.u16", os.O_RDONLY)
        sizes = [int(np.prod(shape)) * 2 for shape in self.shapes]
        self._offsets = np.cumsum([0, *sizes]).tolist()

    def read(self, index: int, out: np.ndarray) -> None:
        done, view = 0, out.reshape(-1).view(np.uint8)
        while done < view.size:
            done += os.preadv(self._file, [view[done:].data], self._offsets[index] + done)


class PreadvChecked(Preadv):
    """The same in pieces, each checked while a core's own cache has it: what no format that checks can beat by much."""

    def read(self, index: int, out: np.ndarray) -> None:
        view = out.reshape(-1).view(np.uint8)
        for start in range(0, view.size, CHECKED_BYTES):
            piece = view[start : start + CHECKED_BYTES].data
            if os.preadv(self._file, [piece], self._offsets[index] + start) != len(piece):
                raise EOFError(f"raw.u16 ends within sample {index}")
            crc32c(piece)


class TorchFiles(SampleFormat):
    """``torch.save`` and ``torch.load``, one file a sample: what SpecForge and ModelOpt write."""

    def write(self, samples: Samples) -> None:
        for index, sample in enumerate(samples()):
            torch.save({"hidden_states": torch.from_numpy(sample).view(torch.bfloat16)}, self.folder / f"{index}.pt")

    def _load(self, index: int) -> torch.Tensor:
        return torch.load(self.folder / f"{index}.pt", weights_only=True)["hidden_states"]

    def read(self, index: int, out: np.ndarray) -> None:
        np.copyto(out, self._load(index).view(torch.uint16).numpy())


class TorchFilesDropped(TorchFiles):
    """The same without the copy into a pack: the loaded tensor is dropped at once."""

    def read(self, index: int, out: np.ndarray) -> None:
        self._load(index)


class Safetensors(SampleFormat):
    """One safetensors file a sample, read through mmap."""

    def write(self, samples: Samples) -> None:
        from safetensors.torch import save_file

        for index, sample in enumerate(samples()):
            save_file({"h": torch.from_numpy(sample).view(torch.bfloat16)}, self.folder / f"{index}.safetensors")

    def read(self, index: int, out: np.ndarray) -> None:
        from safetensors.torch import load_file

        np.copyto(out, load_file(self.folder / f"{index}.safetensors")["h"].view(torch.uint16).numpy())


class SafetensorsDurable(Safetensors):
    """The same files made durable: what a commit record asks for, and a file by itself is not."""

    def write(self, samples: Samples) -> None:
        super().write(samples)
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                os.fsync(file.fileno())


class SpeculatorsFp8(SampleFormat):
    """speculators' 8-bit backend by its own code: E4M3 with a scale a token over all layers, one safetensors file a
    sample, read as bf16."""

    def write(self, samples: Samples) -> None:
        from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
        from safetensors.torch import save_file

        for index, sample in enumerate(samples()):
            states = torch.from_numpy(sample).view(torch.bfloat16).transpose(0, 1).contiguous()
            codes, scales = quantize_tensor_to_fp8(states)
            save_file({"hidden_states": codes, SCALES_KEY: scales}, self.folder / f"hs_{index}.safetensors")

    def open(self) -> None:
        from hs_connectors.transfer import FP8Transfer

        self._transfer = FP8Transfer(self.folder)

    def read(self, index: int, out: np.ndarray) -> None:
        sample = self._transfer.get_cached(index)
        assert sample is not None
        np.copyto(out, sample["hidden_states"].view(torch.uint16).numpy().transpose(1, 0, 2))


class Mds(SampleFormat):
    """MosaicML streaming, local shards, global random access."""

    compression: str | None = None

    def write(self, samples: Samples) -> None:
        streaming = _streaming()
        options = {"out": str(self.folder), "columns": {"h": "bytes"}, "compression": self.compression}
        with streaming.MDSWriter(**options, size_limit=1 << 28) as writer:
            for sample in samples():
                writer.write({"h": sample.tobytes()})

    def open(self) -> None:
        streaming = _streaming()
        streaming.base.util.clean_stale_shared_memory()
        local = self.folder if self.compression is None else self.folder.with_name(self.folder.name + "-cache")
        remote = None if self.compression is None else str(self.folder)
        self._data = streaming.StreamingDataset(local=str(local), remote=remote, shuffle=False, batch_size=1)

    def read(self, index: int, out: np.ndarray) -> None:
        np.copyto(out, np.frombuffer(self._data[index]["h"], np.uint16).reshape(out.shape))


class MdsZstd(Mds):
    """The same with its zstd: shards are inflated once and kept raw, so each pass drops them first."""

    compression = "zstd:1"

    def read_all(self, out_of: Callable[[int], np.ndarray]) -> None:
        shutil.rmtree(self.folder.with_name(self.folder.name + "-cache"), ignore_errors=True)
        self.open()
        super().read_all(out_of)


class LitData(SampleFormat):
    """LitData's binary chunks; it refuses bf16 tensors, so the bits are stored."""

    compression: str | None = None

    def write(self, samples: Samples) -> None:
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(self.folder), chunk_bytes=1 << 28, compression=self.compression)
        for index, sample in enumerate(samples()):
            writer[index] = {"h": sample}
        writer.done()
        writer.merge(1)

    def open(self) -> None:
        import litdata

        self._data = litdata.StreamingDataset(str(self.folder), shuffle=False)

    def read(self, index: int, out: np.ndarray) -> None:
        np.copyto(out, np.asarray(self._data[index]["h"]).reshape(out.shape))


class LitDataZstd(LitData):
    """The same with its zstd: it replaces each chunk by an inflated one, so each pass starts from links to them."""

    compression = "zstd:1"

    def open(self) -> None:
        import litdata

        links = self.folder.with_name(self.folder.name + "-cache")
        shutil.rmtree(links, ignore_errors=True)
        shutil.copytree(self.folder, links, copy_function=os.link)
        self._data = litdata.StreamingDataset(str(links), shuffle=False)

    def read_all(self, out_of: Callable[[int], np.ndarray]) -> None:
        self.open()
        super().read_all(out_of)


class WebDataset(Format):
    """Stock webdataset over plain tar shards: an iterator, no random access."""

    shuffles = False

    def write(self, samples: Samples) -> None:
        import webdataset

        with webdataset.ShardWriter(str(self.folder / "%04d.tar"), maxsize=1 << 28, verbose=0) as sink:
            for index, sample in enumerate(samples()):
                sink.write({"__key__": f"{index:06d}", "h.bin": sample.tobytes()})

    def read_all(self, out_of: Callable[[int], np.ndarray]) -> None:
        import webdataset

        shards = sorted(str(path) for path in self.folder.glob("*.tar"))
        for index, sample in enumerate(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)):
            out = out_of(index)
            np.copyto(out, np.frombuffer(sample["h.bin"], np.uint16).reshape(out.shape))


class Lance(SampleFormat):
    """Lance, one row a token, one fixed-size-list column a layer."""

    def write(self, samples: Samples) -> None:
        import lance
        import pyarrow as pa

        layers, _, width = self.shapes[0]
        schema = pa.schema([(f"l{k}", pa.list_(pa.uint16(), width)) for k in range(layers)])

        def batches() -> Iterator[Any]:
            for sample in samples():
                columns = [pa.FixedSizeListArray.from_arrays(pa.array(layer.reshape(-1)), width) for layer in sample]
                yield pa.record_batch(columns, schema=schema)

        lance.write_dataset(batches(), str(self.folder / "data.lance"), schema=schema)

    def open(self) -> None:
        import lance

        self._data = lance.dataset(str(self.folder / "data.lance"))
        self._starts = np.cumsum([0, *(shape[1] for shape in self.shapes)]).tolist()

    def read(self, index: int, out: np.ndarray) -> None:
        table = self._data.to_table(offset=self._starts[index], limit=out.shape[1])
        for layer, place in enumerate(out):
            start = 0
            for chunk in table.column(layer).chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=True).reshape(-1, out.shape[2])
                np.copyto(place[start : start + len(values)], values)
                start += len(values)


class ZarrSharded(Format):
    """What zarr-python itself writes: one sharded array a layer, bf16 bits."""

    def write(self, samples: Samples) -> None:
        import zarr

        layers, width = self.shapes[0][0], self.shapes[0][2]
        tokens = sum(shape[1] for shape in self.shapes)
        group = zarr.open_group(str(self.folder), mode="w")
        options: dict[str, Any] = {"shape": (tokens, width), "dtype": "uint16", "chunks": (64, width)}
        shard = -(-tokens // 64) * 64
        arrays = [
            group.create_array(f"l{k}", **options, shards=(shard, width), compressors=None, fill_value=0)
            for k in range(layers)
        ]
        # A shard rewrites itself at every append: the whole layer in one assignment is its best case.
        joined = [np.concatenate(parts) for parts in zip(*samples(), strict=True)]
        for array, values in zip(arrays, joined, strict=True):
            array[:] = values


def _streaming() -> Any:
    """MosaicML streaming; torchvision, which its vision readers import and none of this uses, may be absent."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            name = f"torchvision{name}"
            stub = types.ModuleType(name)
            stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
            stub.__getattr__ = lambda _name: object  # type: ignore[method-assign]
            sys.modules[name] = stub
    import streaming

    return streaming

"""DeepSpec's target cache, format 2: ``manifest.json``, ``samples.idx`` and raw shards, ragged.

From DeepSpec's ``target_cache_dataset``: an index record is ``<QIIQQQQQ``: sample id, shard, tokens, then the offsets
of ``input_ids`` int32, ``attention_mask`` uint8, ``loss_mask`` uint8, ``target_hidden_states`` [T, C·D] and
``target_last_hidden_states`` [T, D] (after the final norm), both bf16 or, in newer caches, FP8 without a scale.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.importers.automodel import MANIFEST, read_manifest
from collectors.importers.peer import PeerSample, Stated, Unusable, columns_of, mask_of, token_ids
from collectors.importers.torch_files import TorchFiles
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.fs import is_inside

VERSION = 2
INDEX = "samples.idx"
RECORD = struct.Struct("<QIIQQQQQ")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class DeepSpecCache:
    """A cache folder; ``shard-00001.bin#412`` is sample 412 of the index."""

    def __init__(self, folder: Path, width: int) -> None:
        self._folder, self._width = folder, width
        manifest = read_manifest(folder / MANIFEST)
        if manifest.get("version") != VERSION:
            raise FormatError(
                f"{folder / MANIFEST} is of version {manifest.get('version')}, expected {VERSION}",
                kind="source-version",
            )
        try:
            layers = tuple(int(layer) for layer in manifest["target_layer_ids"])
            hidden, self._dtype = int(manifest["hidden_size"]), DTYPES[manifest["hidden_dtype"]]
            self._shards = [str(shard["file_name"]) for shard in manifest["shards"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder / MANIFEST} lacks or garbles {error}", kind="source-unreadable") from error
        outside = [name for name in self._shards if not is_inside(name)]
        if outside:
            raise ConfigError(
                f"{folder / MANIFEST} names {outside[0]!r}, which is not inside the folder", kind="source-unreadable"
            )
        self._layers = len(layers)
        self.stated = Stated(layers=layers, width=hidden, version=str(VERSION), facts=_facts(manifest))
        self._records = self._index()

    def places(self) -> Sequence[str]:
        return [f"{self._shard(record[1])}#{index}" for index, record in enumerate(self._records)]

    def file_of(self, place: str) -> Path:
        return self._folder / place.rpartition("#")[0]

    def read(self, place: str, states: bool) -> PeerSample:
        record = self._records[int(place.rpartition("#")[2])]
        _, shard, tokens, at_ids, at_attention, at_mask, at_states, at_final = record
        path = self._folder / self._shard(shard)
        if tokens < 1:
            raise Unusable("empty", "the index says it has no tokens")
        ids = token_ids(self._take(path, at_ids, (tokens,), torch.int32), "input_ids")
        attention = mask_of(self._take(path, at_attention, (tokens,), torch.uint8), "attention_mask", tokens)
        if not attention.all():
            raise Unusable("attention-mask", "attention_mask has zeros in a format without padding")
        mask = mask_of(self._take(path, at_mask, (tokens,), torch.uint8), "loss_mask", tokens)
        wide = self._layers * self._width
        if not states:
            # The last byte is read so that a truncated shard is found before anything is registered.
            self._take(path, at_states, (tokens, wide), self._dtype, only_check=True)
            self._take(path, at_final, (tokens, self._width), self._dtype, only_check=True)
            return PeerSample(ids, mask, tokens, wide)
        held = self._take(path, at_states, (tokens, wide), self._dtype).to(torch.bfloat16)
        final = self._take(path, at_final, (tokens, self._width), self._dtype).to(torch.bfloat16)
        columns = columns_of(held, self._width, "target_hidden_states")
        return PeerSample(ids, mask, tokens, wide, columns=columns, final=final)

    def close(self) -> None:
        return

    def _index(self) -> list[tuple[int, ...]]:
        path = self._folder / INDEX
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}", kind="source-unreadable") from error
        if len(data) % RECORD.size:
            raise ConfigError(
                f"{path} has {len(data):,} bytes, no multiple of {RECORD.size}: it is truncated",
                kind="source-unreadable",
            )
        return list(RECORD.iter_unpack(data))

    def _shard(self, number: int) -> str:
        return self._shards[number] if number < len(self._shards) else f"shard-{number:05d}.bin"

    def _take(
        self, path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype, only_check: bool = False
    ) -> Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        if not path.is_file():
            raise Unusable("not-captured", f"{path.name} is not there")
        held = path.stat().st_size
        if offset + size > held:
            raise Unusable("truncated", f"{path.name} has {held:,} bytes, the index points to {offset + size:,}")
        if only_check:
            return torch.empty(0)
        with path.open("rb") as file:
            file.seek(offset)
            data = bytearray(file.read(size))
        return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _facts(manifest: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    names = ("chat_template", "max_length", "git_sha")
    return tuple((name, str(manifest[name])) for name in names if isinstance(manifest.get(name), str | int))


def open_deepspec(folder: Path, width: int, _files: TorchFiles) -> DeepSpecCache:
    """Every sample of the index."""
    return DeepSpecCache(folder, width)

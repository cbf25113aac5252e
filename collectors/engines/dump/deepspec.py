"""DeepSpec's target cache, format 2: ``manifest.json``, ``samples.idx`` and raw shards, ragged.

From DeepSpec's ``target_cache_dataset``: an index record is ``<QIIQQQQQ``: sample id, shard, tokens, then the offsets
of ``input_ids`` int32, ``attention_mask`` uint8, ``loss_mask`` uint8, ``target_hidden_states`` [T, C·D] and
``target_last_hidden_states`` [T, D] (after the final norm), both bf16 or, in newer caches, FP8 without a scale.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from collectors.engines.dump.peer import (
    PeerSample,
    PeerSource,
    Stated,
    Unusable,
    columns_of,
    facts_of,
    index_of,
    mask_of,
    read_manifest,
    require_version,
    token_ids,
    unreadable,
)
from hiddenstore.fs.seam import is_inside

VERSION = 2
MANIFEST = "manifest.json"
INDEX = "samples.idx"
RECORD = struct.Struct("<QIIQQQQQ")
DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


class DeepSpecCache(PeerSource):
    """A cache folder; ``shard-00001.bin#412`` is sample 412 of the index."""

    final = "post_norm"
    has_many_per_file = True

    def __init__(self, name: str, folder: Path, width: int) -> None:
        super().__init__(name, folder, width)
        path = folder / MANIFEST
        manifest = read_manifest(path)
        require_version(path, manifest, "version", VERSION)
        try:
            layers = tuple(int(layer) for layer in manifest["target_layer_ids"])
            hidden, self._dtype = int(manifest["hidden_size"]), DTYPES[manifest["hidden_dtype"]]
            self._shards = [str(shard["file_name"]) for shard in manifest["shards"]]
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable(f"{path} lacks or garbles {error}") from error
        for shard in self._shards:
            if not is_inside(shard):
                raise unreadable(f"{path} names {shard!r}, which is not inside the folder")
        self._layers = len(layers)
        facts = facts_of(manifest, "chat_template", "max_length", "git_sha")
        self.stated = Stated(layers=layers, width=hidden, version=str(VERSION), facts=facts)
        self._records = _read_index(folder / INDEX)

    def locations(self) -> Sequence[str]:
        return [f"{self._shard(record[1])}#{index}" for index, record in enumerate(self._records)]

    def read(self, location: str, states: bool) -> PeerSample:
        _, shard, tokens, ids_at, attention_at, mask_at, states_at, final_at = self._records[index_of(location)]
        if tokens < 1:
            raise Unusable("empty", "the index says it has no tokens")
        path, wide = self.folder / self._shard(shard), self._layers * self._width
        ids = token_ids(_tensor(path, ids_at, (tokens,), torch.int32), "input_ids")
        attention = mask_of(_tensor(path, attention_at, (tokens,), torch.uint8), "attention_mask", tokens)
        if not attention.all():
            raise Unusable("attention-mask", "attention_mask has zeros in a format without padding")
        mask = mask_of(_tensor(path, mask_at, (tokens,), torch.uint8), "loss_mask", tokens)
        if not states:
            # A truncated shard is found before anything is registered.
            for offset, width in ((states_at, wide), (final_at, self._width)):
                _require_bytes(path, offset, tokens * width * self._dtype.itemsize)
            return PeerSample(ids, mask, tokens, wide)
        layers = _tensor(path, states_at, (tokens, wide), self._dtype).to(torch.bfloat16)
        final = _tensor(path, final_at, (tokens, self._width), self._dtype).to(torch.bfloat16)
        columns = columns_of(layers, self._width, "target_hidden_states")
        return PeerSample(ids, mask, tokens, wide, columns=columns, final=final)

    def _shard(self, number: int) -> str:
        return self._shards[number] if number < len(self._shards) else f"shard-{number:05d}.bin"


def _read_index(path: Path) -> list[tuple[int, ...]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(f"{path} cannot be read: {error}") from error
    if len(data) % RECORD.size:
        raise unreadable(f"{path} has {len(data):,} bytes, no multiple of {RECORD.size}: it is truncated")
    return list(RECORD.iter_unpack(data))


def _require_bytes(path: Path, offset: int, size: int) -> None:
    if not path.is_file():
        raise Unusable("not-captured", f"{path.name} is not there")
    stored = path.stat().st_size
    if offset + size > stored:
        raise Unusable("truncated", f"{path.name} has {stored:,} bytes, the index points to {offset + size:,}")


def _tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    _require_bytes(path, offset, size)
    with path.open("rb") as file:
        file.seek(offset)
        data = bytearray(file.read(size))
    return torch.frombuffer(data, dtype=dtype).reshape(shape)

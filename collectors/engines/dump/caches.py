"""Target caches with a ``manifest.json``: DeepSpec's (format 2, raw shards, ragged) and NeMo Automodel's (padded).

From DeepSpec's ``target_cache_dataset``: a record of ``samples.idx`` is ``<QIIQQQQQ``: sample id, shard, tokens, the
offsets of ``input_ids`` int32, ``attention_mask`` uint8, ``loss_mask`` uint8, ``target_hidden_states`` [T, C·D] and
``target_last_hidden_states`` [T, D] (after the final norm), both bf16 or, in newer caches, FP8 without a scale.
"""

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.engines.dump.peer import (
    OpenFile,
    PeerSample,
    PeerSource,
    Stated,
    Unusable,
    columns_of,
    facts_of,
    files_below,
    index_of,
    mask_of,
    opened,
    read_manifest,
    require_read,
    require_version,
    state_shape,
    states_of,
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
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise unreadable(f"{path} lacks or garbles {error}") from error
        for shard in self._shards:
            if not is_inside(shard):
                raise unreadable(f"{path} names {shard!r}, which is not inside the folder")
        self._layers = len(layers)
        facts = facts_of(manifest, "chat_template", "max_length", "git_sha")
        self.stated = Stated(layers=layers, width=hidden, version=str(VERSION), facts=facts)
        self._records = _read_index(folder / INDEX)
        for key, expected in (("token_dtype", "int32"), ("mask_dtype", "uint8"), ("num_samples", len(self._records))):
            if manifest.get(key, expected) != expected:
                raise unreadable(f"{path} has {key} {manifest[key]!r}, expected {expected!r} as {INDEX} holds it")

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
        require_read(error, path)
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
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = bytearray(file.read(size))
    except OSError as error:
        require_read(error, path)
        raise
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


class AutomodelCache(PeerSource):
    """Automodel's: ``shard-000003.safetensors#7`` is the eighth sample of the fourth shard, right-padded."""

    has_many_per_file = True
    version: int
    layers_key: str
    columns_key: str
    final_key: str | None = None
    is_shifted = False

    def __init__(self, name: str, folder: Path, width: int) -> None:
        super().__init__(name, folder, width)
        manifest = read_manifest(folder / MANIFEST)
        require_version(folder / MANIFEST, manifest, "format_version", self.version)
        layers: Any = manifest.get(self.layers_key)
        has_layers = isinstance(layers, list) and all(isinstance(item, int) for item in layers)
        self.stated = Stated(
            layers=tuple(layers) if has_layers else None,
            width=_number(manifest.get("hidden_size")),
            vocab_size=_number(manifest.get("target_vocab_size")),
            version=str(self.version),
            facts=facts_of(manifest, "target_model", "split", "shuffle_seed"),
        )
        self._samples, self._shard_size = _number(manifest.get("num_samples")), _number(manifest.get("shard_size"))

    def locations(self) -> Sequence[str]:
        locations: list[str] = []
        for name in files_below(self.folder, ".safetensors"):
            if not name.startswith("shard-"):
                continue
            try:
                with opened(self.folder / name) as file:
                    count = file.shape("input_ids")[0]
            except Unusable:
                count = self._expected(name)
            locations += [f"{name}#{index}" for index in range(count)]
        return locations

    def read(self, location: str, states: bool) -> PeerSample:
        index = index_of(location)
        columns = final = None
        with opened(self.file_of(location)) as file:
            length = _length(file, index)
            named = length - 1 if self.is_shifted else length
            ids = token_ids(file.row("input_ids", index)[:named], "input_ids")
            mask = mask_of(file.row("loss_mask", index)[:named], "loss_mask", len(ids))
            _, width = state_shape(file.shape(self.columns_key)[1:], self.columns_key)
            if states:
                rows = states_of(file.row(self.columns_key, index)[:length], self.columns_key)
                columns = columns_of(rows, self._width, self.columns_key)
            if states and self.final_key is not None:
                final = states_of(file.row(self.final_key, index)[:length], self.final_key)
        return PeerSample(ids, mask, length, width, first_row=int(self.is_shifted), columns=columns, final=final)

    def _expected(self, name: str) -> int:
        """Samples that a shard nobody can read was to hold."""
        number = re.match(r"shard-(\d+)", name)
        if self._samples is None or not self._shard_size or number is None:
            return 1
        return max(1, min(self._shard_size, self._samples - int(number[1]) * self._shard_size))


def _length(file: OpenFile, index: int) -> int:
    """Rows before the padding: the attention mask is ones, then zeros."""
    attention = mask_of(file.row("attention_mask", index), "attention_mask", file.shape("attention_mask")[1])
    length = int(attention.sum())
    if not bool(np.all(attention[:length] == 1)):
        raise Unusable("attention-mask", "attention_mask is not ones and then zeros: the sample is not right-padded")
    if length < 2:
        raise Unusable("empty", f"attention_mask leaves {length} tokens")
    return length


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Eagle3Cache(AutomodelCache):
    """``eagle3_cache``, format 2: aux layers, and ``target_probs``, from which no final hidden follows.

    It is shifted before it is written: ids and mask stand one place left of the states, and the first id is gone.
    """

    version = 2
    layers_key = "aux_layer_ids"
    columns_key = "aux_hidden_states"
    is_shifted = True


class DSparkCache(AutomodelCache):
    """``dspark_cache``, format 1, not shifted: layers and the final hidden after its norm, which the last is too."""

    final = "post_norm"
    last_is_final = True
    version = 1
    layers_key = "target_layer_ids"
    columns_key = "target_hidden_states"
    final_key = "target_last_hidden_states"

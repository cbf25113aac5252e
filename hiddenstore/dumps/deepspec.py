"""A store as DeepSpec's target cache, format 2: raw shards, a binary index, a manifest.

From DeepSpec's ``target_cache_dataset``: an index record is ``<QIIQQQQQ`` (sample, shard, tokens, five offsets); a
shard holds per sample ``input_ids`` int32, ``attention_mask`` and ``loss_mask`` uint8, ``target_hidden_states`` bf16
[T, L·D] and ``target_last_hidden_states`` bf16 [T, D] after the final norm.

Shapes: T tokens, L aux layers, D target width.
"""

import json
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from hiddenstore.dumps.common import ExportedSample, ExportScope, PeerLayout
from hiddenstore.dumps.torch_files import side_by_side

RECORD = struct.Struct("<QIIQQQQQ")
SHARD_BYTES = 16 << 30


class DeepSpecWriter:
    """Shards of at most ``SHARD_BYTES``, the index beside them, the manifest at the end."""

    def __init__(self, folder: Path, scope: ExportScope) -> None:
        self._folder, self._scope = folder, scope
        self._index = bytearray()
        self._shards = 0
        self._shard: BinaryIO | None = None
        self._size = 0

    def write(self, row: int, exported: ExportedSample) -> None:
        """One sample at the end of the open shard."""
        sample = exported.sample
        assert exported.final is not None
        arrays = (
            sample.input_ids.astype("<i4").tobytes(),
            np.ones(sample.tokens, np.uint8).tobytes(),
            sample.loss_mask.astype(np.uint8).tobytes(),
            _bits(side_by_side(exported.aux)),
            _bits(exported.final),
        )
        shard = self._shard_with_room(sum(map(len, arrays)))
        offsets = []
        for data in arrays:
            offsets.append(self._size)
            shard.write(data)
            self._size += len(data)
        self._index += RECORD.pack(row, self._shards - 1, sample.tokens, *offsets)

    def close(self, complete: bool) -> None:
        """Write index and manifest."""
        if self._shard is not None:
            self._shard.close()
        if not complete:
            return
        (self._folder / "samples.idx").write_bytes(bytes(self._index))
        manifest = {
            "version": 2,
            "num_samples": len(self._index) // RECORD.size,
            "num_shards": self._shards,
            "target_layer_ids": list(self._scope.layers),
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": RECORD.size,
            "hidden_size": self._scope.width,
            "shards": [{"shard_id": index, "file_name": _shard_name(index)} for index in range(self._shards)],
            "target_model_name_or_path": self._scope.target,
        }
        text = json.dumps(manifest, indent=2, sort_keys=True)
        (self._folder / "manifest.json").write_text(text + "\n", encoding="utf-8")

    def _shard_with_room(self, size: int) -> BinaryIO:
        if self._shard is None or (self._size and self._size + size > SHARD_BYTES):
            if self._shard is not None:
                self._shard.close()
            self._shard = (self._folder / _shard_name(self._shards)).open("wb")
            self._shards += 1
            self._size = 0
        return self._shard


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}.bin"


def _bits(states: Tensor) -> bytes:
    bits: np.ndarray = states.contiguous().view(torch.uint16).numpy()
    return bits.astype("<u2").tobytes()


LAYOUT = PeerLayout("deepspec", "output", "post_norm", DeepSpecWriter)

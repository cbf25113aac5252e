"""NeMo Automodel's target caches: ``manifest.json`` and ``shard-<6 digits>.safetensors``, every sample padded.

Keys from Automodel's ``eagle3_cache`` (format 2) and ``dspark_cache`` (format 1). The EAGLE-3 cache is shifted before
it is written: ids and mask stand one place to the left of the states, and the first id is gone. It keeps the target's
probabilities over the draft vocabulary, from which no final hidden follows. The DSpark cache is not shifted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectors.importers.peer import (
    PeerSample,
    Stated,
    Unusable,
    columns_of,
    files_below,
    mask_of,
    state_shape,
    states_of,
    token_ids,
)
from collectors.importers.safetensors_files import OpenFile, opened
from collectors.importers.torch_files import TorchFiles
from hiddenstore.errors import ConfigError, FormatError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class CacheKeys:
    """How one of the caches is written."""

    version: int
    layers: str
    columns: str
    final: str | None
    shifted: bool


EAGLE3 = CacheKeys(version=2, layers="aux_layer_ids", columns="aux_hidden_states", final=None, shifted=True)
DSPARK = CacheKeys(
    version=1,
    layers="target_layer_ids",
    columns="target_hidden_states",
    final="target_last_hidden_states",
    shifted=False,
)


class AutomodelCache:
    """A cache folder; ``shard-000003.safetensors#7`` is the eighth sample of the fourth shard."""

    def __init__(self, folder: Path, width: int, keys: CacheKeys) -> None:
        self._folder, self._width, self._keys = folder, width, keys
        manifest = read_manifest(folder / MANIFEST)
        if manifest.get("format_version") != keys.version:
            raise FormatError(
                f"{folder / MANIFEST} is of format_version {manifest.get('format_version')}, expected {keys.version}",
                kind="source-version",
            )
        self.stated = Stated(
            layers=_ids(manifest.get(keys.layers)),
            width=_number(manifest.get("hidden_size")),
            vocab_size=_number(manifest.get("target_vocab_size")),
            version=str(keys.version),
            facts=_facts(manifest, ("target_model", "split", "shuffle_seed")),
        )
        self._samples, self._shard_size = _number(manifest.get("num_samples")), _number(manifest.get("shard_size"))

    def places(self) -> Sequence[str]:
        found = []
        for name in files_below(self._folder, ".safetensors"):
            if not name.startswith("shard-"):
                continue
            try:
                with opened(self._folder / name) as file:
                    count = file.shape("input_ids")[0]
            except Unusable:
                count = self._expected(name)
            found += [f"{name}#{index}" for index in range(count)]
        return found

    def file_of(self, place: str) -> Path:
        return self._folder / place.rpartition("#")[0]

    def read(self, place: str, states: bool) -> PeerSample:
        keys, index = self._keys, int(place.rpartition("#")[2])
        with opened(self.file_of(place)) as file:
            length = _length(file, index)
            named = slice(0, length - 1) if keys.shifted else slice(0, length)
            ids = token_ids(file.row("input_ids", index)[named], "input_ids")
            mask = mask_of(file.row("loss_mask", index)[named], "loss_mask", len(ids))
            _, width = state_shape(file.shape(keys.columns)[1:], keys.columns)
            sample = PeerSample(ids, mask, length, width, first_row=int(keys.shifted))
            if not states:
                return sample
            held = states_of(file.row(keys.columns, index)[:length], keys.columns)
            final = None if keys.final is None else states_of(file.row(keys.final, index)[:length], keys.final)
        columns = columns_of(held, self._width, keys.columns)
        return PeerSample(ids, mask, length, width, first_row=int(keys.shifted), columns=columns, final=final)

    def close(self) -> None:
        return

    def _expected(self, name: str) -> int:
        """Samples that a shard nobody can read was to hold."""
        if self._samples is None or not self._shard_size:
            return 1
        index = int(name.removeprefix("shard-").partition(".")[0])
        return max(1, min(self._shard_size, self._samples - index * self._shard_size))


def read_manifest(path: Path) -> dict[str, Any]:
    """A JSON object; ConfigError ``source-unreadable``."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", kind="source-unreadable") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no object", kind="source-unreadable")
    return document


def _length(file: OpenFile, index: int) -> int:
    """Rows before the padding: the attention mask is ones, then zeros."""
    attention = mask_of(file.row("attention_mask", index), "attention_mask", file.shape("attention_mask")[1])
    length = int(attention.sum())
    if not bool(np.all(attention[:length] == 1)):
        raise Unusable("attention-mask", "attention_mask is not ones and then zeros: the sample is not right-padded")
    if length < 2:
        raise Unusable("empty", f"attention_mask leaves {length} tokens")
    return length


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        return None
    return tuple(value)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _facts(manifest: dict[str, Any], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """What the manifest says of its origin; a path of somebody's machine is cut to its name."""
    found = [(name, manifest[name]) for name in names if isinstance(manifest.get(name), str | int)]
    return tuple((name, Path(str(value)).name if str(value).startswith("/") else str(value)) for name, value in found)


def open_eagle3(folder: Path, width: int, _files: TorchFiles) -> AutomodelCache:
    """Aux layers only; un-shifted."""
    return AutomodelCache(folder, width, EAGLE3)


def open_dspark(folder: Path, width: int, _files: TorchFiles) -> AutomodelCache:
    """Layers and the final hidden after its norm."""
    return AutomodelCache(folder, width, DSPARK)

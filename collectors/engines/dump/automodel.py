"""NeMo Automodel's target caches: ``manifest.json`` and ``shard-<6 digits>.safetensors``, every sample padded.

Keys from Automodel's ``eagle3_cache`` (format 2) and ``dspark_cache`` (format 1). The EAGLE-3 cache is shifted before
it is written: ids and mask stand one place to the left of the states, and the first id is gone. It keeps the target's
probabilities over the draft vocabulary, from which no final hidden follows. The DSpark cache is not shifted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collectors.engines.dump.peer import (
    PeerSample,
    PeerSource,
    Stated,
    Unusable,
    columns_of,
    facts_of,
    files_below,
    index_of,
    mask_of,
    read_manifest,
    require_version,
    state_shape,
    states_of,
    token_ids,
)
from collectors.engines.dump.safetensors_files import OpenFile, opened

MANIFEST = "manifest.json"


class AutomodelCache(PeerSource):
    """A cache folder; ``shard-000003.safetensors#7`` is the eighth sample of the fourth shard."""

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
        self.stated = Stated(
            layers=_ids(manifest.get(self.layers_key)),
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
        if self._samples is None or not self._shard_size:
            return 1
        index = int(name.removeprefix("shard-").partition(".")[0])
        return max(1, min(self._shard_size, self._samples - index * self._shard_size))


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


class Eagle3Cache(AutomodelCache):
    """Aux layers only; un-shifted."""

    version = 2
    layers_key = "aux_layer_ids"
    columns_key = "aux_hidden_states"
    is_shifted = True


class DSparkCache(AutomodelCache):
    """Layers and the final hidden after its norm, which the last layer is too."""

    final = "post_norm"
    last_is_final = True
    version = 1
    layers_key = "target_layer_ids"
    columns_key = "target_hidden_states"
    final_key = "target_last_hidden_states"

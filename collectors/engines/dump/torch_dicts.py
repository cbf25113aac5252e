"""Dumps of torch dicts, one a conversation: which key holds what is all that tells their formats apart.

Shapes: T rows of one sample as the peer stored it, C layer columns, D target width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from collectors.engines.dump.peer import (
    PeerSample,
    PeerSource,
    Unusable,
    columns_of,
    files_below,
    index_of,
    mask_of,
    require_rows,
    state_shape,
    states_of,
    token_ids,
)
from collectors.engines.dump.torch_files import read_dicts, require_safe_torch, tensor_of
from schemas.capture import NormState

MASK_KEY = "loss_mask"


class TorchDicts(PeerSource):
    """A folder of files with ``input_ids``, ``loss_mask`` and states under the keys that the format names.

    ``columns_keys``: names of the layers side by side [T, C·D], old and new; none where it keeps no layers.
    ``final_key``: of the final hidden [T, D]. ``prenorm_key``: a flag in the file, whether the final hidden is before
    its norm. ``is_padded`` as ``PeerSample.padded``. With ``has_many_per_file`` a file is a list of dicts.
    """

    suffixes: tuple[str, ...]
    columns_keys: tuple[str, ...] = ()
    final_key: str | None = None
    prenorm_key: str | None = None
    needs_mask = True
    is_padded = False

    def __init__(self, name: str, folder: Path, width: int) -> None:
        super().__init__(name, folder, width)
        require_safe_torch()

    def locations(self) -> Sequence[str]:
        names = files_below(self.folder, *self.suffixes)
        if not self.has_many_per_file:
            return names
        return [f"{name}#{index}" for name in names for index in range(self._count(name))]

    def read(self, location: str, states: bool) -> PeerSample:
        entry = self._entry(location)
        ids = token_ids(entry.get("input_ids"), "input_ids")
        has_mask = self.needs_mask or entry.get(MASK_KEY) is not None
        mask = mask_of(entry.get(MASK_KEY), MASK_KEY, len(ids)) if has_mask else None
        sample = PeerSample(ids, mask, len(ids), 0, padded=self.is_padded, final_norm=self._final_norm(entry))
        if self.columns_keys:
            key = next((name for name in self.columns_keys if name in entry), self.columns_keys[0])
            tensor = _rows(entry, key, len(ids))
            columns = columns_of(states_of(tensor, key), self._width, key) if states else None
            sample = replace(sample, column_width=state_shape(tensor.shape, key)[1], columns=columns)
        if self.final_key is not None:
            tensor = _rows(entry, self.final_key, len(ids))
            sample = replace(sample, final=states_of(tensor, self.final_key) if states else None)
        return sample

    def _entry(self, location: str) -> Mapping[str, Any]:
        dicts = read_dicts(self.file_of(location), self.has_many_per_file)
        index = index_of(location) if self.has_many_per_file else 0
        if index >= len(dicts):
            raise Unusable("wrong-content", f"it holds {len(dicts)} dicts, and none at {index}")
        return dicts[index]

    def _count(self, name: str) -> int:
        try:
            return max(1, len(read_dicts(self.folder / name, is_list=True)))
        except Unusable:
            return 1  # reading it again will say why

    def _final_norm(self, entry: Mapping[str, Any]) -> NormState | None:
        flag = None if self.prenorm_key is None else entry.get(self.prenorm_key)
        if flag is None:
            return None
        try:
            return "pre_norm" if flag else "post_norm"
        except (RuntimeError, ValueError) as error:
            raise Unusable("wrong-content", f"{self.prenorm_key} is not one flag") from error


def _rows(entry: Mapping[str, Any], key: str, tokens: int) -> Tensor:
    states = tensor_of(entry, key)
    require_rows(state_shape(states.shape, key)[0], tokens, key)
    return states

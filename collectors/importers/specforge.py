"""SpecForge's offline features: ``rows_*/data_*.ckpt`` or ``.ckpt.gz``, one torch dict a conversation, right-padded.

Read from SpecForge 0.2 (``offline_reader``, ``algorithms/eagle3/data.py``, ``common/dflash_family_data.py``). The
batch's padding is stored and its attention mask is not; layer ids are not stored either. The final hidden comes from
SGLang, after the final norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collectors.importers.peer import (
    PeerSample,
    Stated,
    columns_of,
    files_below,
    mask_of,
    require_rows,
    state_shape,
    states_of,
    token_ids,
)
from collectors.importers.torch_files import TorchFiles

SUFFIXES = (".ckpt", ".ckpt.gz")


@dataclass(frozen=True)
class TorchKeys:
    """Names of tensors in a torch dict; None where the format has no such tensor. ``padded`` as in ``PeerSample``."""

    columns: str | None
    final: str | None
    padded: bool = True
    suffixes: tuple[str, ...] = SUFFIXES


EAGLE3 = TorchKeys(columns="aux_hidden_state", final="hidden_state")
DFLASH = TorchKeys(columns="hidden_states", final=None)
DSPARK = TorchKeys(columns="hidden_states", final="target_last_hidden_states")
EAGLE1 = TorchKeys(columns=None, final="hidden_state", padded=False, suffixes=(".ckpt",))


class TorchDicts:
    """A folder of torch dicts with ``input_ids``, ``loss_mask`` and the states that ``keys`` names."""

    stated = Stated()

    def __init__(self, folder: Path, width: int, files: TorchFiles, keys: TorchKeys) -> None:
        self._folder, self._width, self._files, self._keys = folder, width, files, keys

    def places(self) -> Sequence[str]:
        return files_below(self._folder, *self._keys.suffixes)

    def file_of(self, place: str) -> Path:
        return self._folder / place

    def read(self, place: str, states: bool) -> PeerSample:
        keys = self._keys
        found = self._files.read(self.file_of(place), None if states else ("input_ids", "loss_mask"))
        ids = token_ids(found.tensors.get("input_ids"), "input_ids")
        mask = mask_of(found.tensors.get("loss_mask"), "loss_mask", len(ids))
        column_width = 0
        for key in filter(None, (keys.columns, keys.final)):
            rows, wide = state_shape(found.shape(key), key)
            require_rows(rows, len(ids), key)
            column_width = wide if key == keys.columns else column_width
        sample = PeerSample(ids, mask, len(ids), column_width, padded=keys.padded)
        if not states:
            return sample
        columns = final = None
        if keys.columns is not None:
            columns = columns_of(states_of(found.tensors[keys.columns], keys.columns), self._width, keys.columns)
        if keys.final is not None:
            final = states_of(found.tensors[keys.final], keys.final)
        return PeerSample(ids, mask, len(ids), column_width, padded=keys.padded, columns=columns, final=final)

    def close(self) -> None:
        self._files.close()


def open_eagle3(folder: Path, width: int, files: TorchFiles) -> TorchDicts:
    """``aux_hidden_state`` [1, T, 3·D] and the final ``hidden_state`` [1, T, D]."""
    return TorchDicts(folder, width, files, EAGLE3)


def open_dflash(folder: Path, width: int, files: TorchFiles) -> TorchDicts:
    """``hidden_states`` [1, T, C·D], also of the domino strategy; no final hidden."""
    return TorchDicts(folder, width, files, DFLASH)


def open_dspark(folder: Path, width: int, files: TorchFiles) -> TorchDicts:
    """``hidden_states`` [1, T, C·D] and the final ``target_last_hidden_states`` [1, T, D]."""
    return TorchDicts(folder, width, files, DSPARK)

"""A store as SpecForge 0.2's offline features: ``rows_<a>-<b>/data_<row>.ckpt``, one torch dict a sample, unpadded.

Keys, read from SpecForge's ``offline_reader`` and its strategies: EAGLE-3 ``input_ids`` [T], ``loss_mask`` [T],
``aux_hidden_state`` [1, T, 3·D], ``hidden_state`` [1, T, D] after the final norm; DFlash ``hidden_states`` [1, T, L·D]
and no final hidden. SpecForge splits nothing: validation samples come last.

Shapes: T tokens, L aux layers, D target width.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hiddenstore.dumps.common import ExportedSample, PeerLayout, write_torch_file

ROWS_PER_FOLDER = 2000


class SpecForgeWriter:
    """``states`` names the tensors of one strategy."""

    def __init__(self, folder: Path, states: Callable[[ExportedSample], dict[str, Tensor]]) -> None:
        self._folder, self._states = folder, states

    def write(self, row: int, exported: ExportedSample) -> None:
        """One file."""
        first = row // ROWS_PER_FOLDER * ROWS_PER_FOLDER
        folder = self._folder / f"rows_{first}-{first + ROWS_PER_FOLDER}"
        folder.mkdir(exist_ok=True)
        sample = exported.sample
        entries: dict[str, Tensor | str] = {
            "input_ids": torch.from_numpy(sample.input_ids.astype("int64")),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype("int64")),
            **self._states(exported),
        }
        write_torch_file(folder / f"data_{row}.ckpt", entries)

    def close(self, complete: bool) -> None:
        """Every file is whole already."""


def side_by_side(aux: Tensor) -> Tensor:
    """Layers [L, T, D] as columns [T, L·D]."""
    return aux.transpose(0, 1).flatten(1)


def _eagle3(exported: ExportedSample) -> dict[str, Tensor]:
    assert exported.final is not None
    return {"aux_hidden_state": side_by_side(exported.aux)[None], "hidden_state": exported.final[None]}


def _dflash(exported: ExportedSample) -> dict[str, Tensor]:
    return {"hidden_states": side_by_side(exported.aux)[None]}


EAGLE3 = PeerLayout(
    "specforge-eagle3", "output", "post_norm", lambda folder, _scope: SpecForgeWriter(folder, _eagle3), layer_count=3
)
DFLASH = PeerLayout("specforge-dflash", "output", None, lambda folder, _scope: SpecForgeWriter(folder, _dflash))

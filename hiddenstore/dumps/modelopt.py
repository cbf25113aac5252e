"""A store as ModelOpt's offline dump: ``<sample id>.pt``, one torch dict a sample.

Keys, from Model-Optimizer's ``collect_hidden_states`` scripts and its offline dataset: ``input_ids`` [T],
``hidden_states`` [T, D] after the final norm, ``aux_hidden_states`` [T, L·D], ``loss_mask`` [T], ``conversation_id``.

Shapes: T tokens, L aux layers, D target width.
"""

from pathlib import Path

import torch
from torch import Tensor

from hiddenstore.dumps.common import ExportedSample, ExportScope, PeerLayout, write_torch_file
from hiddenstore.dumps.specforge import side_by_side


class ModelOptWriter:
    """One file a sample, named by its id."""

    def __init__(self, folder: Path, _scope: ExportScope) -> None:
        self._folder = folder

    def write(self, _row: int, exported: ExportedSample) -> None:
        """One file."""
        sample = exported.sample
        assert exported.final is not None
        entries: dict[str, Tensor | str] = {
            "input_ids": torch.from_numpy(sample.input_ids.astype("int64")),
            "hidden_states": exported.final,
            "aux_hidden_states": side_by_side(exported.aux),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype("int64")),
            "conversation_id": sample.id,
        }
        write_torch_file(self._folder / f"{sample.id}.pt", entries)

    def close(self, complete: bool) -> None:
        """Every file is whole already."""


LAYOUT = PeerLayout("modelopt-hf", "output", "post_norm", ModelOptWriter)

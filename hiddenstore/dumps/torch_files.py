"""One torch dict a sample: SpecForge 0.2's offline features and ModelOpt's offline dump.

SpecForge, from its ``offline_reader`` and strategies: ``rows_<a>-<b>/data_<row>.ckpt``, unpadded; EAGLE-3 ``input_ids``
[T], ``loss_mask`` [T], ``aux_hidden_state`` [1, T, 3·D], ``hidden_state`` [1, T, D] after the final norm; DFlash
``hidden_states`` [1, T, L·D] and no final hidden. It reads them sorted as text.

ModelOpt, from its ``collect_hidden_states`` scripts and its offline dataset: ``<sample id>.pt`` with ``input_ids`` [T],
``hidden_states`` [T, D] after the final norm, ``aux_hidden_states`` [T, L·D], ``loss_mask`` [T], ``conversation_id``.
Its dataset reads that mask with ``answer_only_loss`` alone, and teaches every token without. It reads the files as
the folder lists them.

Neither splits anything: which samples are of validation stands in ``hiddenstore-samples.parquet``.

Shapes: T tokens, L aux layers, D target width.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hiddenstore.dumps.common import ExportedSample, ExportScope, PeerLayout, write_torch_file

ROWS_PER_FOLDER = 2000

Entries = dict[str, Tensor | str]


class TorchFilesWriter:
    """One file a sample: ``path`` names it by row and sample id, ``states`` gives what lies beside tokens and mask."""

    def __init__(
        self, path: Callable[[int, str], str], states: Callable[[ExportedSample], Entries], folder: Path, _: ExportScope
    ) -> None:
        self._path, self._states, self._folder = path, states, folder

    def write(self, row: int, exported: ExportedSample) -> None:
        """One file."""
        sample = exported.sample
        path = self._folder / self._path(row, sample.id)
        path.parent.mkdir(exist_ok=True)
        tokens: Entries = {
            "input_ids": torch.from_numpy(sample.input_ids.astype("int64")),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype("int64")),
        }
        write_torch_file(path, {**tokens, **self._states(exported)})

    def close(self, complete: bool) -> None:
        """Every file is whole already."""


def side_by_side(aux: Tensor) -> Tensor:
    """Layers [L, T, D] as columns [T, L·D]."""
    return aux.transpose(0, 1).flatten(1)


def _by_row(row: int, _sample_id: str) -> str:
    first = row // ROWS_PER_FOLDER * ROWS_PER_FOLDER
    return f"rows_{first}-{first + ROWS_PER_FOLDER}/data_{row}.ckpt"


def _by_id(_row: int, sample_id: str) -> str:
    return f"{sample_id}.pt"


def _eagle3(exported: ExportedSample) -> Entries:
    assert exported.final is not None
    return {"aux_hidden_state": side_by_side(exported.aux)[None], "hidden_state": exported.final[None]}


def _dflash(exported: ExportedSample) -> Entries:
    return {"hidden_states": side_by_side(exported.aux)[None]}


def _modelopt(exported: ExportedSample) -> Entries:
    assert exported.final is not None
    return {
        "hidden_states": exported.final,
        "aux_hidden_states": side_by_side(exported.aux),
        "conversation_id": exported.sample.id,
    }


EAGLE3 = PeerLayout(
    "specforge-eagle3",
    "output",
    "post_norm",
    partial(TorchFilesWriter, _by_row, _eagle3),
    layer_count=3,
    is_in_order=False,
)
DFLASH = PeerLayout("specforge-dflash", "output", None, partial(TorchFilesWriter, _by_row, _dflash), is_in_order=False)
MODELOPT = PeerLayout(
    "modelopt-hf",
    "output",
    "post_norm",
    partial(TorchFilesWriter, _by_id, _modelopt),
    masks_by="training.answer_only_loss=true",
    is_in_order=False,
)

"""A store as the offline data that speculators 0.9 trains on (``speculators train --data-path OUT``).

Layout, read from ``speculators.train.data.ArrowDataset`` and ``hs_connectors.FileTransfer`` of release 0.9.0:

* ``OUT/`` is a ``datasets`` folder (``save_to_disk``, torch format) with one row per sample: ``input_ids`` int64 [T],
  ``loss_mask`` int64 [T], ``seq_len``.
* ``OUT/hidden_states/hs_<row>.safetensors`` holds ``token_ids`` int64 [T] and ``hidden_states`` bf16 [T, L+1, D]: the
  aux layers ascending, then the final hidden before its norm at every token (speculators norms it itself).
* The layout ``speculators-store`` is the first of these alone: ``speculators_backend`` reads the states from the store.
* The split is by position, ``int(rows * train_data_ratio)`` rows first, so training samples are written first.

Shapes: T tokens, L aux layers, D target width.
"""

import shutil
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save

from hiddenstore.dumps.common import ExportedData, ExportedSample, ExportScope, PeerLayout

STATES_FOLDER = "hidden_states"


class RowsWriter:
    """Rows into one Arrow file."""

    def __init__(self, folder: Path, _scope: ExportScope) -> None:
        from datasets import Features, Value
        from datasets import Sequence as ListOf
        from datasets.arrow_writer import ArrowWriter

        self._folder = folder
        # A folder of its own: `datasets` refuses to save a dataset beside the file it reads.
        rows = folder / ".rows"
        rows.mkdir()
        self._rows_file = rows / "rows.arrow"
        features = Features(
            {"input_ids": ListOf(Value("int64")), "loss_mask": ListOf(Value("int64")), "seq_len": Value("int64")}
        )
        self._open = ExitStack()
        self._open.callback(shutil.rmtree, rows)
        self._rows = self._open.enter_context(
            ArrowWriter(features=features, path=str(self._rows_file), writer_batch_size=500)
        )

    def write(self, row: int, exported: ExportedSample) -> None:
        """The tokens and mask of one sample."""
        sample = exported.sample
        self._rows.write(
            {
                "input_ids": sample.input_ids.astype("int64"),
                "loss_mask": sample.loss_mask.astype("int64"),
                "seq_len": sample.tokens,
            }
        )

    def close(self, complete: bool) -> None:
        """Save the rows as ``datasets`` loads them."""
        from datasets import Dataset

        with self._open:
            if complete:
                self._rows.finalize()
                _save_quietly(Dataset.from_file(str(self._rows_file)).with_format("torch"), self._folder)


class SpeculatorsWriter(RowsWriter):
    """Rows into one Arrow file, states into a file each."""

    def __init__(self, folder: Path, scope: ExportScope) -> None:
        super().__init__(folder, scope)
        (folder / STATES_FOLDER).mkdir()

    def write(self, row: int, exported: ExportedSample) -> None:
        """One row and its states."""
        super().write(row, exported)
        file = self._folder / STATES_FOLDER / f"hs_{row}.safetensors"
        file.write_bytes(save(peer_tensors(exported)))


def peer_tensors(exported: ExportedSample) -> dict[str, torch.Tensor]:
    """A sample as its dataset takes it: ``hidden_states`` bf16 [T, L+1, D], ``token_ids`` int64 [T]."""
    assert exported.final is not None
    states = torch.cat([exported.aux.transpose(0, 1), exported.final[:, None]], dim=1)
    return {"hidden_states": states, "token_ids": torch.from_numpy(exported.sample.input_ids.astype("int64"))}


def train_command(report: ExportedData, store: str) -> list[str]:
    """The peer's command that trains on an export of ``store`` without a server; empty for others' layouts."""
    if report.layout == LAYOUT.name:
        program = ["speculators", "train"]
    elif report.layout == STORE_LAYOUT.name:
        program = ["python", "-m", "hiddenstore.dumps.speculators_backend"]
        program += ["--hidden-states-backend", "hiddenstore", "--store", store]
    else:
        return []
    return [
        *(*program, "--data-path", str(report.path)),
        *("--target-layer-ids", *(str(i) for i in report.layer_ids)),
        # Every digit: at a million rows the seventh moves the cut.
        *("--train-data-ratio", repr(report.train_data_ratio), "--on-missing", "raise"),
    ]


LAYOUT = PeerLayout("speculators", "vllm", "pre_norm", SpeculatorsWriter)
STORE_LAYOUT = PeerLayout("speculators-store", "vllm", "pre_norm", RowsWriter, holds_states=False)


def _save_quietly(dataset: object, folder: Path) -> None:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))  # type: ignore[attr-defined]
    finally:
        if not silent:
            enable_progress_bars()

"""speculators' offline data, and the files that vLLM's hidden-states connector writes for it.

Read from speculators 0.9 (``train.data.ArrowDataset``, ``hs_connectors``): a ``datasets`` folder with ``input_ids`` and
``loss_mask``, and ``hidden_states/hs_<row>.safetensors`` with ``token_ids`` [T] and ``hidden_states`` [T, C+1, D], the
last slot the final hidden before its norm; in FP8 with ``hidden_states_scales`` [T, 1, 1]. vLLM's
``ExampleHiddenStatesConnector`` writes the same tensors under the name of the request, without tokens' masks anywhere.
Neither holds layer ids.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectors.importers.peer import (
    PeerSample,
    Stated,
    Unusable,
    files_below,
    first_line,
    mask_of,
    require_rows,
    states_of,
    token_ids,
)
from collectors.importers.safetensors_files import OpenFile, opened
from collectors.importers.torch_files import TorchFiles
from hiddenstore.errors import ConfigError

STATES_FOLDER = "hidden_states"
STATES_KEY = "hidden_states"
SCALES_KEY = "hidden_states_scales"
TOKENS_KEY = "token_ids"


class VllmFiles:
    """A folder of ``<request>.safetensors``."""

    stated = Stated()

    def __init__(self, folder: Path, width: int) -> None:
        self._folder, self._width = folder, width

    def places(self) -> Sequence[str]:
        return files_below(self._folder, ".safetensors")

    def file_of(self, place: str) -> Path:
        return self._folder / place

    def read(self, place: str, states: bool) -> PeerSample:
        with opened(self.file_of(place)) as file:
            return _read(file, states, self._width)

    def close(self) -> None:
        return


class SpeculatorsData:
    """A ``datasets`` folder with the states beside it; a row without its file was never captured."""

    stated = Stated()

    def __init__(self, folder: Path, width: int) -> None:
        self._folder, self._width = folder, width

    @cached_property
    def _rows(self) -> Any:
        from datasets import load_from_disk

        try:
            rows = load_from_disk(str(self._folder)).with_format("torch")
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{self._folder} is no speculators data: {first_line(error)}",
                kind="source-unreadable",
                hint="name the folder that `speculators prepare-data` wrote, with hidden_states/ inside; for bare "
                "connector files: --from vllm-extract",
            ) from error
        missing = [name for name in ("input_ids", "loss_mask") if name not in rows.column_names]
        if missing:
            raise ConfigError(
                f"the rows of {self._folder} have no {', '.join(missing)}, only {', '.join(rows.column_names)}",
                kind="source-unreadable",
            )
        return rows

    def places(self) -> Sequence[str]:
        return [f"{STATES_FOLDER}/hs_{row}.safetensors" for row in range(len(self._rows))]

    def file_of(self, place: str) -> Path:
        return self._folder / place

    def read(self, place: str, states: bool) -> PeerSample:
        row = self._rows[int(place.rpartition("_")[2].partition(".")[0])]
        with opened(self.file_of(place)) as file:
            sample = _read(file, states, self._width)
        ids = token_ids(row["input_ids"], "input_ids")
        if not torch.equal(torch.from_numpy(ids), torch.from_numpy(sample.input_ids)):
            detail = f"{Path(place).name} holds {len(sample.input_ids)} tokens that are not the {len(ids)} of its row"
            raise Unusable("tokens-mismatch", detail)
        mask = mask_of(row["loss_mask"], "loss_mask", len(ids))
        return PeerSample(ids, mask, sample.rows, sample.column_width, columns=sample.columns, final=sample.final)

    def close(self) -> None:
        return


def _read(file: OpenFile, states: bool, width: int) -> PeerSample:
    ids = token_ids(file.tensor(TOKENS_KEY), TOKENS_KEY)
    shape = file.shape(STATES_KEY)
    if len(shape) != 3 or shape[1] < 1:
        raise Unusable("wrong-shape", f"{STATES_KEY} has shape {list(shape)}, expected [T, layers, {width}]")
    require_rows(shape[0], len(ids), STATES_KEY)
    wide = (shape[1] - 1) * shape[2]
    if not states:
        return PeerSample(ids, None, shape[0], wide)
    if shape[2] != width:
        raise Unusable("wrong-width", f"{STATES_KEY} is {shape[2]} wide, the target {width}")
    held = _unscaled(file)
    return PeerSample(ids, None, shape[0], wide, columns=held[:, :-1], final=held[:, -1])


def _unscaled(file: OpenFile) -> Tensor:
    """States [T, C+1, D] as speculators' own reader gives them: FP8 is multiplied out in bf16."""
    held = file.tensor(STATES_KEY)
    if SCALES_KEY not in file.keys:
        return states_of(held.flatten(1), STATES_KEY).reshape(held.shape)
    if held.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise Unusable("wrong-dtype", f"{STATES_KEY} has scales but is {held.dtype}")
    scales = file.tensor(SCALES_KEY)
    if scales.shape[0] != held.shape[0] or scales.numel() != held.shape[0]:
        raise Unusable("wrong-shape", f"{SCALES_KEY} has shape {list(scales.shape)}, expected one scale a token")
    return held.to(torch.bfloat16) * scales.reshape(-1, 1, 1).to(torch.bfloat16)


def open_speculators(folder: Path, width: int, _files: TorchFiles) -> SpeculatorsData:
    """The whole data folder: masks come with it."""
    return SpeculatorsData(folder, width)


def open_vllm_extract(folder: Path, width: int, _files: TorchFiles) -> VllmFiles:
    """Bare connector files."""
    return VllmFiles(folder, width)

"""speculators' offline data, and the files that vLLM's hidden-states connector writes for it.

Read from speculators 0.9 (``train.data.ArrowDataset``, ``hs_connectors``): a ``datasets`` folder with ``input_ids`` and
``loss_mask``, and ``hidden_states/hs_<row>.safetensors`` with ``token_ids`` [T] and ``hidden_states`` [T, C+1, D], the
last slot the final hidden before its norm; in FP8 with ``hidden_states_scales`` [T, 1, 1]. vLLM's
``ExampleHiddenStatesConnector`` writes the same tensors under the name of the request, without tokens' masks anywhere.
Neither holds layer ids.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.engines.dump.peer import (
    OpenFile,
    PeerSample,
    PeerSource,
    Unusable,
    files_below,
    mask_of,
    opened,
    require_read,
    require_rows,
    states_of,
    token_ids,
    unreadable,
)
from hiddenstore.targets.folder import first_line

STATES_FOLDER = "hidden_states"
STATES_KEY = "hidden_states"
SCALES_KEY = "hidden_states_scales"
TOKENS_KEY = "token_ids"


class ConnectorFiles(PeerSource):
    """Bare connector files, ``<request>.safetensors``."""

    numbering = "vllm"
    default_layers = "eagle3"
    final = "pre_norm"

    def locations(self) -> Sequence[str]:
        return files_below(self.folder, ".safetensors")

    def read(self, location: str, states: bool) -> PeerSample:
        with opened(self.file_of(location)) as file:
            return _read(file, states, self._width)


class SpeculatorsData(ConnectorFiles):
    """A ``datasets`` folder with masks, the states beside it; a row without its file was never captured."""

    @cached_property
    def _rows(self) -> Any:
        from datasets import load_from_disk

        try:
            rows = load_from_disk(str(self.folder)).with_format("torch")
        except Exception as error:  # its files may hold anything
            require_read(error, self.folder)
            raise unreadable(
                f"{self.folder} is no speculators data: {first_line(error)}",
                "name the folder that `speculators prepare-data` wrote, with hidden_states/ inside; for bare connector "
                "files: --from vllm-extract",
            ) from error
        missing = [name for name in ("input_ids", "loss_mask") if name not in rows.column_names]
        if missing:
            columns = ", ".join(rows.column_names)
            raise unreadable(f"the rows of {self.folder} have no {', '.join(missing)}, only {columns}")
        return rows

    def locations(self) -> Sequence[str]:
        return [f"{STATES_FOLDER}/hs_{row}.safetensors" for row in range(len(self._rows))]

    def read(self, location: str, states: bool) -> PeerSample:
        row = self._rows[int(location.rpartition("_")[2].partition(".")[0])]
        sample = super().read(location, states)
        ids = token_ids(row["input_ids"], "input_ids")
        if not np.array_equal(ids, sample.input_ids):
            name, tokens = Path(location).name, len(sample.input_ids)
            raise Unusable("tokens-mismatch", f"{name} holds {tokens} tokens that are not the {len(ids)} of its row")
        return replace(sample, loss_mask=mask_of(row["loss_mask"], "loss_mask", len(ids)))


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
    slots = _unscaled(file)
    return PeerSample(ids, None, shape[0], wide, columns=slots[:, :-1], final=slots[:, -1])


def _unscaled(file: OpenFile) -> Tensor:
    """States [T, C+1, D] as speculators' own reader gives them: FP8 is multiplied out in bf16."""
    slots = file.tensor(STATES_KEY)
    if SCALES_KEY not in file.keys:
        return states_of(slots.flatten(1), STATES_KEY).reshape(slots.shape)
    if slots.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise Unusable("wrong-dtype", f"{STATES_KEY} has scales but is {slots.dtype}")
    scales = file.tensor(SCALES_KEY)
    if scales.shape[0] != slots.shape[0] or scales.numel() != slots.shape[0]:
        raise Unusable("wrong-shape", f"{SCALES_KEY} has shape {list(scales.shape)}, expected one scale a token")
    return slots.to(torch.bfloat16) * scales.reshape(-1, 1, 1).to(torch.bfloat16)

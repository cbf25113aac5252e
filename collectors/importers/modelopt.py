"""ModelOpt's dumps: ``<conversation_id>.pt``, a torch dict a conversation, the same keys from three engines.

Keys from Model-Optimizer's ``collect_hidden_states`` scripts: ``input_ids`` [T], ``hidden_states`` [T, D] (the final
hidden), ``aux_hidden_states`` [T, C·D], ``conversation_id``; newer ones add ``loss_mask``, and a reader knows
``hidden_states_prenorm``. Nothing in a file says which engine wrote it: Hugging Face and TensorRT-LLM hand out the
final hidden after its norm and count layers by their output, vLLM before it and by their input.
"""

from collections.abc import Sequence
from pathlib import Path

from collectors.importers.peer import (
    PeerSample,
    Stated,
    Unusable,
    columns_of,
    files_below,
    mask_of,
    require_rows,
    state_shape,
    states_of,
    token_ids,
)
from collectors.importers.torch_files import TorchFiles
from schemas.capture import NormState

FINAL_KEY = "hidden_states"
AUX_KEY = "aux_hidden_states"
PRENORM_KEY = "hidden_states_prenorm"
_SMALL = ("input_ids", "loss_mask", PRENORM_KEY)


class ModelOptFiles:
    """A folder of ``.pt`` files."""

    stated = Stated()

    def __init__(self, folder: Path, width: int, files: TorchFiles) -> None:
        self._folder, self._width, self._files = folder, width, files

    def places(self) -> Sequence[str]:
        return files_below(self._folder, ".pt")

    def file_of(self, place: str) -> Path:
        return self._folder / place

    def read(self, place: str, states: bool) -> PeerSample:
        found = self._files.read(self.file_of(place), None if states else _SMALL)
        ids = token_ids(found.tensors.get("input_ids"), "input_ids")
        mask = mask_of(found.tensors["loss_mask"], "loss_mask", len(ids)) if "loss_mask" in found.tensors else None
        for key in (FINAL_KEY, AUX_KEY):
            require_rows(state_shape(found.shape(key), key)[0], len(ids), key)
        width = state_shape(found.shape(AUX_KEY), AUX_KEY)[1]
        columns = final = None
        if states:
            columns = columns_of(states_of(found.tensors[AUX_KEY], AUX_KEY), self._width, AUX_KEY)
            final = states_of(found.tensors[FINAL_KEY], FINAL_KEY)
        before = found.scalars.get(PRENORM_KEY)
        if before is None and PRENORM_KEY in found.tensors:
            before = _one_bool(found.tensors[PRENORM_KEY])
        norm: NormState | None = None if before is None else "pre_norm" if before else "post_norm"
        return PeerSample(ids, mask, len(ids), width, columns=columns, final=final, final_norm=norm)

    def close(self) -> None:
        self._files.close()


def _one_bool(flag: object) -> bool:
    try:
        return bool(flag)
    except (RuntimeError, ValueError) as error:
        raise Unusable("wrong-content", f"{PRENORM_KEY} is not one flag") from error


def open_modelopt(folder: Path, width: int, files: TorchFiles) -> ModelOptFiles:
    """The same files whichever engine wrote them; the format's name says which."""
    return ModelOptFiles(folder, width, files)

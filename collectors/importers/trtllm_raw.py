"""What TensorRT-LLM itself saves: ``<prefix>_<counter>.pt``, a torch list with one dict per request.

Keys of ``SaveHiddenStatesDecodingConfig`` (TensorRT-LLM 1.2 documentation): ``id``, ``input_ids`` [T], ``hidden_state``
[T, D] after the final norm, ``aux_hidden_states`` [T, C·D] (an older version: ``hidden_state_features``), layers
ascending; asked for layer -1 they end in the final hidden once more. The counter says nothing of the conversation.
"""

from collections.abc import Sequence
from pathlib import Path

from collectors.importers.peer import (
    PeerSample,
    Stated,
    Unusable,
    columns_of,
    files_below,
    require_rows,
    state_shape,
    states_of,
    token_ids,
)
from collectors.importers.torch_files import TorchFile, TorchFiles

AUX_KEYS = ("aux_hidden_states", "hidden_state_features")
FINAL_KEY = "hidden_state"


class TrtLlmFiles:
    """A folder of ``.pt`` lists. Listing its places opens every file once, since each may hold several requests."""

    stated = Stated()

    def __init__(self, folder: Path, width: int, files: TorchFiles) -> None:
        self._folder, self._width, self._files = folder, width, files
        self._last: tuple[str, TorchFile] | None = None

    def places(self) -> Sequence[str]:
        found = []
        for name in files_below(self._folder, ".pt"):
            try:
                shapes = self._files.read(self._folder / name, ()).shapes
            except Unusable:
                found.append(f"{name}#0")  # reading it again will say why
                continue
            count = 1 + max((int(key.partition("/")[0]) for key in shapes if key[0].isdigit()), default=0)
            found += [f"{name}#{index}" for index in range(count)]
        return found

    def file_of(self, place: str) -> Path:
        return self._folder / place.rpartition("#")[0]

    def read(self, place: str, states: bool) -> PeerSample:
        name, _, index = place.rpartition("#")
        found = self._file(name) if states else self._files.read(self._folder / name, (f"{index}/input_ids",))
        ids = token_ids(found.tensors.get(f"{index}/input_ids"), "input_ids")
        final_key = f"{index}/{FINAL_KEY}"
        require_rows(state_shape(found.shape(final_key), FINAL_KEY)[0], len(ids), FINAL_KEY)
        aux_key = next((f"{index}/{key}" for key in AUX_KEYS if f"{index}/{key}" in found.shapes), None)
        if aux_key is None:
            raise Unusable("missing-key", f"there is no tensor {' or '.join(AUX_KEYS)}")
        rows, width = state_shape(found.shape(aux_key), aux_key)
        require_rows(rows, len(ids), aux_key)
        if not states:
            return PeerSample(ids, None, len(ids), width)
        columns = columns_of(states_of(found.tensors[aux_key], aux_key), self._width, aux_key)
        final = states_of(found.tensors[final_key], FINAL_KEY)
        return PeerSample(ids, None, len(ids), width, columns=columns, final=final)

    def close(self) -> None:
        self._last = None
        self._files.close()

    def _file(self, name: str) -> TorchFile:
        """One file in memory, so that its requests are not unpickled once each."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._files.read(self._folder / name))
        return self._last[1]


def open_trtllm_raw(folder: Path, width: int, files: TorchFiles) -> TrtLlmFiles:
    """Requests in the order of their counters."""
    return TrtLlmFiles(folder, width, files)

"""Dumps of torch dicts (``.pt``, ``.ckpt``, ``.ckpt.gz``): which key holds what is all that tells formats apart.

They are files of strangers: tensors and plain values are read, no code of theirs runs.

Shapes: T rows of one sample as the peer stored it, C layer columns, D target width.
"""

import gzip
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectors.engines.dump.peer import (
    PeerSample,
    PeerSource,
    Unusable,
    columns_of,
    files_below,
    index_of,
    mask_of,
    missing_key,
    require_read,
    require_rows,
    state_shape,
    states_of,
    token_ids,
)
from hiddenstore.files.pickles import require_safe_torch
from hiddenstore.targets.folder import first_line
from schemas.capture import NormState

MIB = 1 << 20
TAIL = 1 << 17
"""More than the directory's end and the longest comment."""
# Hidden states in bf16 shrink to about 0.7 of their bytes: what unpacks to far more is no dump.
MOST_UNPACKED = 64
SMALL = 64 * MIB


def read_dicts(path: Path, is_list: bool = False) -> list[Mapping[str, Any]]:
    """The one dict of a file, or its list of dicts, with tensors on the disk until they are used, but for ``.gz``.
    Raises Unusable: ``refused`` (more than tensors), ``truncated``, ``unreadable``, ``too-large``,
    ``wrong-content``."""
    try:
        _read_tail(path)
        packed = _unpacked(path) if path.suffix == ".gz" else None
        _require_stored(path if packed is None else io.BytesIO(packed))
        file = path if packed is None else io.BytesIO(packed)
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=packed is None)
    except Unusable:
        raise
    except MemoryError:
        raise Unusable("too-large", "reading it needs more memory than there is") from None
    except Exception as error:  # a hostile file may raise anything
        require_read(error, path)
        raise _verdict(error) from error
    dicts = loaded if is_list else [loaded]
    if not isinstance(dicts, list) or not all(isinstance(entry, dict) for entry in dicts):
        expected = "a list of dicts" if is_list else "a dict"
        raise Unusable("wrong-content", f"it holds a {type(loaded).__name__}, expected {expected}")
    for entry in dicts:
        for name, value in entry.items():
            _require_plain(name, value)
    return [{str(name): value for name, value in entry.items()} for entry in dicts]


def tensor_of(entry: Mapping[str, Any], key: str) -> Tensor:
    """A tensor of a dict; Unusable ``missing-key``."""
    if not isinstance(entry.get(key), Tensor):
        raise missing_key(key, [name for name, value in entry.items() if isinstance(value, Tensor)])
    tensor: Tensor = entry[key]
    return tensor


def _unpacked(path: Path) -> bytes:
    most = MOST_UNPACKED * path.stat().st_size + SMALL
    with gzip.open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unusable("too-large", f"it unpacks to more than {MOST_UNPACKED} times its size")
    return data


def _read_tail(path: Path) -> None:
    """OSError where the disk refuses: zipfile takes a refusal for a file that is no archive."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        file.read()


def _require_stored(file: Path | io.BytesIO) -> None:
    """torch stores its records as they are and once each; others could unpack to any size."""
    if not zipfile.is_zipfile(file):
        raise Unusable("truncated", "it is no whole torch file: the directory at its end is missing")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    packed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise Unusable("refused", f"its record {packed[0]!r} is compressed, which torch never writes")
    size = file.stat().st_size if isinstance(file, Path) else len(file.getbuffer())
    if sum(record.file_size for record in records) > size:
        raise Unusable("refused", "its records claim more bytes than it has")


def _require_plain(name: object, value: object) -> None:
    """Refuse what a few stored bytes can make arbitrarily large: sparse and overlapping tensors."""
    if not isinstance(value, Tensor):
        return
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise Unusable("wrong-content", f"{name} is no plain tensor")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise Unusable("refused", f"{name} claims more elements than are stored")


def _verdict(error: Exception) -> Unusable:
    text = str(error).strip() or type(error).__name__
    if "weights_only" in text or "nsupported" in text:
        named = next((line.strip() for line in text.splitlines() if "GLOBAL" in line or "nsupported" in line), text)
        return Unusable("refused", f"it holds more than tensors, and its code is not run: {named[:200]}")
    if isinstance(error, EOFError | gzip.BadGzipFile | zipfile.BadZipFile):
        return Unusable("truncated", f"it ends early: {first_line(error)[:200]}")
    return Unusable("unreadable", first_line(error)[:200])


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


class Eagle3Features(TorchDicts):
    """SpecForge's ``rows_*/data_*.ckpt``, right-padded; read from SpecForge 0.2 (``offline_reader``, ``algorithms``).

    ``aux_hidden_state`` [1, T, 3·D] and the final ``hidden_state`` [1, T, D], from SGLang, after the final norm. The
    batch's padding is stored, its attention mask and its layer ids are not.
    """

    default_layers = "eagle3"
    final = "post_norm"
    suffixes = (".ckpt", ".ckpt.gz")
    columns_keys = ("aux_hidden_state",)
    final_key = "hidden_state"
    is_padded = True


class DFlashFeatures(TorchDicts):
    """SpecForge's ``hidden_states`` [1, T, C·D], also of the domino strategy; no final hidden."""

    suffixes = (".ckpt", ".ckpt.gz")
    columns_keys = ("hidden_states",)
    is_padded = True


class DSparkFeatures(DFlashFeatures):
    """``hidden_states`` [1, T, C·D] and the final ``target_last_hidden_states`` [1, T, D]."""

    final = "post_norm"
    final_key = "target_last_hidden_states"


class ModelOptFiles(TorchDicts):
    """What Model-Optimizer's ``collect_hidden_states`` scripts wrote through Hugging Face or TensorRT-LLM.

    Nothing in a file says which engine wrote it. Newer ones add ``loss_mask``.
    """

    default_layers: str | None = "eagle3"
    final: NormState | None = "post_norm"

    suffixes = (".pt",)
    columns_keys = ("aux_hidden_states",)
    final_key = "hidden_states"
    prenorm_key = "hidden_states_prenorm"
    needs_mask = False
    pre_norm_hint = ", or --from modelopt-vllm if vLLM made it"


class ModelOptVllmFiles(ModelOptFiles):
    """The same files from vLLM: layers counted by their input, the final hidden before its norm.

    ``compute_hidden_states_vllm.py`` works ``--aux-layers eagle`` and ``dflash`` out as outputs, and sorts them.
    """

    numbering = "vllm"
    moves_layers = True
    default_layers = None
    final = "pre_norm"
    layers_note = (
        ". ModelOpt hands its ids to vLLM unchanged, so the same --aux-layers mean one block earlier than in its other "
        "dumps"
    )


class EagleFiles(TorchDicts):
    """EAGLE's own ``ge_data`` (SafeAILab): ``data_*.ckpt`` in fp16, a file a conversation, unpadded; no aux layers."""

    default_layers = "eagle1"
    final = "post_norm"
    suffixes = (".ckpt",)
    final_key = "hidden_state"


class TrtLlmFiles(TorchDicts):
    """TensorRT-LLM 1.2's ``SaveHiddenStatesDecodingConfig``: ``<prefix>_<counter>.pt``, a list with a dict per request.

    Layers ascending; asked for layer -1 they end in the final hidden once more. Listing them opens every file once.
    """

    default_layers = "eagle3"
    final = "post_norm"
    has_many_per_file = True
    suffixes = (".pt",)
    columns_keys = ("aux_hidden_states", "hidden_state_features")
    final_key = "hidden_state"
    needs_mask = False

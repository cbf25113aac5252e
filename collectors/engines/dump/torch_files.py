"""Torch files (``.pt``, ``.ckpt``, ``.ckpt.gz``) of strangers: tensors and plain values; no code of theirs runs."""

import gzip
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from collectors.engines.dump.peer import Unusable, missing_key
from collectors.targets.folder import first_line
from hiddenstore.errors import ConfigError, Kind

SAFE_TORCH = Version("2.10")
MIB = 1 << 20
# Hidden states in bf16 shrink to about 0.7 of their bytes: what unpacks to far more is no dump.
MOST_UNPACKED = 64
SMALL = 64 * MIB


def require_safe_torch() -> None:
    """Refuse a torch whose ``weights_only`` can be talked into running code.

    Raises:
        ConfigError: ``pickle-refused``.
    """
    if Version(torch.__version__) < SAFE_TORCH:
        raise ConfigError(
            f"torch {torch.__version__} cannot read torch files of strangers safely (CVE-2026-24747), {SAFE_TORCH} can",
            kind=Kind.PICKLE_REFUSED,
            hint=f"pip install 'torch>={SAFE_TORCH}'",
        )


def read_dicts(path: Path, is_list: bool = False) -> list[Mapping[str, Any]]:
    """The one dict of a file, or its list of dicts: tensors and whatever else ``weights_only`` lets through.

    Tensors lie on the disk until they are used, but for ``.gz``.

    Raises:
        Unusable: ``refused`` (it holds more than tensors), ``truncated``, ``unreadable``, ``too-large``,
            ``wrong-content``.
    """
    try:
        packed = _unpacked(path) if path.suffix == ".gz" else None
        _require_stored(path if packed is None else io.BytesIO(packed))
        file = path if packed is None else io.BytesIO(packed)
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=packed is None)
    except Unusable:
        raise
    except MemoryError:
        raise Unusable("too-large", "reading it needs more memory than there is") from None
    except Exception as error:  # a hostile file may raise anything
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

"""Reads torch files for an importer in a process of its own: no code of theirs runs, and memory is bounded.

Run as a script. Each line of stdin is a request ``{"path", "wanted"}``, each answer 8 bytes of length, a JSON header, 8
bytes of length and a safetensors payload. ``wanted`` are keys whose tensors to send, null sends all; shapes and scalars
are sent always. A file is a dict, or a list of dicts whose keys become ``0/key``.
"""

import gzip
import io
import json
import os
import resource
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save

MIB = 1 << 20
# What unpickling, copying out and serialising one file needs beside it.
ROOM = 512 * MIB
COPIES = 4
# Hidden states in bf16 shrink to about 0.7 of their bytes: what unpacks to far more is no dump.
MOST_UNPACKED = 64
SMALL = 64 * MIB
LONGEST_TEXT = 512
MOST_ENTRIES = 100_000


class RefusedError(Exception):
    """``reason`` and ``detail`` of a file that is not read."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the answers
    torch.set_num_threads(1)
    own = _own_bytes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            header, payload = _answer(Path(request["path"]), request["wanted"], own)
        except RefusedError as error:
            header, payload = {"reason": error.reason, "detail": str(error)}, b""
        except MemoryError:
            header, payload = {"reason": "too-large", "detail": "reading it needs more memory than it may take"}, b""
        except Exception as error:  # noqa: BLE001 - a hostile file may raise anything; it is reported, never passed on
            header, payload = _unreadable(error), b""
        _send(answers, json.dumps(header).encode())
        _send(answers, payload)
        answers.flush()


def _answer(path: Path, wanted: list[str] | None, own: int) -> tuple[dict[str, Any], bytes]:
    size = path.stat().st_size
    most = MOST_UNPACKED * size + SMALL
    if path.suffix == ".gz":
        _limit(own + COPIES * most + ROOM)
        loaded = _load(io.BytesIO(_unpacked(path, most)), mmap=False)
    else:
        _limit(own + COPIES * size + ROOM)
        _require_stored(path)
        loaded = _load(str(path), mmap=True)
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, value in _entries(loaded):
        if isinstance(value, torch.Tensor):
            tensors[name] = _plain(name, value)
        elif value is None or isinstance(value, bool | int | float):
            scalars[name] = value
        elif isinstance(value, str):
            scalars[name] = value[:LONGEST_TEXT]
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    keys = [name for name in tensors if wanted is None or name.rpartition("/")[2] in wanted or name in wanted]
    payload = save({name: tensors[name].contiguous().clone() for name in keys}) if keys else b""
    return {"shapes": shapes, "scalars": scalars}, payload


def _load(file: Any, mmap: bool) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _require_stored(path: Path) -> None:
    """torch stores its records as they are; one that is packed could unpack to any size."""
    if not zipfile.is_zipfile(path):
        raise RefusedError("truncated", "it is no whole torch file: the directory at its end is missing")
    with zipfile.ZipFile(path) as archive:
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise RefusedError("refused", f"its record {packed[0]!r} is compressed, which torch never writes")


def _unpacked(path: Path, most: int) -> bytes:
    parts, held = [], 0
    with gzip.open(path, "rb") as file:
        while block := file.read(4 * MIB):
            held += len(block)
            if held > most:
                raise RefusedError("too-large", f"it unpacks to more than {MOST_UNPACKED} times its size")
            parts.append(block)
    return b"".join(parts)


def _entries(loaded: Any) -> list[tuple[str, Any]]:
    if isinstance(loaded, dict):
        found = list(loaded.items())
    elif isinstance(loaded, list) and all(isinstance(entry, dict) for entry in loaded):
        found = [(f"{index}/{name}", value) for index, entry in enumerate(loaded) for name, value in entry.items()]
    else:
        raise RefusedError("wrong-content", f"it holds a {type(loaded).__name__}, expected a dict or a list of dicts")
    if len(found) > MOST_ENTRIES:
        raise RefusedError("wrong-content", f"it holds {len(found)} entries")
    return [(str(name), value) for name, value in found]


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Refuse what a few stored bytes can make arbitrarily large: sparse and overlapping tensors."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise RefusedError("wrong-content", f"{name} is no plain tensor")
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > held:
        raise RefusedError("refused", f"{name} claims more elements than are stored")
    return tensor.detach()


def _unreadable(error: Exception) -> dict[str, str]:
    text = str(error).strip() or type(error).__name__
    if "weights_only" in text or "Unsupported" in text or "unsupported" in text:
        named = next((line.strip() for line in text.splitlines() if "GLOBAL" in line or "nsupported" in line), text)
        return {"reason": "refused", "detail": f"it holds more than tensors, and its code is not run: {named[:200]}"}
    if isinstance(error, EOFError | gzip.BadGzipFile | zipfile.BadZipFile):
        return {"reason": "truncated", "detail": f"it ends early: {text.splitlines()[0][:200]}"}
    return {"reason": "unreadable", "detail": text.splitlines()[0][:200]}


def _own_bytes() -> int:
    """Address space of this process before any file."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    return pages * resource.getpagesize()


def _limit(most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(answers: BinaryIO, data: bytes) -> None:
    answers.write(struct.pack("<Q", len(data)))
    answers.write(data)


if __name__ == "__main__":
    main()

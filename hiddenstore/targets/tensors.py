"""One digest over every tensor of a checkpoint, of its stored bytes: headers and some blocks are read, nothing loaded.

How tensors are spread over files does not matter; a cast or a quantisation makes another checkpoint. It tells two
checkpoints apart; it does not guard against somebody who hides a change between the blocks.
"""

import hashlib
import os
from collections.abc import Iterator

from hiddenstore.fs.seam import storage_error
from hiddenstore.targets.checkpoint import damage, damaged, read_header, read_object, weight_files
from hiddenstore.targets.folder import TargetFolder
from hiddenstore.targets.gguf import RECORD_FILE

BLOCK_BYTES = 4096
BLOCKS = 16
WHOLE_BELOW_BYTES = 1 << 20


def checkpoint_sha256(folder: TargetFolder) -> str | None:
    """Digest over ``<name>\\t<dtype>\\t<shape>\\t<content>\\n`` of the tensors, sorted; ``docs/format.md`` §2.1.

    Of what was converted from a GGUF file, the digest of that file. None without safetensors: of torch's own files
    (``.bin``) nothing can be said without unpickling them; and where the target runs elsewhere and not all are here.
    Raises ConfigError: ``target-damaged``; StorageError: a file cannot be read."""
    origin = folder.file(RECORD_FILE)
    record = (read_object(origin) if origin is not None else None) or {}
    if "sha256_of_blocks" in record:
        return str(record["sha256_of_blocks"])
    names = weight_files(folder)
    if folder.runs_elsewhere and any(folder.file(name, fetch=False) is None for name in names):
        return None
    if names and (error := damage(folder)):
        raise error
    lines = sorted(line for name in names for line in _lines(folder, name))
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else None


def _lines(folder: TargetFolder, name: str) -> Iterator[str]:
    """One line for each tensor of a safetensors file that ``damage`` passed."""
    path = folder.file(name)
    assert path is not None
    table, begin = read_header(path)
    try:
        with path.open("rb", buffering=0) as file:
            for tensor, entry in table.items():
                start, end = entry["data_offsets"]
                content = _content_sha256(file.fileno(), begin + start, end - start)
                yield f"{tensor}\t{entry['dtype']}\t{'x'.join(map(str, entry['shape']))}\t{content}\n"
    except EOFError as error:
        raise damaged(folder, name, "became shorter while it was read") from error
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _content_sha256(file: int, begin: int, size: int) -> str:
    digest = hashlib.sha256()
    spread = [(index * (size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES) for index in range(BLOCKS)]
    for offset, length in [(0, size)] if size < WHOLE_BELOW_BYTES else spread:
        data = os.pread(file, length, begin + offset)
        if len(data) < length:
            raise EOFError
        digest.update(data)
    return digest.hexdigest()

"""The files of a checkpoint: which holds what, are they whole, do they belong to the config beside them, and one digest
over every tensor of its stored bytes: headers and some blocks are read, nothing loaded.

How tensors are spread over files does not matter to it; a cast or a quantisation makes another checkpoint. It tells two
checkpoints apart; it does not guard against somebody who hides a change between the blocks.
"""

import hashlib
import os
import re
import shlex
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.documents import foreign_json
from hiddenstore.fs.seam import is_inside, storage_error, storage_errors
from hiddenstore.targets.folder import CONFIG_FILE, TOKENIZER_FILES, TargetFolder, beginning_of_another, first_line
from hiddenstore.targets.gguf import RECORD_FILE

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
QUANTISATION_FILE = "hf_quant_config.json"
_MOST_NAMED = 4
_LONGEST_HEADER, _MOST_BYTES = 100_000_000, 1 << 62
_PICKLES = {b"\x80": "is a pickle, not safetensors", b"PK\x03\x04": "is a torch file, not safetensors"}
# Tensors that the decoder blocks of a text model do not read: buffers of old checkpoints, other modalities, drafting
# layers, scales of a KV cache that a forward without one never fills.
_BESIDE_THE_BLOCKS = re.compile(
    r"rotary_emb\.inv_freq$|position_ids$|masked_bias$"
    r"|(^|\.)\w*(vision|visual|audio|image|speech|multi_modal|mm_projector)\w*\."
    r"|(^|\.)mtp\w*\."
    r"|\.(k|v|kv|q|prob)_scale$"
)
BLOCK_BYTES = 4096
BLOCKS = 16
WHOLE_BELOW_BYTES = 1 << 20
_SAMPLED_FROM_BYTES = 64 << 20
_OF_A_TARGET = (CONFIG_FILE, *TOKENIZER_FILES, QUANTISATION_FILE, "adapter_config.json")
_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".jinja", ".model", ".tiktoken", ".py")


def weights_bytes(folder: TargetFolder) -> int | None:
    """Size of all weights in the form the checkpoint holds them; None where it does not say."""
    index = _index(folder)
    if index is not None:
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        return int(total) if isinstance(total, int | float) and 0 <= total < _MOST_BYTES else None
    single = folder.file(WEIGHTS_FILE)
    return None if single is None else single.stat().st_size


def weight_files(folder: TargetFolder) -> list[str]:
    """Names of the safetensors files that hold the weights, in order; none where it has no safetensors. Raises
    ConfigError: ``target-damaged``: the index of several files cannot be read."""
    index = _index(folder)
    if index is not None:
        return sorted(set(index["weight_map"].values()))
    return [] if folder.file(WEIGHTS_FILE) is None else [WEIGHTS_FILE]


def file_of_tensor(folder: TargetFolder) -> dict[str, str]:
    """Tensor name to the safetensors file that holds it. Raises ConfigError: ``target-incomplete``: no safetensors;
    ``target-damaged``, ``target-unreadable``."""
    index = _index(folder)
    if index is not None:
        return dict(index["weight_map"])
    path = folder.file(WEIGHTS_FILE)
    if path is None:
        raise ConfigError(
            f"target {folder.label} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            kind=Kind.TARGET_INCOMPLETE,
            hint="load it with transformers and save_pretrained it to a folder, or --engine hf",
        )
    if (fault := fault_of(path)) is not None:
        raise damaged(folder, WEIGHTS_FILE, fault)
    return dict.fromkeys(read_header(path)[0], WEIGHTS_FILE)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The table of a safetensors file: ``dtype``, ``shape`` and ``data_offsets`` by tensor, and where its data begins.
    Raises ValueError, LookupError, TypeError, AttributeError: it has none, or not one that can be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = foreign_json(file.read(length) if length <= _LONGEST_HEADER else b"")
    table = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for entry in table.values():
        start, end = entry["data_offsets"]
        if not 0 <= start <= end or not isinstance(entry["dtype"], str):
            raise ValueError("an entry of the header is none")
        entry["shape"] = [int(count) for count in entry["shape"]]
    return table, 8 + length


def unreadable(folder: TargetFolder, detail: str) -> ConfigError:
    """``target-unreadable``: weights in a form that only transformers knows."""
    problem = f"the checkpoint of target {folder.label} {detail}"
    return ConfigError(problem, kind=Kind.TARGET_UNREADABLE, hint="--engine hf, which reads what transformers can")


def require_applied(folder: TargetFolder, hint: str, is_decoded: bool = False) -> None:
    """Refuse, before any weights are read, a checkpoint whose quantisation transformers would leave out, cannot apply
    here, or would decode otherwise than it was written (``is_decoded``: it is told to decode): ConfigError
    ``quantisation-unsupported``."""
    from transformers.quantizers.auto import AutoHfQuantizer

    stated, path = folder.quantisation or {}, folder.file(QUANTISATION_FILE)
    stated = stated if isinstance(stated, Mapping) else {"quant_method": stated}
    is_known = False
    with suppress(ValueError):
        is_known = bool(stated) and AutoHfQuantizer.supports_quant_method(stated)
    if is_known:
        settings = _applied_settings(folder, stated, hint)
        if is_decoded or getattr(settings, "dequantize", False):
            _require_whole_blocks(folder, getattr(settings, "weight_block_size", None), hint)
        return
    if path is not None and not stated:
        document = read_object(path) or {}
        named = document.get("quantization")
        stated = {"quant_method": "modelopt"} | (named if isinstance(named, dict) else {})
    if stated:
        name = (
            " ".join(str(stated[key]) for key in ("quant_method", "quant_algo") if key in stated) or "without a method"
        )
        raise ConfigError(
            f"target {folder.label} is quantised ({name}), which transformers does not apply: its scales would be lost",
            kind=Kind.QUANTISATION_UNSUPPORTED,
            hint=f"{hint}; or name the checkpoint it was made from",
        )


def _applied_settings(folder: TargetFolder, stated: Mapping[str, Any], hint: str) -> Any:
    """The quantisation's settings as transformers changes them for this machine."""
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(dict(stated), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except Exception as error:  # every method checks its own packages and devices, and a config may hold anything
        raise inapplicable(folder, error, f"install what it names; {hint}") from error
    return quantizer.quantization_config


def _require_whole_blocks(folder: TargetFolder, sides: Sequence[int] | None, hint: str) -> None:
    """Refuse fp8 matrices whose last block is cut, as in DeepSeek-V3's ``kv_a_proj_with_mqa``. transformers 5.23
    (``Fp8Dequantize`` of ``integrations/finegrained_fp8.py``) divides a side by the number of its blocks, which then
    is not the side of one."""
    if not sides:
        return
    paths = [path for name in weight_files(folder) if (path := folder.file(name)) is not None]
    # Damage is named by whoever reads the weights.
    for path in (path for path in paths if fault_of(path) is None):
        for name, entry in read_header(path)[0].items():
            edges = zip(entry["shape"][-2:], sides, strict=False)
            if entry["dtype"] == "F8_E4M3" and any(size > side and size % side for size, side in edges):
                matrix = f"{name} {entry['shape']} ends inside its blocks of {list(sides)}"
                raise ConfigError(
                    f"target {folder.label} is quantised (fp8), and {matrix}, which transformers decodes wrongly",
                    kind=Kind.QUANTISATION_UNSUPPORTED,
                    hint=f"a GPU that multiplies fp8 (compute capability 8.9 or later); {hint}",
                )


def inapplicable(folder: TargetFolder, error: Exception, hint: str) -> ConfigError:
    """What to raise where transformers knows a quantisation and cannot apply it here, for ``error`` of its own."""
    stated = folder.quantisation
    method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
    return ConfigError(
        f"target {folder.label} is quantised ({method}), which cannot be applied here: {first_line(error)}",
        kind=Kind.QUANTISATION_UNSUPPORTED,
        hint=f"{hint}; or name the checkpoint it was made from",
    )


def require_complete(folder: TargetFolder, report: Mapping[str, Any]) -> None:
    """Refuse a model whose weights are not the checkpoint's: ConfigError ``target-incomplete`` names the tensors.

    ``report`` is what transformers says of loading; tied tensors and those it knows to be harmless are not in it.
    """
    blocks = folder.num_layers
    more = getattr(folder.config, "num_nextn_predict_layers", 0)
    drafting = range(blocks, blocks + (more if isinstance(more, int) else 0))

    def is_read(name: str) -> bool:
        block = re.search(r"\.layers\.(\d+)\.", name)
        return not _BESIDE_THE_BLOCKS.search(name) and not (block and int(block[1]) in drafting)

    unread, shapes = filter(is_read, report["unexpected_keys"]), {_name(entry) for entry in report["mismatched_keys"]}
    parts = [
        f"{fault} {_listed(sorted(names))}"
        for fault, names in (
            ("it lacks", {*report["missing_keys"]} - shapes),
            ("nothing of the model reads its", [*unread]),
            ("of another shape are", shapes),
        )
        if names
    ]
    if parts:
        problem = f"config and checkpoint of target {folder.label} do not belong together: {'; '.join(parts)}"
        raise ConfigError(problem, kind=Kind.TARGET_INCOMPLETE, hint=_fetch(folder))


def _name(entry: Any) -> str:
    """transformers 4 gives the name alone, later ones name and shapes."""
    return entry if isinstance(entry, str) else str(entry[0])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def damage(folder: TargetFolder) -> ConfigError | None:
    """``target-damaged``: the first file of weights that is not what its name says; None where all look whole."""
    for name in weight_files(folder) or [TORCH_FILE]:
        path = folder.file(name)
        if path is None and name != TORCH_FILE:
            return damaged(folder, name, "is named by the index and is not there")
        if path is not None and (fault := fault_of(path)):
            return damaged(folder, name, fault)
    return None


def fault_of(path: Path) -> str | None:
    """Why a file of weights is not whole, or not what its name says; None where it looks well."""
    with path.open("rb") as file:
        start = file.read(64)
    if path.suffix == ".safetensors":
        # The length that a sound header begins with may have the first byte of a pickle.
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            table, begin = read_header(path)
            whole = begin + max((entry["data_offsets"][1] for entry in table.values()), default=0)
            if (size := path.stat().st_size) >= whole:
                return None
            return f"states {whole:,} bytes, of which it has {size:,}: a download that ended early"
    if other := beginning_of_another(start):
        return f"is {other}"
    if path.suffix != ".safetensors":
        is_cut = start.startswith(b"PK") and not zipfile.is_zipfile(path)
        return "is no whole torch file: the directory at its end is missing" if is_cut else None
    fault = next((words for text, words in _PICKLES.items() if start.startswith(text)), None)
    return fault or "has no safetensors header that can be read"


def damaged(folder: TargetFolder, file: str, fault: str) -> ConfigError:
    """``target-damaged``: what is wrong with a file of the weights, and the command that fetches it again."""
    message = f"the weights of target {folder.label} are damaged: {file} {fault}"
    return ConfigError(message, kind=Kind.TARGET_DAMAGED, hint=_fetch(folder))


def _fetch(folder: TargetFolder) -> str:
    if Path(folder.name).exists():
        return f"hf download ORG/NAME --local-dir {shlex.quote(folder.name)}; in a Git clone: git lfs pull"
    return shlex.join(["hf", "download", folder.name, "--force-download"])


def _index(folder: TargetFolder) -> dict[str, Any] | None:
    """The index of a checkpoint in several files; ConfigError ``target-damaged``."""
    path = folder.file(INDEX_FILE)
    # transformers takes the one file where both are there.
    if path is None or folder.file(WEIGHTS_FILE) is not None:
        return None
    document = read_object(path)
    files = None if document is None else document.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) and is_inside(file) for file in files.values()):
        other = beginning_of_another(path.read_bytes()[:64])
        raise damaged(folder, INDEX_FILE, f"is {other}" if other else "holds no weight_map")
    return document


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where it holds something else."""
    try:
        document = foreign_json(path.read_bytes())
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


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
    try:
        yield from _tensor_lines(path)
    except EOFError as error:
        raise damaged(folder, name, "became shorter while it was read") from error
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _tensor_lines(path: Path) -> Iterator[str]:
    """Raises what ``read_header`` raises; EOFError: the file is shorter than it says."""
    table, begin = read_header(path)
    with path.open("rb", buffering=0) as file:
        for tensor, entry in table.items():
            start, end = entry["data_offsets"]
            content = _content_sha256(file.fileno(), begin + start, end - start)
            yield f"{tensor}\t{entry['dtype']}\t{'x'.join(map(str, entry['shape']))}\t{content}\n"


def files_sha256(path: Path) -> str:
    """Digest of what a target or an adapter on this machine is made of, whether or not it can be opened here: files of
    config, tokenizer, template, code and weights in the folder ``path``, or that file with the tokenizer beside it. Of
    safetensors the tensors as ``checkpoint_sha256`` reads them, of other large files a block of each MiB. Raises
    StorageError: one cannot be read."""
    files = [path, path.parent / TOKENIZER_FILES[0]]
    lines = []
    with storage_errors(path):
        if path.is_dir():
            files = [file for file in path.iterdir() if file.name in _OF_A_TARGET or file.suffix in _ENDINGS]
        for file in sorted(file for file in files if file.is_file()):
            lines.append(f"{file.name}\t{file.stat().st_size}\t{_file_sha256(file)}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    if path.suffix == ".safetensors":
        with suppress(ValueError, LookupError, TypeError, AttributeError, EOFError):
            return hashlib.sha256("".join(sorted(_tensor_lines(path))).encode()).hexdigest()
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        if size < _SAMPLED_FROM_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        blocks = (os.pread(file.fileno(), BLOCK_BYTES, offset) for offset in range(0, size, WHOLE_BELOW_BYTES))
        return hashlib.sha256(b"".join(blocks)).hexdigest()


def _content_sha256(file: int, begin: int, size: int) -> str:
    digest = hashlib.sha256()
    spread = [(index * (size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES) for index in range(BLOCKS)]
    for offset, length in [(0, size)] if size < WHOLE_BELOW_BYTES else spread:
        data = os.pread(file, length, begin + offset)
        if len(data) < length:
            raise EOFError
        digest.update(data)
    return digest.hexdigest()

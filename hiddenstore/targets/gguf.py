"""Targets in llama.cpp's GGUF, converted once into a folder that every engine reads.

The weights are dequantised by transformers' own reader and kept in bf16 (F32 and F16 files in their own dtype). What
that reader drops without a word is refused by name: stretched rotary frequencies, tensors and fields of the
architecture it does not know, and rules that split text before the merges, which it takes to be GPT-2's.
"""

import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hiddenstore.console.output import output
from hiddenstore.errors import ConfigError, ConflictError, Kind, NotFoundError, StorageError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.fs.publish import new_folder

if TYPE_CHECKING:
    from gguf import GGUFReader

SUFFIX = ".gguf"
RECORD_FILE = "gguf.json"
"""What a converted folder says of its origin: file, digest, and tensors by their form of quantisation."""
_OF_BYTES = "gpt2"
"""What llama.cpp calls vocabularies of bytes and their merges."""
_CONVERSION = 4
"""Counts up with what a conversion writes, so that older ones in the cache are not taken for it."""
_BLOCK, _BLOCKS = 4096, 16
_MOST_NAMED = 4
_DTYPES = {"F32": "float32", "F16": "float16"}

# Rules that split text before the merges, by llama.cpp's names for them; as in the tokenizer.json of these models.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": r"\p{N}",
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"\p{N}" + _REST,
}

# Fields that transformers does not read, and the member of its config that must say the same.
_SAME_AS = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.dimension_count": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "vocab_size": "vocab_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def target_folder(name: str) -> str:
    """The folder or hub id that stands for a target: a GGUF file, or a folder whose only content is one, as what it was
    converted into; everything else as it is. Raises NotFoundError: ``target-missing``: no such file; ConfigError:
    ``target-unreadable``: several GGUF files, one of a split file, or one that transformers cannot read or would read
    otherwise than it was written."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(file for file in path.iterdir() if _is_gguf(file))
        if len(files) > 1:
            names, hint = ", ".join(file.name for file in files), f"--target {shlex.quote(str(files[0]))}"
            raise ConfigError(f"{name} holds several GGUF files: {names}", kind=Kind.TARGET_UNREADABLE, hint=hint)
        path = files[0] if files else path
    if not _is_gguf(path) or path.is_dir():
        return name
    if not path.is_file():
        message = f"target {path} does not exist"
        raise NotFoundError(message, kind=Kind.TARGET_MISSING, hint="--target FOLDER, FILE.gguf or ORG/NAME")
    return str(_converted(path))


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def cache_folder() -> Path:
    """Where conversions are kept: ``HIDDENSTORE_CACHE``, else ``hiddenstore`` in the user's cache."""
    own, users = os.environ.get("HIDDENSTORE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(users or Path.home() / ".cache") / "hiddenstore"


def _converted(path: Path) -> Path:
    reader = _reader(path)
    digest = _digest(path, reader)
    folder = cache_folder() / "gguf" / f"{digest[:16]}-{_CONVERSION}" / path.stem
    forms = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    if (folder / RECORD_FILE).is_file():
        output().note(f"{path.name} ({forms_text(forms)}) as converted into {folder}")
        return folder
    _require_whole(path, reader, forms)
    split = _split_rule(path, reader)
    output().note(f"converting {path.name} ({forms_text(forms)}) once into {folder}")
    try:
        with new_folder(folder) as hidden, TemporaryDirectory() as room:
            # Beside other files transformers would read some of them instead.
            alone = Path(room, path.name)
            alone.symlink_to(path.absolute())
            # First, as it takes seconds, and the weights may take an hour.
            _tokenizer(alone, reader, split, _tokenizer_beside(path)).save_pretrained(hidden)
            _write_model(alone, reader, forms, hidden)
            record = {"file": path.name, "sha256_of_blocks": digest, "tensors": dict(forms)}
            (hidden / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except ConflictError:
        if not (folder / RECORD_FILE).is_file():
            raise
        # Another process was first.
    except StorageError as error:
        error.hint = error.hint or "HIDDENSTORE_CACHE=DIR names a folder that can be written"
        raise
    return folder


def forms_text(forms: Mapping[str, int]) -> str:
    """Tensors by their form of quantisation: ``210 Q4_1, 61 F32, 1 Q8_0``."""
    return ", ".join(f"{count} {form}" for form, count in Counter(forms).most_common())


def bounded_reader(path: Path) -> "GGUFReader":
    """The ``gguf`` package's reader of a file, which raises anything over a damaged one. Where a count is damaged that
    package reads nothing behind the end of the file for as long as the count says; this one raises ValueError. Fields
    that hold what they may not, such as text that is no UTF-8, raise here and not where they are used."""
    import numpy as np
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if isinstance(self.data, np.memmap):
                # Of a vocabulary each token is two slices, and one of a memmap takes as long as ten of an array.
                self.data: Any = self.data.view(np.ndarray)
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError(f"a field ends at byte {end:,} of {len(self.data):,}")
            return super()._get(offset, dtype, count, override_order)

    reader = BoundedReader(path)
    for field in reader.fields.values():
        field.contents()
    return reader


def _reader(path: Path) -> "GGUFReader":
    try:
        return bounded_reader(path)
    except Exception as error:  # numpy slices of a damaged file raise anything
        raise_refusal(error, path)
        raise _unreadable(path, f"is no whole GGUF file: {error}", f"download {path.name} again") from error


def _digest(path: Path, reader: "GGUFReader") -> str:
    """sha256 over size, header, a tokenizer.json beside, and 16 blocks of 4 KiB of every tensor, so that a
    file is known without reading all of it."""
    beside = _tokenizer_beside(path)
    digest = hashlib.sha256(str(path.stat().st_size).encode() + (b"" if beside is None else beside.read_bytes()))
    with path.open("rb") as file:
        digest.update(file.read(reader.data_offset))
        for tensor in reader.tensors:
            for block in range(_BLOCKS):
                file.seek(tensor.data_offset + block * max(0, tensor.n_bytes - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(min(_BLOCK, tensor.n_bytes)))
    return digest.hexdigest()


def _require_whole(path: Path, reader: "GGUFReader", forms: Mapping[str, int]) -> None:
    """Refuse what cannot be read, or would be read otherwise than it was written."""
    from gguf import dequantize

    if _field(reader, "split.count", 0) not in (0, 1):
        merge = f"llama-gguf-split --merge {shlex.quote(str(path))} whole.gguf"
        raise _unreadable(path, "is one part of a split file", merge)
    for form in forms:
        tensor = next(tensor for tensor in reader.tensors if tensor.tensor_type.name == form)
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as error:
            message = f"holds {form}, which nothing here dequantises"
            raise _unreadable(path, message, "name a file in Q8_0, Q4_K_M, F16 or BF16") from error
    # llama.cpp multiplies by such a tensor whatever the fields say.
    stretched = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    if _field(reader, f"{_architecture(reader)}.rope.scaling.type", "") != "none":
        stretched += [name for name in reader.fields if ".rope.scaling." in name]
    if stretched:
        message = f"stretches its rotary frequencies ({', '.join(stretched)}), which transformers' reader drops"
        raise _unreadable(path, message, "name the checkpoint it was made from")


def _split_rule(path: Path, reader: "GGUFReader") -> str | None:
    """The pattern that splits text before the merges; None for GPT-2's, for one that transformers applies itself, and
    where the vocabulary has no merges."""
    pre = str(_field(reader, "tokenizer.ggml.pre", "gpt-2"))
    if _field(reader, "tokenizer.ggml.model", "") != _OF_BYTES or _tokenizer_beside(path) is not None:
        return None
    if pre not in _SPLITS and pre not in _table_of_transformers("gguf_tokenizer_mapping", "GGUF_PRE_TOKENIZER_SPLITS"):
        message = f"splits text by the rule {pre!r}, which transformers' reader takes to be GPT-2's"
        raise _unreadable(path, message, f"put the tokenizer.json of the original beside {path.name}")
    return _SPLITS.get(pre)


def _table_of_transformers(module: str, name: str) -> Mapping[str, Any]:
    """A table of transformers' reader of GGUF files; empty for releases that lack it."""
    try:
        table: Mapping[str, Any] = getattr(import_module(f"transformers.integrations.gguf.{module}"), name, {})
    except ImportError:
        return {}
    return table


def _write_model(path: Path, reader: "GGUFReader", forms: Mapping[str, int], out: Path) -> None:
    """Write config and weights as ``save_pretrained`` writes them."""
    import torch
    from transformers import AutoModelForCausalLM

    # transformers draws bars of its own while it reads.
    with redirect_stderr(StringIO()):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
            )
        except Exception as error:  # transformers knows some architectures, and computes with any metadata
            raise _unreadable(path, f"cannot be read by transformers: {_reason(error)}") from error
        absent = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
        if absent:
            raise _unreadable(path, f"lacks {', '.join(absent[:4])} ({len(absent)} in all)")
        _require_all_read(path, reader, model, report["unexpected_keys"])
        config = type(model.config).from_dict(
            {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
        )
        _require_same(path, reader, config)
        whole = {_DTYPES.get(form, "bfloat16") for form in forms if form != "F32"} or {"float32"}
        dtype = getattr(torch, whole.pop() if len(whole) == 1 else "bfloat16")
        # A model that says it was quantised refuses to be saved.
        with torch.device("meta"):
            plain = type(model)(config)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        plain.to(dtype).save_pretrained(out)


def _require_all_read(path: Path, reader: "GGUFReader", model: Any, unexpected: Iterable[str]) -> None:
    """Refuse tensors that nothing of the model was made from, as the biases of a Llama, for which its config has no
    place; for most architectures transformers reports none (``unexpected``). Counted by their values, for tensors are
    joined, split and renamed."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    layers = model.config.num_hidden_layers
    # Blocks behind the last draft tokens, and are no part of the text model.
    sizes = {
        tensor.name: int(tensor.n_elements)
        for tensor in reader.tensors
        if not (block := re.match(r"blk\.(\d+)\.", tensor.name)) or int(block[1]) < layers
    }
    weights = model.state_dict()
    # Tied weights are one tensor of the file.
    surplus = sum(sizes.values()) - sum({tensor.data_ptr(): tensor.numel() for tensor in weights.values()}.values())
    if surplus <= 0:
        return
    unread = sorted(unexpected)
    kinds = [kind for kind, name in MODEL_ARCH_NAMES.items() if name == _architecture(reader)]
    if kinds and not unread:
        names = get_tensor_name_map(kinds[0], layers)
        read = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in weights}
        # Tensors that were joined have no name of the model's either, and are larger.
        unread = [name for name, size in sizes.items() if name not in read and size <= surplus]
    message = f"holds {', '.join(unread[:_MOST_NAMED])} ({surplus:,} values in all), which transformers' reader drops"
    raise _unreadable(path, message, "name the checkpoint it was made from")


def _tokenizer_beside(path: Path) -> Path | None:
    """The tokenizer.json of the original, where somebody put it beside the file."""
    beside = path.parent / "tokenizer.json"
    return beside if beside.is_file() else None


def _tokenizer(path: Path, reader: "GGUFReader", split: str | None, beside: Path | None) -> Any:
    from tokenizers import Regex, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        # transformers 4.57 gives the end the name of the begin.
        tokens = _field(reader, "tokenizer.ggml.tokens", [])
        for end in ("bos", "eos"):
            if (index := _field(reader, f"tokenizer.ggml.{end}_token_id", None)) is not None:
                setattr(tokenizer, f"{end}_token", tokens[index])
        if beside is not None:
            own = PreTrainedTokenizerFast(tokenizer_file=str(beside), **tokenizer.special_tokens_map)
            own.chat_template = tokenizer.chat_template
            return own
    except Exception as error:  # as of the weights
        where = "has a tokenizer" if beside is None else f"has a {beside.name} beside it"
        raise _unreadable(path, f"{where} that transformers cannot read: {_reason(error)}") from error
    if split is not None:
        pattern = pre_tokenizers.Split(Regex(split), "isolated")
        # A pattern of digits alone leaves the words to GPT-2's own.
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == _SPLITS["smollm"])
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pattern, words])
    if _field(reader, "tokenizer.ggml.model", "") == _OF_BYTES:
        _settle(tokenizer.backend_tokenizer)
    return tokenizer


def _settle(backend: Any) -> None:
    """Rules of bytes alone. Releases of transformers differ in what they add and no byte ever needs: an unknown token,
    fallbacks, an empty normaliser, a decoder of other vocabularies. The digest of the rules would then be of the
    release, and data prepared by one would fit no capture by another."""
    from tokenizers import decoders

    backend.decoder = decoders.ByteLevel()
    backend.model.unk_token = None
    backend.model.fuse_unk = backend.model.byte_fallback = False
    backend.model.continuing_subword_prefix = backend.model.end_of_word_suffix = ""
    if json.loads(backend.to_str())["normalizer"] == {"type": "Sequence", "normalizers": []}:
        backend.normalizer = None


def _require_same(path: Path, reader: "GGUFReader", config: Any) -> None:
    """Refuse fields of the architecture that transformers does not read, unless its config says the same anyway."""
    prefix, lost = f"{_architecture(reader)}.", []
    values = {name: field.contents() for name, field in reader.fields.items() if name.startswith(prefix)}
    read = _keys_read(_architecture(reader), values, config.model_type)
    for field, value in values.items():
        key = field.removeprefix(prefix)
        if key not in read and _member(config, _SAME_AS.get(key, "")) != value and value not in (0, False):
            lost.append(f"{field}={value}")
    if lost:
        message = f"says {', '.join(lost)}, which transformers' reader drops"
        raise _unreadable(path, message, "name the checkpoint it was made from")


def _keys_read(architecture: str, values: Mapping[str, Any], model_type: str) -> set[str]:
    """The fields of an architecture that transformers makes its config of: those its table maps, or in newer releases
    those that a function of its own asks for."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    make_config = _table_of_transformers("gguf_config_mapping", "GGUF_CONFIG_ARCHS").get(architecture)
    if make_config is None:
        table = GGUF_CONFIG_MAPPING.get(model_type) or GGUF_CONFIG_MAPPING.get(architecture) or {}
        return {key for key, member in table.items() if member is not None}
    requests = _Requests(values)
    make_config(requests, ())
    return {name.removeprefix(f"{architecture}.") for name in requests.names}


class _Requests(dict[str, Any]):
    """Fields that know which of them were asked for; any other is 0, as the vocabulary here."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().get(name, 0)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _member(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if name == "head_dim" and value is None:
        # Classes without the member compute it.
        value = config.hidden_size // config.num_attention_heads
    return value


def _architecture(reader: "GGUFReader") -> str:
    return str(_field(reader, "general.architecture", ""))


def _field(reader: "GGUFReader", name: str, default: Any) -> Any:
    field = reader.fields.get(name)
    return default if field is None else field.contents()


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unreadable(path: Path, message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"target {path} {message}", kind=Kind.TARGET_UNREADABLE, hint=hint)

"""Fingerprints of a target: the digests of ``schemas.TargetIdentity`` and how two identities are compared.

Everything that meets a target (prepare, collect, decode) computes them here, so that equal targets have equal digests
whoever loaded them and in whatever dtype; that of the checkpoint's tensors is in ``hiddenstore.targets.checkpoint``.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hiddenstore.files.documents import sha256_hex
from schemas.capture import STATED, TargetIdentity

if TYPE_CHECKING:
    import torch

# What a config.json may change between two savings of one model.
_VOLATILE_KEYS = frozenset({"transformers_version", "torch_dtype", "dtype", "use_cache", "name_or_path", "model_name"})

# Merges, digits, spaces, accents and scripts: two tokenizers with one vocabulary but other rules differ here.
_PROBES = (
    "The quick brown fox jumps over the lazy dog. 0123456789 3.14159 1,000,000",
    "def f(x):\n\treturn x ** 2  # tabs,  double  spaces\n\n\n",
    "naïve café Zürich Ελλάδα мир 漢字かな 🙂 don't IT'S",
)

# A name, a branch or a loading dtype is for people; the rest decides what the states are.
_COMPARED = (
    "model_type",
    "hidden_size",
    "num_layers",
    "vocab_size",
    "config_sha256",
    "tokenizer_sha256",
    "chat_template_sha256",
    "weights_sha256",
)
CHECKPOINT = "checkpoint_sha256"
"""The digest in which a cast copy of a target differs from it."""
_PARTS_OF_RULES = ("model", "normalizer", "pre_tokenizer")


class Tokenised(Protocol):
    """What names the tokenizer that it was made with."""

    @property
    def tokenizer_sha256(self) -> str: ...

    @property
    def tokenizer_rules_sha256(self) -> str | None: ...


def config_sha256(config: Mapping[str, Any]) -> str:
    """Digest of a target's config.json as parsed from disk (``PretrainedConfig.get_config_dict(name)[0]``).

    Not of ``model.config.to_dict()``: that one changes with the transformers release. Private (``_…``) and volatile
    keys (versions, dtypes) are left out at every depth.
    """
    return sha256_hex(_canonical(_without_volatile(config)))


def tokenizer_sha256(tokenizer: Any) -> str:
    """Digest of what a tokenizer does: its vocabulary and the ids of fixed probe texts.

    ``tokenizer`` is a loaded transformers tokenizer, or a folder or hub id to load one from. Independent of the file
    form and of who saved it.
    """
    if isinstance(tokenizer, str | Path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
    probes = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]
    return sha256_hex(_canonical({"vocab": tokenizer.get_vocab(), "probes": probes}))


def tokenizer_rules_sha256(serialised: str | bytes) -> str:
    """Digest of a ``tokenizer.json``: its vocabulary, merges, normaliser, pre-tokeniser and added tokens.

    Whitespace, order of members and of added tokens, members that are left at nothing and the older way to write a
    merge do not change it. Raises ValueError: it is no JSON object."""
    document = json.loads(serialised)
    if not isinstance(document, dict):
        raise ValueError("expected an object")
    model = document.get("model") or {}
    # Hundreds of thousands of entries each, none of which is ever left out.
    large = {name: model.pop(name, None) for name in ("vocab", "merges")}
    if large["merges"]:
        large["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in large["merges"]]
    rules = large | {name: _without_nothing(document.get(name)) for name in _PARTS_OF_RULES}
    added = [_canonical(_without_nothing(token)).decode() for token in document.get("added_tokens") or ()]
    return sha256_hex(_canonical(rules | {"added_tokens": sorted(added)}))


def chat_template_sha256(template: str | Mapping[str, str] | None) -> str:
    """Digest of a chat template's text; of the empty string when there is none."""
    return sha256_hex(_canonical(template) if isinstance(template, Mapping) else (template or "").encode("utf-8"))


def weights_sha256(embed_tokens: "torch.Tensor", norm: "torch.Tensor", lm_head: "torch.Tensor | None") -> str:
    """Digest of embeddings [V, D], final norm [D] and LM head [V, D] (None when tied), as values rounded to bf16.

    Rounding first makes a target loaded in fp32 and the same one loaded in bf16 agree.
    """
    digest = hashlib.sha256()
    for name, tensor in (("embed_tokens", embed_tokens), ("norm", norm), ("lm_head", lm_head)):
        shape = "tied" if tensor is None else "x".join(str(n) for n in tensor.shape)
        digest.update(f"{name} {shape}\n".encode())
        if tensor is not None:
            _hash_rows(digest, tensor)
    return digest.hexdigest()


def target_argument(identity: TargetIdentity) -> str:
    """What names exactly these weights after ``--target``: a hub id, or the word TARGET, for no store knows a path and
    nothing on the hub has an adapter merged."""
    return identity.name if _is_of_hub(identity) and not has_adapter(identity) else "TARGET"


def target_words(identity: TargetIdentity) -> list[str]:
    """``--target X``, with ``--adapter DIR`` where one was merged, for hints of commands that take both options."""
    if has_adapter(identity):
        base = identity.name.partition("+")[0] if _is_of_hub(identity) else "TARGET"
        return ["--target", base, "--adapter", "DIR"]
    return ["--target", target_argument(identity)]


def has_adapter(identity: TargetIdentity) -> bool:
    """Whether the name says that an adapter was merged."""
    return "+" in identity.name


def captured_from(identity: TargetIdentity) -> str:
    """What to say of ``--target``: which target it has to be."""
    return f"{shlex.join(target_words(identity))}: the one called {shlex.quote(identity.name)}"


def _is_of_hub(identity: TargetIdentity) -> bool:
    return "/" in identity.name or identity.revision is not None


def identity_differences(expected: TargetIdentity, actual: TargetIdentity, same_target: bool = False) -> list[str]:
    """Every field that makes two targets different ones, as ``weights_sha256: 77ab… expected, 19c0… found``.

    ``same_target`` excuses ``checkpoint_sha256``; whoever passes it compares states.
    """
    unstated = {*unstated_digests(expected, actual), *([CHECKPOINT] if same_target else [])}
    return [
        f"{field}: {_short(getattr(expected, field))} expected, {_short(getattr(actual, field))} found"
        for field in (*_COMPARED, *STATED)
        if field not in unstated and getattr(expected, field) != getattr(actual, field)
    ]


def tokenizer_differences(data: Tokenised, target: Tokenised) -> list[str]:
    """What tells the tokenizer of some data from a target's, as ``tokenizer 77ab… in the data, 19c0… of …``."""
    pairs = (
        ("tokenizer", data.tokenizer_sha256, target.tokenizer_sha256),
        ("merges and rules of the tokenizer", data.tokenizer_rules_sha256, target.tokenizer_rules_sha256),
    )
    return [
        f"{what} {one[:8]}… in the data, {other[:8]}… of the target"
        for what, one, other in pairs
        if one is not None and other is not None and one != other
    ]


def cast_hint(differences: Sequence[str], otherwise: str) -> str:
    """What to do about ``differences``: where the checkpoint's digest is the only one, it may be a cast copy."""
    only = differences[0].removeprefix("capture.target.") if len(differences) == 1 else ""
    return f"--same-target, if it is a cast copy; else {otherwise}" if only.startswith(f"{CHECKPOINT}:") else otherwise


def unstated_digests(*identities: TargetIdentity) -> list[str]:
    """The digests of ``STATED`` that one of the identities lacks: nothing can be said of them."""
    return [field for field in STATED if None in [getattr(identity, field) for identity in identities]]


def _hash_rows(digest: Any, tensor: "torch.Tensor") -> None:
    import torch

    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    # Blocks bound the peak: an embedding of a large target is gigabytes.
    step = max(1, (64 << 20) // max(1, 2 * rows.shape[-1]))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step].to("cpu", torch.bfloat16).contiguous()
        digest.update(block.view(torch.uint16).numpy().tobytes())


def _without_volatile(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _without_volatile(item)
            for key, item in value.items()
            if not str(key).startswith("_") and key not in _VOLATILE_KEYS
        }
    if isinstance(value, list | tuple):
        return [_without_volatile(item) for item in value]
    return value


def _without_nothing(value: Any) -> Any:
    """Without members that are null, false or empty text, which one version writes and another leaves out."""
    if isinstance(value, dict):
        return {
            key: _without_nothing(item) for key, item in value.items() if item not in (None, "") and item is not False
        }
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str).encode("utf-8")


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:8]}…" if len(text) == 64 else text

"""The words of export, import and serve: an engine, what it reads of a drafter by version, what a drafter brings, and
what the files of every drafter share: dimensions and rope, weights in a dtype, the draft vocabulary.

Nothing here imports torch before it is called, so that tables can be asked without loading a drafter.

Shapes: V target vocabulary, U draft vocabulary, D target width, T tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import InvalidVersion, Version

from hiddenstore.errors import ConfigError, Kind
from schemas.capture import TargetIdentity
from schemas.layers import LayerConvention

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hiddenstore.targets.head import HeadBundle
    from trainer.vocab import DraftVocab


Proof = Literal["ran", "names"]
Tensors = dict[str, "Tensor"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is exported: a drafter, its draft vocabulary, and the target it drafts for. ``model`` is a
    `trainer.drafters.base.Drafter`. ``draft_len``: how many tokens it is to draft, None for what its shape
    says. ``target_name``: hub id or path of the target for the formats that name it, ``target_config`` its
    ``config.json``, empty where it is not at hand. ``origin``: ``run``, the name of its folder, and ``step``."""

    model: Any
    vocab: "DraftVocab"
    head: "HeadBundle"
    identity: TargetIdentity
    draft_len: int | None = None
    target_name: str | None = None
    target_config: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The drafter's settings, a `trainer.config.DrafterConfig`."""
        return self.model.config


@dataclass(frozen=True, eq=False)
class Files:
    """Contents of ``config.json`` and ``model.safetensors``."""

    config: dict[str, Any]
    tensors: Tensors


@dataclass(frozen=True, eq=False)
class Target:
    """The target a published checkpoint is read for; ``convention`` of its layer ids where it leaves that open."""

    head: "HeadBundle"
    vocab: "DraftVocab"
    num_layers: int
    convention: LayerConvention | None


@dataclass(frozen=True)
class Lack:
    """Something a drafter may have that an engine does not read: ``of`` says whether a checkpoint has it."""

    of: Callable[[Checkpoint], bool]
    reason: str
    fix: str | None = None


@dataclass(frozen=True)
class Quirks:
    """How an engine's file of a drafter differs from the plain one. ``fc_bias``: its EAGLE-1 has one. Of EAGLE-3:
    ``top_level_ids``, layer ids are read there as well; ``first_layer``, its name of layer 0; ``later_norm``, its name
    of the input norm of layers after that; ``stacked``, several layers are ``midlayer.0``, ``midlayer.1`` …; ``t2d``,
    it knows that tensor; ``embeddings``, it needs them in the file. ``wrap``: puts config.json, for a checkpoint and a
    draft length, into another."""

    fc_bias: bool = False
    top_level_ids: bool = False
    first_layer: str = "midlayer"
    later_norm: str = "input_layernorm"
    stacked: bool = False
    t2d: bool = True
    embeddings: bool = False
    wrap: Callable[[dict[str, Any], Checkpoint, int], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Reads:
    """What an engine reads of one drafter from version ``since`` until before ``before``. ``architecture``: its name in
    config.json. ``method``: what the engine calls drafting with it. ``source``: what the names were read from. ``ran``:
    the version in which a real engine ran the exported file; in any other, names and shapes are compared with a
    restatement of its published loader. ``warn``: what is known to go wrong in silence with a published
    ``config.json``. ``told``: what its speculation has to be told besides method, model and length.
    ``full_blocks``: it drafts as far as the drafter can, and with another length reads the weights wrong."""

    architecture: str
    method: str
    source: str
    ran: str | None = None
    since: str | None = None
    before: str | None = None
    lacks: tuple[Lack, ...] = ()
    quirks: Quirks = Quirks()
    warn: Callable[[Mapping[str, Any]], str | None] = lambda config: None
    told: Mapping[str, Any] = field(default_factory=dict)
    full_blocks: bool = False

    def same_file(self, other: "Row | None") -> bool:
        """Whether a file that was written for this row is one for the other."""
        if not isinstance(other, Reads):
            return False
        return (self.architecture, self.lacks, self.quirks) == (other.architecture, other.lacks, other.quirks)

    def preceded_by(self, reason: str, nearest: str) -> "tuple[Row, ...]":
        """This row, after the one that refuses whatever version comes before it."""
        return Refused(reason, nearest, before=self.since), self

    def first_known(self, engine: str, instead: str = "", what: str = "this format") -> "tuple[Row, ...]":
        """The same of a version that is the first known to read it, not the first that does."""
        nearest = f"--engine-version {self.since}" + (f", or {instead}" if instead else "")
        return self.preceded_by(f"the first {engine} known to read {what} is {self.since}", nearest)


@dataclass(frozen=True)
class Refused:
    """Why an engine cannot take a drafter over a range of versions, and the nearest thing that works."""

    reason: str
    nearest: str
    since: str | None = None
    before: str | None = None


Row = Reads | Refused


@dataclass(frozen=True)
class Engine:
    """One engine: its version where none is named, the convention of its layer ids, and whether a drafter is one GGUF
    file to it instead of a folder."""

    name: str
    title: str
    version: str
    convention: LayerConvention
    reads_gguf: bool = False


@dataclass(frozen=True, kw_only=True)
class DrafterExport:
    """Everything that export, import and serve know of one kind of drafter. Nothing but ``variant_of``, ``is_read`` and
    ``unread`` has a default: a missing fact is an error.

    titles: the words it goes by and what a person calls each; several where settings make it another format. word:
    which of them, by its settings or a ``config.json``.

    rows: by engine and word, what is read, by version; an engine that is not named has no loader.

    architectures: pattern of the published names of its class. signs: whether a ``config.json`` and tensors (none where
    only the former is at hand) are surely its own, whatever its class is called. longest: most tokens of one draft, by
    ``config.json``; None for any number. ids_follow_engine: its layer ids are in each engine's own numbering, and
    nothing else in a file says whose. has_positions: it rotates by position, so that rope can be stretched.

    files: what is written for an engine's row, in a dtype. our_name: a published tensor's name here. read: settings and
    fp32 weights by published ``config.json`` and fp32 tensors under our names; KeyError where something is missing,
    ValueError where something cannot be had here. probe: logits [rows, U] of a model over fixed random states.

    variant_of: the drafter under whose class it is published too; its own signs then tell the two apart. is_read:
    whether a published tensor is read, by ``config.json`` and name, where it lies among others of a target. unread: why
    the engine of a name, which reads this drafter, does not read it as this published ``config.json`` has it, and of
    which versions that is so.
    """

    drafter: str
    titles: Mapping[str, str]
    word: Callable[[Mapping[str, Any]], str]
    rows: Mapping[tuple[str, str], tuple[Row, ...]]
    architectures: str
    signs: Callable[[Mapping[str, Any], Tensors], bool]
    longest: Callable[[Mapping[str, Any]], int | None]
    ids_follow_engine: bool
    has_positions: bool
    files: Callable[[Checkpoint, Engine, Reads, str], Files]
    our_name: Callable[[str], str]
    read: Callable[[Mapping[str, Any], Tensors, Target], tuple[dict[str, Any], Tensors]]
    probe: Callable[[Any, Checkpoint], "Tensor"]
    variant_of: str | None = None
    is_read: Callable[[Mapping[str, Any], str], bool] | None = None
    unread: Callable[[Mapping[str, Any], str], Refused | None] = lambda config, engine: None


@dataclass(frozen=True)
class Support:
    """Whether an engine of a version takes a drafter. ``reason`` and ``nearest`` where it does not."""

    engine: str
    version: str
    drafter: str
    ok: bool
    proof: Proof | None = None
    reason: str | None = None
    nearest: str | None = None
    source: str | None = None


def parse_version(text: str) -> Version:
    """An engine's version, as ``1.3.0rc12``. Raises ConfigError: ``engine-version``, no version."""
    try:
        return Version(text)
    except InvalidVersion as error:
        raise ConfigError(
            f"{text!r} is no version", kind=Kind.ENGINE_VERSION, hint="--engine-version 1.3.0rc12"
        ) from error


def is_within(version: str, since: str | None, before: str | None) -> bool:
    """Whether ``since <= version < before``; None leaves a side open. A candidate counts to its release. ``1.3.0rc12``
    has what came with 1.3."""
    release = Version(parse_version(version).base_version)
    return (since is None or release >= Version(since)) and (before is None or release < Version(before))


ABOUT_FILE = "hiddenstore.json"
"""What an export says of itself, beside its config and weights."""
PROBE_TOKENS = 16
PROBE_STEPS = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUT_IDS = "aux_hidden_states_layer_ids"
"""AngelSlim's word (``target_model_wrapper.py``), which no engine reads: numbers of layer outputs."""
EMBEDDINGS_AS_A_LAYER = Lack(
    lambda c: -1 in c.config.aux_layers,
    "its layer ids name layer outputs, and the embedding output is none",
    "train with drafter.aux_layers from 0 on",
)

ATTENTION_FACTOR = Lack(
    lambda c: abs(_attention_share(c.config) - 1) > 1e-6,
    "it reads no attention factor of YaRN's and derives its own",
    "--engine vllm or sglang, or train with drafter.rope_scaling=none",
)

# llama.cpp hands out what enters a layer; only some targets also what leaves the last.
_PAST_THE_LAST_INPUT = Lack(
    lambda c: max(c.config.aux_layers) >= c.identity.num_layers - 1,
    "it reads what enters a layer of the target, and nothing enters one after the last",
    "train with drafter.aux_layers below the last layer",
)
_ROPE_OF_ITS_OWN = Lack(
    lambda c: _has_other_rope(c.config.rope_scaling),
    "it stretches rope by linear, Llama 3's or YaRN's rule, the latter with its own attention factor",
    "train with drafter.rope_scaling=none",
)
OF_LLAMACPP = (_PAST_THE_LAST_INPUT, _ROPE_OF_ITS_OWN)
"""What any drafter may have that llama.cpp does not read."""


def _has_other_rope(scaling: Any) -> bool:
    written = scaling.written() if scaling else {"rope_type": "linear"}
    unread = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}
    return written["rope_type"] not in ("linear", "llama3", "yarn") or bool(unread & written.keys())


def _attention_share(drafter: Any) -> float:
    """What a drafter's attention factor is of the one that YaRN derives where none is set."""
    from trainer.attention.rope import frequencies

    scaling = drafter.rope_scaling
    if scaling is None or scaling.rope_type != "yarn" or scaling.attention_factor is None:
        return 1.0
    unset = scaling.model_copy(update={"attention_factor": None})
    _, derived = frequencies(drafter.head_dim, drafter.rope_theta, unset, drafter.max_position)
    share: float = scaling.attention_factor / derived
    return share


def weights(checkpoint: Checkpoint, dtype: "str | torch.dtype") -> Tensors:
    """The drafter's own weights under its own names, on the CPU, in a dtype or the one of that name."""
    import torch

    as_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    state = checkpoint.model.state_dict()
    return {name: tensor.detach().to("cpu", as_dtype).contiguous() for name, tensor in state.items()}


def like(tensors: Tensors, table: "Tensor") -> "Tensor":
    """A copy of a table on the CPU in the dtype of the tensors that are written."""
    dtype = next(iter(tensors.values())).dtype
    return table.detach().to("cpu", dtype).clone().contiguous()


def llama_dimensions(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """Dimensions of a Llama-like drafter; rope in the old and the new form, because engines read either. SGLang's
    ``rotary_embedding/yarn.py`` reads ``attn_factor``, a multiple of its own, in the place of ``attention_factor``."""
    drafter = checkpoint.config
    scaling = drafter.rope_scaling.written() if drafter.rope_scaling else None
    if scaling and (share := _attention_share(drafter)) != 1:
        scaling["attn_factor"] = share
    return {
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "num_hidden_layers": drafter.num_layers,
        "rms_norm_eps": drafter.rms_norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": drafter.max_position,
        "rope_theta": drafter.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta, **(scaling or {})},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **vocabulary(checkpoint),
        **dtype_words(dtype),
    }


def dimensions(config: Mapping[str, Any], rotates_partly: bool = False) -> dict[str, Any]:
    """The settings that a Llama-like ``config.json`` gives. KeyError where it lacks one; ValueError where its MLP is
    another, or it rotates a part of each head, and the drafter is not one that ``rotates_partly``."""
    from trainer.attention.rope import published_rope

    if (activation := config.get("hidden_act") or "silu") != "silu":
        raise ValueError(f"hidden_act is {activation}, and ours is silu")
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    places = (config, config.get("rope_scaling") or {}, config.get("rope_parameters") or {})
    for word, plain in (("partial_rotary_factor", 1.0), ("rope_dim", width)):
        value = next((value for place in places if (value := place.get(word)) is not None), plain)
        if value != plain and not rotates_partly:
            raise ValueError(f"{word} is {value}, and ours rotates every channel of a head")
    theta, scaling = published_rope(config)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": width,
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position": config["max_position_embeddings"],
    }


def vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Both sizes, always: an engine that lacks the second takes it for the first, or takes the file for no drafter."""
    return {"vocab_size": checkpoint.vocab.target_size, "draft_vocab_size": checkpoint.vocab.size}


def dtype_words(dtype: str) -> dict[str, str]:
    """Under the older name and the newer one."""
    return {"torch_dtype": dtype, "dtype": dtype}


def draft_vocabulary(checkpoint: Checkpoint) -> Tensors:
    """``d2t`` int64 [U], target id minus draft id, and ``t2d`` bool [V], which target tokens the drafter knows."""
    vocab = checkpoint.vocab
    return {"d2t": vocab.d2t.cpu().long().contiguous(), "t2d": vocab.t2d.cpu().bool().contiguous()}


def shares_embeddings(checkpoint: Checkpoint) -> bool:
    """Whether the drafter's embeddings are the target's, so that an engine's shared copy is exact."""
    table = checkpoint.model.state_dict().get("embed_tokens.weight")
    target = checkpoint.head.embed_tokens
    return table is None or (table.shape == target.shape and table.cpu().float().equal(target.cpu().float()))


def drop_shared(tensors: Tensors, name: str, rows: "Tensor") -> None:
    """Drop a published fp32 table that equals the target's rows, as they are or rounded to a file's dtype."""
    import torch

    table = tensors.get(name)
    if table is None or table.shape != rows.shape:
        return
    if any(table.equal(rows.cpu().to(dtype).float()) for dtype in (torch.float32, torch.bfloat16, torch.float16)):
        del tensors[name]


def require_shared_embeddings(tensors: Tensors, head: "HeadBundle", title: str) -> None:
    """Drop published embeddings that are the target's; ValueError where they differ."""
    drop_shared(tensors, "embed_tokens.weight", head.embed_tokens)
    if "embed_tokens.weight" in tensors:
        raise ValueError(f"embed_tokens.weight differs from the target's, which {title} shares")


def speculators_config(
    config: dict[str, Any], checkpoint: Checkpoint, draft_len: int, algorithm: str, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """A drafter's ``config.json`` inside that of speculators, which names the target, so that ``vllm serve`` of the
    folder alone works. ``flags`` are all written, because vLLM's defaults differ from speculators' own."""
    verifier = {
        "name_or_path": checkpoint.target_name or checkpoint.identity.name,
        "architectures": list(map(str, checkpoint.target_config.get("architectures") or ())),
    }
    outer = {
        "architectures": config["architectures"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_len}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "draft_vocab_size": config["draft_vocab_size"],
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
        **flags,
    }
    both, outside = ("dtype", "tie_word_embeddings"), ("dflash_config", "eagle_config", "num_target_layers")
    inner = {key: value for key, value in config.items() if key in both or key not in (*outside, *outer)}
    return {**outer, "transformer_layer_config": inner}


def probe_states(checkpoint: Checkpoint, layers: int) -> "Tensor":
    """The random states of a probe: fp32 [layers, T, D]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(layers, PROBE_TOKENS, checkpoint.identity.hidden_size, generator=generator)


def probe_ids(checkpoint: Checkpoint) -> "Tensor":
    """The random tokens of a probe: int64 [T + steps]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    vocabulary_size = checkpoint.head.embed_tokens.shape[0]
    return torch.randint(vocabulary_size, (PROBE_TOKENS + PROBE_STEPS,), generator=generator)


def probe_chain(model: Any, checkpoint: Checkpoint) -> "Tensor":
    """Logits [rows, U] of a chain: one forward over text, then a token at a time."""
    import torch

    from trainer.attention.ttt import KVCache

    layers = len(model.config.aux_layers)
    aux, ids = probe_states(checkpoint, layers or 1), probe_ids(checkpoint)
    cache, positions = KVCache(), torch.arange(len(ids))
    start = model.start(aux) if layers else aux[0]
    g, logits = model.step(start, ids[:PROBE_TOKENS], positions[:PROBE_TOKENS], cache)
    steps = [logits]
    for i in range(PROBE_TOKENS, PROBE_TOKENS + PROBE_STEPS - 1):
        g, logits = model.step(g[-1:], ids[i : i + 1], positions[i : i + 1], cache)
        steps.append(logits)
    return torch.cat(steps)

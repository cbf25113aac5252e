"""The settings of a training run, loaded.

Precedence: defaults of `trainer.config` < derived from target and store < file < ``key.path=value``; unknown keys are
errors.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import Field, create_model

from hiddenstore import settings
from hiddenstore.console.output import output
from hiddenstore.console.text import size
from hiddenstore.data import WHOLE, SampleView
from hiddenstore.data.order import Order, global_batches
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.files.documents import foreign_json
from hiddenstore.index.table import SPLITS
from hiddenstore.process import free_bytes, from_environment
from hiddenstore.store import Store
from hiddenstore.targets.load import pick_device
from hiddenstore.targets.matmul import bf16_pays
from hiddenstore.threads import local_ranks
from schemas.prepared import LossChoice
from trainer.attention.rope import inherited_scaling
from trainer.config import DrafterConfig, LoopConfig, TrainConfig
from trainer.drafters import drafter_kind
from trainer.drafters.base import TargetFacts
from trainer.vocab import count_store

FULL_VOCAB_LIMIT = 32768
"""Targets up to this size are drafted with their whole vocabulary."""
IMAGE_TOKEN = "image_token_id"
"""The setting of drafters that are trained beside images."""
USUAL_VOCAB, FEWEST_VOCAB = 32000, 4096
VOCAB_COVERAGE = 0.98
"""Share of the supervised tokens that a derived draft vocabulary holds. On SmolLM2, 884,000 tokens read, chains of 3
come to 1.570 on held-out text with all of them (14,720) and to 1.575 with 98 % (9,024), one seed; training is about a
quarter cheaper (benchmarks/results/what-pays-2026-11-23.md)."""
STEPS_OF_AN_EPOCH = 400
"""A small store is cut into so many batches, as far as they stay above ``FEWEST_BATCH_TOKENS``."""
FEWEST_BATCH_TOKENS = 1024
MOST_BATCH_TOKENS, MOST_PACK_TOKENS = 32768, 8192
MEMORY_SHARE = 0.5
"""Of the free memory, what the activations of a derived pack may take: weights, reader and others have the rest."""

BF16_ROWS = 512
"""Rows of the product that decides about bf16, as a pack of short samples has them."""

LONG_RUN, HIGHEST_LR_FACTOR = 500, 4.0
"""Steps from which a run takes the rate of its width alone, and how many times that the shortest run takes. SmolLM2,
30, 100 and 434 steps of 1,000 tokens, once, twice and four times that rate: EAGLE-3.1 1.207, 1.241, 1.268; 1.347,
1.363, 1.353; 1.525, 1.498, 1.433 (benchmarks/results/rate-2026-11-24.md)."""


@cache
def config_class(drafter: str) -> type[TrainConfig]:
    """The settings of a run that trains this kind of drafter. Raises ConfigError: there is no such drafter."""
    kind = drafter_kind(drafter)
    loss = (kind.loss, Field(default_factory=kind.loss))
    return create_model("TrainConfig", __base__=TrainConfig, drafter=(kind.config, ...), loss=loss)


def load_config(
    store: "Store",
    drafter: str | None = None,
    file: str | Path | None = None,
    words: Sequence[str] = (),
    start: DrafterConfig | None = None,
) -> TrainConfig:
    """Settings for a run over ``store``. ``start``: those of the drafter to start from, which then are the defaults.
    Raises ConfigError: every unknown or invalid setting at once, or ``drafter-contradiction``."""
    name = _drafter_name(drafter, file, words, start)
    view = _named_view(file, words)
    defaults = derived(store, name, view)
    images = {key: value for key, value in defaults["drafter"].items() if key == IMAGE_TOKEN}
    if start is not None:
        defaults["drafter"] = start.model_dump(mode="json", exclude={"vocab_file"}) | images
    if settings.assignments("drafter.rope_scaling", file, words):
        # One scaling is not the other with a key changed.
        defaults["drafter"]["rope_scaling"] = None
    for _, batch_tokens in settings.assignments("data.batch_tokens", file, words)[-1:]:
        if str(batch_tokens).isdecimal() and int(batch_tokens) > 0:
            # A smaller batch is one smaller pack; a larger one is several.
            smaller = min(defaults["data"]["pack_tokens"], int(batch_tokens))
            defaults["data"]["pack_tokens"] = max(smaller, longest_sample(store, view.max_tokens))
    config = settings.load(config_class(name), file, words, defaults)
    if not settings.assignments("data.pack_tokens", file, words):
        config = _within_memory(store, config)
    room = _room(config)
    if room == 0:
        _warn_of_drafter(config)
    elif room is not None and not config.train.checkpoint_activations:
        _warn_of_longest(store, config, room)
    if settings.assignments("optim.lr", file, words):
        return config
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": derived_lr(store, config)})})


def _named_view(file: str | Path | None, words: Sequence[str]) -> SampleView:
    """What file and words train on of every sample, as far as they say it rightly; `settings.load` refuses the rest."""
    cut, choice = (
        next((str(value) for _, value in settings.assignments(f"data.{key}", file, words)[-1:]), "")
        for key in ("max_tokens", "loss_on")
    )
    loss_on = next((value for value in get_args(LossChoice) if value == choice), WHOLE.loss_on)
    return SampleView(int(cut) or None if cut.isdecimal() else None, loss_on)


def view_of(config: TrainConfig) -> SampleView:
    """What the settings train on of every sample."""
    return SampleView(config.data.max_tokens, config.data.loss_on)


def longest_sample(store: "Store", max_tokens: int | None = None) -> int:
    """Tokens of the longest sample, cut at ``max_tokens``."""
    longest = int(store.catalog.table.tokens.max(initial=1))
    return min(longest, max_tokens or longest)


def activation_bytes(config: TrainConfig, anchors: float = 0.0) -> int:
    """Memory that a token of a pack takes from forward to backward, in fp32, from the shapes: norms, MLP and attention
    of every layer at every row, those of the blocks that open at ``anchors`` of each token included. At width 256 and
    seven steps it gives 109 kB, where 107 was measured (benchmarks/results/train-2026-11-21.md)."""
    drafter, loss = config.drafter, config.loss
    layer = 5 * drafter.hidden_size + 2 * drafter.intermediate_size + 2 * drafter.num_heads * drafter.head_dim
    rows = anchors * getattr(drafter, "block_size", 0) + getattr(loss, "steps", 1)
    states = 2 * len(drafter.aux_layers) * drafter.hidden_size
    return round(4 * rows * getattr(drafter, "num_layers", 1) * layer) + states


def state_bytes(config: TrainConfig) -> int:
    """Memory that a rank keeps of the drafter: weights, gradients and moments of its large matrices, in fp32, from the
    shapes."""
    ranks = from_environment().world_size if config.train.parallel == "fsdp" else 1
    return (12 if config.optim.kind == "muon" else 16) * config.drafter.weights // ranks


def _tokens_and_anchors(store: "Store", config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """Of every sample its tokens and the anchors of its blocks at most: int [N]; no anchors where there are no
    blocks."""
    table, data = store.catalog.table, config.data
    tokens = np.minimum(table.tokens, longest_sample(store, data.max_tokens))
    # A wider choice than the stored one is known once the texts are read.
    teaching = tokens if data.loss_on in ("assistant", "all") else np.minimum(table.supervised, tokens)
    return tokens, np.minimum(teaching, getattr(config.loss, "num_anchors", 0))


def _bytes_a_token(store: "Store", config: TrainConfig) -> int:
    """`activation_bytes` with the blocks that the samples of this store have."""
    tokens, anchors = _tokens_and_anchors(store, config)
    return activation_bytes(config, anchors.sum(dtype=np.int64) / max(1, tokens.sum(dtype=np.int64)))


def _within_memory(store: "Store", config: TrainConfig) -> TrainConfig:
    """The settings with smaller packs where the free memory of the device asks for them; a batch is then more packs."""
    a_token, room = _bytes_a_token(store, config), _room(config)
    if not room or config.train.checkpoint_activations:
        return config
    pack = max(longest_sample(store, config.data.max_tokens), int(MEMORY_SHARE * room) // a_token)
    if pack >= config.data.pack_tokens:
        return config
    output().note(
        f"data.pack_tokens={pack} instead of {config.data.pack_tokens:,}: a token takes about {size(a_token)} of "
        f"memory, and {size(room)} are free beside the drafter itself"
    )
    return config.model_copy(update={"data": config.data.model_copy(update={"pack_tokens": pack})})


def _warn_of_drafter(config: TrainConfig) -> None:
    """Say that the drafter itself does not fit, which no shorter pack or sample changes."""
    drafter, own, free = config.drafter, state_bytes(config), _free_bytes(config.train.device)
    sharing = from_environment().world_size if config.train.parallel == "fsdp" else 1
    ways = ["optim.kind=muon takes a quarter less"] if config.optim.kind != "muon" else []
    ways.append(
        f"train.parallel=fsdp shares them among {sharing * own // max(1, free) + 1} ranks with as much free each"
    )
    for name, words in (("num_layers", "fewer drafter.num_layers"), ("vocab_size", "a smaller drafter.vocab_size")):
        # One to start from has its shape already.
        if config.train.init_from is None and drafter.model_copy(update={name: 1}).weights < drafter.weights:
            ways.append(words)
    output().warn(
        f"the drafter's weights, gradients and moments take about {size(own)}, and {size(free)} are free: "
        + "; ".join(ways)
    )


def _warn_of_longest(store: "Store", config: TrainConfig, room: int) -> None:
    """Say that the longest sample may end the run wherever it is drawn: no pack may be shorter."""
    tokens, anchors = _tokens_and_anchors(store, config)
    longest = int(tokens.max(initial=1))
    blocks = int(anchors[tokens == longest].max(initial=0))
    a_token = activation_bytes(config)
    a_block = activation_bytes(config, 1) - a_token
    needed = a_token * -(-longest // config.train.context_parallel) + a_block * blocks
    if needed <= room:
        return
    share = int(MEMORY_SHARE * room)
    # Of so few tokens each may open a block, of more so many as the longest sample opens.
    cut = max(2, share // (a_token + a_block), (share - a_block * blocks) // a_token)
    ways = [f"data.max_tokens={cut} cuts it", "train.checkpoint_activations=true keeps less of it"]
    if drafter_kind(config.drafter.name).splits_context(config.loss):
        ranks = config.train.context_parallel * -(-needed // room)
        ways.append(f"train.context_parallel={ranks} shares it among as many ranks")
    output().warn(
        f"the longest sample has {longest:,} tokens, which take about {size(needed)} of memory at once, and "
        f"{size(room)} are free beside the drafter itself: {'; '.join(ways)}"
    )


def _room(config: TrainConfig) -> int | None:
    """Free memory of the device beside the drafter, 0 where this does not fit; None where it is not known."""
    free = _free_bytes(config.train.device)
    return max(0, free - state_bytes(config)) if free else None


def _free_bytes(device: str) -> int:
    """Free memory of the device for a rank of a run, 0 where it is not known. Ranks of one machine share its own."""
    import torch

    chosen = torch.device(pick_device(device))
    return int(torch.cuda.mem_get_info(chosen)[0]) if chosen.type == "cuda" else free_bytes() // local_ranks()


def with_precision(config: TrainConfig, *, measure: bool = True) -> TrainConfig:
    """The settings with ``train.precision`` of ``auto`` replaced on a CPU, by bf16 where it multiplies the drafter's
    MLP markedly faster so, which tens of milliseconds tell; on other devices it stays, and means bf16.
    Without ``measure`` it is fp32, as in the runs of earlier versions that say ``auto``. Raises ConfigError:
    ``device-unavailable``."""
    drafter, loop = config.drafter, config.train
    if loop.precision != "auto" or not pick_device(loop.device).startswith("cpu"):
        return config
    pays = measure and bf16_pays(drafter.hidden_size, drafter.intermediate_size, BF16_ROWS) is not None
    return config.model_copy(update={"train": loop.model_copy(update={"precision": "bf16" if pays else "fp32"})})


def rank_settings(file: str | Path | None, words: Sequence[str]) -> LoopConfig:
    """``train.dist_*`` alone: what has to be known before the ranks meet, and so before there is a store."""
    words = [
        f"{name}={value}"
        for name in ("dist_backend", "dist_timeout_minutes")
        for _, value in settings.assignments(f"train.{name}", file, words)[-1:]
    ]
    return settings.load(LoopConfig, None, words)


def check_settings(drafter: str | None, file: str | Path | None, words: Sequence[str]) -> None:
    """Refuse settings before there is a store: what `settings.check` finds. Raises ConfigError: every unknown setting
    and every value of a wrong type, or ``drafter-contradiction``."""
    is_named = drafter is not None or settings.assignments("drafter.name", file, words)
    if not is_named and settings.assignments("train.init_from", file, words):
        # Which drafter it is, only what it starts from can tell.
        return
    settings.check(config_class(_drafter_name(drafter, file, words, None)), file, words)


def refuse_overruled(words: Sequence[str], loop: LoopConfig, resume_command: str) -> None:
    """Refuse ``train.epochs`` of a resume where ``max_steps``, which the run has, ends it whatever the epochs. Raises
    ConfigError: ``resume-settings``."""
    named = [key for key in ("epochs", "max_steps") if settings.assignments(f"train.{key}", None, words)]
    if named != ["epochs"] or loop.max_steps is None:
        return
    # A run that follows its store has no other end.
    change = "train.max_steps=N" if loop.follow else f"train.epochs={loop.epochs} train.max_steps=none"
    raise ConfigError(
        f"train.epochs={loop.epochs} changes nothing: the run ends at its train.max_steps={loop.max_steps}, which wins",
        kind=Kind.RESUME_SETTINGS,
        hint=f"{resume_command} {change}",
    )


def _drafter_name(flag: str | None, file: str | Path | None, words: Sequence[str], start: DrafterConfig | None) -> str:
    """What flag, file, words and the drafter to start from agree on; ``eagle3`` when none names one."""
    named = [("--drafter", flag)] if flag is not None else []
    assignments = settings.assignments("drafter.name", file, words)
    named += [(f"drafter.name ({origin})", str(value)) for origin, value in assignments]
    named += [("train.init_from", start.name)] if start is not None else []
    if len({name for _, name in named}) > 1:
        raise ConfigError(
            "which drafter? " + ", ".join(f"{origin} says {name}" for origin, name in named),
            kind=Kind.DRAFTER_CONTRADICTION,
            hint=f"leave out all but one, or name {named[-1][1]} everywhere",
        )
    return named[0][1] if named else "eagle3"


def derived(store: "Store", drafter: str = "eagle3", view: SampleView = WHOLE) -> dict[str, Any]:
    """Defaults that follow from the target and from what ``view`` leaves of the samples of a store."""
    target = store.capture.target
    shape = _target_shape(store)
    facts = TargetFacts(
        target.hidden_size,
        target.num_layers,
        target.vocab_size,
        shape,
        tuple(store.capture.aux_layers),
        partial(_target_file, store),
    )
    longest = longest_sample(store, view.max_tokens)
    batch_tokens, _ = _batch(store)
    common = {
        "data": {"batch_tokens": batch_tokens, "pack_tokens": max(min(batch_tokens, MOST_PACK_TOKENS), longest)},
        "drafter": {"name": drafter, **_dimensions(facts, store.manifest.head.norm_eps)},
        "loss": {},
        "optim": {"lr": default_lr(target.hidden_size)},
    }
    if (images := store.capture.images) is not None and drafter_kind(drafter).takes_images:
        common["drafter"][IMAGE_TOKEN] = images.token_id
    for section, values in drafter_kind(drafter).derive(facts).items():
        common.setdefault(section, {}).update(values)
    if "vocab_size" not in common["drafter"]:
        common["drafter"]["vocab_size"] = _covering_size(store, view)
    return {section: values for section, values in common.items() if values}


def _batch(store: "Store") -> tuple[int, str]:
    """Tokens of a batch, and why so many. Not the longest sample's, which is a batch alone: one would make the steps of
    all others fewer and their rate higher."""
    width, tokens = store.capture.target.hidden_size, store.totals["tokens"]
    limits = {
        f"{MOST_BATCH_TOKENS:,} at most": MOST_BATCH_TOKENS,
        f"8 for each of the target's {width:,} channels, 2,048 at least": max(2048, 8 * width),
        f"a {STEPS_OF_AN_EPOCH}th of the store's {tokens:,} tokens, {FEWEST_BATCH_TOKENS:,} at least": max(
            FEWEST_BATCH_TOKENS, tokens // STEPS_OF_AN_EPOCH
        ),
    }
    why, batch = min(limits.items(), key=lambda limit: limit[1])
    return batch, why


def reasons(store: "Store", config: TrainConfig) -> dict[str, str]:
    """Why ``load_config`` derived what it did, by key; for each setting that it derives unless it was set."""
    target, data, name = store.capture.target, config.data, config.drafter.name
    longest = longest_sample(store, data.max_tokens)
    usual = max(min(data.batch_tokens, MOST_PACK_TOKENS), longest)
    pack = f"a batch, {MOST_PACK_TOKENS:,} at most"
    if data.pack_tokens < usual:
        pack = f"as far as memory goes: about {size(_bytes_a_token(store, config))} a token"
    elif data.pack_tokens == longest:
        pack = "the longest sample"
    every = {f"{section}.{key}" for section, values in derived(store, name, view_of(config)).items() for key in values}
    why = dict.fromkeys(every, f"what {name} takes of this target and store")
    facts = TargetFacts(target.hidden_size, target.num_layers, target.vocab_size, {}, (), partial(_target_file, store))
    start = "" if config.train.init_from is None else "as the drafter that it starts from"
    why |= {f"drafter.{key}": "the target's" for key in _dimensions(facts, store.manifest.head.norm_eps)}
    why |= {"data.batch_tokens": _batch(store)[1], "data.pack_tokens": pack, "optim.lr": _rate_reason(store, config)}
    why["drafter.vocab_size"] = "the target's whole vocabulary"
    if config.drafter.vocab_size < target.vocab_size:
        why["drafter.vocab_size"] = (
            f"{VOCAB_COVERAGE:.0%} of the supervised tokens, {FEWEST_VOCAB:,} at least and {USUAL_VOCAB:,} at most"
        )
    return {key: start or reason if key.startswith("drafter.") else reason for key, reason in why.items()}


def _rate_reason(store: "Store", config: TrainConfig) -> str:
    width = store.capture.target.hidden_size
    factor, steps = _short_run(store, config)
    short = f", {factor:.2g} times (sqrt({LONG_RUN}/steps), {HIGHEST_LR_FACTOR:g} at most) for {steps:,.0f} steps"
    return f"{default_lr(width):g} at width {width:,}{short if factor > 1 else ''}"


def _covering_size(store: "Store", view: SampleView) -> int:
    """Tokens of the smallest draft vocabulary that holds ``VOCAB_COVERAGE`` of those that teach in this view of the
    store, between 4,096 and the field's usual 32,000, in whole groups of 64, as kernels like them."""
    target_vocab = store.capture.target.vocab_size
    if target_vocab <= FULL_VOCAB_LIMIT:
        return target_vocab
    covered = np.sort(count_store(store, target_vocab, view))[::-1].cumsum()
    size = 1 + int(np.searchsorted(covered, VOCAB_COVERAGE * covered[-1]))
    return min(USUAL_VOCAB, max(FEWEST_VOCAB, -(-size // 64) * 64))


def _dimensions(facts: TargetFacts, norm_eps: float) -> dict[str, Any]:
    hidden, shape = facts.hidden_size, facts.shape
    heads = int(shape.get("num_attention_heads") or max(1, hidden // 64))
    rope = _rope(shape)
    window = int(shape.get("max_position_embeddings") or 4096)
    return {
        "hidden_size": hidden,
        "intermediate_size": int(shape.get("intermediate_size") or 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": int(shape.get("num_key_value_heads") or heads),
        "head_dim": int(shape.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(shape.get("rms_norm_eps") or norm_eps),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "rope_scaling": inherited_scaling(rope, window),
        "max_position": window,
    }


def _rope(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    """Base and scaling in one mapping, from the new form of a config (``rope_parameters``) or the old one."""
    rope = shape.get("rope_parameters") or {}
    if "full_attention" in rope:
        # Families with one table per layer type (Gemma 3): the full-attention one reaches as far as the drafter must.
        rope = rope["full_attention"]
    old = {"rope_theta": shape.get("rope_theta"), **(shape.get("rope_scaling") or {})}
    return {**old, **rope}


def derived_lr(store: "Store", config: TrainConfig) -> float:
    """The rate of a run over ``store`` with these settings, its own rate aside. Under Muon a run of fewer than
    ``LONG_RUN`` steps takes a higher one, by the root of how much shorter it is, `HIGHEST_LR_FACTOR` times at most;
    AdamW gains nothing from it."""
    rate = default_lr(store.capture.target.hidden_size)
    return float(f"{rate * _short_run(store, config)[0]:.1e}") if config.optim.kind == "muon" else rate


def _short_run(store: "Store", config: TrainConfig) -> tuple[float, float]:
    """How many times the usual rate a run takes for its few steps, and these: the true ones below ``LONG_RUN``."""
    if config.optim.kind != "muon":
        return 1.0, math.inf
    steps = config.train.max_steps or _steps_of_epochs(store, config)
    return min(HIGHEST_LR_FACTOR, max(1.0, (LONG_RUN / max(1, steps)) ** 0.5)), steps


def _steps_of_epochs(store: "Store", config: TrainConfig) -> float:
    """Global batches of all epochs: whole samples seldom fill one, so tokens over those of a batch are fewer. These are
    given where they are ``LONG_RUN`` already, so that nothing large is counted."""
    table, data, epochs = store.catalog.table, config.data, range(config.train.epochs)
    rows = np.flatnonzero(table.split == SPLITS.index("train"))
    lengths = np.minimum(table.tokens[rows], data.max_tokens or longest_sample(store))
    fewest = len(epochs) * int(np.minimum(lengths, data.batch_tokens).sum()) / data.batch_tokens
    if fewest >= LONG_RUN:
        return fewest
    order, pack = Order(table.ids.take(rows)), int(lengths.max(initial=1))
    plans = (global_batches(lengths, order.permutation(data.seed, n), data.batch_tokens, pack) for n in epochs)
    return sum(1 for plan in plans for _ in plan)


def default_lr(hidden_size: int) -> float:
    """1e-4 at width 4096 (SpecForge, TorchSpec, ModelOpt, speculators), rising as drafters shrink; two digits. The
    exponent is set by a 192-wide drafter, which learns fastest near 5e-3."""
    return float(f"{min(5e-3, 1e-4 * (4096 / hidden_size) ** 1.28):.1e}")


def value_text(value: Any) -> str:
    """A value of ``model_dump(mode="json")`` as a person gives it."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def target_config(store: "Store") -> dict[str, Any]:
    """The target's ``config.json``, or nothing when the store holds none. Raises FormatError: ``document-invalid``."""
    if not any(file.path.endswith("config.json") for file in store.manifest.target_files):
        return {}
    try:
        config = foreign_json(store.target_file("config.json"))
    except ValueError as error:
        raise FormatError(
            f"target/config.json of {store.path} is no JSON: {error}", kind=Kind.DOCUMENT_INVALID
        ) from error
    if not isinstance(config, dict):
        raise FormatError(f"target/config.json of {store.path} should hold an object", kind=Kind.DOCUMENT_INVALID)
    return config


def _target_shape(store: "Store") -> Mapping[str, Any]:
    """The text part of the target's ``config.json``."""
    config = target_config(store)
    inner = config.get("text_config")
    shape: dict[str, Any] = inner if isinstance(inner, dict) else config
    return {**_class_defaults(shape), **shape}


_DERIVED_FROM = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta",
    "rope_parameters", "max_position_embeddings", "layer_types",
)  # fmt: skip


def _class_defaults(shape: Mapping[str, Any]) -> dict[str, Any]:
    """What a published config leaves out because it equals the default of its class, as Gemma 3's heads do."""
    if "hidden_size" not in shape or "model_type" not in shape:
        return {}
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**shape)
    except (ValueError, KeyError, TypeError, StrictDataclassError):
        # A type that this transformers does not know, or knows otherwise: what the file says must do.
        return {}
    return {key: value for key in _DERIVED_FROM if (value := getattr(config, key, None)) is not None}


def _target_file(store: "Store", name: str) -> bytes | None:
    return store.target_file(name) if any(file.path == name for file in store.manifest.target_files) else None

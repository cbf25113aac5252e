"""Every setting of a training run. What depends on the target is derived from the store and printed.

Precedence: defaults here < derived from the target < file < ``key.path=value``; unknown keys are errors.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, create_model, model_validator

from hiddenstore import config as settings
from hiddenstore.errors import ConfigError
from trainer.drafters.rope import RopeScaling
from trainer.section import Section

if TYPE_CHECKING:
    from hiddenstore.store import Store


class DataConfig(Section):
    """batch_tokens: tokens of one optimizer step over all ranks. pack_tokens: tokens of one forward; a batch of several
    packs accumulates their gradients."""

    batch_tokens: int = Field(2048, gt=0)
    pack_tokens: int = Field(2048, gt=0)
    seed: int = Field(0, ge=0)
    prefetch_mb: int = Field(512, gt=0)

    @model_validator(mode="after")
    def _packs_fit(self) -> "DataConfig":
        if self.pack_tokens > self.batch_tokens:
            raise ValueError(f"pack_tokens {self.pack_tokens} is more than batch_tokens {self.batch_tokens}")
        return self


class DrafterConfig(Section):
    """What every drafter has; each kind adds its own. The dimensions default to those of the target. ``vocab_file``
    wins over ``vocab_size``."""

    name: str
    aux_layers: tuple[int, ...]
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(1e-5, gt=0)
    rope_theta: float = Field(10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    max_position: int = Field(4096, gt=0)
    vocab_size: int = Field(gt=0)
    vocab_file: str | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> "DrafterConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd")
        scaling = self.rope_scaling
        for factors in (scaling.short_factor, scaling.long_factor) if scaling else ():
            if factors is not None and len(factors) != self.head_dim // 2:
                raise ValueError(f"rope_scaling has {len(factors)} factors for heads of {self.head_dim // 2} pairs")
        return self


class LossConfig(Section):
    """What is taught; each kind of drafter has its own settings."""


class OptimConfig(Section):
    """The rate rises linearly over ``warmup_ratio`` of the steps, then falls to ``min_lr_ratio`` of it. kind: ``muon``
    updates matrices by Muon at twice ``lr`` and the rest, embeddings and LM head included, by AdamW at ``lr``."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(1e-4, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.04, ge=0, lt=1)
    min_lr_ratio: float = Field(0.02, ge=0, le=1)


class LoopConfig(Section):
    """Length and upkeep of the run. ``max_steps`` wins over ``epochs``. Intervals are in steps, 0 for never.

    init_from: a run or checkpoint whose weights to start from. keep, keep_best: how many of the newest and of the best
    checkpoints stay, by validation ``best_by``. patience: validations without a better one that end the run.
    spike_factor: a step whose loss exceeds this many running medians changes nothing (`run.spikes`).

    parallel: every rank a copy of the drafter, or a shard (`scale.parallel`). context_parallel: ranks that share a
    pack. checkpoint_activations: recompute layers in the backward. compile: torch.compile on the drafter's blocks.
    """

    epochs: int = Field(1, gt=0)
    max_steps: int | None = Field(None, gt=0)
    seed: int = Field(0, ge=0)
    validate_every: int = Field(500, ge=0)
    validation_tokens: int = Field(65536, gt=0)
    checkpoint_every: int = Field(500, ge=0)
    keep: int = Field(3, gt=0)
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    tensorboard: bool = False
    init_from: str | None = None
    keep_best: int = Field(1, ge=0)
    best_by: Literal["loss", "accepted_length"] = "loss"
    patience: int | None = Field(None, gt=0)
    spike_factor: float | None = Field(10.0, gt=1)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    context_parallel: int = Field(1, gt=0)
    checkpoint_activations: bool = False
    compile: bool = False

    @model_validator(mode="after")
    def _patience_has_validations(self) -> "LoopConfig":
        if self.patience is not None and not self.validate_every:
            raise ValueError("patience waits for validations, but validate_every is 0")
        return self


class TrainConfig(Section):
    """The resolved settings, saved as ``config.yaml`` beside every run; ``config_class`` gives that of a drafter."""

    data: DataConfig
    drafter: DrafterConfig
    loss: LossConfig
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig())
    train: LoopConfig = Field(default_factory=lambda: LoopConfig())


@cache
def config_class(drafter: str) -> type[TrainConfig]:
    """The settings of a run that trains this kind of drafter.

    Raises:
        ConfigError: there is no such drafter.
    """
    from trainer.drafters import drafter_kind

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

    Raises:
        ConfigError: every unknown or invalid setting at once, or ``drafter-contradiction``.
    """
    from trainer.derived import derived

    name = _drafter_name(drafter, file, words, start)
    defaults = derived(store, name)
    if start is not None:
        defaults["drafter"] = start.model_dump(mode="json", exclude={"vocab_file"})
    if settings.said("drafter.rope_scaling", file, words):
        # One scaling is not the other with a key changed.
        defaults["drafter"]["rope_scaling"] = None
    for _, batch_tokens in settings.said("data.batch_tokens", file, words)[-1:]:
        if str(batch_tokens).isdecimal() and int(batch_tokens) > 0:
            # A smaller batch is one smaller pack; a larger one is several.
            defaults["data"]["pack_tokens"] = min(defaults["data"]["pack_tokens"], int(batch_tokens))
    return settings.load(config_class(name), file, words, defaults)


def check_settings(drafter: str | None, file: str | Path | None, words: Sequence[str]) -> None:
    """Refuse settings before there is a store: what `settings.check` finds.

    Raises:
        ConfigError: every unknown setting and every value of a wrong type, or ``drafter-contradiction``.
    """
    if (
        drafter is None
        and settings.said("train.init_from", file, words)
        and not settings.said("drafter.name", file, words)
    ):
        # Which drafter it is, only what it starts from can tell.
        return
    # Where only the batch is said, the pack becomes no larger.
    settings.check(config_class(_drafter_name(drafter, file, words, None)), file, words, {"data": {"pack_tokens": 1}})


def _drafter_name(flag: str | None, file: str | Path | None, words: Sequence[str], start: DrafterConfig | None) -> str:
    """What the flag, the file, the words and the drafter to start from agree on; ``eagle3`` when nobody says."""
    named = [("--drafter", flag)] if flag is not None else []
    named += [(f"drafter.name ({origin})", str(value)) for origin, value in settings.said("drafter.name", file, words)]
    named += [("train.init_from", start.name)] if start is not None else []
    if len({name for _, name in named}) > 1:
        raise ConfigError(
            "which drafter? " + ", ".join(f"{origin} says {name}" for origin, name in named),
            kind="drafter-contradiction",
            hint=f"leave out all but one, or name {named[-1][1]} everywhere",
        )
    return named[0][1] if named else "eagle3"

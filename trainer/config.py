"""Every setting of a training run. What depends on the target is derived from the store and printed.

Precedence: defaults here < derived from the target < file < ``key.path=value``; unknown keys are errors.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from schemas.prepared import LossChoice

RopeType = Literal["linear", "llama3", "yarn", "longrope"]
ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
ROPE_OPTIONAL: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}


class Section(BaseModel):
    """A group of settings; unknown keys are errors. The docstring under a field is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )


class RopeScaling(Section):
    """The field's ``rope_scaling`` under its own key names."""

    rope_type: RopeType
    """How rotary frequencies are stretched."""
    factor: float | None = Field(None, ge=1)
    """How many times longer than the original window texts may be."""
    original_max_position_embeddings: int | None = Field(None, gt=0)
    """The original window, in tokens."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3: wavelengths above the original window over this are divided by ``factor``."""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3: wavelengths below the original window over this stay."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn, longrope: what cos and sin are multiplied by; derived where it is not set."""
    beta_fast: float | None = Field(None, gt=0)
    """yarn: channels that turn more often than this in the original window stay; 32 where it is not set."""
    beta_slow: float | None = Field(None, gt=0)
    """yarn: channels that turn less often than this are divided by ``factor``; 1 where it is not set."""
    mscale: float | None = None
    """yarn: numerator of DeepSeek's attention factor; read together with ``mscale_all_dim``."""
    mscale_all_dim: float | None = None
    """yarn: denominator of DeepSeek's attention factor."""
    truncate: bool | None = None
    """yarn: round the limits of the blend to whole channels, as where it is not set."""
    short_factor: tuple[float, ...] | None = None
    """longrope: a divisor of every frequency for windows up to the original one; head_dim / 2 numbers."""
    long_factor: tuple[float, ...] | None = None
    """longrope: a divisor of every frequency for longer windows; head_dim / 2 numbers."""

    @model_validator(mode="after")
    def _has_what_its_type_reads(self) -> "RopeScaling":
        names = {name for name, value in self if value is not None and name != "rope_type"}
        missing = [name for name in ROPE_REQUIRED[self.rope_type] if name not in names]
        if missing:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}")
        foreign = sorted(names - {*ROPE_REQUIRED[self.rope_type], *ROPE_OPTIONAL[self.rope_type]})
        if foreign:
            raise ValueError(f"rope_type {self.rope_type} has no {', '.join(foreign)}")
        return self

    def written(self) -> dict[str, Any]:
        """What config.json says: only what is set."""
        return self.model_dump(mode="json", exclude_none=True)


class DataConfig(Section):
    """How the store is read."""

    batch_tokens: int = Field(2048, gt=0)
    """Tokens of one optimizer step, over all ranks; a longer sample is a step alone."""
    pack_tokens: int = Field(2048, gt=0)
    """Tokens of one forward, at least those of the longest sample; a batch of several packs accumulates their
    gradients."""
    max_tokens: int | None = Field(None, gt=1)
    """Tokens after which longer samples end; none for whole samples."""
    loss_on: LossChoice = "stored"
    """Tokens that teach: those ``prepare`` chose (``stored``), every answer (``assistant``), the last one
    (``last-turn``) or every token of a turn (``all``); more than was stored needs ``collect --final all``."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the order of samples."""
    prefetch_mb: int = Field(512, gt=0)
    """Memory that packs read ahead may take on a rank, in MB."""


class DrafterConfig(Section):
    """What every drafter has; each kind adds its own. The dimensions default to those of the target."""

    name: str
    """The kind of drafter."""
    aux_layers: tuple[int, ...]
    """Layers of the target whose states are read, as the store numbers them; ascending, however they are named."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Width inside the MLP."""
    num_heads: int = Field(gt=0)
    """Query heads."""
    num_kv_heads: int = Field(gt=0)
    """Key and value heads; divides ``num_heads``."""
    head_dim: int = Field(gt=0)
    """Width of a head; even."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """What is added to the mean square in every norm."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are stretched for long texts; none for plain ones."""
    max_position: int = Field(4096, gt=0)
    """Longest text the drafter is served with, in tokens."""
    vocab_size: int = Field(gt=0)
    """Tokens of the draft vocabulary: the most frequent supervised ones of the store."""
    vocab_file: str | None = None
    """A draft vocabulary to load (safetensors, npy or pt); wins over ``vocab_size``."""

    @property
    def weights(self) -> int:
        """Numbers in its trained matrices, from the shapes: what joins the states that are read, decoder layers and LM
        head. A final hidden that is read alone is joined with a token."""
        width, heads = self.hidden_size, self.num_heads + self.num_kv_heads
        layer = width * (3 * self.intermediate_size + 2 * heads * self.head_dim)
        head = width * self.vocab_size * getattr(self, "train_head", False)
        return (len(self.aux_layers) or 2) * width**2 + getattr(self, "num_layers", 1) * layer + head

    @field_validator("aux_layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        # Every export and every engine has them so.
        return tuple(sorted(set(layers)))

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

    def as_rejection(self) -> Self | None:
        """These settings, but that every taught slot loses 1 - sum min(p, q), the chance that a draft is rejected, over
        all slots there are; None where this drafter's losses do not read the target's distribution."""
        return None


class OptimConfig(Section):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon``: Muon for matrices at twice ``lr``, AdamW at ``lr`` for the rest, embeddings and LM head included."""
    lr: float = Field(1e-4, gt=0)
    """The highest learning rate; derived from the target's width and, under Muon, from how few steps there are."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay of the mean of their squares."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: what is added to the root of that mean."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, multiplied by the rate."""
    clip: float = Field(1.0, gt=0)
    """The largest global norm of the gradient; a larger one is scaled down to it."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after the warm-up."""
    warmup_ratio: float = Field(0.04, ge=0, lt=1)
    """Share of the steps over which the rate rises linearly."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps over which the rate rises linearly; wins over ``warmup_ratio``."""
    min_lr_ratio: float = Field(0.02, ge=0, le=1)
    """The last rate, as a share of ``lr``."""


class LoopConfig(Section):
    """Length and upkeep of the run. Intervals are in steps, 0 for never."""

    epochs: int = Field(1, gt=0)
    """Passes over the training split."""
    max_steps: int | None = Field(None, gt=0)
    """Optimizer steps; wins over ``epochs``."""
    follow: bool = False
    """Each epoch reads what the store holds when it begins; needs ``max_steps``."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the first weights and of what a step draws."""
    validate_every: int = Field(500, ge=0)
    """Steps between validations."""
    validation_tokens: int = Field(65536, gt=0)
    """Tokens of the validation split after which a validation ends."""
    checkpoint_every: int = Field(500, ge=0)
    """Steps between checkpoints."""
    keep: int = Field(3, gt=0)
    """How many of the newest checkpoints stay."""
    device: str = "auto"
    """A torch device; ``auto`` is the GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products; ``auto`` is bf16 on a GPU, and on a CPU that multiplies the drafter's widths faster
    so. Weights and moments stay fp32."""
    tensorboard: bool = False
    """Write the log for TensorBoard too, as ``tracker=tensorboard`` does."""
    tracker: str | None = None
    """Who also gets the curves: ``tensorboard``, ``wandb``, ``mlflow``, or one that a package adds; none for nobody."""
    init_from: str | None = None
    """A run or checkpoint whose weights to start from."""
    keep_best: int = Field(1, ge=0)
    """How many of the best checkpoints stay, by ``best_by``."""
    best_by: Literal["loss", "accepted_length"] = "loss"
    """The figure of the validation that tells which checkpoint is best."""
    patience: int | None = Field(None, gt=0)
    """Validations without a better one that end the run; none for no such end."""
    spike_factor: float | None = Field(10.0, gt=1)
    """A step whose loss exceeds this many running medians changes nothing; none to take every step."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What a rank holds of the drafter: a copy, or a shard of every parameter, which on GPUs needs NCCL."""
    context_parallel: int = Field(1, gt=0)
    """Ranks that share the sequence of a pack; divides their number."""
    checkpoint_activations: bool = False
    """Compute the layers again in the backward instead of storing what it reads."""
    compile: bool = False
    """Compile norms and MLPs of the drafter by torch.compile."""
    dist_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries tensors of GPUs between ranks, ``auto`` being NCCL where it is; those of CPUs go by gloo."""
    dist_timeout_minutes: float = Field(30, gt=0, le=10080)
    """How long a rank waits for the others: longer than the first one needs to write a large checkpoint."""

    @model_validator(mode="after")
    def _patience_has_validations(self) -> "LoopConfig":
        if self.patience is not None and not self.validate_every:
            raise ValueError("patience waits for validations, but validate_every is 0")
        return self

    @model_validator(mode="after")
    def _follow_has_an_end(self) -> "LoopConfig":
        if self.follow and self.max_steps is None:
            raise ValueError(
                "follow trains on a store that grows: max_steps says when to end, and the schedule its rate"
            )
        return self


class TrainConfig(Section):
    """The resolved settings, saved as ``config.yaml`` beside every run."""

    data: DataConfig
    """How the store is read."""
    drafter: DrafterConfig
    """The drafter; its kind decides which settings there are."""
    loss: LossConfig
    """What is taught; the kind of drafter decides which settings there are."""
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig())
    """The optimizer and its schedule."""
    train: LoopConfig = Field(default_factory=lambda: LoopConfig())
    """Length and upkeep of the run."""

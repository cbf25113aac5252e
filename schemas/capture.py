"""What a store holds and where it came from: target identity, captured layers, norm state, codecs, head."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from schemas.base import Document
from schemas.layers import field_name

FinalMode = Literal["supervised", "all", "none"]
NormState = Literal["pre_norm", "post_norm"]
StateDtype = Literal["bfloat16"]
NormFlavour = Literal["rms", "rms_plus_one", "layer"]

FINAL = "final"
TOPK = "topk"
MOST_TOPK = 64
STATED = ("checkpoint_sha256", "tokenizer_rules_sha256")
"""Digests of a target that are compared where both sides state them."""


class TargetIdentity(Document):
    """Fingerprint of the target; compared wherever two things meet.

    ``weights_sha256`` covers embeddings, final norm and LM head as bf16 values, ``checkpoint_sha256`` every tensor of
    the checkpoint as it is stored, ``tokenizer_rules_sha256`` the tokenizer's merges and rules; the last two are absent
    in stores of older writers and where the checkpoint does not say. ``name`` is for people and never compared.
    """

    name: str
    revision: str | None = None
    model_type: str
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    dtype: str
    config_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    weights_sha256: str
    checkpoint_sha256: str | None = None
    tokenizer_rules_sha256: str | None = None

    @model_serializer(mode="wrap")
    def _without_unstated(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as older readers know it where nothing more is known."""
        members = dict(serialise(self))
        return {name: value for name, value in members.items() if value is not None or name not in STATED}


class HeadSpec(Document):
    """How logits follow from the final hidden and the tensors of ``target/head.safetensors``.

    logits = softcap(lm_head(norm(h)) * logit_scale); embeddings = embed_tokens[ids] * embed_scale.
    ``rms_plus_one`` multiplies by 1 + weight (Gemma); ``layer`` is LayerNorm with bias.
    """

    norm_flavour: NormFlavour
    norm_eps: float = Field(gt=0)
    tied: bool
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcap: float | None = None


class Codecs(Document):
    """Codec name per field group. ``final: topk`` holds the target's top tokens at each final row, not the hidden."""

    aux: str
    final: str

    @model_validator(mode="after")
    def _only_finals_become_top_tokens(self) -> "Codecs":
        if self.aux == TOPK:
            raise ValueError("topk stands for the target's distribution at a final row; aux layers cannot be stored so")
        return self


class CaptureSpec(Document):
    """Everything that must agree for two units to live in one store."""

    target: TargetIdentity
    aux_layers: tuple[int, ...]
    final: FinalMode
    final_norm: NormState
    state_dtype: StateDtype = "bfloat16"
    codecs: Codecs

    @model_validator(mode="after")
    def _layers_are_ascending_and_in_range(self) -> "CaptureSpec":
        if list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise ValueError(f"aux_layers must be ascending and distinct, found {list(self.aux_layers)}")
        outside = [k for k in self.aux_layers if not -1 <= k < self.target.num_layers]
        if outside:
            raise ValueError(f"layers {outside} are outside -1…{self.target.num_layers - 1}")
        if not self.aux_layers and not self.holds_final_hidden:
            raise ValueError("a store needs at least one aux layer or the final hidden")
        if self.holds_topk and self.target.vocab_size < self.topk:
            raise ValueError(f"topk keeps {self.topk} tokens of a vocabulary of {self.target.vocab_size}")
        return self

    @property
    def aux_fields(self) -> list[str]:
        """Array names of the aux layers, ascending: ``["layer_1", "layer_15", "layer_28"]``."""
        return [field_name(layer) for layer in self.aux_layers]

    @property
    def holds_final_hidden(self) -> bool:
        """Whether the final hidden itself is held, at the rows ``final`` names."""
        return self.final != "none" and self.codecs.final != TOPK

    @property
    def holds_topk(self) -> bool:
        """Whether the rows ``final`` names hold the target's top tokens in place of the final hidden."""
        return self.final != "none" and self.codecs.final == TOPK

    @property
    def topk(self) -> int:
        """Tokens per final row that the ``topk`` codec keeps at this width."""
        return topk_of(self.target.hidden_size)

    @property
    def state_fields(self) -> list[str]:
        """Array names of the states that can be read back, the final hidden last."""
        return self.aux_fields + ([FINAL] if self.holds_final_hidden else [])

    @property
    def fields(self) -> list[str]:
        """Array names of everything captured, what stands at the final rows last."""
        return self.aux_fields + ([FINAL] if self.final != "none" else [])


def topk_of(hidden_size: int) -> int:
    """k of the ``topk`` codec: 64, less where 6 bytes a token would not stay well under the 2 D of the hidden."""
    return max(1, min(MOST_TOPK, hidden_size // 8))

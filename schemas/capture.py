"""What a store holds and where it came from: target identity, captured layers, norm state, codecs, head."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from schemas.base import Document, Sparse
from schemas.layers import field_name

FinalMode = Literal["supervised", "all", "none"]
NormState = Literal["pre_norm", "post_norm"]
StateDtype = Literal["bfloat16"]
NormFlavour = Literal["rms", "rms_plus_one", "layer"]
Kept = Literal["stored", "rebuilt"]

FINAL = "final"
TOPK = "topk"
REBUILT = "rebuilt"
OF_AUX_ROWS = ("q4q3", "q3")
OF_AUX_LAYERS = "klt"
MOST_BLOCKS = 4
"""A state is rebuilt through no more decoder blocks of the target than these."""
MOST_TOPK = 64
STATED = ("checkpoint_sha256", "tokenizer_rules_sha256")
"""Digests of a target that are compared where both sides state them."""


class TargetIdentity(Sparse):
    """Fingerprint of the target; compared wherever two things meet.

    ``weights_sha256`` covers embeddings, final norm and LM head as bf16 values, ``checkpoint_sha256`` every tensor of
    the checkpoint as it is stored, ``tokenizer_rules_sha256`` the tokenizer's merges and rules; the last two are absent
    in stores of older writers and where the checkpoint does not say. ``name`` is for people and never compared.
    """

    absent = STATED
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
    """Codec name per field group. ``final: topk`` holds the target's top tokens at each final row, not the hidden.

    ``final: rebuilt`` holds nothing: the final hidden comes back from the decoded top aux layer. ``aux: q4q3`` stores
    in fewer bits what the loss mask leaves out, ``aux: q3`` all but the first rows of a sample. ``aux: klt-<digest>``
    is fitted to states of the store, by the file of that name in ``target/``.
    """

    aux: str
    final: str

    @model_validator(mode="after")
    def _only_finals_become_top_tokens(self) -> "Codecs":
        if self.aux == TOPK:
            raise ValueError("topk stands for the target's distribution at a final row; aux layers cannot be stored so")
        if self.aux == REBUILT:
            raise ValueError("rebuilt holds nothing; aux layers need a codec, from which the final hidden comes back")
        if self.final.partition("-")[0] == OF_AUX_LAYERS:
            raise ValueError(f"{self.final} is fitted to aux layers; final rows are stored as q8")
        if self.final in OF_AUX_ROWS:
            raise ValueError(f"{self.final} has classes of aux rows; final rows are those a loss needs: q4 holds them")
        return self


class ImageSpec(Document):
    """What makes tokens of an image: ``token_id`` stands at each of its places, and ``processor_sha256`` is the digest
    of the target's image processor."""

    token_id: int = Field(ge=0)
    processor_sha256: str


class CaptureSpec(Sparse):
    """Everything that must agree for two units to live in one store.

    ``states`` says of every field whether it is ``stored`` or ``rebuilt`` through the target's own blocks; it is absent
    where all are stored. With codecs of the recipe ``rebuilt`` it follows from the layers: ``rebuilt_states``.
    ``images`` is absent where samples hold none.
    """

    absent = ("states", "images")
    target: TargetIdentity
    aux_layers: tuple[int, ...]
    final: FinalMode
    final_norm: NormState
    state_dtype: StateDtype = "bfloat16"
    codecs: Codecs
    states: dict[str, Kept] = Field(default_factory=dict)
    images: ImageSpec | None = None

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

    @model_validator(mode="after")
    def _states_can_be_rebuilt(self) -> "CaptureSpec":
        if self.codecs.final != REBUILT:
            if self.states:
                raise ValueError(f"states {self.states} are rebuilt, but the codec of the final hidden is stored")
            return self
        if (reason := not_rebuildable(self.aux_layers, self.target.num_layers)) is not None:
            raise ValueError(reason)
        states = self.states or rebuilt_states(self.aux_layers, self.final)
        lowest = [name for name in self.aux_fields if states.get(name) == "rebuilt"]
        if (
            sorted(states) != sorted(self.fields)
            or lowest not in ([], self.aux_fields[:1])
            or lowest == self.aux_fields
        ):
            raise ValueError(f"states {states} are not the fields {self.fields} with at most the lowest layer rebuilt")
        # A frozen model is complete only behind its validators.
        object.__setattr__(self, "states", {name: states[name] for name in self.fields})
        return self

    def with_codecs(self, codecs: Codecs) -> "CaptureSpec":
        """The same states under other codecs; pydantic's ValidationError where they do not allow it."""
        return CaptureSpec.model_validate({**dict(self), "codecs": codecs, "states": {}})

    @property
    def aux_fields(self) -> list[str]:
        """Array names of the aux layers, ascending: ``["layer_1", "layer_15", "layer_28"]``."""
        return [field_name(layer) for layer in self.aux_layers]

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """The aux layers that lie on disk, ascending."""
        return tuple(layer for layer in self.aux_layers if self.states.get(field_name(layer)) != "rebuilt")

    @property
    def rebuilds_final(self) -> bool:
        """Whether the final hidden comes back from the top aux layer instead of from disk."""
        return self.final != "none" and self.codecs.final == REBUILT

    @property
    def stores_final(self) -> bool:
        """Whether the final hidden itself lies on disk."""
        return self.holds_final_hidden and not self.rebuilds_final

    @property
    def blocks(self) -> tuple[int, ...]:
        """The decoder blocks of the target that rebuilding runs, ascending; none where all states are stored."""
        if not self.states:
            return ()
        lowest = self.aux_layers[0] + 1 if self.aux_layers[0] not in self.stored_layers else 0
        first = self.aux_layers[-1] + 1 if self.rebuilds_final else self.target.num_layers
        return (*range(lowest), *range(max(lowest, first), self.target.num_layers))

    @property
    def holds_final_hidden(self) -> bool:
        """Whether the final hidden itself can be read, at the rows ``final`` names."""
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
        """Names of everything captured, what stands at the final rows last."""
        return self.aux_fields + ([FINAL] if self.final != "none" else [])


def rebuilt_states(aux_layers: Sequence[int], final: FinalMode) -> dict[str, Kept]:
    """What the recipe ``rebuilt`` keeps of each field: not the final hidden, nor the lowest aux layer where others are
    above it and no more than ``MOST_BLOCKS`` blocks lie before it."""
    states: dict[str, Kept] = {field_name(layer): "stored" for layer in aux_layers}
    if len(aux_layers) > 1 and aux_layers[0] < MOST_BLOCKS:
        states[field_name(aux_layers[0])] = "rebuilt"
    return states | ({} if final == "none" else {FINAL: "rebuilt"})


def not_rebuildable(aux_layers: Sequence[int], num_layers: int) -> str | None:
    """Why the recipe ``rebuilt`` does not go with these layers; None where it does."""
    if not aux_layers:
        return "the final hidden comes back from the top aux layer, and there is no aux layer"
    after = num_layers - 1 - aux_layers[-1]
    if after <= MOST_BLOCKS:
        return None
    return (
        f"the final hidden comes back from the top aux layer through at most {MOST_BLOCKS} blocks, and the top aux "
        f"layer is {aux_layers[-1]} of {num_layers}: {after} blocks lie behind it"
    )


def topk_of(hidden_size: int) -> int:
    """k of the ``topk`` codec: 64, less where 6 bytes a token would not stay well under the 2 D of the hidden."""
    return max(1, min(MOST_TOPK, hidden_size // 8))

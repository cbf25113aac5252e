"""The tensors every engine trains on: one sample, a target's head and the drafter's first weights, in one file.

Rows of the LM head outside the draft vocabulary are a quarter as loud, so that the target's choice lies inside it at
nearly every token, as it does for a vocabulary chosen by frequency.

Shapes: T tokens, L aux layers, D width of target and drafter, V target vocabulary, U draft vocabulary, F MLP width.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HEAD_DIM = 64
NORM_EPS = 1e-5
ROPE_THETA = 10000.0
MAX_POSITION = 65536
LR, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0
SEED = 0


@dataclass(frozen=True)
class Case:
    """One shape. ``supervised``: share of the tokens, at the end. steps: TTT steps of EAGLE-3; layers, block, anchors:
    of DFlash; aux: ids of the stored layers of a 32-layer target, else of an eight-layer one; precision: as the trainer
    names it, ``bf16`` also of peers."""

    drafter: str
    tokens: int
    vocab: int = 4096
    draft: int = 4096
    width: int = 256
    wider: int = 1024
    heads: int = 4
    kv_heads: int = 2
    supervised: float = 1.0
    steps: int = 7
    layers: int = 1
    block: int = 8
    anchors: int = 32
    head_dim: int = HEAD_DIM
    aux: tuple[int, ...] = ()
    precision: str = "auto"

    @property
    def steps_a_turn(self) -> int:
        """Steps before the next engine's turn: DFlash's are short, and the first of a turn finds the caches cold."""
        return 1 if self.drafter == "eagle3" else 8

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.aux or ((1, 3, 4) if self.drafter == "eagle3" else (1, 3))

    @property
    def target_layers(self) -> int:
        return 32 if self.aux else 8

    @property
    def first_supervised(self) -> int:
        """The first row whose token is supervised."""
        return self.tokens - round(self.tokens * self.supervised)

    @property
    def two_packs_mb(self) -> int:
        """Room for two packs."""
        return max(1, round(2 * (len(self.aux_layers) + 1) * self.tokens * self.width * 2 / 1e6))

    @property
    def drafter_settings(self) -> dict[str, Any]:
        """The drafter's dimensions as the trainer names them."""
        settings = {
            "hidden_size": self.width,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.wider,
            "max_position": MAX_POSITION,
            "vocab_size": self.draft,
        }
        blocks = {"num_layers": self.layers, "block_size": self.block, "mask_token_id": 0}
        return settings | (blocks if self.drafter == "dflash" else {})

    @property
    def loss_settings(self) -> dict[str, Any]:
        return {"steps": self.steps} if self.drafter == "eagle3" else {"num_anchors": self.anchors}

    def save(self, folder: Path) -> None:
        """Draw every tensor but the drafter's weights and write them to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        target_ids = torch.randperm(self.vocab, generator=generator)[: self.draft].sort().values
        lm_head = normal(self.vocab, self.width) / 8
        outside = torch.ones(self.vocab, dtype=torch.bool)
        outside[target_ids] = False
        lm_head[outside] /= 4
        channels = torch.linspace(0.5, 2, self.width)
        # Tables of large targets are as their checkpoints have them.
        dtype = torch.bfloat16 if self.aux else torch.float32
        tensors = {
            "embed_tokens": (normal(self.vocab, self.width) / 2).to(dtype),
            "lm_head": lm_head.to(dtype),
            "norm_weight": 1 + normal(self.width) / 10,
            "target_ids": target_ids,
            "input_ids": target_ids[torch.randint(self.draft, (self.tokens,), generator=generator)],
            "loss_mask": torch.arange(self.tokens) >= self.first_supervised,
            "aux": (normal(len(self.aux_layers), self.tokens, self.width) * channels).bfloat16(),
            "final": (normal(self.tokens, self.width) * channels).bfloat16(),
        }
        save_file(tensors, folder / "tensors.safetensors")
        # Defaults stay out, so that another checkout reads it whose cases have fewer dimensions.
        values = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        (folder / "case.json").write_text(json.dumps(values), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "tuple[Case, Tensors]":
        """The case and its tensors; the drafter's weights once they were saved."""
        values = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        case = cls(**values | {"aux": tuple(values.get("aux", ()))})
        weights = folder / "weights.safetensors"
        tensors = load_file(folder / "tensors.safetensors")
        return case, Tensors(**tensors, weights=load_file(weights) if weights.exists() else {})


@dataclass(frozen=True, eq=False)
class Tensors:
    """embed_tokens, lm_head fp32 [V, D]; norm_weight fp32 [D]; target_ids int64 [U]; input_ids int64 [T]; loss_mask
    bool [T]; aux bf16 [L, T, D]; final bf16 [T, D], before the final norm; weights: the drafter's, under our names."""

    embed_tokens: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    target_ids: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    weights: dict[str, Tensor]

    @property
    def normed(self) -> Tensor:
        """The final hidden after the final norm: fp32 [1, T, D]."""
        final = self.final.float()
        scale = torch.rsqrt(final.square().mean(-1, keepdim=True) + NORM_EPS)
        return (final * scale * self.norm_weight)[None]

    @property
    def states(self) -> Tensor:
        """The aux layers side by side, as peers read them: fp32 [1, T, L*D]."""
        return self.aux.float().transpose(0, 1).flatten(1)[None]

    @property
    def t2d(self) -> Tensor:
        """Whether the drafter has a target token: bool [V]."""
        in_draft = torch.zeros(self.lm_head.shape[0], dtype=torch.bool)
        in_draft[self.target_ids] = True
        return in_draft

    @property
    def d2t(self) -> Tensor:
        """Target id minus draft id: int64 [U]."""
        return self.target_ids - torch.arange(len(self.target_ids))


class Peer(ABC):
    """Forward, backward, clip and AdamW (torch's fused kernel) of one engine. ``equal``: our settings under which the
    two losses are one function. A subclass makes ``model`` and its inputs in ``build``."""

    equal: ClassVar[dict[str, Any]]
    model: Any

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self.case, self.tensors = case, tensors
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16")
        self.build()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(self.parameters, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    @abstractmethod
    def build(self) -> None:
        """Make ``model`` and what it reads."""

    @abstractmethod
    def total(self) -> Tensor:
        """The loss that is trained."""

    @torch.no_grad()
    def loss(self, anchors: list[int]) -> float:
        """Before any update; of DFlash with blocks at these anchors."""
        with self.autocast:
            return float(self.total())

    def step(self) -> float:
        """One update; the loss."""
        with self.autocast:
            loss = self.total()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(loss.detach())

    def shape(self) -> dict[str, Any]:
        """The drafter's dimensions as transformers' configs name them."""
        return {
            "vocab_size": self.case.vocab,
            "hidden_size": self.case.width,
            "intermediate_size": self.case.wider,
            "num_attention_heads": self.case.heads,
            "num_key_value_heads": self.case.kv_heads,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": NORM_EPS,
            "max_position_embeddings": MAX_POSITION,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        }

    def qwen3(self, attention: str, **more: Any) -> Any:
        """DFlash's dimensions as a Qwen3 config."""
        from transformers import Qwen3Config

        layers = {"num_hidden_layers": self.case.layers, "layer_types": ["full_attention"] * self.case.layers}
        config = Qwen3Config(pad_token_id=None, **layers, **self.shape(), **more)
        config._attn_implementation = attention
        return config


def check_loaded(result: Any) -> None:
    """Every weight has its parameter, every parameter its weight."""
    missing, unexpected = result
    if unexpected or not set(missing) <= {"t2d", "d2t"}:
        raise ValueError(f"weights without a parameter {unexpected}, parameters without a weight {missing}")

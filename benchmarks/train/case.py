"""The tensors every engine trains on: one sample, a target's head and the drafter's first weights, in one file.

Rows of the LM head outside the draft vocabulary are a quarter as loud, so that the target's choice lies inside it at
nearly every token, as it does for a vocabulary chosen by frequency.

Shapes: T tokens, L aux layers, D width of target and drafter, V target vocabulary, U draft vocabulary, F MLP width.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HEAD_DIM = 64
NORM_EPS = 1e-5
ROPE_THETA = 10000.0
LR, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0
SEED = 0


@dataclass(frozen=True)
class Case:
    """One shape. ``supervised``: share of the tokens, at the end. steps: TTT steps of EAGLE-3; layers, block, anchors:
    of DFlash."""

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

    @property
    def steps_a_turn(self) -> int:
        """Steps before the next engine's turn: DFlash's are short, and the first of a turn finds the caches cold."""
        return 1 if self.drafter == "eagle3" else 8

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Ids of the stored layers of an eight-layer target."""
        return (1, 3, 4) if self.drafter == "eagle3" else (1, 3)

    @property
    def first_supervised(self) -> int:
        """The first row whose token is supervised."""
        return self.tokens - round(self.tokens * self.supervised)

    def save(self, folder: Path) -> None:
        """Draw every tensor but the drafter's weights and write them to ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        known = torch.randperm(self.vocab, generator=generator)[: self.draft].sort().values
        lm_head = normal(self.vocab, self.width) / 8
        outside = torch.ones(self.vocab, dtype=torch.bool)
        outside[known] = False
        lm_head[outside] /= 4
        channels = torch.linspace(0.5, 2, self.width)
        tensors = {
            "embed_tokens": normal(self.vocab, self.width) / 2,
            "lm_head": lm_head,
            "norm_weight": 1 + normal(self.width) / 10,
            "target_ids": known,
            "input_ids": known[torch.randint(self.draft, (self.tokens,), generator=generator)],
            "loss_mask": torch.arange(self.tokens) >= self.first_supervised,
            "aux": (normal(len(self.aux_layers), self.tokens, self.width) * channels).bfloat16(),
            "final": (normal(self.tokens, self.width) * channels).bfloat16(),
        }
        save_file(tensors, folder / "tensors.safetensors")
        (folder / "case.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "tuple[Case, Tensors]":
        """The case and its tensors; the drafter's weights once they were saved."""
        case = cls(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
        weights = folder / "weights.safetensors"
        held = load_file(folder / "tensors.safetensors")
        return case, Tensors(**held, weights=load_file(weights) if weights.exists() else {})


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
        """Whether the drafter knows a target token: bool [V]."""
        known = torch.zeros(self.lm_head.shape[0], dtype=torch.bool)
        known[self.target_ids] = True
        return known

    @property
    def d2t(self) -> Tensor:
        """Target id minus draft id: int64 [U]."""
        return self.target_ids - torch.arange(len(self.target_ids))


def llama_shape(case: Case) -> dict[str, Any]:
    """The drafter's dimensions as transformers' configs name them."""
    return {
        "vocab_size": case.vocab,
        "hidden_size": case.width,
        "intermediate_size": case.wider,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": NORM_EPS,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }


def shifted_left(x: Tensor) -> Tensor:
    """Rows one earlier along axis 1, a zero row at the end."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)

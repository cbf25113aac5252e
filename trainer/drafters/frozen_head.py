"""The target's LM head as one frozen matrix, for drafters whose states are read by it.

Shapes: n states, D target width, V target vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.head import HeadBundle
from trainer.objectives.teacher import FP32_HEAD_BYTES


@dataclass(frozen=True, eq=False)
class FrozenHead:
    """logits = widened(x) @ weight.T: the logit scale is multiplied in, a bias is one more column.

    weight [V, D], or [V, D+1] with a bias; fp32 while that is small. A soft cap (Gemma 2) is left out: it is monotone,
    so greedy proposals are the same, and a loss that leaves it out on both sides has the same minimum.
    """

    weight: Tensor
    bundle: HeadBundle

    @classmethod
    def of(cls, head: HeadBundle) -> Self:
        """The head of a bundle, sharing its memory where it can."""
        weight = head.output_weight
        if weight.numel() * 4 <= FP32_HEAD_BYTES:
            weight = weight.float()
        if head.lm_head_bias is not None:
            weight = torch.cat([weight, head.lm_head_bias[:, None].to(weight.dtype)], -1)
        if head.spec.logit_scale != 1.0:
            weight = weight * head.spec.logit_scale
        return cls(weight, replace(head, spec=head.spec.model_copy(update={"final_logit_softcap": None})))

    def widened(self, x: Tensor) -> Tensor:
        """States [n, D] as ``weight`` reads them."""
        return x if self.bundle.lm_head_bias is None else F.pad(x, (0, 1), value=1.0)

    def probabilities(self, x: Tensor) -> Tensor:
        """Softmax over the vocabulary of states after the final norm [n, D]: fp32 [n, V]."""
        return torch.softmax(self.bundle.logits(x, norm_state="post_norm"), -1)

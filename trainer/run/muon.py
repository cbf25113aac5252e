"""Muon (Jordan 2024): each matrix moves along the orthogonal part of its momentum.

torch's own runs its Newton-Schulz steps in bf16 wherever it is, which turns the last bit of a gradient, and so the
number of ranks that summed it, into a part in a hundred of the update. Here they are fp32 on a CPU, where bf16 saves
nothing, and bf16 on a GPU. Over shards (FSDP2) a matrix is gathered for its orthogonal part.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.scale.parallel import shard_like, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's quintic: five steps leave singular values between about 0.7 and 1.2."""
STEPS = 5
ADAMW_RMS = 0.2
"""Root mean square of an AdamW update over its rate (Moonlight, arXiv 2502.16982)."""


def orthogonal(matrix: Tensor) -> Tensor:
    """About U Vᵀ of the singular value decomposition of ``matrix`` [A, B], in its dtype."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal and scaled to the size of an AdamW update; decoupled weight decay.

    State: ``momentum_buffer`` of every matrix.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; ``closure`` is not used."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                buffer.lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(whole(matrix.grad.lerp(buffer, momentum)))
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(shard_like(update, matrix), alpha=-lr * ADAMW_RMS * max(matrix.shape) ** 0.5)

"""AdamW with a warm-up and a decay that are functions of the step alone, so that a resume needs no scheduler state."""

import math

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig
from trainer.scale.parallel import shard_like, whole


class Optimizer:
    """AdamW (torch's fused kernel) over the trainable parameters of a model, with clipping by the global norm.

    Master weights are the parameters themselves, in fp32.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._adam = torch.optim.AdamW(
            self.named.values(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, step: int, *, update: bool = True) -> tuple[float, float]:
        """Update with the gradients at hand for step number ``step`` (from 0); returns rate and norm before clipping.

        A norm that is not finite leaves weights and state untouched, and so does ``update`` False.
        """
        lr = learning_rate(self.config, step, self.total_steps)
        norm = float(whole(nn.utils.clip_grad_norm_(self.named.values(), self.config.clip, foreach=True)))
        if update and math.isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return lr, norm

    def tensors(self) -> dict[str, Tensor]:
        """State as named tensors: ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``, ``step.<parameter>``."""
        found = {}
        for name, parameter in self.named.items():
            for key, value in self._adam.state.get(parameter, {}).items():
                found[f"{key}.{name}"] = value.detach()
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``tensors``."""
        for name, parameter in self.named.items():
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                stored = tensors.get(f"{key}.{name}")
                if stored is not None:
                    moved = stored.clone().to(parameter.device if key != "step" or parameter.is_cuda else "cpu")
                    state[key] = moved if key == "step" else shard_like(moved, parameter)
            if state:
                self._adam.state[parameter] = state


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Rate of step ``step`` (from 0) of ``total_steps``: linear warm-up to ``lr``, then the schedule."""
    warmup = round(config.warmup_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)

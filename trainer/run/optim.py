"""AdamW or Muon, with a warm-up and a decay that are functions of the step alone: a resume needs no scheduler state.

Muon's updates are scaled to the size of AdamW's, so that one rate serves both. speculators 0.9 trains this way.
"""

import math

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig
from trainer.run.muon import Muon
from trainer.scale.parallel import shard_like, whole

TABLES = ("embed_tokens", "lm_head")
"""Matrices whose rows are tokens: AdamW's, as Muon's author has it."""
MUON_RATE = 2.0
"""Muon's rate over AdamW's. On the bundled target, 300 steps, one seed, chains of 3, both parts at once, twice and four
times the derived rate: EAGLE-3.1 1.576, 1.607, 1.520; DFlash 1.378, 1.392, 1.401; under AdamW alone 1.496 and 1.206."""


class Optimizer:
    """The trainable parameters of a model under AdamW (torch's fused kernel) or Muon, clipped by the global norm.

    Master weights are the parameters themselves, in fp32.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = {name for name, p in self.named.items() if config.kind == "muon" and _is_matrix(name, p)}
        adam = torch.optim.AdamW(
            [p for name, p in self.named.items() if name not in matrices],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._parts: list[torch.optim.Optimizer] = [adam]
        if matrices:
            chosen = [self.named[name] for name in self.named if name in matrices]
            self._parts.append(Muon(chosen, config.lr, config.weight_decay))
        self._part_of = {name: self._parts[name in matrices] for name in self.named}

    def step(self, step: int, *, update: bool = True) -> tuple[float, float]:
        """Update with the gradients at hand for step number ``step`` (from 0); returns rate and norm before clipping.

        A norm that is not finite leaves weights and state untouched, and so does ``update`` False.
        """
        lr = learning_rate(self.config, step, self.total_steps)
        norm = float(whole(nn.utils.clip_grad_norm_(self.named.values(), self.config.clip, foreach=True)))
        if update and math.isfinite(norm):
            for part in self._parts:
                for group in part.param_groups:
                    group["lr"] = lr * (MUON_RATE if isinstance(part, Muon) else 1.0)
                part.step()
        for part in self._parts:
            part.zero_grad(set_to_none=True)
        return lr, norm

    def tensors(self) -> dict[str, Tensor]:
        """State as named tensors: ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``, ``step.<parameter>``, or
        ``momentum_buffer.<parameter>``."""
        found = {}
        for name, parameter in self.named.items():
            for key, value in self._part_of[name].state.get(parameter, {}).items():
                found[f"{key}.{name}"] = value.detach()
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``tensors``."""
        for name, parameter in self.named.items():
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
                stored = tensors.get(f"{key}.{name}")
                if stored is not None:
                    moved = stored.clone().to(parameter.device if key != "step" or parameter.is_cuda else "cpu")
                    state[key] = moved if key == "step" else shard_like(moved, parameter)
            if state:
                self._part_of[name].state[parameter] = state


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and min(parameter.shape) > 1 and not any(table in name for table in TABLES)


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

"""AdamW or Muon, with a warm-up and a decay that are functions of the step alone: a resume needs no scheduler state.

Muon's updates are scaled to the size of AdamW's, so that one rate serves both. speculators 0.9 trains this way.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hiddenstore.data.order import balanced
from hiddenstore.errors import CorruptionError, Kind
from hiddenstore.process import Rank
from trainer.config import OptimConfig
from trainer.parallel.data_parallel import full_tensor, shard_like
from trainer.parallel.group import ProcessGroup

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's quintic: five steps leave singular values between about 0.7 and 1.2."""
STEPS = 5
ADAMW_RMS = 0.2
"""Root mean square of an AdamW update over its rate (Moonlight, arXiv 2502.16982)."""


def orthogonal(matrix: Tensor, *, bf16: bool | None = None) -> Tensor:
    """About U Vᵀ of the singular value decomposition of ``matrix`` [A, B], in its dtype; iterated in bf16 where told
    so, by default on a GPU."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if (matrix.is_cuda if bf16 is None else bf16) else matrix.float()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal and scaled to the size of an AdamW update; decoupled weight decay. Each rank
    of ``group`` makes its share of the matrices orthogonal for all. State: ``momentum_buffer`` of every matrix."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        bf16: bool | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self._bf16 = bf16
        self._group = group or ProcessGroup(Rank())
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; ``closure`` is not used."""
        for group in self.param_groups:
            lr, matrices = group["lr"], [matrix for matrix in group["params"] if matrix.grad is not None]
            for matrix, update in zip(matrices, self._updates(matrices, group["momentum"]), strict=True):
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(shard_like(update, matrix), alpha=-lr * ADAMW_RMS * max(matrix.shape) ** 0.5)

    def _updates(self, matrices: Sequence[Tensor], momentum: float) -> Iterator[Tensor]:
        """The orthogonal directions of the matrices, one held at a time beside this rank's share of them."""
        directions = (full_tensor(self._direction(matrix, momentum)) for matrix in matrices)
        if self._group.is_single:
            yield from (orthogonal(direction, bf16=self._bf16) for direction in directions)
            return
        rank, costs = self._group.rank, [_cost(matrix) for matrix in matrices]
        owners = {index: owner for owner, share in enumerate(balanced(costs, rank.world_size)) for index in share}
        mine = {
            index: orthogonal(direction, bf16=self._bf16).contiguous()
            for index, direction in enumerate(directions)
            if owners[index] == rank.rank
        }
        for index, matrix in enumerate(matrices):
            update = mine.pop(index, None)
            if update is None:
                update = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
            self._group.broadcast([update], owners[index])
            yield update

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        assert matrix.grad is not None
        buffer: Tensor = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
        buffer.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(buffer, momentum)


def _cost(matrix: Tensor) -> int:
    """Multiplications of one of `orthogonal`'s steps."""
    short, long = sorted(matrix.shape)
    return short * short * (2 * long + short)


TABLES = ("embed_tokens", "lm_head", "markov_w1", "markov_w2", "codebook", "embed_proj.2", "xpress_head.w")
"""Matrices whose rows are tokens: AdamW's, as Muon's author has it."""
MUON_RATE = 2.0
"""Muon's rate over AdamW's. On the bundled target, 300 steps, one seed, chains of 3, both parts at once, twice and four
times the derived rate: EAGLE-3.1 1.576, 1.607, 1.520; DFlash 1.378, 1.392, 1.401; under AdamW alone 1.496 and 1.206."""
MARKOV_RATE = 4.0
"""AdamW's rate of DSpark's Markov tables and XPress's over that of what else it trains: most of their rows see few
tokens of a short run (benchmarks/results/rate-2026-11-25.md,
benchmarks/results/drafter_quality-smollm2-xpress-2026-11-29.md)."""
PAIRED_TABLES = ("markov_w", "xpress_head.w")
"""How these are named: a token's row is read, and one is multiplied with what it says."""


class Optimizer:
    """The trainable parameters of a model under AdamW (torch's fused kernel) or Muon, clipped by the global norm.
    Master weights are the parameters themselves, in fp32."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        total_steps: int,
        *,
        bf16: bool | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.config, self.total_steps = config, total_steps
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = {name for name, p in self.named.items() if config.kind == "muon" and _is_matrix(name, p)}
        self.matrices = [p for name, p in self.named.items() if name in matrices]
        rates: dict[float, list[nn.Parameter]] = {1.0: [], MARKOV_RATE: []}
        for name, parameter in self.named.items():
            if name not in matrices:
                rates[MARKOV_RATE if any(table in name for table in PAIRED_TABLES) else 1.0].append(parameter)
        adam = torch.optim.AdamW(
            [{"params": group, "rate": rate} for rate, group in rates.items() if group],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._optimizers: list[torch.optim.Optimizer] = [adam]
        if matrices:
            muon = Muon(self.matrices, config.lr, config.weight_decay, bf16=bf16, group=group)
            self._optimizers.append(muon)
        self._optimizer_of = {name: self._optimizers[name in matrices] for name in self.named}

    def step(self, step: int, *, update: bool = True) -> tuple[float, float]:
        """Update with the gradients at hand for step number ``step`` (from 0); returns rate and norm before clipping. A
        norm that is not finite leaves weights and state untouched, and so does ``update`` False."""
        lr = learning_rate(self.config, step, self.total_steps)
        norm = float(full_tensor(nn.utils.clip_grad_norm_(self.named.values(), self.config.clip, foreach=True)))
        if update and math.isfinite(norm):
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * (MUON_RATE if isinstance(optimizer, Muon) else group["rate"])
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return lr, norm

    def tensors(self) -> dict[str, Tensor]:
        """State as named tensors: ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``, ``step.<parameter>``, or
        ``momentum_buffer.<parameter>``."""
        return {
            f"{key}.{name}": value.detach()
            for name, parameter in self.named.items()
            for key, value in self._optimizer_of[name].state.get(parameter, {}).items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``tensors``. Raises CorruptionError: ``checkpoint-corrupt``: one is not of its parameter."""
        for name, parameter in self.named.items():
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
                stored = tensors.get(f"{key}.{name}")
                if stored is not None:
                    shape = torch.Size() if key == "step" else parameter.shape
                    if stored.shape != shape or not stored.is_floating_point():
                        found = f"{key}.{name} is {stored.dtype} {list(stored.shape)}, expected {list(shape)}"
                        raise CorruptionError(f"the optimizer's state: {found}", kind=Kind.CHECKPOINT_CORRUPT)
                    moved = stored.clone().to(parameter.device if key != "step" or parameter.is_cuda else "cpu")
                    state[key] = moved if key == "step" else shard_like(moved, parameter)
            if state:
                self._optimizer_of[name].state[parameter] = state


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and min(parameter.shape) > 1 and not any(table in name for table in TABLES)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Rate of step ``step`` (from 0) of ``total_steps``: linear warm-up to ``lr``, then the schedule."""
    warmup = round(config.warmup_ratio * total_steps)
    if config.warmup_steps is not None:
        warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)

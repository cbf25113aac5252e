"""Data parallelism: every rank has a copy of the drafter (ddp), or a shard of each parameter (fsdp).

The drafter is one FSDP2 unit. A drafter is a few layers, and its objective reads weights and calls methods that no
module hook sees; so the unit is gathered once before the packs of a step, which then run as they do alone, and
gradients are reduce-scattered once after them. At rest a rank holds its share of weights, gradients and moments.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.parallel.group import ProcessGroup, peer_errors


class Ddp:
    """A copy on every rank, gradients summed in buckets. With one process everything here is free. Every method is
    called by all ranks, in the same order. ``shards``: ranks that share a parameter and its moments."""

    shards = 1

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._group = group

    def unshard(self) -> None:
        """Gather every parameter, for the packs of one step."""

    def reduce_gradients(self) -> None:
        """Sum the gradients of all ranks, also of those that saw no pack; parameters are sharded again after it. A
        parameter that no pack reached has a gradient of zero, on one rank as on several, and under fsdp."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._group.all_reduce_gradients(self._parameters)

    def reshard(self) -> None:
        """Shard the parameters again, without a step."""


class Fsdp(Ddp):
    """FSDP2: a shard of each parameter on every rank, all of them while a step is computed."""

    def __init__(self, model: nn.Module, group: ProcessGroup, device: torch.device) -> None:
        with peer_errors():
            self.shards = group.rank.world_size
            mesh = init_device_mesh(device.type, (self.shards,))
            self._touch, self._start = _TouchParameters(model), torch.zeros((), device=device)
            self._unit: FSDPModule = fully_shard(self._touch, mesh=mesh, reshard_after_forward=False)
        # The objective divides by the slots of the global batch, so that gradients add up.
        self._unit.set_gradient_divide_factor(1.0)
        self._unit.set_force_sum_reduction_for_comms(True)

    def unshard(self) -> None:
        with peer_errors():
            self._unit.unshard()

    def reduce_gradients(self) -> None:
        with peer_errors():
            # FSDP2 moves the arguments of a forward to its GPU, and fails where there are none.
            self._touch(self._start).backward()

    def reshard(self) -> None:
        self._unit.reshard()


class _TouchParameters(nn.Module):
    """A forward that touches every parameter once and adds nothing: its backward is where FSDP2 reduces what the packs
    before it have accumulated, on every rank alike."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, start: Tensor) -> Tensor:
        """A zero, from the zero ``start``."""
        touched = [p.flatten()[:1].sum() for p in self.model.parameters() if p.requires_grad]
        return start + torch.stack(touched).sum() * 0.0


def parallelize(model: nn.Module, strategy: str, group: ProcessGroup, device: torch.device) -> Ddp:
    """``ddp`` or ``fsdp``. One process alone has nothing to shard."""
    return Ddp(model, group) if strategy == "ddp" or group.is_single else Fsdp(model, group, device)


@contextmanager
def unsharded(parallel: Ddp) -> Iterator[None]:
    """Gathered parameters inside, for reading them without a step."""
    parallel.unshard()
    try:
        yield
    finally:
        parallel.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, on every rank; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with peer_errors():
        return tensor.full_tensor()


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """``full``, which every rank has, sharded as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


def full_state_dict(named: dict[str, Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """Full tensors on rank 0's CPU, one gathered at a time; empty on the others."""
    tensors = {}
    for name, tensor in named.items():
        full = full_tensor(tensor.detach())
        if group.is_first:
            tensors[name] = full.cpu()
    return tensors

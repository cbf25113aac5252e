"""How the ranks of a run hold one drafter: every rank a whole copy (ddp), or a shard of each parameter (fsdp).

The drafter is one FSDP2 unit. A drafter is a few layers, and its objective reads weights and calls methods that no
module hook sees; so the unit is gathered once before the packs of a step, which then run as they do alone, and
gradients are reduce-scattered once after them. At rest a rank holds its share of weights, gradients and moments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.scale.group import Group, contact


class Parallel(Protocol):
    """The ranks' hold on the drafter. Every method is called by all ranks, in the same order."""

    def gather(self) -> None:
        """Make every parameter whole, for the packs of one step."""

    def sum_gradients(self) -> None:
        """Add up the gradients of all ranks, also of those that saw no pack; parameters are as at rest after it."""

    def release(self) -> None:
        """Parameters as at rest, without a step."""


class Copies:
    """ddp: whole copies, gradients summed in buckets. Alone, everything here is free."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._group = group

    def gather(self) -> None:
        """Nothing: they are."""

    def sum_gradients(self) -> None:
        """See `Parallel`."""
        self._group.sum_gradients(self._parameters)

    def release(self) -> None:
        """Nothing."""


class Shards:
    """fsdp: a shard of each parameter at rest, the whole drafter while a step runs."""

    def __init__(self, model: nn.Module, group: Group, device: torch.device) -> None:
        with contact():
            mesh = init_device_mesh(device.type, (group.rank.world_size,))
            self._closing = _Closing(model)
            self._unit: FSDPModule = fully_shard(self._closing, mesh=mesh, reshard_after_forward=False)
        # The objective divides by the slots of the global batch, so that gradients add up.
        self._unit.set_gradient_divide_factor(1.0)
        self._unit.set_force_sum_reduction_for_comms(True)

    def gather(self) -> None:
        """See `Parallel`."""
        with contact():
            self._unit.unshard()

    def sum_gradients(self) -> None:
        """See `Parallel`."""
        with contact():
            self._closing().backward()

    def release(self) -> None:
        """See `Parallel`."""
        self._unit.reshard()


class _Closing(nn.Module):
    """A forward that touches every parameter once and adds nothing: its backward is where FSDP2 reduces what the packs
    before it have accumulated, on every rank alike."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        touched = [p.flatten()[:1].sum() for p in self.model.parameters() if p.requires_grad]
        return torch.stack(touched).sum() * 0.0


def hold(model: nn.Module, how: str, group: Group, device: torch.device) -> Parallel:
    """``ddp`` or ``fsdp``. One process alone has nothing to shard."""
    return Copies(model, group) if how == "ddp" or group.is_alone else Shards(model, group, device)


@contextmanager
def gathered(parallel: Parallel) -> Iterator[None]:
    """Whole parameters inside, for reading them without a step."""
    parallel.gather()
    try:
        yield
    finally:
        parallel.release()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, on every rank; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with contact():
        return tensor.full_tensor()


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """``full``, which every rank has, held as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


def first_has_whole(named: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Full tensors on rank 0's CPU, one gathered at a time; empty on the others."""
    found = {}
    for name, tensor in named.items():
        full = whole(tensor.detach())
        if group.is_first:
            found[name] = full.cpu()
    return found

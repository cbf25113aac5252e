"""The processes of one run, joined through torch.distributed when there are several; alone, everything here is free.

What one rank meets is agreed by all before anybody stops, so that nobody waits for a rank that is gone. Small control
messages travel through gloo; gradients through NCCL where they lie on a GPU.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from hiddenstore.errors import ConfigError, HiddenstoreError, StorageError
from hiddenstore.rank import Rank

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others: longer than the first one needs to write a large checkpoint."""
BUCKET_BYTES = 64 << 20
"""Gradients sent as one message: large enough for the full rate of a link, small enough to overlap the copies."""
_MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Group:
    """This process among its peers. Collective calls must be made by every rank, in the same order."""

    rank: Rank

    @property
    def is_first(self) -> bool:
        return self.rank.is_first

    @property
    def is_alone(self) -> bool:
        return self.rank.world_size == 1

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add up small tensors over the ranks in place, as one message in fp64: exact for counts below 2^53."""
        if self.is_alone:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.double().flatten() for tensor in tensors])
        with contact():
            distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up gradients over the ranks in place; a rank that saw no pack contributes zero.

        One message a bucket, the next under way while the last is read back.
        """
        if self.is_alone:
            return
        under_way: deque[tuple[list[Tensor], Tensor, Any]] = deque()
        with contact():
            for gradients in _buckets(parameters):
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                under_way.append((gradients, flat, distributed.all_reduce(flat, async_op=True)))
                if len(under_way) > 1:
                    _take_sum(*under_way.popleft())
            while under_way:
                _take_sum(*under_way.popleft())

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        if self.is_alone:
            return flag
        said = torch.tensor(int(flag))
        with contact():
            distributed.all_reduce(said)
        return bool(said)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A part that may fail on some ranks only: afterwards every rank goes on, or every rank raises.

        Raises:
            HiddenstoreError: kind ``another-rank``; the rank that failed raises its own error.
        """
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                with suppress(StorageError):
                    self.any(True)
        if self.any(False):
            raise HiddenstoreError(f"{self.rank} stopped because another rank failed", kind="another-rank")

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, on every rank. An error of ``make`` stops them all."""
        with self.together():
            data = make() if self.is_first else b""
        if self.is_alone:
            return data
        size = torch.tensor(len(data))
        with contact():
            distributed.broadcast(size, 0)
            buffer = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8)
                if data
                else torch.zeros(int(size), dtype=torch.uint8)
            )
            distributed.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    @torch.no_grad()
    def take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of rank 0."""
        if self.is_alone:
            return
        with contact():
            for tensor in tensors:
                distributed.broadcast(tensor, 0)


@contextmanager
def joined(rank: Rank, environment: Mapping[str, str] | None = None) -> Iterator[Group]:
    """Meet the other ranks where torchrun's MASTER_ADDR and MASTER_PORT say; part from them at the end.

    Raises:
        ConfigError: ``rank-rendezvous``, the environment does not say where.
        StorageError: ``rank-lost``, the others cannot be reached.
    """
    if rank.world_size == 1:
        yield Group(rank)
        return
    _check_meeting(rank, os.environ if environment is None else environment)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"
    with contact():
        distributed.init_process_group(backend, rank=rank.rank, world_size=rank.world_size, timeout=PATIENCE)
    try:
        yield Group(rank)
    finally:
        distributed.destroy_process_group()


def _check_meeting(rank: Rank, environment: Mapping[str, str]) -> None:
    missing = [name for name in _MEETING if not environment.get(name)]
    if not missing:
        return
    if "SLURM_PROCID" in environment and "RANK" not in environment:
        fix = (
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500, '
            "before srun in the batch script"
        )
    else:
        fix = "torchrun --nproc-per-node N --no-python hiddenstore train …"
    raise ConfigError(
        f"this is {rank}, but {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set: "
        "the ranks do not know where to meet",
        kind="rank-rendezvous",
        hint=fix,
    )


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in the order of the parameters, as many of one type as fit ``BUCKET_BYTES``."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (size + parameter.grad.nbytes > BUCKET_BYTES or parameter.grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter.grad)
        size += parameter.grad.nbytes
    if bucket:
        yield bucket


def _take_sum(gradients: list[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@contextmanager
def contact() -> Iterator[None]:
    """Backends raise RuntimeError and its children for a peer that is gone."""
    try:
        yield
    except RuntimeError as error:
        raise StorageError(
            f"lost contact with the other ranks: {str(error).splitlines()[0]}",
            kind="rank-lost",
            hint="the message of the rank that failed first says why",
        ) from error

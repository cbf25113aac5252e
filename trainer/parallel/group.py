"""The process group of a run, through torch.distributed where there are several ranks; one alone pays nothing.

An error of one rank is told to all before any stops, so that none waits for a rank that is gone. Small control
messages travel through gloo; gradients through NCCL where they lie on a GPU.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from hiddenstore.errors import ConfigError, HiddenstoreError, Kind, StorageError
from hiddenstore.process import Rank, is_out_of_memory
from trainer.config import LoopConfig

_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}


def limit_kernel_caches() -> None:
    """Let oneDNN and torch's layer above it keep the kernels of few shapes. Every pack has shapes of its own, and at
    their default of 1,024 kernels of megabytes each, memory grew from 0.5 to 2 GB in 50 steps of a 135M target. They
    are read at the first product of the process; where the environment sets them, that wins."""
    for name, capacity in _KERNEL_CACHES.items():
        os.environ.setdefault(name, capacity)


BUCKET_BYTES = 64 << 20
"""Gradients sent as one message: large enough for the full rate of a link, small enough to overlap the copies."""
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_TEXT_BYTES = 256
_NCCL_REASON = "Last error:"


@dataclass(frozen=True)
class ProcessGroup:
    """This rank among its peers. Collective calls must be made by every rank, in the same order."""

    rank: Rank
    timeout: timedelta | None = None
    """Of its collectives; None: torch's own."""

    @property
    def is_first(self) -> bool:
        return self.rank.is_first

    @property
    def is_single(self) -> bool:
        return self.rank.world_size == 1

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Add up small tensors over the ranks in place, as one message in fp64: exact for counts below 2^53."""
        if self.is_single:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.double().flatten() for tensor in tensors])
        with peer_errors():
            distributed.all_reduce(flat)
        for tensor, reduced in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(reduced.view_as(tensor))

    def all_reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up gradients over the ranks in place. One message a bucket, the next under way while the last is read
        back."""
        if self.is_single:
            return
        under_way: deque[tuple[list[Tensor], Tensor, Any]] = deque()
        with peer_errors():
            for gradients in _buckets(parameters):
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                under_way.append((gradients, flat, distributed.all_reduce(flat, async_op=True)))
                if len(under_way) > 1:
                    _read_back(*under_way.popleft())
            while under_way:
                _read_back(*under_way.popleft())

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        if self.is_single:
            return flag
        count = torch.tensor(int(flag))
        with peer_errors():
            distributed.all_reduce(count)
        return bool(count)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """For work that may fail on some ranks only: after it every rank goes on, or every rank raises. Raises
        HiddenstoreError: kind ``another-rank``; the rank that failed raises its own error."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                with suppress(StorageError):
                    self.any(True)
        if self.any(False):
            raise HiddenstoreError(f"{self.rank} stopped because another rank failed", kind=Kind.ANOTHER_RANK)

    def broadcast_bytes(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` returns on rank 0, on every rank. An error of ``make`` stops them all."""
        with self.all_or_none():
            data = make() if self.is_first else b""
        if self.is_single:
            return data
        size = torch.tensor(len(data))
        with peer_errors():
            distributed.broadcast(size, 0)
            buffer = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8)
                if data
                else torch.zeros(int(size), dtype=torch.uint8)
            )
            distributed.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def gather_text(self, text: str) -> list[str]:
        """What every rank gives, in their order; cut after ``_TEXT_BYTES``."""
        if self.is_single:
            return [text]
        sent = torch.frombuffer(bytearray(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.rank.world_size)]
        with peer_errors():
            distributed.all_gather(received, sent)
        return [one.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for one in received]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Overwrite tensors by those of rank ``source``, in place."""
        if self.is_single:
            return
        with peer_errors():
            for tensor in tensors:
                distributed.broadcast(tensor, source)


@contextmanager
def process_group(
    rank: Rank, settings: LoopConfig | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[ProcessGroup]:
    """The group that torchrun's MASTER_ADDR and MASTER_PORT describe, as ``dist_backend`` and ``dist_timeout_minutes``
    of the settings say; it is left at the end. Raises ConfigError: ``rank-rendezvous``, the environment does not say
    where; ``device-unavailable``, no NCCL; StorageError: ``rank-lost``, the others cannot be reached."""
    if rank.world_size == 1:
        yield ProcessGroup(rank)
        return
    _check_rendezvous(rank, os.environ if environment is None else environment)
    settings = settings or LoopConfig()
    backend, timeout = _backend(settings.dist_backend), timedelta(minutes=settings.dist_timeout_minutes)
    with peer_errors():
        distributed.init_process_group(backend, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    try:
        yield ProcessGroup(rank, timeout)
    except BaseException:
        # NCCL would wait here for the others, and the error never be told; the end of the process frees what it has.
        if "nccl" not in backend:
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


def require_own_gpus(group: ProcessGroup, device: torch.device) -> None:
    """Refuse ranks that share a GPU, before NCCL says of it that it lost the others. Raises as ``refuse_shared_gpus``,
    on rank 0."""
    name = f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}" if device.type == "cuda" else ""
    names = group.gather_text(name)
    with group.all_or_none():
        if group.is_first:
            refuse_shared_gpus(names)


def refuse_shared_gpus(gpus: Sequence[str]) -> None:
    """``gpus``: what each rank calls its own, empty on a CPU. Raises ConfigError: ``devices-too-few``, naming each GPU
    of several ranks, and those."""
    ranks: dict[str, list[str]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu, []).append(str(rank))
    shared = [f"ranks {', '.join(those)} on GPU {gpu}" for gpu, those in ranks.items() if gpu and len(those) > 1]
    if shared:
        raise ConfigError(
            f"NCCL takes one rank for each GPU; there are {'; '.join(shared)}",
            kind=Kind.DEVICES_TOO_FEW,
            hint="torchrun --nproc-per-node N … on a machine of N GPUs; or, slower, train.dist_backend=gloo",
        )


def uses_nccl(name: str) -> bool:
    """Whether tensors of a GPU pass through NCCL where ``dist_backend`` is called so."""
    return name != "gloo" and torch.cuda.is_available() and distributed.is_nccl_available()


def _backend(name: str) -> str:
    if name == "nccl" and not uses_nccl(name):
        raise ConfigError(
            "train.dist_backend is nccl, and there is no GPU with NCCL here",
            kind=Kind.DEVICE_UNAVAILABLE,
            hint="train.dist_backend=auto",
        )
    return "cpu:gloo,cuda:nccl" if uses_nccl(name) else "gloo"


def _check_rendezvous(rank: Rank, environment: Mapping[str, str]) -> None:
    missing = [name for name in _RENDEZVOUS if not environment.get(name)]
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
        kind=Kind.RANK_RENDEZVOUS,
        hint=fix,
    )


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in the order of the parameters, as many of one type as fit ``BUCKET_BYTES``."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        assert parameter.grad is not None
        if bucket and (size + parameter.grad.nbytes > BUCKET_BYTES or parameter.grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter.grad)
        size += parameter.grad.nbytes
    if bucket:
        yield bucket


def _read_back(gradients: list[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    for gradient, reduced in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(reduced.view_as(gradient))


@contextmanager
def peer_errors() -> Iterator[None]:
    """StorageError for what backends raise, RuntimeError and its children, when a peer is gone. A GPU or a machine that
    is full, or a GPU on which something failed before, has lost nobody: torch's own error."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        # NCCL's first line names a file of its own source.
        reason = lines[lines.index(_NCCL_REASON) + 1] if _NCCL_REASON in lines[:-1] else lines[0]
        raise StorageError(
            f"lost contact with the other ranks: {reason}",
            kind=Kind.RANK_LOST,
            hint="the message of the rank that failed first says why",
        ) from error

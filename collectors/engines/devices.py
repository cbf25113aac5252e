"""Which GPUs the engine of one rank sees, for engines that take the first ones visible to their process."""

import os
from collections.abc import Sequence

import torch

from collectors.engines import EngineOptions
from hiddenstore.errors import ConfigError


def choose_devices(options: EngineOptions) -> None:
    """Let this process, and those it starts, see its rank's own ``tensor_parallel`` GPUs only, counted by local rank.

    Raises:
        ConfigError: ``devices-too-few``.
    """
    if not torch.cuda.is_available():
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_devices(visible, options.local_rank, options.tensor_parallel))


def own_devices(visible: Sequence[str], local_rank: int, count: int) -> list[str]:
    """This rank's devices; a launcher that shows each rank only its own is left alone.

    >>> own_devices(["0", "1", "2", "3"], local_rank=1, count=2)
    ['2', '3']
    """
    if len(visible) == count:
        return list(visible)
    own = list(visible[local_rank * count : (local_rank + 1) * count])
    if len(own) < count:
        raise ConfigError(
            f"rank {local_rank} of this machine needs {count} GPUs, and {len(visible)} are visible to all of its ranks",
            kind="devices-too-few",
            hint=f"start {max(1, len(visible) // count)} ranks per machine, or a smaller --tensor-parallel",
        )
    return own

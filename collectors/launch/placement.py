"""Where Ray puts the workers: one per group of ``tensor_parallel`` GPUs, or a share of the cores without GPUs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hiddenstore.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """How many workers, and what Ray sets aside for each; a worker lies on one node."""

    workers: int
    cpus: float
    gpus: int


def place(nodes: Sequence[Mapping[str, float]], workers: int | None, tensor_parallel: int, device: str) -> Placement:
    """Fit the workers into the nodes, given by their ``CPU`` and ``GPU``; ``workers`` None: as many as there is room.

    >>> place([{"CPU": 32, "GPU": 8}, {"CPU": 32, "GPU": 4}], None, tensor_parallel=4, device="auto")
    Placement(workers=3, cpus=1.0, gpus=4)
    >>> place([{"CPU": 16}, {"CPU": 16}], 4, tensor_parallel=1, device="auto")
    Placement(workers=4, cpus=8.0, gpus=0)

    Raises:
        ConfigError: ``launcher-resources``.
    """
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    if device.startswith("cuda") or (device == "auto" and any(gpus)):
        return _on_gpus(gpus, workers, tensor_parallel)
    cores = [node["CPU"] for node in nodes if node.get("CPU", 0) > 0]
    if not cores:
        raise ConfigError("no node of the Ray cluster has a CPU to run on", kind="launcher-resources")
    workers = len(cores) if workers is None else workers
    share = min(cores) / math.ceil(workers / len(cores))
    return Placement(workers, float(math.floor(share)) if share >= 1 else math.floor(share * 100) / 100, 0)


def _on_gpus(gpus: Sequence[int], workers: int | None, tensor_parallel: int) -> Placement:
    room = sum(count // tensor_parallel for count in gpus)
    found = ", ".join(map(str, gpus)) or "none"
    if room == 0:
        raise ConfigError(
            f"no node of the Ray cluster has the {tensor_parallel} GPUs of one worker; GPUs per node: {found}",
            kind="launcher-resources",
            hint="a smaller --tensor-parallel, or --device cpu",
        )
    if workers is not None and workers > room:
        raise ConfigError(
            f"{workers} workers of {tensor_parallel} GPUs each do not fit; GPUs per node: {found}",
            kind="launcher-resources",
            hint=f"--launcher ray:{room}",
        )
    return Placement(room if workers is None else workers, 1.0, tensor_parallel)

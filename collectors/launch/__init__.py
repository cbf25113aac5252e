"""What starts the workers of a collect job: this process, or one of the ranks around it, or Ray."""

import re
from collections.abc import Callable

from collectors.capture.job import CollectReport, collect
from collectors.capture.options import CollectOptions
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.process import Drain, from_environment
from hiddenstore.threads import local_ranks

LAUNCHERS = ("local", "ray")
SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that accelerate makes of the GPUs there are; any other names one device."""


def launch(launcher: str, options: CollectOptions, drain: Drain, note: Callable[[str], None]) -> CollectReport:
    """Run the job under a launcher, ``local``, ``ray``, or ``ray:WORKERS``; without a number as many as fit. Raises
    ConfigError: ``option-invalid``, ``launcher-resources``, ``not-installed``; and whatever ``collect`` raises."""
    name, colon, count = launcher.partition(":")
    if name not in LAUNCHERS or (colon and not re.fullmatch("ray:[1-9][0-9]*", launcher)):
        raise ConfigError(
            f"--launcher should be {', '.join(LAUNCHERS)} or ray:WORKERS, found {launcher!r}",
            kind=Kind.OPTION_INVALID,
            hint="--launcher ray:4; or torchrun --nproc-per-node 4 -m hiddenstore.cli collect …",
        )
    _refuse_spreading(name, options)
    if name == "local":
        return collect(options, from_environment(), drain, note)
    try:
        from collectors.launch.ray import on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        hint = "pip install 'hiddenstore[ray]'"
        raise ConfigError("ray is not installed here", kind=Kind.NOT_INSTALLED, hint=hint) from error
    return on_ray(options, int(count) if colon else None, drain, note)


def _refuse_spreading(launcher: str, options: CollectOptions) -> None:
    """Refuse a ``device_map`` of engine hf that spreads, for several workers of a machine: of those that see all of its
    GPUs each would take all, and Ray shows a worker one."""
    ranks, word = local_ranks(), options.extra.get("device_map")
    if options.engine != "hf" or word not in SPREADING or (launcher == "local" and (ranks == 1 or not _sees_gpus())):
        return
    why = (
        "Ray gives each worker one GPU" if launcher == "ray" else f"all {ranks} ranks of this machine would share them"
    )
    raise ConfigError(
        f"--device-map {word} spreads a target over every GPU that a worker sees, and {why}",
        kind=Kind.LAUNCHER_RESOURCES,
        hint="for each group of GPUs a worker by itself: CUDA_VISIBLE_DEVICES=0,1,2,3 RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 "
        "hiddenstore collect …; or --engine vllm --tensor-parallel 4",
    )


def _sees_gpus() -> bool:
    """Whether a rank sees several of them."""
    import torch

    return torch.cuda.device_count() > 1

"""In which precision a run multiplies: ``train.precision=auto`` measures it once, and the run keeps what was found."""

import torch

from hiddenstore.targets.load import pick_device
from hiddenstore.targets.matmul import bf16_pays
from trainer.config import DrafterConfig, TrainConfig

ROWS = 512
"""Rows of the product measured, as a pack of short samples has them."""


def resolved(config: TrainConfig, *, measure: bool = True) -> TrainConfig:
    """The settings with ``train.precision`` of ``auto`` replaced on a CPU; on other devices it stays, and means bf16.
    Without ``measure`` it is fp32, as in the runs of earlier versions that say ``auto``. Raises ConfigError:
    ``device-unavailable``."""
    if config.train.precision != "auto" or torch.device(pick_device(config.train.device)).type != "cpu":
        return config
    precision = "bf16" if measure and is_faster_in_bf16(config.drafter) else "fp32"
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def multiplies_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether a run with these settings, resolved, multiplies bf16 on that device."""
    return config.train.precision == "bf16" or (config.train.precision == "auto" and device.type == "cuda")


def is_faster_in_bf16(drafter: DrafterConfig) -> bool:
    """Whether this CPU multiplies the drafter's MLP markedly faster in bf16; measured in some tens of milliseconds."""
    return bf16_pays(drafter.hidden_size, drafter.intermediate_size, ROWS) is not None

"""Which device a command runs on."""

import torch

from hiddenstore.errors import ConfigError


def pick_device(name: str) -> str:
    """``auto`` is the first GPU where there is one, else the CPU; ConfigError for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", kind="device-unavailable") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} asked for, but there is no GPU here", kind="device-unavailable")
    return name

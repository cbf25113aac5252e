"""The one place that writes torch's own file format: some peers read nothing else."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_torch_file(path: Path, entries: Mapping[str, Tensor | str]) -> None:
    """A dict of tensors and texts, which ``torch.load(weights_only=True)`` reads back."""
    own = {name: value.contiguous().clone() if isinstance(value, Tensor) else value for name, value in entries.items()}
    torch.save(own, path)

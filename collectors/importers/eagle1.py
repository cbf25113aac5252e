"""EAGLE's own ``ge_data``: ``data_*.ckpt``, torch dicts with the final hidden after its norm in fp16, no aux layers.

Keys from SafeAILab EAGLE's ``ge_data`` scripts: ``input_ids`` [T], ``hidden_state`` [T, D], ``loss_mask`` [T].
"""

from pathlib import Path

from collectors.importers.specforge import EAGLE1, TorchDicts
from collectors.importers.torch_files import TorchFiles


def open_eagle1(folder: Path, width: int, files: TorchFiles) -> TorchDicts:
    """One file a conversation, unpadded."""
    return TorchDicts(folder, width, files, EAGLE1)

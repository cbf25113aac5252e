"""EAGLE's own ``ge_data``: ``data_*.ckpt``, torch dicts with the final hidden after its norm in fp16, no aux layers.

Keys from SafeAILab EAGLE's ``ge_data`` scripts: ``input_ids`` [T], ``hidden_state`` [T, D], ``loss_mask`` [T].
"""

from collectors.engines.dump.torch_dicts import TorchDicts


class EagleFiles(TorchDicts):
    """One file a conversation, unpadded."""

    default_layers = "eagle1"
    final = "post_norm"
    suffixes = (".ckpt",)
    final_key = "hidden_state"

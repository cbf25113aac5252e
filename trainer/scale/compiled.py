"""torch.compile for the parts of a drafter it helps: the blocks every drafter shares.

The rest of a step is shaped by the data (runs of slots, anchors) or already one kernel, and would be compiled anew for
every pack. Blocks are compiled in place for any length, so weight names and checkpoints stay as they are.
"""

from torch import nn

from trainer.drafters.blocks import GatedMLP, RMSNorm


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the norms and MLPs of a drafter at their first use; how many there are."""
    blocks = [module for module in model.modules() if isinstance(module, (GatedMLP, RMSNorm))]
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    return len(blocks)

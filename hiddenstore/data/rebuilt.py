"""A pack of stored states completed on the consumer's thread and device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hiddenstore.data.packed import PackedBatch
from hiddenstore.targets.rebuild import Rebuilder, layers_to_read


def complete(pack: PackedBatch, rebuilder: Rebuilder, layers: Sequence[int], final: bool) -> PackedBatch:
    """The pack with what is rebuilt of ``layers`` and, where ``final`` says so, of the final rows.

    The pack holds ``layers_to_read`` and no final hidden where that is rebuilt. A sample comes back as it does from
    ``store[id]`` on the same device, whatever pack it lies in.
    """
    lengths = torch.bincount(pack.document, minlength=len(pack.sample_ids)).tolist()
    read = layers_to_read(rebuilder.capture, layers, final)
    aux = rebuilder.aux(pack.input_ids.cpu(), pack.aux, lengths, read, layers)
    if not final or not rebuilder.capture.rebuilds_final:
        return replace(pack, aux=aux)
    return replace(pack, aux=aux, final=rebuilder.final(pack.aux[-1], lengths)[pack.final_rows])

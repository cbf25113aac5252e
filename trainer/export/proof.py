"""The proof before a folder appears: its files alone, read back, give the drafter's own logits bit for bit.

Shapes: T tokens, L aux layers, D target width, U draft vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hiddenstore.errors import CorruptionError, HiddenstoreError
from trainer.drafters import drafter_kind
from trainer.drafters.base import Drafter, TargetSide
from trainer.drafters.blocks import KVCache
from trainer.drafters.dflash import DFlash
from trainer.drafters.medusa_heads import Medusa
from trainer.export.base import Checkpoint
from trainer.export.parts import shares_embeddings, weights
from trainer.objectives.anchors import Blocks
from trainer.run.published import read_published
from trainer.run.warm_start import load_weights
from trainer.vocab import DraftVocab

_TOKENS = 16
_STEPS = 3


def prove_equal(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Raise CorruptionError unless the files give the drafter's own logits and tokens, bit for bit.

    Both run the same steps over random states, weights in ``dtype``, arithmetic in float32.
    """
    try:
        reloaded, vocab = read_back(folder, checkpoint)
    except HiddenstoreError as error:
        raise CorruptionError(f"{folder} is no drafter: {error}", kind="export-unreadable", path=str(folder)) from error
    expected, found = probe(_own(checkpoint, dtype), checkpoint), probe(reloaded, checkpoint)
    same_tokens = torch.equal(vocab.target_ids, checkpoint.vocab.target_ids.cpu())
    same_layers = list(reloaded.config.aux_layers) == sorted(checkpoint.config.aux_layers)
    if not torch.equal(expected, found) or not same_tokens or not same_layers:
        worst = float((expected - found).abs().max()) if expected.shape == found.shape else float("nan")
        raise CorruptionError(
            f"{folder}: the exported files do not give the drafter's logits (largest difference {worst:g})",
            kind="export-differs",
            path=str(folder),
        )


def read_back(folder: Path, checkpoint: Checkpoint) -> tuple[Drafter, DraftVocab]:
    """The drafter that an exported folder describes, from its files alone plus what engines share of the target.

    Raises:
        HiddenstoreError: a file is damaged or lacks something.
    """
    found = read_published(folder, checkpoint.head, checkpoint.identity.num_layers)
    kind = drafter_kind(found.config.name)
    model = kind.build(found.config, TargetSide(checkpoint.head, found.vocab), 0)
    load_weights(model, found.weights, str(folder))
    return cast(Drafter, model.eval()), found.vocab


@torch.no_grad()
def probe(model: Drafter, checkpoint: Checkpoint) -> Tensor:
    """Logits [rows, U] over fixed random states: a chain of steps, a block, or every head."""
    return _PROBES[model.config.name](model, checkpoint)


def _own(checkpoint: Checkpoint, dtype: torch.dtype) -> Drafter:
    """A copy on the CPU with weights that were rounded to ``dtype``, as the file holds them."""
    head, config = checkpoint.head.to("cpu"), checkpoint.config
    model: Drafter = drafter_kind(config.name).build(config, TargetSide(head, checkpoint.vocab.to("cpu")), 0)
    state = {name: tensor.float() for name, tensor in weights(checkpoint, dtype).items()}
    if "embed_tokens.weight" in state and shares_embeddings(checkpoint):
        state["embed_tokens.weight"] = head.embed_tokens.float()
    model.load_state_dict(state)
    return model.eval()


def _chain(model: Any, checkpoint: Checkpoint) -> Tensor:
    aux, ids = _states(checkpoint, len(model.config.aux_layers) or 1), _ids(checkpoint)
    cache, positions = KVCache(), torch.arange(len(ids))
    start = model.start(aux) if model.config.aux_layers else aux[0]
    g, logits = model.step(start, ids[:_TOKENS], positions[:_TOKENS], cache)
    found = [logits]
    for i in range(_TOKENS, _TOKENS + _STEPS - 1):
        g, logits = model.step(g[-1:], ids[i : i + 1], positions[i : i + 1], cache)
        found.append(logits)
    return torch.cat(found)


def _block(model: Any, checkpoint: Checkpoint) -> Tensor:
    dflash = cast(DFlash, model)
    aux, ids = _states(checkpoint, len(dflash.config.aux_layers)), _ids(checkpoint)
    context = dflash.context(aux, torch.arange(_TOKENS))
    blocks = Blocks.of([(0, _TOKENS)], torch.device("cpu"))
    states = dflash.fill(ids[:1], torch.tensor([_TOKENS]), context, blocks, (0, dflash.block_size))
    return states.float() @ dflash.head_weight().float().T


def _heads(model: Any, checkpoint: Checkpoint) -> Tensor:
    medusa, features = cast(Medusa, model), _states(checkpoint, 1)[0]
    heads = range(medusa.config.medusa_heads)
    return torch.cat([medusa.states(features, k).float() @ medusa.head_weight(k).float().T for k in heads])


_PROBES: dict[str, Callable[[Any, Checkpoint], Tensor]] = {
    "eagle1": _chain,
    "eagle3": _chain,
    "dflash": _block,
    "medusa": _heads,
}


def _states(checkpoint: Checkpoint, layers: int) -> Tensor:
    """fp32 [layers, T, D]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(layers, _TOKENS, checkpoint.identity.hidden_size, generator=generator)


def _ids(checkpoint: Checkpoint) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(checkpoint.head.embed_tokens.shape[0], (_TOKENS + _STEPS,), generator=generator)

"""Random tiny heads, packs and drafters for the trainer's tests."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.targets.head import HeadBundle
from schemas import HeadSpec
from trainer.drafters.eagle3 import Eagle3, Eagle3Config
from trainer.vocab import DraftVocab

LAYERS, WIDTH, VOCAB = 3, 16, 40


@dataclass
class Setting:
    head: HeadBundle
    vocab: DraftVocab
    model: Eagle3
    batch: PackedBatch


def make_head(vocab: int = VOCAB, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> HeadBundle:
    spec = HeadSpec(norm_flavour="rms", norm_eps=1e-5, tied=False)
    return HeadBundle(
        spec,
        torch.randn(vocab, width, dtype=dtype) * 0.5,
        torch.randn(vocab, width, dtype=dtype) * 0.7,
        1 + 0.3 * torch.randn(width, dtype=dtype),
    )


def make_batch(lengths: list[int], mask: Tensor | None = None, dtype: torch.dtype = torch.float32) -> PackedBatch:
    """A pack of random samples with the final hidden at every row; about two thirds supervised unless told."""
    total = sum(lengths)
    return PackedBatch(
        input_ids=torch.randint(0, VOCAB, (total,)),
        loss_mask=torch.rand(total) < 0.66 if mask is None else mask,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        document=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]),
        aux=torch.randn(LAYERS, total, WIDTH, dtype=dtype),
        final=torch.randn(total, WIDTH, dtype=dtype),
        final_rows=torch.arange(total),
        sample_ids=[f"{i:032x}" for i in range(len(lengths))],
    )


def drafter_config(**changes: object) -> Eagle3Config:
    shape: dict[str, object] = {
        "aux_layers": (1, 2, 4), "hidden_size": WIDTH, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "vocab_size": VOCAB, **changes,
    }  # fmt: skip
    return Eagle3Config.model_validate(shape)


def make_setting(lengths: list[int], known: int = 24, dtype: torch.dtype = torch.float32, **changes: object) -> Setting:
    """``known`` of the target's tokens in the draft vocabulary; every weight of the drafter random, norms unequal."""
    head = make_head(dtype=dtype)
    ids = torch.randperm(VOCAB)[:known]
    vocab = DraftVocab.of_ids(ids, VOCAB)
    model = Eagle3.build(drafter_config(**changes), head, vocab).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.25
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
    return Setting(head, vocab, model, make_batch(lengths, dtype=dtype))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

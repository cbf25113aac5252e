"""What drafters here may have that some engine does not read: one predicate and its reason each."""

from typing import Any

from trainer.export.base import Checkpoint, Lack


def _config(checkpoint: Checkpoint) -> Any:
    return checkpoint.config


FIRST_NORM = Lack(
    lambda c: _config(c).first_norm, "its layer 0 has no input_layernorm", "train with drafter.first_norm=false"
)
LAST_NORM = Lack(
    lambda c: _config(c).last_norm, "it has no norm after the last layer", "train with drafter.last_norm=false"
)
HEAD_BIAS = Lack(
    lambda c: c.head.lm_head_bias is not None, "it reads the drafter's states with the target's head without its bias"
)
ORIGINAL_HEAD_BIAS = Lack(
    lambda c: c.head.lm_head_bias is not None and _config(c).original_head,
    "it reads the drafter's states with the target's head without its bias",
    "train with drafter.original_head=false",
)
NORM_BEFORE_RESIDUAL = Lack(
    lambda c: _config(c).norm_before_residual,
    "its layer keeps the state before hidden_norm as the residual",
    "train with drafter.norm_before_residual=false",
)
SEVERAL_LAYERS = Lack(
    lambda c: _config(c).num_layers > 1,
    "it drops the residual between layers, so several are another function",
    "train with drafter.num_layers=1",
)
OWN_EMBEDDINGS = Lack(
    lambda c: _has_own_embeddings(c) and _config(c).hidden_size == c.identity.hidden_size,
    "it replaces embeddings of the target's width by the target's",
    "train with drafter.train_embeddings=false",
)
NOT_THREE_LAYERS = Lack(
    lambda c: len(_config(c).aux_layers) != 3, "its fc reads three aux layers", "train with three drafter.aux_layers"
)
AS_WIDE_AS_ITS_STATES = Lack(
    lambda c: len(_config(c).aux_layers) * c.identity.hidden_size == _config(c).hidden_size,
    "it tells states that fc has fused from those it has not by their width, which are equal here",
    "train with more than one of drafter.aux_layers",
)
ONE_LAYER = Lack(
    lambda c: len(_config(c).aux_layers) < 2, "it has no fc over a single aux layer", "train with several aux_layers"
)
EMBEDDINGS_AS_A_LAYER = Lack(
    lambda c: -1 in _config(c).aux_layers,
    "its layer ids name layer outputs, and the embedding output is none",
    "train with drafter.aux_layers from 0 on",
)
NARROWER = Lack(
    lambda c: _config(c).hidden_size != c.identity.hidden_size,
    "its drafter is as wide as the target",
    "train with drafter.hidden_size= the target's",
)
SLIDING_WINDOW = Lack(
    lambda c: _config(c).sliding_window is not None,
    "it has no sliding window that is symmetric inside a block",
    "train with drafter.sliding_window=none",
)
OWN_HEAD = Lack(
    lambda c: _config(c).train_head,
    "it reads the drafter's states with the target's head only",
    "train with drafter.train_head=false",
)
OWN_HEAD_OF_ALL_TOKENS = Lack(
    lambda c: _config(c).train_head and c.vocab.is_full,
    "it replaces a head over the whole vocabulary by the target's when it loads one",
    "train with drafter.train_head=false or a smaller drafter.vocab_size, or --engine vllm",
)
SMALL_VOCABULARY = Lack(
    lambda c: not c.vocab.is_full,
    "it has no draft vocabulary for this drafter",
    "train with drafter.vocab_size= the target's",
)


def _has_own_embeddings(checkpoint: Checkpoint) -> bool:
    from trainer.export.parts import shares_embeddings

    return not shares_embeddings(checkpoint)

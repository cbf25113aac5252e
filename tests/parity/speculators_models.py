"""How the installed speculators 0.9 is given our drafters: configs of their dimensions, and their weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hiddenstore.targets.head import HeadBundle
from tests.trainer.conftest import VOCAB, WIDTH
from trainer.vocab import DraftVocab


def dimensions(ours: Any) -> dict[str, Any]:
    """Our drafter's as transformers' configs name them."""
    return {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": ours.num_layers, "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.num_kv_heads, "head_dim": ours.head_dim, "rms_norm_eps": ours.rms_norm_eps,
        "max_position_embeddings": 256, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_theta},
    }  # fmt: skip


def qwen3(ours: Any, attention: str, **more: Any) -> Any:
    """The layers of a block drafter."""
    from transformers import Qwen3Config

    types = ["full_attention"] * ours.num_layers
    shape = Qwen3Config(tie_word_embeddings=False, layer_types=types, **dimensions(ours), **more)
    shape._attn_implementation = attention
    return shape


def llama(ours: Any, attention: str) -> Any:
    """The layers of a drafter that feeds back its states."""
    from transformers import LlamaConfig

    layer = LlamaConfig(**dimensions(ours))
    layer._attn_implementation = attention
    return layer


def members(algorithm: str, tokens: int) -> dict[str, Any]:
    """What every config of speculators has, for drafts of so many tokens."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    facts = SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    return {"speculators_config": facts}


def fill(model: Any, weights: Mapping[str, Tensor], head: HeadBundle, vocab: DraftVocab) -> Any:
    """``model`` with these weights; embeddings that are not among them, norm and head rows are the target's."""
    if not vocab.is_full:
        model.load_vocab_mappings(vocab.t2d, vocab.d2t)
    tables = {"verifier_norm.weight": head.norm_weight, "verifier_lm_head.weight": head.output_weight[vocab.target_ids]}
    weights = {"embed_tokens.weight": head.embed_tokens, **weights, **tables}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"t2d", "d2t"}
    return model

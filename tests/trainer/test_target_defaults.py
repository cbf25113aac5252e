"""Defaults of every drafter from the published config.json of the families that are drafted for most."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hiddenstore.testing.builders import capture_spec
from schemas.capture import HeadSpec
from schemas.layers import default_aux_layers
from trainer.drafters import DRAFTERS
from trainer.settings import config_class, derived

LLAMA31 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

# The values that the models' own config.json publish; heads, width of a head and so on are left out where they do.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096,
        "rope_scaling": None, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "Llama-3-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "max_position_embeddings": 8192,
        "rope_scaling": None, "rope_theta": 500000.0, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072,
        "rope_scaling": LLAMA31, "rope_theta": 500000.0, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072, "rope_scaling": {**LLAMA31, "factor": 32.0}, "rope_theta": 500000.0,
        "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768, "tie_word_embeddings": False,
    },
    "Phi-3-mini-4k": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096,
        "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 32064, "tie_word_embeddings": False,
    },
    "Phi-3-mini-128k": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "vocab_size": 32064,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.08] * 48},
    },
    "Qwen1.5-7B": {
        "model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "Qwen2-7B-Instruct": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen2.5-7B-Instruct with YaRN": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "rope_scaling": YARN, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 40960, "rope_scaling": None, "rope_theta": 1000000, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 40960, "rope_scaling": None, "rope_theta": 1000000, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "gemma-2b": {
        "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 8192, "rope_theta": 10000.0, "vocab_size": 256000,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 8192, "rope_theta": 10000.0, "vocab_size": 256000,
    },
    # Most of what follows from the class is left out of this one, as it was published.
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
}  # fmt: skip

# heads, key heads, head width, MLP width, eps, rope theta, window, kind and factor of the scaling, draft vocabulary
EXPECTED: dict[str, tuple[Any, ...]] = {
    "Llama-2-7b": (32, 32, 128, 11008, 1e-5, 1e4, 4096, None, None, 32000),
    "Llama-3-8B": (32, 8, 128, 14336, 1e-5, 5e5, 8192, None, None, 32000),
    "Llama-3.1-8B": (32, 8, 128, 14336, 1e-5, 5e5, 131072, "llama3", 8, 32000),
    "Llama-3.2-1B": (32, 8, 64, 8192, 1e-5, 5e5, 131072, "llama3", 32, 32000),
    "Mistral-7B-v0.3": (32, 8, 128, 14336, 1e-5, 1e6, 32768, None, None, 32768),
    "Phi-3-mini-4k": (32, 32, 96, 8192, 1e-5, 1e4, 4096, None, None, 32064),
    "Phi-3-mini-128k": (32, 32, 96, 8192, 1e-5, 1e4, 131072, None, None, 32064),
    "Qwen1.5-7B": (32, 32, 128, 11008, 1e-6, 1e6, 32768, None, None, 32000),
    "Qwen2-7B-Instruct": (28, 4, 128, 18944, 1e-6, 1e6, 32768, None, None, 32000),
    "Qwen2.5-7B-Instruct with YaRN": (28, 4, 128, 18944, 1e-6, 1e6, 32768, "yarn", 4, 32000),
    "Qwen3-8B": (32, 8, 128, 12288, 1e-6, 1e6, 40960, None, None, 32000),
    "Qwen3-0.6B": (16, 8, 128, 3072, 1e-6, 1e6, 40960, None, None, 32000),
    "gemma-2b": (8, 1, 256, 16384, 1e-6, 1e4, 8192, None, None, 32000),
    "gemma-2-9b": (16, 8, 256, 14336, 1e-6, 1e4, 8192, None, None, 32000),
    "gemma-3-4b": (8, 4, 256, 10240, 1e-6, 1e6, 131072, "linear", 8, 32000),
}


class _Captured(SimpleNamespace):
    __hash__ = object.__hash__

    @property
    def catalog(self) -> SimpleNamespace:
        return SimpleNamespace(table=SimpleNamespace(tokens=np.array([entry.tokens for _, entry in self.entries])))

    @property
    def totals(self) -> dict[str, int]:
        return {"tokens": sum(entry.tokens for _, entry in self.entries)}


def store_of(name: str) -> Any:
    """What `derived` reads of a store captured for every drafter from that target."""
    published = PUBLISHED[name]
    text = published.get("text_config", published)
    layers, width = text["num_hidden_layers"], text["hidden_size"]
    held = sorted({*default_aux_layers("eagle3", layers), *default_aux_layers("dflash", layers)})
    vocab = text.get("vocab_size", 262208)
    target = capture_spec().target.model_copy(
        update={"hidden_size": width, "num_layers": layers, "vocab_size": vocab, "model_type": text["model_type"]}
    )
    capture = capture_spec(final="all").model_copy(update={"target": target, "aux_layers": tuple(held)})
    files = {"config.json": json.dumps(published).encode()}
    # More supervised tokens than any draft vocabulary holds.
    sample = SimpleNamespace(split="train", input_ids=np.arange(34000), loss_mask=np.ones(34000, dtype=np.uint8))
    return _Captured(
        path=name,
        sample_ids=["a"],
        sample=lambda sample_id: sample,
        capture=capture,
        entries=[(None, SimpleNamespace(tokens=2048, split="train"))],
        manifest=SimpleNamespace(
            target_files=[SimpleNamespace(path="config.json")],
            head=HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=text.get("tie_word_embeddings", True)),
        ),
        target_file=files.__getitem__,
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_follow_from_the_published_config(name: str, drafter: str) -> None:
    store = store_of(name)
    values = derived(store, drafter)
    if "mask_token_id" in config_class(drafter).model_fields["drafter"].annotation.model_fields:
        # It follows from the tokenizer, which this store does not hold.
        values["drafter"]["mask_token_id"] = 0
    config = config_class(drafter).model_validate(values)
    heads, key_heads, head_dim, inner, eps, theta, window, kind, factor, vocab = EXPECTED[name]
    d = config.drafter
    assert d.hidden_size == store.capture.target.hidden_size
    assert (d.num_heads, d.num_kv_heads, d.head_dim, d.intermediate_size) == (heads, key_heads, head_dim, inner)
    assert (d.rms_norm_eps, d.rope_theta, d.max_position) == (eps, theta, window)
    assert (d.rope_scaling.rope_type, d.rope_scaling.factor) == (kind, factor) if kind else d.rope_scaling is None
    if drafter == "eagle3":
        assert d.vocab_size == vocab
        layers = store.capture.target.num_layers
        assert d.aux_layers == (1, layers // 2 - 1, layers - 4)


def test_llama_3_1_keeps_every_number_of_its_scaling() -> None:
    found = config_class("eagle3").model_validate(derived(store_of("Llama-3.1-8B"))).drafter.rope_scaling
    assert found is not None
    assert found.written() == LLAMA31


@pytest.mark.parametrize(("often", "rare", "size"), [(0, 20000, 19648), (10, 5000, 8960), (200, 5000, 4928)])
def test_the_draft_vocabulary_covers_98_percent_of_what_is_supervised(often: int, rare: int, size: int) -> None:
    """5,000 tokens stand ``often`` times beside ``rare`` ones that stand once."""
    store = store_of("Qwen3-8B")
    ids = np.concatenate([np.tile(np.arange(5000) * 3, often), 30000 + np.arange(rare)])
    store.sample = lambda _: SimpleNamespace(split="train", input_ids=ids, loss_mask=np.ones(len(ids), dtype=np.uint8))
    assert derived(store)["drafter"]["vocab_size"] == size


def test_a_small_store_is_cut_into_small_batches() -> None:
    store = store_of("Qwen3-8B")
    values = derived(store)
    assert values["data"] == {"batch_tokens": 1024, "pack_tokens": 2048}
    store.entries = [(None, SimpleNamespace(tokens=1500, split="train")) for _ in range(4000)]
    assert derived(store)["data"]["batch_tokens"] == 4000 * 1500 // 400

"""Rotary frequencies against transformers', and what a drafter takes over from its target."""

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trainer.attention.rope import RopeScaling, inherited_scaling, published_rope
from trainer.drafters.blocks import Rotary

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, every option": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "beta_fast": 24.0,
        "beta_slow": 2.0, "mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False,
    },
    "yarn, attention given": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25,
    },
    "longrope, short": {
        "rope_type": "longrope", "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [2.0 + i for i in range(16)],
    },
    "longrope, long": {
        "rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [2.0 + i for i in range(16)],
    },
}  # fmt: skip
WINDOW, THETA, HEAD = 512, 50000.0, 32


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_those_of_transformers(name: str) -> None:
    written = SCALINGS[name]
    rope = {"rope_type": "default", "rope_theta": THETA, **(written or {})}
    config = LlamaConfig(
        hidden_size=2 * HEAD, num_attention_heads=2, head_dim=HEAD, max_position_embeddings=WINDOW, rope_parameters=rope
    )
    positions = torch.arange(WINDOW)
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    scaling = None if written is None else RopeScaling.model_validate(written)
    cos, sin = Rotary(HEAD, THETA, scaling, WINDOW).at(positions)
    torch.testing.assert_close(cos[:, 0], expected_cos[0, :, : HEAD // 2], rtol=0, atol=5e-5)
    torch.testing.assert_close(sin[:, 0], expected_sin[0, :, : HEAD // 2], rtol=0, atol=5e-5)
    if written is not None:
        plain, _ = Rotary(HEAD, THETA).at(positions)
        assert float((plain - cos).abs().max()) > 0.1


def test_a_sample_is_rotated_the_same_whatever_it_is_packed_with() -> None:
    scaling = RopeScaling.model_validate(SCALINGS["longrope, long"])
    short, _ = Rotary(HEAD, THETA, scaling, WINDOW).at(torch.arange(10))
    packed, _ = Rotary(HEAD, THETA, scaling, WINDOW).at(torch.arange(400))
    assert torch.equal(short, packed[:10])


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({"rope_type": "llama3", "factor": 8}, "needs low_freq_factor, high_freq_factor, original_max"),
        ({"rope_type": "linear", "factor": 8, "beta_fast": 2}, "has no beta_fast"),
        ({"rope_type": "dynamic", "factor": 8}, "linear"),
    ],
)
def test_a_scaling_without_what_it_reads_is_refused(written: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        RopeScaling.model_validate(written)


def test_a_lone_attn_factor_is_refused_as_engines_read_it_otherwise() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match=r"attn_factor is 1\.5 without an attention_factor: SGLang multiplies"):
        published_rope({"rope_scaling": yarn | {"attn_factor": 1.5}})
    assert published_rope({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "attn_factor": 1.5}})[1] is not None
    known = RopeScaling.model_validate(yarn)
    assert published_rope({"rope_scaling": yarn | {"attn_factor": 1}}) == (10000.0, known)
    both = {"rope_parameters": yarn | {"attention_factor": 1.25, "attn_factor": 1.1}}
    assert published_rope(both) == (10000.0, known.model_copy(update={"attention_factor": 1.25}))


def test_multimodal_and_longrope_scalings_are_not_inherited() -> None:
    assert inherited_scaling({"rope_type": "default", "mrope_section": [16, 24, 24]}, 4096) is None
    assert inherited_scaling({"type": "mrope", "mrope_section": [16, 24, 24]}, 4096) is None
    assert inherited_scaling({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 4096) is None
    found = inherited_scaling({"type": "yarn", "factor": 4.0, "rope_theta": 1e6}, 4096)
    assert found == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

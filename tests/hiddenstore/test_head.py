"""The head bundle reproduces each family's own norm, logits and embeddings."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_tensors
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from hiddenstore.errors import ConfigError, CorruptionError
from hiddenstore.targets.head import HeadBundle
from hiddenstore.testing.builders import HEAD, capture_spec, target_files
from hiddenstore.writer import create_store
from schemas.capture import HeadSpec

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}


def family(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, torch.nn.Module, HeadSpec]:
    """A tiny random model with unequal norm weights, its final norm and the spec that describes it."""
    torch.manual_seed(0)
    if name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))
        norm, spec = model.model.norm, HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)
    elif name == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=3.0))
        norm = model.model.norm
        spec = HeadSpec(
            norm_flavour="rms_plus_one", norm_eps=1e-6, tied=True, embed_scale=32**0.5, final_logit_softcap=3.0
        )
    elif name == "cohere":
        model = CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25))
        norm, spec = model.model.norm, HeadSpec(norm_flavour="layer", norm_eps=1e-5, tied=True, logit_scale=0.25)
    elif name == "granite":
        model = GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0, tie_word_embeddings=False))
        norm, spec = model.model.norm, HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False, logit_scale=0.25)
    else:
        model = PhiForCausalLM(PhiConfig(**SMALL, tie_word_embeddings=False))
        norm, spec = model.model.final_layernorm, HeadSpec(norm_flavour="layer", norm_eps=1e-5, tied=False)
    with torch.no_grad():
        for module in (norm, *([model.lm_head] if name == "phi" else [])):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.5)
    return model.to(dtype).eval(), norm, spec


def bundle(model: PreTrainedModel, norm: torch.nn.Module, spec: HeadSpec) -> HeadBundle:
    output = model.get_output_embeddings()
    return HeadBundle(
        spec,
        model.get_input_embeddings().weight.detach(),
        None if spec.tied else output.weight.detach(),
        norm.weight.detach(),
        getattr(norm, "bias", None),
        getattr(output, "bias", None),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "phi"])
def test_bundle_logits_equal_the_family_s_own(name: str, dtype: torch.dtype) -> None:
    model, norm, spec = family(name, dtype)
    head = HeadBundle.from_bytes(bundle(model, norm, spec).save_bytes(), spec)
    ids = torch.arange(1, 25)[None]
    seen: dict[str, torch.Tensor] = {}
    norm.register_forward_hook(lambda _, args, out: seen.update(pre=args[0], post=out))
    with torch.no_grad():
        logits = model(ids).logits
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(head.norm(seen["pre"]), seen["post"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.logits(seen["pre"]), logits.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(head.logits(seen["post"], "post_norm"), logits.float(), rtol=tolerance, atol=tolerance)


def test_bundle_embeddings_equal_the_family_s_own() -> None:
    model, norm, spec = family("gemma2", torch.bfloat16)
    ids = torch.arange(61)
    assert torch.equal(bundle(model, norm, spec).embed(ids), model.get_input_embeddings()(ids))


def test_another_norm_weight_changes_the_logits() -> None:
    model, norm, spec = family("llama", torch.float32)
    head = bundle(model, norm, spec)
    other = HeadBundle(spec, head.embed_tokens, head.lm_head, torch.ones(32))
    h = torch.randn(5, 32)
    assert not torch.allclose(head.logits(h), other.logits(h), atol=1e-2)


def test_restricted_logits_are_the_columns_of_the_full_ones() -> None:
    model, norm, spec = family("phi", torch.float32)
    head = bundle(model, norm, spec)
    h, ids = torch.randn(3, 7, 32), torch.tensor([5, 2, 60])
    torch.testing.assert_close(head.logits(h, token_ids=ids), head.logits(h)[..., ids])
    other = torch.tensor([1])
    torch.testing.assert_close(head.logits(h, token_ids=other), head.logits(h)[..., other])


def test_logits_in_chunks_equal_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model, norm, spec = family("llama", torch.float32)
    head, h = bundle(model, norm, spec), torch.randn(11, 32)
    whole = head.logits(h)
    monkeypatch.setattr("hiddenstore.targets.head.ROW_CHUNK", 3)
    monkeypatch.setattr("hiddenstore.targets.head.VOCAB_CHUNK", 7)
    torch.testing.assert_close(head.logits(h), whole)


@pytest.mark.parametrize("chunk", [7, 16384])
def test_logits_are_fp32_products_under_autocast_too(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.targets.head.VOCAB_CHUNK", chunk)
    model, norm, spec = family("llama", torch.float32)
    head, h = bundle(model, norm, spec), torch.randn(11, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head.logits(h)
    torch.testing.assert_close(found, head.logits(h))


def test_gradients_reach_the_hidden_through_a_soft_cap() -> None:
    model, norm, spec = family("gemma2", torch.float32)
    head, h = bundle(model, norm, spec), torch.randn(5, 32, requires_grad=True)
    (found,) = torch.autograd.grad(head.logits(h, norm_state="post_norm").square().sum(), h)
    weight = model.get_input_embeddings().weight.detach()
    (expected,) = torch.autograd.grad((torch.tanh(h @ weight.T / 3.0) * 3.0).square().sum(), h)
    torch.testing.assert_close(found, expected)


def test_gradients_reach_the_hidden_through_the_head() -> None:
    model, norm, spec = family("llama", torch.float32)
    h = torch.randn(4, 32, requires_grad=True)
    bundle(model, norm, spec).logits(h).logsumexp(-1).sum().backward()
    assert h.grad is not None
    assert bool((h.grad != 0).any())


def test_a_bundle_whose_shapes_disagree_is_refused() -> None:
    spec = HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=True)
    with pytest.raises(ConfigError, match="norm_weight") as narrow:
        HeadBundle(spec, torch.ones(5, 4), None, torch.ones(3))
    with pytest.raises(ConfigError, match="tied") as doubled:
        HeadBundle(spec, torch.ones(5, 4), torch.ones(5, 4), torch.ones(4))
    with pytest.raises(ConfigError, match=r"shape \[5\], expected \[V, D\]") as flat:
        HeadBundle(spec, torch.ones(5), None, torch.ones(5))
    assert {error.value.kind for error in (narrow, doubled, flat)} == {"head-invalid"}


def test_load_reads_the_store_s_bundle_and_refuses_a_flipped_byte(tmp_path: Path) -> None:
    files = target_files()
    store = create_store(tmp_path, capture_spec(), HEAD, "safe", files)
    assert store.head().save_bytes() == HeadBundle.from_bytes(files["head.safetensors"], HEAD).save_bytes()
    path = tmp_path / "target" / "head.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError) as caught:
        store.head()
    assert caught.value.kind == "target-file-corrupt"


def test_bytes_that_are_no_bundle_are_refused() -> None:
    with pytest.raises(CorruptionError, match="no safetensors file") as garbage:
        HeadBundle.from_bytes(b"not a bundle at all", HEAD)
    with pytest.raises(CorruptionError, match="lacks embed_tokens") as partial:
        HeadBundle.from_bytes(save_tensors({"norm_weight": torch.ones(4), "lm_head": torch.ones(5, 4)}), HEAD)
    assert (garbage.value.kind, partial.value.kind) == ("head-corrupt", "head-corrupt")

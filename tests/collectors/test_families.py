"""Captured states and bundle logits equal transformers' own, for every family."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig, Phi3Config

from collectors.checks.capture import CheckSpec
from collectors.checks.crosscheck import CrossCheck
from collectors.engines import Captured, CaptureRequest, EngineOptions
from collectors.engines.hf import HfEngine
from collectors.targets.load import EngineTarget, LoadedTarget, load_target, verify_parts
from hiddenstore.errors import CaptureError, ConfigError
from hiddenstore.records import Sample, sample_id
from hiddenstore.targets import families
from hiddenstore.targets.families import FAMILIES, find_parts, on_top_of
from schemas.layers import to_convention
from tests.collectors.tiny import CONFIGS, LAYERS, VOCAB, save_target, tiny_target
from tests.collectors.tiny_families import MORE, REFUSED, TEXT, WITH_VISION, more_config

ALL_LAYERS = tuple(range(-1, LAYERS))
LENGTHS = (3, 21, 7, 30, 20, 12)


def requests(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[CaptureRequest]:
    generator = np.random.default_rng(seed)
    return [
        CaptureRequest(generator.integers(3, VOCAB, n).astype(np.int32), np.arange(0, n, 2, dtype=np.int32))
        for n in lengths
    ]


def capture(target: LoadedTarget, asked: list[CaptureRequest], batch_tokens: int = 64) -> Captured:
    return HfEngine(target, EngineOptions(ALL_LAYERS, batch_tokens)).capture(asked)


@torch.no_grad()
def reference(target: LoadedTarget, request: CaptureRequest) -> tuple[list[torch.Tensor], torch.Tensor]:
    """hidden_states and logits of an independent forward over one sample alone."""
    ids = torch.from_numpy(request.input_ids.astype(np.int64))[None]
    output = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = [layer[0] for layer in output.hidden_states]
    for layer in getattr(target.config, "cross_attention_layers", ()):
        # transformers lists the blocks that ran; text passes the others by.
        states.insert(layer + 1, states[layer])
    return states, output.logits[0]


def close(found: torch.Tensor, expected: torch.Tensor, rtol: float = 2**-7) -> bool:
    # One unit in the last place of bf16; batched and single fp32 forwards differ by far less.
    return torch.allclose(found.float(), expected.float(), rtol=rtol, atol=4e-4 * float(expected.abs().max()))


class _Before524(torch.nn.Module):
    def forward(self, past_key_values: object = None, use_cache: bool = False) -> object:
        return past_key_values if use_cache else None


class _Since524(torch.nn.Module):
    def forward(self, cache: object = None, use_cache: bool = False) -> object:
        return cache if use_cache else None


@pytest.mark.parametrize("model", [_Before524(), _Since524()], ids=lambda model: type(model).__name__)
def test_a_forward_takes_its_cache_by_the_name_that_its_transformers_gives_it(model: torch.nn.Module) -> None:
    assert model(**on_top_of("keys and values", model)) == "keys and values"


@pytest.mark.parametrize("family", CONFIGS)
def test_captured_states_and_bundle_logits_equal_transformers_own(family: str) -> None:
    require_equal_to_transformers(tiny_target(family))


@pytest.mark.parametrize("family", MORE)
def test_a_saved_target_of_a_larger_family_is_captured_equal_to_transformers(family: str, tmp_path: Path) -> None:
    target = load_target(str(save_target(tmp_path, family)), device="cpu")
    require_equal_to_transformers(target)
    ids = torch.from_numpy(requests((40,))[0].input_ids.astype(np.int64))[None]
    verify_parts(target.model, target.parts, ids, family)
    read = EngineTarget(target.folder, None)
    assert read.identity == target.identity
    assert read.target_files() == target.target_files(), "engines that load the weights themselves get the same head"


@pytest.mark.parametrize("family", [family for family, (name, _) in REFUSED.items() if hasattr(transformers, name)])
def test_a_family_that_computes_otherwise_is_refused_by_the_probe(family: str) -> None:
    def probe() -> None:
        target = tiny_target(family)
        verify_parts(target.model, target.parts, ids, family)

    ids = torch.from_numpy(requests((10,))[0].input_ids.astype(np.int64))[None]
    with pytest.raises(ConfigError, match=r"differ|embeddings|has no weight|tokens behind it") as caught:
        probe()
    assert caught.value.kind == "family-unsupported"


def require_equal_to_transformers(target: LoadedTarget) -> None:
    asked = requests()
    captured = capture(target, asked)
    start = final_start = 0
    for request in asked:
        n, rows = len(request.input_ids), torch.from_numpy(request.final_rows).long()
        expected, logits = reference(target, request)
        for slot, layer in enumerate(ALL_LAYERS[:-1]):
            (index,) = to_convention([layer], "hf")
            assert close(captured.aux[slot, start : start + n], expected[index]), f"layer {layer}"
        final = captured.final[final_start : final_start + len(rows)]
        assert torch.equal(captured.aux[-1, start : start + n][rows], final), "the last block's output is the final"
        normed = target.head.norm(final.float())
        assert close(normed, expected[-1][rows]), "norm of the final hidden is HF's last entry"
        own = target.head.logits(final.float())
        assert (own - logits[rows]).abs().max() < 0.03 * logits.std()
        start, final_start = start + n, final_start + len(rows)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_parts_of_every_family_pass_the_probe(family: str) -> None:
    target = tiny_target(family)
    ids = torch.from_numpy(requests((40,))[0].input_ids.astype(np.int64))[None]
    verify_parts(target.model, target.parts, ids, family)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_a_swapped_layer_or_a_missing_norm_would_be_seen(family: str) -> None:
    target = tiny_target(family)
    (request,) = requests((24,))
    captured = capture(target, [request])
    expected, logits = reference(target, request)
    for slot in range(len(ALL_LAYERS) - 1):
        assert not close(captured.aux[slot], expected[slot + 1]), "the neighbouring layer is another tensor"
    rows = torch.from_numpy(request.final_rows).long()
    as_post_norm = target.head.logits(captured.final.float(), norm_state="post_norm")
    assert (as_post_norm - logits[rows]).abs().max() > 0.5 * logits.std()
    assert not close(captured.final, expected[-1][rows]), "pre-norm is not HF's last entry"


@pytest.mark.parametrize("family", CONFIGS)
def test_batched_and_single_samples_have_equal_states(family: str) -> None:
    target = tiny_target(family)
    asked = requests()
    together = capture(target, asked, batch_tokens=10_000)
    start = 0
    for request in asked:
        alone = capture(target, [request])
        n = len(request.input_ids)
        assert close(together.aux[:, start : start + n], alone.aux)
        start += n


def spelled(rope: dict[str, object]) -> dict[str, object]:
    """A rotary embedding as the installed transformers spells it in a config."""
    if int(transformers.__version__.partition(".")[0]) >= 5:
        return {"rope_parameters": rope}
    own = {key: value for key, value in rope.items() if key in ("short_factor", "long_factor", "factor")}
    return {"rope_scaling": {"type": rope["rope_type"], **own}, "rope_theta": rope["rope_theta"]}


def long_rope_target(monkeypatch: pytest.MonkeyPatch) -> LoadedTarget:
    """A Phi-3 with other frequencies for samples of more than 16 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16,
    }
    config = CONFIGS["phi3"]().to_dict() | spelled(rope) | {"original_max_position_embeddings": 16}
    monkeypatch.setitem(CONFIGS, "phi3-long", lambda: Phi3Config(**config))
    return tiny_target("phi3-long")


def test_a_long_sample_leaves_the_rotary_embedding_of_the_short_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = long_rope_target(monkeypatch)
    short, long = requests((14, 18))
    alone = capture(target, [short])
    together = capture(target, [short, long], batch_tokens=10_000)
    assert close(together.aux[:, :14], alone.aux)
    monkeypatch.setattr("collectors.engines.hf.rope_boundary", lambda _config: None)
    assert not close(capture(target, [short, long], batch_tokens=10_000).aux[:, :14], alone.aux)


def test_a_sample_with_a_long_rotary_embedding_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    target = long_rope_target(monkeypatch)
    (long,) = requests((18,))
    mask = np.isin(np.arange(18), long.final_rows).astype(np.uint8)
    sample = Sample(sample_id(long.input_ids, mask), long.input_ids, mask, np.zeros((0, 3), np.int32))
    check = CrossCheck(target, CheckSpec(ALL_LAYERS, "pre_norm"), 1, prefix=8)
    assert check.unit([sample], [long], capture(target, [long])) == 1


def test_dynamic_rotary_embeddings_beyond_their_context_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    config = CONFIGS["llama"]().to_dict() | spelled(rope) | {"max_position_embeddings": 16}
    monkeypatch.setitem(CONFIGS, "dynamic", lambda: LlamaConfig(**config))
    target = tiny_target("dynamic")
    capture(target, requests((16,)))
    with pytest.raises(ConfigError, match="beyond 16") as caught:
        capture(target, requests((17,)))
    assert caught.value.kind == "rope-dynamic"


def test_capture_is_a_pure_function_of_the_unit() -> None:
    target = tiny_target("mistral")
    capture(target, requests(seed=5))
    first, second = capture(target, requests()), capture(target, requests())
    assert torch.equal(first.aux.view(torch.int16), second.aux.view(torch.int16))
    assert torch.equal(first.final.view(torch.int16), second.final.view(torch.int16))


def test_the_engine_names_the_models_own_next_tokens() -> None:
    target = tiny_target("qwen2")
    (request,) = requests((25,))
    captured = capture(target, [request])
    _, logits = reference(target, request)
    positions = torch.from_numpy(request.final_rows).long()[captured.next_rows]
    assert torch.equal(captured.next_tokens, logits[positions].argmax(-1))
    assert len(captured.next_tokens) > 0


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"norm_flavour": "rms"}),
        ("gemma3", {"embed_scale": 1.0}),
        ("gemma2", {"final_logit_softcap": None}),
        ("granite", {"logit_scale": 1.0}),
        ("llama", {"norm_eps": 0.5}),
    ],
)
def test_a_wrong_rule_of_the_head_fails_the_probe(family: str, change: dict[str, object]) -> None:
    target = tiny_target(family)
    head = replace(target.head, spec=target.head.spec.model_copy(update=change))
    ids = torch.from_numpy(requests((40,))[0].input_ids.astype(np.int64))[None]
    with pytest.raises(ConfigError, match=r"differ|embeddings") as caught:
        verify_parts(target.model, replace(target.parts, head=head), ids, family)
    assert caught.value.kind == "family-unsupported"


def test_swapped_blocks_fail_the_probe() -> None:
    target = tiny_target("llama")
    blocks = list(target.blocks)
    blocks[1], blocks[2] = blocks[2], blocks[1]
    ids = torch.from_numpy(requests((10,))[0].input_ids.astype(np.int64))[None]
    with pytest.raises(ConfigError, match="does not read the output of block"):
        verify_parts(target.model, replace(target.parts, blocks=blocks), ids, "llama")


def test_a_family_without_a_row_is_tried_as_llama_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", {})
    ids = torch.from_numpy(requests((10,))[0].input_ids.astype(np.int64))[None]
    target = tiny_target("qwen3")
    verify_parts(target.model, target.parts, ids, "qwen3")
    target = tiny_target("gemma3")
    with pytest.raises(ConfigError) as caught:
        verify_parts(target.model, target.parts, ids, "gemma3")
    assert caught.value.kind == "family-unsupported"


def test_nan_weights_fail_the_probe_and_name_the_layer() -> None:
    target = tiny_target("llama")
    target.blocks[2].mlp.down_proj.weight[0, 0] = float("nan")
    ids = torch.from_numpy(requests((10,))[0].input_ids.astype(np.int64))[None]
    with pytest.raises(CaptureError, match="layer 2") as caught:
        verify_parts(target.model, target.parts, ids, "llama")
    assert caught.value.kind == "non-finite"


def test_an_architecture_without_the_expected_modules_is_refused() -> None:
    target = tiny_target("llama")
    with pytest.raises(ConfigError, match="has no model"):
        find_parts(target.parts.backbone, target.config)


def test_capture_never_asks_for_all_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("gemma2")
    seen: list[dict[str, object]] = []
    target.parts.backbone.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(dict(kwargs)), with_kwargs=True
    )
    capture(target, requests())
    assert seen
    for kwargs in seen:
        assert not kwargs.get("output_hidden_states")
        assert kwargs["use_cache"] is False
    hooks = [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in target.blocks]
    assert hooks == [0] * LAYERS, "hooks live only while a unit runs"


def test_only_the_asked_blocks_carry_a_hook() -> None:
    target = tiny_target("llama")
    counts: list[list[int]] = []
    target.parts.backbone.register_forward_pre_hook(
        lambda _module, _args: counts.append([len(block._forward_hooks) for block in target.blocks])
    )
    HfEngine(target, EngineOptions((1, 3), 64)).capture(requests((8,)))
    assert counts == [[0, 1, 0, 1]]


def test_every_family_of_the_table_has_a_tiny_model_here() -> None:
    configs = [*(factory() for factory in CONFIGS.values()), *map(more_config, MORE)]
    tested = {config.get_text_config(decoder=True).model_type for config in configs}
    if len(MORE) == len(TEXT) + len(WITH_VISION):
        assert set(FAMILIES) <= tested

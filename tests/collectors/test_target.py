"""How a target is opened and loaded: its head without its blocks, several devices, fp8, its own code."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from collectors.checks import reference
from collectors.checks.reference import Check, cpu_seconds, open_reference
from collectors.engines import CaptureRequest, EngineOptions, open_engine
from collectors.engines.hf import HfEngine
from collectors.targets.load import EngineTarget, LoadOptions, load_target, load_weights, read_head
from collectors.tokenize.prepare import PrepareOptions, prepare
from hiddenstore.errors import ConfigError, Kind, StorageError
from hiddenstore.process import Rank
from hiddenstore.targets import matmul
from hiddenstore.targets.checkpoint import weights_bytes
from hiddenstore.targets.folder import open_target
from tests.collectors.tiny import CONFIGS, VOCAB, save_target
from tests.hiddenstore.hub_double import Repo, in_place_of_the_hub

AUX = (-1, 1, 3)
needs_transformers_5 = pytest.mark.skipif(
    transformers.__version__.startswith("4."),
    reason="4.x reads fp8 on a GPU only, and another layout of the hub's cache",
)
COMMIT = "a" * 40
CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def engine_target(folder: Path, dtype: str | None = None) -> EngineTarget:
    return EngineTarget(open_target(str(folder)), dtype)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_head_read_from_files_is_the_loaded_models(family: str, tmp_path: Path) -> None:
    read, loaded = engine_target(save_target(tmp_path, family)), load_target(str(tmp_path))
    assert read.identity == loaded.identity
    assert read.head.spec == loaded.head.spec
    assert read.target_files() == loaded.target_files()


@pytest.mark.parametrize(("asked", "found"), [(None, "float32"), ("bf16", "bfloat16")])
def test_the_head_has_the_dtype_asked_for(llama: Path, asked: str | None, found: str) -> None:
    read, loaded = engine_target(llama, asked), load_target(str(llama), asked, device="cpu")
    assert read.identity.dtype == loaded.identity.dtype == found
    assert torch.equal(read.head.embed_tokens, loaded.head.embed_tokens)


def test_the_head_of_a_checkpoint_in_several_files_and_one_level_deeper(llama: Path, tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {}
    for index, (name, tensor) in enumerate(weights.items()):
        file = f"model-{index % 3}.safetensors"
        places[f"language_model.{name}"] = file
        kept = load_file(folder / file) if (folder / file).exists() else {}
        save_file(kept | {f"language_model.{name}": tensor}, folder / file)
    index_file = {"metadata": {"total_size": 123}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    found, expected = read_head(open_target(str(folder))), read_head(open_target(str(llama)))
    assert torch.equal(found.output_weight, expected.output_weight)
    assert torch.equal(found.norm_weight, expected.norm_weight)
    assert weights_bytes(open_target(str(folder))) == 123


def test_a_checkpoint_without_safetensors_or_with_a_packed_head_is_named(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds lm_head\.weight as float8_e4m3fn \[96, 64\], expected bf16"):
        read_head(open_target(str(folder)))
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no tensor lm_head\.weight"):
        read_head(open_target(str(folder)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        read_head(open_target(str(folder)))
    assert caught.value.kind == "target-incomplete"


def states(folder: Path, options: LoadOptions) -> torch.Tensor:
    engine = HfEngine(load_weights(open_target(str(folder)), options), EngineOptions(AUX, 64))
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (5, 17, 30)]
    return engine.capture([CaptureRequest(ids, np.array([len(ids) - 1], np.int32)) for ids in rows]).aux.float()


@pytest.mark.parametrize("options", [LoadOptions(device_map="auto"), LoadOptions(attention="eager")])
def test_other_ways_to_run_it_give_the_same_states(llama: Path, options: LoadOptions) -> None:
    torch.testing.assert_close(states(llama, options), states(llama, LoadOptions()), rtol=2**-7, atol=1e-3)


def test_the_engine_record_says_how_attention_ran(llama: Path) -> None:
    eager = HfEngine(engine_target(llama), EngineOptions(AUX, 64, extra={"attention": "eager"}))
    assert eager.describe().settings == {"attention": "eager", "dtype": "float32"}
    assert HfEngine(engine_target(llama), EngineOptions(AUX, 64)).describe().settings["attention"] == "sdpa"


@pytest.mark.parametrize(
    "options",
    [
        {"extra": {"attention": "flash"}},
        {"extra": {"atention": "sdpa"}},
        {"server": "http://127.0.0.1:8000"},
        {"tensor_parallel": 2},
        {"scratch": Path("/dev/shm")},
    ],
)
def test_settings_the_engine_does_not_have_are_refused(llama: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine("hf", engine_target(llama), EngineOptions(AUX, 64, **options))  # type: ignore[arg-type]
    assert caught.value.kind in ("option-invalid", "engine-arg")


@needs_transformers_5
def test_fp8_blocks_are_loaded_as_the_checkpoint_says(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "fp8", dtype=torch.bfloat16)
    weights, plain, side = load_file(folder / "model.safetensors"), {}, 32
    for name, tensor in list(weights.items()):
        plain[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        blocks = tensor.float().unflatten(0, (-1, side)).unflatten(2, (-1, side))
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        weights[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
        weights[f"{name}_scale_inv"] = scale
        restored = weights[name].float().unflatten(0, (-1, side)).unflatten(2, (-1, side)) * scale[:, None, :, None]
        plain[name] = restored.flatten(2, 3).flatten(0, 1).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "weight_block_size": [side, side], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    expected = save_target(tmp_path / "plain", dtype=torch.bfloat16)
    save_file(plain, expected / "model.safetensors", metadata={"format": "pt"})
    found = states(folder, LoadOptions(device="cpu"))
    torch.testing.assert_close(found, states(expected, LoadOptions(device="cpu")), rtol=2**-6, atol=2e-2)
    assert engine_target(folder).identity.weights_sha256 == engine_target(expected).identity.weights_sha256


@needs_transformers_5
@pytest.mark.parametrize("has_gpu", [False, True])
def test_an_fp8_matrix_that_ends_inside_a_block_is_refused_where_it_would_be_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    folder = save_target(tmp_path, dtype=torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    packed = {name: x.to(torch.float8_e4m3fn) if name.endswith("_proj.weight") else x for name, x in weights.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 40], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ConfigError) as caught:
        load_weights(open_target(str(folder)), LoadOptions(device="cpu"))
    assert caught.value.kind == "quantisation-unsupported"
    assert "model.layers.0.mlp.down_proj.weight [64, 96] ends inside its blocks of [128, 40]" in caught.value.message


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts [E, in, out] as gpt-oss stores them: nibbles [E, out, in/32, 16], exponents [E, out, in/32]; and what
    they stand for, bf16 [E, in, out]."""
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scale = torch.exp2(exponents)
    codes = ((groups / scale[..., None])[..., None] - FP4).abs().argmin(-1)
    restored = (FP4[codes] * scale[..., None]).flatten(-2).transpose(1, 2)
    nibbles = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return nibbles, (exponents + 127).to(torch.uint8), restored.to(torch.bfloat16)


@pytest.fixture
def in_mxfp4(tmp_path: Path) -> tuple[Path, Path]:
    """A gpt-oss with its experts in mxfp4, and one with what they stand for in bf16."""
    folder, plain = (save_target(tmp_path / name, "gpt-oss", dtype=torch.bfloat16) for name in ("fp4", "plain"))
    weights, packed = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(weights.items()):
        if name.endswith(("experts.down_proj", "experts.gate_up_proj")):
            packed[f"{name}_blocks"], packed[f"{name}_scales"], restored = mxfp4(tensor)
            weights[name] = restored.contiguous()
        else:
            packed[name] = tensor
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = [f"model.{name}" for name in ("layers.*.self_attn", "layers.*.mlp.router", "embed_tokens")]
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folder, plain


@needs_transformers_5
def test_the_experts_of_gpt_oss_in_mxfp4_are_loaded_as_the_checkpoint_says(in_mxfp4: tuple[Path, Path]) -> None:
    folder, plain = in_mxfp4
    on_cpu = LoadOptions(device="cpu")
    assert torch.equal(states(folder, on_cpu), states(plain, on_cpu))
    assert engine_target(folder).identity.checkpoint_sha256 != engine_target(plain).identity.checkpoint_sha256


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, org/own, whose code is its own; the folder of its only commit."""
    import huggingface_hub.constants as constants
    import transformers.dynamic_module_utils as modules

    commit = tmp_path / "hub" / "models--org--own" / "snapshots" / COMMIT
    save_target(commit)
    config = json.loads((commit / "config.json").read_text())
    named = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (commit / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": named}))
    (commit / "configuration_own.py").write_text(CONFIGURATION)
    (commit / "modeling_own.py").write_text(MODELING)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return commit


@needs_transformers_5
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(httpx2|huggingface_hub).*")
def test_a_private_target_of_the_hub_is_opened_with_the_token_of_the_environment(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with in_place_of_the_hub(monkeypatch) as hub:
        hub.repos["org/private"] = Repo(True, [{path.name: (path.read_bytes(), False) for path in llama.iterdir()}])
        opened = load_target("org/private", device="cpu").identity
        assert (opened.name, opened.revision) == ("org/private", hub.repos["org/private"].sha("main"))
        assert opened.checkpoint_sha256 == load_target(str(llama), device="cpu").identity.checkpoint_sha256
        monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
        with pytest.raises(ConfigError) as caught:
            open_target("org/another")
    assert caught.value.kind == "target-unreadable"
    assert "hf_of_somebody_else" not in f"{caught.value}{caught.value.hint}"


@needs_transformers_5
def test_a_targets_own_code_runs_at_a_pinned_commit_only(hub: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        open_target("org/own", COMMIT)
    for revision in (None, "main", COMMIT[:12]):
        with pytest.raises(ConfigError, match="may be other code tomorrow") as caught:
            open_target("org/own", revision, trust_remote_code=True)
        assert caught.value.kind == "code-unpinned"
    folder = open_target("org/own", COMMIT, trust_remote_code=True)
    loaded = load_weights(folder, LoadOptions(device="cpu"))
    assert type(loaded.model).__name__ == "OwnForCausalLM"
    assert EngineTarget(folder, None).identity == loaded.identity


@needs_transformers_5
def test_conversations_are_prepared_with_a_target_of_own_code_as_capture_reads_it(hub: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text(json.dumps({"messages": messages}))
    with pytest.raises(ConfigError, match="cannot read the config"):
        prepare([str(chats)], tmp_path / "data", "org/own", PrepareOptions(revision=COMMIT))
    options = PrepareOptions(revision=COMMIT, trust_remote_code=True, loss_on="all")
    document = prepare([str(chats)], tmp_path / "data", "org/own", options)
    assert document.tokenizer_sha256 == open_target("org/own", COMMIT, None, True).tokenizer_sha256


@needs_transformers_5
def test_the_code_of_a_folder_is_a_part_of_the_target(hub: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        open_target(str(hub))
    folder = open_target(str(hub), trust_remote_code=True)
    assert folder.config_sha256 == open_target("org/own", COMMIT, None, True).config_sha256, "as the hub's own commit"
    loaded = load_weights(folder, LoadOptions(device="cpu"))
    assert type(loaded.model).__name__ == "OwnForCausalLM"
    assert EngineTarget(folder, None).identity == loaded.identity
    code = hub / "configuration_own.py"
    code.write_text(code.read_text() + "# another line\n")
    assert open_target(str(hub), trust_remote_code=True).config_sha256 != folder.config_sha256
    code.unlink()
    with pytest.raises(ConfigError, match=r"its own code in configuration_own\.py, which it lacks") as caught:
        open_target(str(hub), trust_remote_code=True)
    assert caught.value.kind == "target-incomplete"


@needs_transformers_5
def test_code_of_another_repository_is_refused(hub: Path) -> None:
    config = json.loads((hub / "config.json").read_text())
    config["auto_map"]["AutoConfig"] = "elsewhere/code--configuration_own.OwnConfig"
    (hub / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="code of another repository") as caught:
        open_target("org/own", COMMIT, trust_remote_code=True)
    assert caught.value.kind == "code-unpinned"


def test_the_copy_to_compare_with_is_loaded_where_it_fits(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, options, first = engine_target(llama), LoadOptions(), Rank()
    found = open_reference(Check("auto"), target, options, first)
    assert found.target is not None
    assert found.compares
    assert open_reference(Check("auto"), target, options, Rank(1, 2)).target is None
    assert open_reference(Check("none"), target, options, first).target is None
    assert open_reference(Check("hf"), target, options, Rank(1, 2)).target is not None
    loaded = found.target
    assert open_reference(Check("auto"), loaded, options, first) == replace(found, compares=False, explained=None)
    monkeypatch.setattr("collectors.checks.reference.free_bytes", lambda: 1000)
    too_big = open_reference(Check("auto"), target, options, first)
    assert too_big.target is None
    assert "--check hf compares all the same" in str(too_big.explained)


def test_what_comparing_costs_is_said_before_the_copy_is_loaded_and_too_much_is_left_out(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    target = engine_target(llama)
    monkeypatch.setattr(reference, "load_weights", lambda *words: said.append("loading") or load_weights(*words))

    def opened(mode: Literal["auto", "hf"], minutes: float) -> list[str]:
        """What is said where this CPU takes so long for the profile and for 512 tokens of four samples."""
        operations = 2 * (weights_bytes(target.folder) or 0) / target.head.norm_weight.dtype.itemsize * 5 * 512
        monkeypatch.setattr(reference, "_operations_per_s", lambda _dtype: operations / (60 * minutes))
        said.clear()
        open_reference(Check(mode), target, LoadOptions(), Rank(), 10_000, said.append)
        return said

    line, loading = opened("auto", 3)
    assert loading == "loading"
    assert "the first 512 tokens of 4 samples" in line
    assert "about 3 min on the CPU at first, while the engine waits" in line
    assert "min on the CPU" not in opened("auto", 0.01)[0]
    (line,) = opened("auto", 20)
    assert "it would take about 20 min on this CPU" in line
    assert "--check hf compares all the same" in line
    line, loading = opened("hf", 1)
    assert (loading, "about 16 min on the CPU" in line) == ("loading", True)


def test_comparing_is_timed_by_products_as_the_copy_computes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widened = []
    monkeypatch.setattr(matmul, "HAS_BF16", False)
    monkeypatch.setattr(matmul.WideLinear, "forward", lambda _layer, rows: widened.append(rows.dtype))
    assert cpu_seconds(engine_target(save_target(tmp_path, dtype=torch.bfloat16)), 10_000) > 0
    assert set(widened) == {torch.bfloat16}


@needs_transformers_5
def test_a_copy_unpacked_on_the_cpu_counts_as_large_as_it_gets(
    in_mxfp4: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plain = map(engine_target, in_mxfp4)
    found = open_reference(Check("auto"), packed, LoadOptions(), Rank()).target
    assert found is not None
    held = sum(weight.nbytes for weight in found.model.parameters())
    assert held > 1.5 * (weights_bytes(packed.folder) or 0)
    for free, is_loaded in ((2 * held, True), (2 * held - 2, False)):
        monkeypatch.setattr("collectors.checks.reference.free_bytes", lambda free=free: free)
        assert (open_reference(Check("auto"), packed, LoadOptions(), Rank()).target is not None) == is_loaded
    monkeypatch.setattr(reference, "_operations_per_s", lambda _dtype: 1e9)
    assert cpu_seconds(packed, 1000) == cpu_seconds(plain, 1000)


def test_a_mixture_of_experts_is_timed_by_the_weights_that_a_token_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four experts; attention, router, shared expert, embeddings and head are everybody's."""
    monkeypatch.setattr(reference, "_operations_per_s", lambda _dtype: 2e9)
    mixed = engine_target(save_target(tmp_path, "qwen2-moe"))
    weights = load_file(tmp_path / "model.safetensors")
    routed = sum(weight.numel() for name, weight in weights.items() if ".experts." in name)
    every = sum(weight.numel() for weight in weights.values())
    assert routed > 0
    assert cpu_seconds(mixed, 10**9) == every - routed / 2


def test_a_copy_that_cannot_be_loaded_is_no_reason_to_stop_unless_it_was_asked_for(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> None:
        raise ConfigError("no kernel for it", kind=Kind.TARGET_UNREADABLE)

    def full(*_words: object) -> None:
        raise StorageError("no kernel for it: the GPU is full", kind=Kind.OUT_OF_MEMORY)

    for failing, kind in ((refuse, ConfigError), (full, StorageError)):
        monkeypatch.setattr("collectors.checks.reference.load_weights", failing)
        found = open_reference(Check("auto"), engine_target(llama), LoadOptions(), Rank())
        assert found.target is None
        assert "no kernel for it" in str(found.explained)
        with pytest.raises(kind, match="no kernel for it"):
            open_reference(Check("hf"), engine_target(llama), LoadOptions(), Rank())


def test_weights_that_no_device_holds_are_no_damage_of_the_checkpoint(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_words: object, **_more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", full)
    with pytest.raises(StorageError, match=r"weights of target .* do not fit into the memory of cpu: CUDA") as caught:
        load_target(str(llama), device="cpu")
    assert caught.value.kind == "out-of-memory"
    assert "--device-map auto" in str(caught.value.hint)

"""Checkpoints that are not what their config says: tensors missing or left over, quantised otherwise, damaged files."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from collectors.targets.load import EngineTarget, LoadOptions, load_target, load_weights
from hiddenstore.errors import ConfigError
from hiddenstore.targets.checkpoint import weights_bytes
from hiddenstore.targets.folder import TargetFolder, open_target
from hiddenstore.targets.rope import require_rope_read
from tests.collectors.tiny import CONFIGS, WIDTH, save_target

CPU = LoadOptions(device="cpu")
WEIGHTS = "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def configure(folder: Path, **members: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | members))


def refused(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_weights(open_target(str(folder)), CPU)
    return caught.value


@pytest.mark.parametrize("family", CONFIGS)
def test_a6_a_whole_checkpoint_of_every_family_loads_tied_or_not(family: str, tmp_path: Path) -> None:
    assert load_target(str(save_target(tmp_path, family)), device="cpu").blocks


def test_a6_a_checkpoint_without_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    rewrite(folder, lambda weights: weights.pop("model.layers.2.mlp.down_proj.weight") is None)
    error = refused(folder)
    assert error.kind == "target-incomplete"
    assert "model.layers.2.mlp.down_proj.weight" in error.message


def test_a6_a_checkpoint_with_a_block_left_over_is_refused_by_its_tensors(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    configure(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    error = refused(folder)
    assert error.kind == "target-incomplete"
    assert "model.layers.3.input_layernorm.weight" in error.message
    assert error.hint is not None


def test_a6_a_tensor_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(WIDTH + 1)}))
    assert "model.norm.weight" in refused(folder).message


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
        ("vision_tower.patches.weight", {}),
        ("model.visual.patches.weight", {}),
        ("mtp.fc.weight", {}),
        ("model.layers.4.eh_proj.weight", {"num_nextn_predict_layers": 1}),
        ("model.layers.0.self_attn.k_scale", {}),
    ],
)
def test_a6_tensors_that_no_decoder_block_reads_are_no_alarm(
    name: str, members: dict[str, int], tmp_path: Path
) -> None:
    folder = save_target(tmp_path)
    configure(folder, **members)
    rewrite(folder, lambda weights: weights.update({name: torch.ones(4)}))
    assert load_weights(open_target(str(folder)), CPU).blocks


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_a7_a_quantisation_that_transformers_does_not_apply_is_refused_by_name(
    place: str, algorithm: str, tmp_path: Path
) -> None:
    folder = save_target(tmp_path)
    if place == "config.json":
        configure(folder, quantization_config={"quant_method": "modelopt", "quant_algo": algorithm})
    else:
        document = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        (folder / place).write_text(json.dumps(document))
    error = refused(folder)
    assert error.kind == "quantisation-unsupported"
    assert f"modelopt {algorithm}" in error.message
    assert "--engine vllm" in str(error.hint)
    assert "--engine trtllm" in str(error.hint)


@pytest.mark.parametrize(
    ("method", "package", "members"),
    [
        ("awq", "AWQ quantized model requires", {"bits": 4, "group_size": 128}),
        ("gptq", "optimum", {"bits": 4, "group_size": 128}),
        ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True}),
        ("compressed-tensors", "compressed-tensors", {"format": "pack-quantized", "config_groups": {}}),
    ],
)
def test_a_quantisation_whose_package_is_not_here_is_refused_before_weights_are_read(
    method: str, package: str, members: dict[str, object], tmp_path: Path
) -> None:
    folder = save_target(tmp_path)
    configure(folder, quantization_config={"quant_method": method, **members})
    (folder / WEIGHTS).unlink()
    error = refused(folder)
    assert error.kind == "quantisation-unsupported"
    assert f"({method})" in error.message
    assert package in error.message
    assert "--engine vllm" in str(error.hint)


def test_a7_a_quantisation_without_a_method_is_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    configure(folder, quantization_config={"bits": 4})
    assert refused(folder).kind == "quantisation-unsupported"


READERS: dict[str, Callable[[TargetFolder], object]] = {
    "weights": lambda folder: load_weights(folder, CPU),
    "head": lambda folder: EngineTarget(folder, None).head,
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n"
DAMAGE = {
    "a Git LFS pointer": lambda _data: POINTER,
    "is empty": lambda _data: b"",
    "of which it has": lambda data: data[: len(data) // 2],
    "no safetensors header": lambda data: b"\xff" * 8 + data[8:],
    "a pickle": lambda _data: b"\x80\x02}q\x00.",
    "a torch file": lambda _data: b"PK\x03\x04" + bytes(60),
    "a web page": lambda _data: b"<!DOCTYPE html><html></html>",
}


@pytest.mark.parametrize("words", DAMAGE)
@pytest.mark.parametrize("read", READERS)
def test_a13_damaged_weights_are_named_with_the_way_to_fetch_them_again(words: str, read: str, tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    path = folder / WEIGHTS
    path.write_bytes(DAMAGE[words](path.read_bytes()))
    with pytest.raises(ConfigError) as caught:
        READERS[read](open_target(str(folder)))
    assert caught.value.kind == "target-damaged"
    assert WEIGHTS in caught.value.message
    assert words in caught.value.message
    assert "hf download" in str(caught.value.hint)


@pytest.mark.parametrize("data", [POINTER, b"", b"[]", b'{"weight_map": 3}'])
def test_a13_a_damaged_index_is_named_too(data: bytes, tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    (folder / "model.safetensors.index.json").write_bytes(data)
    (folder / WEIGHTS).unlink()
    for read in (
        lambda target: EngineTarget(target, None).head,
        weights_bytes,
        lambda target: load_weights(target, CPU),
    ):
        with pytest.raises(ConfigError) as caught:
            read(open_target(str(folder)))
        assert caught.value.kind == "target-damaged"
        assert "model.safetensors.index.json" in caught.value.message


def test_a13_a_file_that_the_index_names_and_nobody_fetched_is_named(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    names = dict.fromkeys(load_file(folder / WEIGHTS), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / WEIGHTS).unlink()
    error = refused(folder)
    assert error.kind == "target-damaged"
    assert "model-00001-of-00001.safetensors" in error.message


def test_a13_a_damaged_torch_file_is_named(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(60))
    error = refused(folder)
    assert error.kind == "target-damaged"
    assert "pytorch_model.bin" in error.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("data", "words"), [(POINTER, "a Git LFS pointer"), (b"", "empty")])
def test_a13_a_damaged_config_or_tokenizer_is_named(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{name} is {words}"):
        open_target(str(folder))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "members",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"vocab_size": 0},
        {"vocab_size": "x"},
        {"num_hidden_layers": "x"},
        {"hidden_act": "nope"},
        {"rope_parameters": "x", "rope_scaling": "x"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}, "rope_theta": "x"},
        {"quantization_config": "x"},
    ],
    ids=str,
)
def test_a18_a_config_that_no_model_can_be_made_of_is_a_named_error(
    members: dict[str, object], read: str, tmp_path: Path
) -> None:
    folder = save_target(tmp_path)
    configure(folder, **members)
    with pytest.raises(ConfigError, match=r"target|checkpoint"):
        READERS[read](open_target(str(folder)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ],
    ids=str,
)
def test_rotary_parameters_that_transformers_before_5_passes_over_are_refused(
    rope: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, before_5 = {"rope_parameters": rope}, SimpleNamespace(rope_theta=1e4, rope_scaling=None)
    monkeypatch.setattr("transformers.__version__", "5.0.0")
    require_rope_read("t", raw, before_5)
    monkeypatch.setattr("transformers.__version__", "4.57.3")
    with pytest.raises(ConfigError, match=r"^target t has rope_parameters, which transformers 4\.57\.3 does not read$"):
        require_rope_read("t", raw, before_5)
    require_rope_read("t", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, before_5)
    read = SimpleNamespace(rope_theta=rope.get("rope_theta"), rope_scaling=rope)
    require_rope_read("t", raw, read)


@pytest.mark.parametrize("is_said", [True, False], ids=["HF_HUB_OFFLINE", "no network"])
def test_a_hub_id_without_a_network_is_refused_in_one_go_before_transformers_is_asked(
    is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    from huggingface_hub import constants

    def unknown_host(*_arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_said)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("hiddenstore.targets.folder.getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    with pytest.raises(ConfigError, match="is no folder here nor in the hub's cache") as caught:
        open_target("org/model")
    assert caught.value.kind == "target-unreadable"
    assert ("HF_HUB_OFFLINE is set" if is_said else "cannot be reached") in caught.value.message
    assert "hf download org/model" in (caught.value.hint or "")


def test_a_chat_template_with_half_a_character_is_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages }} \ud800"}))
    error = refused(folder)
    assert error.kind == "target-unreadable"
    assert "'\\ud800' is half a character" in error.message

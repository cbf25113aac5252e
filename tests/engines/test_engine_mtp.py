"""A target's own MTP layer in a real vLLM: trained on here, it drafts there as it does here, and a mistake shows.

The target is the bundled one as MiMo spells it (Qwen2's layers with biases of zero), so its greedy answers are those of
the bundled one; the MTP layer that it gets is its own last layer behind a random projection.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from agreement import agreement, assert_agrees, assert_caught, spoiled
from engine_world import EngineWorld, hiddenstore
from filelock import FileLock
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]

PREFIX = "model.mtp_layers.0."


def save_as_mimo(source: str, folder: Path) -> str:
    """The bundled target with biases and an MTP layer; returns the folder as str."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace("weight", "bias")] = weight.new_zeros(len(weight))
    width, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    layer = {name.removeprefix(last): weight for name, weight in tensors.items() if name.startswith(last)}
    torch.manual_seed(0)
    layer["input_proj.weight"] = torch.randn(width, 2 * width, dtype=tensors[f"{last}mlp.up_proj.weight"].dtype) * 0.05
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer[f"{norm}.weight"] = tensors["model.norm.weight"].clone()
    tensors |= {PREFIX + name: weight.clone() for name, weight in layer.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def mimo_world(engine_world: EngineWorld) -> EngineWorld:
    root = engine_world.root / "mimo"
    world = EngineWorld(root, str(root / "target"))
    root.mkdir(exist_ok=True)
    with FileLock(f"{root}/mimo.lock"):
        if not Path(world.store).exists():
            save_as_mimo(engine_world.target, root / "target")
            for file in ("answers.jsonl", "greedy.json"):
                shutil.copy(engine_world.root / file, root / file)
            hiddenstore("prepare", world.questions, "-o", str(root / "data"), "--target", world.target, "--val", "0")
            how = ("--layers", "eagle1", "--final", "all", "--dtype", "fp32", "--recipe", "lossless", "--engine", "hf")
            hiddenstore("collect", str(root / "data"), "-o", world.store, "--target", world.target, *how)
    return world


def test_a_tuned_mtp_layer_drafts_as_decode_foretells(mimo_world, record_property):
    run = mimo_world.trained("mtp", "mtp", "--target", mimo_world.target)
    (row,) = agreement(mimo_world, run, "mtp-tuned", (3,))
    record_property("agreement", row)
    assert_agrees(row)

    def swap(tensors):
        name = f"{PREFIX}input_proj.weight"
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)

    folder = spoiled(mimo_world.exported(run), "halves-swapped", tensors=swap)
    (mistaken,) = agreement(mimo_world, run, "mtp-tuned", (3,), folder)
    record_property("caught", mistaken)
    assert_caught(mistaken)

    (before,) = agreement(mimo_world, f"{run}/start", "mtp-tuned", (3,))
    assert before["identical"] == before["answers"]
    assert before["engine"] < row["engine"]

"""LoRA adapters: merged as peft computes them, a target of their own wherever targets are compared, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from collectors.engines import EngineOptions, open_engine
from collectors.regenerate.in_process import open_in_process
from collectors.regenerate.options import RegenerateOptions, require_possible
from collectors.targets.load import EngineTarget, LoadOptions, load_target, load_weights
from hiddenstore.errors import ConfigError
from hiddenstore.targets.folder import open_adapter, open_target
from tests.collectors.tiny import WIDTH, save_target
from tests.tiny_world import LAYERS, TRAIN, World, error_of, run

RANK = 3
MODULE = "model.layers.1.mlp.down_proj"
WIDE = {"model.layers.0.self_attn.q_proj": (WIDTH, WIDTH), MODULE: (WIDTH, 96)}


def save_adapter(folder: Path, seed: int = 0, tensors: dict[str, torch.Tensor] | None = None, **settings: Any) -> Path:
    """A random adapter of two modules as peft 0.21 saves one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {} if tensors is None else dict(tensors)
    for module, (wide, inner) in WIDE.items() if tensors is None else ():
        prefix = f"base_model.model.{module}.lora_"
        weights[f"{prefix}A.weight"] = torch.randn(RANK, inner, generator=generator) * 0.3
        weights[f"{prefix}B.weight"] = torch.randn(wide, RANK, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "use_rslora": False, "use_dora": False}
    known |= {"base_model_name_or_path": "org/base", "target_modules": ["q_proj", "down_proj"], "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(known | settings))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two adapters whose folders have one name."""
    root = tmp_path_factory.mktemp("adapters")
    return [str(save_adapter(root / str(seed) / "lora", seed)) for seed in (0, 1)]


def loaded(world: World, adapter: Path) -> Any:
    folder = open_target(world / "target", adapter=str(adapter))
    return load_weights(folder, LoadOptions(device="cpu")).model


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, dict.fromkeys(WIDE, 6 / RANK)),
        ({"use_rslora": True}, dict.fromkeys(WIDE, 6 / RANK**0.5)),
        ({"alpha_pattern": {"mlp.down_proj": 12}}, {MODULE: 12 / RANK, "model.layers.0.self_attn.q_proj": 6 / RANK}),
    ],
)
def test_the_forward_of_a_merged_target_is_that_of_the_pairs_beside_their_weights(
    settings: dict[str, Any], scales: dict[str, float], world: World, tmp_path: Path
) -> None:
    adapter = open_adapter(str(save_adapter(tmp_path / "a", **settings)))
    beside = load_target(world / "target", device="cpu").model
    for module, scale in scales.items():
        up, down, _ = adapter.pairs[module]

        def add(_module: Any, args: Any, output: torch.Tensor, up: Any = up, down: Any = down, s: Any = scale) -> Any:
            return output + s * (args[0] @ down.T @ up.T)

        beside.get_submodule(module).register_forward_hook(add)
    ids = torch.arange(3, 40)[None]
    merged = loaded(world, tmp_path / "a")
    torch.testing.assert_close(merged(ids).logits, beside(ids).logits, rtol=1e-4, atol=1e-3)
    plain = load_target(world / "target", device="cpu").model(ids).logits
    assert (merged(ids).logits - plain).abs().max() > 0.5


def test_an_adapter_is_a_target_of_its_own_from_collect_to_decode(
    world: World, adapters: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store, trained, base = str(tmp_path / "store"), str(tmp_path / "run"), world / "target"
    collect = ("collect", world / "data", "-o", store, "--target", base, "--layers", LAYERS, "--adapter")
    assert run(*collect, adapters[0], "--check", "hf") == 0
    target = json.loads((Path(store) / "store.json").read_text())["capture"]["target"]
    assert target["name"] == "target+lora"
    capsys.readouterr()
    assert run(*collect, adapters[1]) == 6
    assert "config_sha256" in error_of(capsys.readouterr().err)[0]
    assert run(*collect[:-1]) == 6
    assert run("verify", store, "--full") == 0
    assert run("train", store, "-o", trained, *TRAIN) == 0
    assert run("eval", trained, store) == 0
    assert run("eval", trained, world / "store") == 4, "the store of the base is another target's"
    decode = ("decode", trained, "--target", base, "--prompts", store, "-n", "2", "--max-new-tokens", "8")
    capsys.readouterr()
    assert run(*decode) == 4
    assert error_of(capsys.readouterr().err)[1] == "--target TARGET --adapter DIR: the one called target+lora"
    assert run(*decode, "--adapter", adapters[0], "--json") == 0
    assert json.loads(capsys.readouterr().out)["target"] == "target+lora"
    costs = ("eval", trained, store, "--costs", "--target", base)
    assert run(*costs) == 4
    capsys.readouterr()
    assert run(*costs, "--adapter", adapters[0]) == 0
    said = capsys.readouterr()
    assert "of plain decoding on this machine" in said.out
    assert f"hiddenstore decode {trained} --target TARGET --adapter DIR --prompts {store}" in said.err
    assert run("eval", "--engine", "vllm", "--server", "http://127.0.0.1:1", "--adapter", adapters[0]) == 2
    assert "--adapter: --engine and --serve measure servers" in capsys.readouterr().err


def test_a_plus_in_the_name_of_a_folder_begins_no_adapter(tmp_path: Path) -> None:
    assert open_target(save_target(tmp_path / "my+target")).label == "my-target"


def test_states_of_an_adapter_are_not_rebuilt_with_the_blocks_of_the_base(
    world: World, adapters: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("collect", world / "data", "-o", str(tmp_path / "store"), "--target", world / "target", "--layers", LAYERS)
    assert run(*words, "--adapter", adapters[0], "--recipe", "rebuilt") == 2
    message, fix = error_of(capsys.readouterr().err)
    assert "the adapter lora is not in its checkpoint" in message
    assert fix.startswith("--recipe compact")
    assert not (tmp_path / "store").exists()


def test_answers_of_an_adapter_are_told_from_those_of_another(world: World, adapters: list[str]) -> None:
    labels = [
        open_in_process(RegenerateOptions((), "out", target=world / "target", adapter=adapter))[0]
        for adapter in (None, adapters[0], adapters[1])
    ]
    assert labels[0] == "target"
    assert labels[1].startswith("target+lora@")
    assert labels[1] != labels[2]


def test_an_adapter_beside_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="the adapter it was started with") as caught:
        require_possible(RegenerateOptions((), "out", server="http://127.0.0.1:1", model="m", adapter="lora"))
    assert caught.value.kind == "option-invalid"


PAIR = {f"base_model.model.{MODULE}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
REFUSED: dict[str, Callable[[Path], Path]] = {
    "of type IA3": lambda folder: save_adapter(folder, peft_type="IA3"),
    "use_dora": lambda folder: save_adapter(folder, use_dora=True),
    "modules_to_save": lambda folder: save_adapter(folder, modules_to_save=["lm_head"]),
    "bias=all": lambda folder: save_adapter(folder, bias="all"),
    "pissa_niter_4": lambda folder: save_adapter(folder, init_lora_weights="pissa_niter_4"),
    "lora_embedding_A": lambda folder: save_adapter(
        folder, tensors={**PAIR, "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}
    ),
    "no fitting A and B": lambda folder: save_adapter(folder, tensors=dict([*PAIR.items()][:1])),
    "no fitting A and B for model": lambda folder: save_adapter(
        folder, tensors={name: torch.ones(*(0, 2) if "A" in name else (2, 0)) for name in PAIR}
    ),
    "alpha_pattern": lambda folder: save_adapter(folder, alpha_pattern={"(": 2}),
    "no tensors": lambda folder: save_adapter(folder, tensors={}),
    r"Linear \[64, 96\]": lambda folder: save_adapter(folder, tensors=PAIR),
    "the target has nothing": lambda folder: save_adapter(
        folder, tensors={name.replace("layers.1", "layers.9"): tensor for name, tensor in PAIR.items()}
    ),
    "can be read": lambda folder: folder,
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_adapter_that_is_more_or_of_another_target_is_refused(words: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        loaded(world, REFUSED[words](tmp_path / "adapter"))
    assert caught.value.kind == "adapter-unfit"
    assert "merge_and_unload" in str(caught.value.hint)


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "tied", "llama-tied")
    tensors = {f"base_model.model.lm_head.lora_{side}.weight": torch.ones(*shape) for side, shape in SIDES.items()}
    folder = open_target(str(target), adapter=str(save_adapter(tmp_path / "lora", tensors=tensors)))
    with pytest.raises(ConfigError, match="is also the embedding"):
        load_weights(folder, LoadOptions(device="cpu"))


SIDES = {"A": (2, WIDTH), "B": (96, 2)}


def test_engines_that_load_the_weights_themselves_and_packed_weights_take_no_adapter(
    world: World, adapters: list[str], tmp_path: Path
) -> None:
    folder = open_target(world / "target", adapter=adapters[0])
    with pytest.raises(ConfigError, match="engine vllm does not merge") as caught:
        open_engine("vllm", EngineTarget(folder, None), EngineOptions((1,), 64))
    assert caught.value.kind == "engine-arg"
    packed = save_target(tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantised") as caught:
        open_target(str(packed), adapter=adapters[0])
    assert caught.value.kind == "adapter-unfit"

"""A small Qwen3.5 with an MTP layer, taught answers of the bundled target by heart, so that it answers at length.

Half of its layers keep a running state. The MTP layer is a copy of the last layer behind a random projection.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.engines.engine_world import EngineWorld, greedy_answers, hiddenstore

TEXTS = 12
TARGET_STEPS = 60


def make_qwen_world(bundled: EngineWorld, root: Path) -> EngineWorld:
    """The target, its greedy answers, and a store of them with every final hidden."""
    world = EngineWorld(root, str(root / "target"), TEXTS)
    _save(world.target, bundled.target, bundled.greedy[:TEXTS])
    lines = Path(bundled.questions).read_text(encoding="utf-8").splitlines()[:TEXTS]
    rows = greedy_answers(world, [json.loads(line)["messages"][0]["content"] for line in lines])
    (root / "greedy.json").write_text(json.dumps(rows), encoding="utf-8")
    text = "".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows)
    Path(world.questions).write_text(text, encoding="utf-8")
    hiddenstore("prepare", world.questions, "-o", str(root / "data"), "--target", world.target, "--val", "0")
    how = ("--layers", "eagle1", "--final", "all", "--dtype", "fp32", "--recipe", "lossless", "--engine", "hf")
    hiddenstore("collect", str(root / "data"), "-o", world.store, "--target", world.target, *how)
    return world


def _save(folder: str, bundled: str, texts: list[tuple[list[int], list[int]]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in texts]
    ids, labels = (pad_sequence(rows, batch_first=True, padding_value=fill) for fill in (0, -100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(TARGET_STEPS):
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _add_mtp(Path(folder))


def _add_mtp(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    last, final = "model.layers.1.", tensors["model.norm.weight"]
    layer = {f"layers.0.{name.removeprefix(last)}": t for name, t in tensors.items() if name.startswith(last)}
    layer["fc.weight"] = torch.randn(len(final), 2 * len(final)) * 0.05
    layer |= {f"{norm}.weight": final for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    tensors |= {f"mtp.{name}": tensor.clone() for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}), encoding="utf-8")

"""A tiny target with an MTP layer of its own, MiMo-shaped: Qwen2's layers, trained to count, and the layer after them.

The checkpoint is what a publisher's is: config.json, tokenizer, one safetensors file with ``model.mtp_layers.0.*``.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from tests.trainer.tiny_target import make_tokenizer

PREFIX = "model.mtp_layers.0."


def make_mimo(vocab=99, width=64, layers=4, seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.15, max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=1, bos_token_id=None, pad_token_id=None, use_sliding_window=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    for module in model.modules():
        if type(module).__name__ == "Qwen2RMSNorm":
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def mtp_tensors(config, seed=1):
    """The tensors of an MTP layer for such a target, random, under the published names."""
    torch.manual_seed(seed)
    layer, width = Qwen2DecoderLayer(config, 0), config.hidden_size
    tensors = {f"{PREFIX}{name}": torch.randn_like(t) * 0.15 for name, t in layer.state_dict().items()}
    tensors[f"{PREFIX}input_proj.weight"] = torch.randn(width, 2 * width) * 0.15
    for name in ("token", "hidden", "final", "input", "post_attention"):
        tensors[f"{PREFIX}{name}_layernorm.weight"] = torch.rand(width) + 0.5
    return tensors


def save_mimo(folder, model=None, tensors=None):
    """Write the checkpoint; returns the folder as str."""
    model, folder = model or make_mimo(), Path(folder)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tensors = tensors or mtp_tensors(model.config)
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)

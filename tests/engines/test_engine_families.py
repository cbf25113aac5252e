"""Families beside Llama in a real vLLM: its states are Hugging Face's, and a drafter is accepted as foretold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agreement, assert_agrees
from engine_world import EngineWorld, hiddenstore, make_engine_world
from tokenizers import decoders

from tests.collectors.tiny import CONFIGS, model_of, tiny_tokenizer
from tests.collectors.tiny_families import IN_VLLM, more_config

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

WIDER = {
    **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"intermediate_size": 128, "moe_intermediate_size": 64, "max_position_embeddings": 512},
}
"""vLLM's attention on a CPU has no head of 16."""

LAYERS = "0,1,2"
ONE_STEP = 2.0**-7
"""What two engines' states may differ by once both are rounded to bf16, as in ``test_three_engines.py``."""


def target_of(folder: Path, family: str) -> str:
    """A tiny random target of a family, of widths that vLLM takes, whose answers are the same ids once read again as
    text: no space stands between tokens, and special ones are never the most probable."""
    config = CONFIGS[family]() if family in CONFIGS else more_config(family)
    settings = config.to_dict()
    config = type(config).from_dict(settings | {name: value for name, value in WIDER.items() if settings.get(name)})
    model, tokenizer = model_of(config), tiny_tokenizer()
    with torch.no_grad():
        model.get_output_embeddings().weight[:2] = 0
    model.save_pretrained(folder)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", IN_VLLM)
def test_vllm_captures_what_hugging_face_does_and_accepts_what_decode_and_eval_foretell(
    family: str, tmp_path: Path, record_property: Any
) -> None:
    target = target_of(tmp_path / family, family)
    world = make_engine_world(EngineWorld(tmp_path / "world", target, count=6, new_tokens=72), LAYERS)
    by_vllm = str(tmp_path / "by-vllm")
    how = ("--layers", LAYERS, "--dtype", "fp32", "--recipe", "lossless", "--engine", "vllm", "--check", "hf=4")
    hiddenstore("collect", str(world.root / "data"), "-o", by_vllm, "--target", world.target, *how)
    found = hiddenstore("diff", world.store, by_vllm, "--samples", "0", "--tolerance", str(ONE_STEP))
    assert found["beyond_tolerance"] == []
    assert found["coverage"] == {"only_a": 0, "both": len(world.greedy), "only_b": 0}
    run = world.trained(f"eagle3-{family}", "eagle3", "loss.steps=3", "loss.kind=target_ce")
    (row,) = agreement(world, run, "eagle3", (3,))
    assert row["decode"] > 2
    record_property("agreement", row)
    assert_agrees(row)

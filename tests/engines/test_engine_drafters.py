"""EAGLE-1, DFlash and Medusa in a real vLLM: what was exported drafts there as it does here, and a mistake shows."""

import pytest
import torch
from agreement import agreement, assert_agrees, assert_caught, layers_one_off, spoiled

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]


def test_eagle1_reads_the_final_hidden_after_the_final_norm(engine_world, record_property):
    run = engine_world.trained("eagle1", "eagle1")
    (row,) = agreement(engine_world, run, "eagle1", (3,))
    record_property("agreement", row)
    assert_agrees(row)

    def swap(tensors):
        tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)

    (row,) = agreement(
        engine_world, run, "eagle1", (3,), spoiled(engine_world.exported(run), "halves-swapped", tensors=swap)
    )
    record_property("caught", row)
    assert_caught(row)


def test_dflash_fills_a_block_from_the_layers_it_was_trained_on(engine_world, record_property):
    run = engine_world.trained("dflash", "dflash", "drafter.block_size=6", steps=40)
    (row,) = agreement(engine_world, run, "dflash", (5,))
    record_property("agreement", row)
    assert_agrees(row)

    (row,) = agreement(
        engine_world, run, "dflash", (5,), spoiled(engine_world.exported(run), "layers-one-off", layers_one_off)
    )
    record_property("caught", row)
    assert_caught(row)


def test_medusa_heads_propose_in_their_own_order(engine_world, record_property):
    run = engine_world.trained("medusa", "medusa", steps=40)
    (row,) = agreement(engine_world, run, "medusa", (4,))
    record_property("agreement", row)
    assert_agrees(row)

    def shift(tensors):
        for name in [name for name in tensors if name.startswith(("blocks.0.", "lm_heads.0."))]:
            later = name.replace("blocks.0.", "blocks.1.").replace("lm_heads.0.", "lm_heads.1.")
            tensors[name], tensors[later] = tensors[later], tensors[name]

    (row,) = agreement(
        engine_world, run, "medusa", (4,), spoiled(engine_world.exported(run), "one-token-late", tensors=shift)
    )
    record_property("caught", row)
    assert_caught(row)

"""Drafters of one forward a draft in a real vLLM: P-EAGLE's mask slots, and a block whose slots see no later ones."""

import pytest
import torch
from agreement import OF_COUNTS, agreement, assert_agrees, assert_caught, layers_one_off, spoiled, within

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]


def test_p_eagle_drafts_all_its_tokens_in_one_forward(engine_world, record_property):
    words = ("loss.steps=5", "drafter.num_layers=2", "drafter.vocab_size=600", "loss.keep_least=0.6")
    run = engine_world.trained("peagle", "peagle", *words)
    (row,) = agreement(engine_world, run, "peagle", (5,))
    record_property("agreement", row)
    assert_agrees(row)
    assert row["decode_per_position"][1] > 0

    def forget(tensors):
        tensors["mask_hidden"] = torch.zeros_like(tensors["mask_hidden"])

    folder = spoiled(engine_world.exported(run), "mask-forgotten", tensors=forget)
    (row,) = agreement(engine_world, run, "peagle", (5,), folder)
    record_property("caught", row)
    assert_caught(row)


def test_a_causal_block_is_a_chain_that_vllm_drafts_causally(engine_world, record_property):
    run = engine_world.trained("jetspec", "dflash", "drafter.block_size=6", "drafter.causal=true", steps=40)
    (row,) = agreement(engine_world, run, "jetspec", (5,))
    record_property("agreement", row)
    assert_agrees(row)

    def forget(config):
        del config["dflash_config"]["causal"]

    (row,) = agreement(engine_world, run, "jetspec", (5,), spoiled(engine_world.exported(run), "not-causal", forget))
    record_property("caught", row)
    # Later slots say little of earlier ones, so that it costs a few per cent, of which OF_COUNTS is one.
    assert row["identical"] == row["answers"]
    assert not within(row["engine"], row["decode_as_counted"], 2 * OF_COUNTS), row

    (row,) = agreement(
        engine_world, run, "jetspec", (5,), spoiled(engine_world.exported(run), "layers-one-off", layers_one_off)
    )
    record_property("caught", row)
    assert_caught(row)

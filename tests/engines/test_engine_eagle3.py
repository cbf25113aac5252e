"""EAGLE-3 and 3.1 in a real vLLM: what was exported drafts there as it does here, and a mistake in it shows."""

import pytest
from agreement import agreement, assert_agrees, assert_caught, spoiled

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]

CHAINS = (3, 5)


@pytest.fixture(scope="module")
def run(engine_world):
    return engine_world.trained("eagle3", "eagle3", "loss.steps=3")


def test_an_eagle3_chain_of_3_and_of_5_is_accepted_as_decode_and_eval_foretell(engine_world, run, record_property):
    for row in agreement(engine_world, run, "eagle3", CHAINS):
        record_property("agreement", row)
        assert_agrees(row)


def test_the_speculators_format_drafts_alike(engine_world, run, record_property):
    (row,) = agreement(engine_world, run, "eagle3", (3,), engine_world.exported(run, "speculators"))
    record_property("agreement", row)
    assert_agrees(row)


def test_a_small_draft_vocabulary_is_mapped_back_to_the_target_s(engine_world, record_property):
    small = engine_world.trained("eagle3-small-vocabulary", "eagle3", "loss.steps=3", "drafter.vocab_size=300")
    (row,) = agreement(engine_world, small, "eagle3", (3,))
    record_property("agreement", row)
    assert_agrees(row)

    def shift(tensors):
        tensors["d2t"] += 1

    folder = spoiled(engine_world.exported(small), "shifted", tensors=shift)
    (row,) = agreement(engine_world, small, "eagle3", (3,), folder)
    record_property("caught", row)
    assert_caught(row)


def test_eagle31_reads_a_norm_a_layer_and_feeds_back_the_normed_output(engine_world, record_property):
    words = ("loss.steps=3", "drafter.fc_norm=true", "drafter.norm_output=true")
    run = engine_world.trained("eagle3.1", "eagle3", *words)
    (row,) = agreement(engine_world, run, "eagle3", (3,))
    record_property("agreement", row)
    assert_agrees(row)
    folder = spoiled(engine_world.exported(run), "output-not-normed", lambda config: config.update(norm_output=False))
    (row,) = agreement(engine_world, run, "eagle3", (3,), folder)
    record_property("caught", row)
    assert_caught(row)


def test_layers_read_one_off_are_caught(engine_world, run, record_property):
    def shift(config):
        ids = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
        config["eagle_aux_hidden_state_layer_ids"] = ids
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids

    (row,) = agreement(engine_world, run, "eagle3", (3,), spoiled(engine_world.exported(run), "layers-one-off", shift))
    record_property("caught", row)
    assert_caught(row)


def test_a_norm_at_the_wrong_side_of_the_residual_is_caught(engine_world, run, record_property):
    folder = spoiled(engine_world.exported(run), "norm-moved", lambda config: config.update(norm_before_residual=True))
    (row,) = agreement(engine_world, run, "eagle3", (3,), folder)
    record_property("caught", row)
    assert_caught(row)

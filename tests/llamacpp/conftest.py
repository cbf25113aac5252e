"""What every test of llama.cpp shares: the world of the other engine's tests, and its target as a GGUF file."""

import os
from pathlib import Path

import pytest

from tests.engines.engine_world import EngineWorld, make_engine_world
from tests.llamacpp.llama_server import convert

collect_ignore_glob = [] if os.environ.get("LLAMACPP") else ["test_*.py"]


@pytest.fixture(scope="session")
def engine_world(tmp_path_factory: pytest.TempPathFactory) -> EngineWorld:
    return make_engine_world(EngineWorld(tmp_path_factory.getbasetemp() / "engine_world"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for every accepted length that was compared."""
    reports = [report for word in ("passed", "failed") for report in terminalreporter.stats.get(word, [])]
    for row in (row for report in reports for name, row in report.user_properties if name == "agreement"):
        terminalreporter.write_line("  ".join(f"{name} {value}" for name, value in row.items()))


@pytest.fixture(scope="session")
def target(engine_world: EngineWorld) -> str:
    """The bundled target in fp32; its tokenizer splits as GPT-2's."""
    return convert(engine_world.target, Path(engine_world.root, "target.gguf"), "gpt-2", "--outtype", "f32")

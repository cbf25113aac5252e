"""What doctor says of engines: none, one that fits, and ones that lack or break something."""

from pathlib import Path

import pytest

from collectors.engines import ENGINES, load_attribute, resources
from collectors.engines import vllm as vllm_engine
from hiddenstore.doctor import DoctorCheck

DOUBLE = Path(__file__).with_name("double_trtllm")
CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages this process and those it starts can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def package(folder: Path, name: str, source: str = "") -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)
    return folder / name


def engine(name: str) -> DoctorCheck:
    return next(iter(load_attribute(ENGINES[name].doctor)()))


def test_an_installation_with_all_that_is_used_is_fine(installed: Path) -> None:
    (installed / "tensorrt_llm").symlink_to(DOUBLE / "tensorrt_llm")
    found = engine("trtllm")
    assert (found.status, found.fix) == ("ok", None)
    assert found.detail.startswith("TensorRT-LLM 1.2.1 has what is used of it")


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("raise ImportError('libnvinfer.so.10: cannot open')", "cannot be imported: libnvinfer.so.10: cannot open"),
        ("raise OSError('libcuda.so.1')", "cannot be imported: libcuda.so.1"),
        ("import os; os.abort()", "ends the process that imports it"),
        (
            "__version__ = '1.0.0'",
            "TensorRT-LLM 1.0.0 lacks tensorrt_llm.LLM, tensorrt_llm.SamplingParams, tensorrt_llm.",
        ),
    ],
)
def test_an_installation_that_cannot_serve_says_what_is_wrong(installed: Path, source: str, detail: str) -> None:
    package(installed, "tensorrt_llm", source)
    found = engine("trtllm")
    assert found.status == "problem"
    assert detail in found.detail
    assert "release container of NGC" in str(found.fix)


def test_without_an_engine_its_line_is_no_problem() -> None:
    assert engine("trtllm").status == "absent"


@pytest.mark.parametrize(
    ("version", "status"), [("0.31.2", "warning"), ("0.32.0", "ok"), ("0.33.0+cpu", "ok"), ("0.99.0", "warning")]
)
def test_vllm_is_judged_by_its_connector_and_by_versions_that_were_measured(
    installed: Path, monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    vllm = package(installed, "vllm", "raise AssertionError('doctor must not import vllm')")
    monkeypatch.setattr(vllm_engine, "version_of", lambda *_names: version)
    assert engine("vllm").status == "problem"
    assert "no hidden-states connector" in engine("vllm").detail
    (vllm / CONNECTOR).parent.mkdir(parents=True)
    (vllm / CONNECTOR).touch()
    assert engine("vllm").status == status


def test_a_small_shared_memory_is_warned_of_with_the_containers_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.engines.resources._SMALL_BYTES", 1 << 60)
    found = resources._scratch()
    assert found.status == ("warning" if resources._MEMORY.is_dir() else "ok")
    assert found.status == "ok" or found.fix == "docker run --ipc host, or --shm-size 16g"

"""What doctor says of dependencies, cores and checks that other packages add."""

import ast
import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from packaging.requirements import Requirement

from hiddenstore.cli import main
from hiddenstore.doctor import PACKAGES, DoctorCheck, install_command
from hiddenstore.doctor.machine import GROUP, _added, compute_checks, installation_checks


def needing(monkeypatch: pytest.MonkeyPatch, *lines: str) -> dict[str, DoctorCheck]:
    monkeypatch.setattr(metadata, "requires", lambda _name: list(lines))
    return {check.name: check for check in installation_checks()}


def doctor(*words: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *words], prog_name="hiddenstore")


def test_a_dependency_outside_its_bounds_is_a_problem_with_the_command_that_fixes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = needing(monkeypatch, "torch>=99", "click>=8.1", "nothing-of-that-name>=2; extra == 'hf'")
    assert (found["torch"].status, found["torch"].fix) == ("problem", "pip install 'torch>=99'")
    assert found["libraries"].detail == f"click {metadata.version('click')}"
    assert "nothing-of-that-name" not in found
    monkeypatch.setattr("hiddenstore.doctor.machine.TRIAL_BYTES", 1 << 20)
    result = doctor(str(tmp_path), "--json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["ok"] is False


def test_a_prerelease_that_a_container_brings_counts_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.10.0a0+container" if name == "torch" else "1")
    assert needing(monkeypatch, "torch>=2.9")["torch"].status == "ok"
    assert needing(monkeypatch, "torch>=2.10")["torch"].status == "problem"


def test_a_dependency_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    found = needing(monkeypatch, "nothing-of-that-name>=2")
    assert found["nothing-of-that-name"].detail == "not installed, >=2 is needed"


def test_a_slow_checksum_of_stock_zarr_is_not_said_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google_crc32c.implementation", "python")
    zarr = needing(monkeypatch, "zarr>=3")["zarr"]
    assert zarr.status == "warning"
    assert f"crc32c of awscrt {metadata.version('awscrt')}; of stock zarr python" in zarr.detail


@pytest.mark.parametrize(
    ("environment", "status", "fix"),
    [
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "warning", "export OMP_WAIT_POLICY=PASSIVE"),
        ({"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "9999"}, "warning", "export OMP_NUM_THREADS="),
        ({"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}, "ok", ""),
    ],
)
def test_threads_that_spin_or_crowd_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], status: str, fix: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (cpu,) = [check for check in compute_checks() if check.name == "cpu"]
    assert cpu.status == status
    assert (cpu.fix or "").startswith(fix)


def test_checks_of_other_packages_are_asked_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint("mine", "tests.hiddenstore_doctor_absent:checks", GROUP),
        metadata.EntryPoint("other", "operator:no_such_function", GROUP),
        metadata.EntryPoint("engines", "collectors.engines.resources:checks", GROUP),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == GROUP else [])
    found = {check.name: check for check in _added()}
    assert (found["mine"].status, "cannot be imported" in found["mine"].detail) == ("problem", True)
    assert (found["other"].status, "fails: AttributeError" in found["other"].detail) == ("problem", True)
    assert {"engine hf", "engine vllm", "engine trtllm", "ray", "scratch"} <= set(found)


def test_a_torch_that_cannot_see_its_gpus_is_a_problem_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise OSError("libcudart.so.13: no such file")

    monkeypatch.setattr("torch.cuda.is_available", broken)
    (gpu,) = [check for check in compute_checks() if check.name == "gpu"]
    assert (gpu.status, gpu.detail) == ("problem", "torch fails: OSError: libcudart.so.13: no such file")


def test_an_extra_of_ours_is_offered_where_there_is_one() -> None:
    assert install_command("accelerate", "hf") == "pip install 'hiddenstore[hf]'"
    assert install_command("something", "no-such-extra") == "pip install something"


def test_every_base_dependency_is_imported_by_our_source_and_what_it_imports_is_declared() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    imported = {
        name.split(".")[0]
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imports(node)
    }
    base, extras = map(_name, project["dependencies"]), project["optional-dependencies"]
    modules = {name: name.replace("-", "_") for name in base} | {"PyYAML": "yaml"}
    assert [name for name, module in modules.items() if module not in imported] == []
    assert "tensorrt-llm" in map(_name, extras["trtllm"])
    offered = {"PIL", "mlflow", *(_name(line) for name, lines in extras.items() if name != "dev" for line in lines)}
    ours = {*modules.values(), *offered, *PACKAGES, *sys.stdlib_module_names}
    # Of numba, torch, vLLM and zarr; data frames and a peer's reader are for those who have them.
    assert imported - ours - {""} == {"google_crc32c", "hs_connectors", "llvmlite", "pandas", "speculators", "triton"}


def _name(requirement: str) -> str:
    return Requirement(requirement).name


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []

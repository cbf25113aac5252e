"""The command ``serve`` itself: what it prints runs, what it runs becomes the engine, and the page's examples."""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hiddenstore.cli import main
from tests.trainer.serve_cases import write_exports


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_exports(tmp_path_factory.mktemp("exports"), "eagle3")


def run(*words: str) -> Any:
    return CliRunner().invoke(main, ["serve", *words], prog_name="hiddenstore")


def test_print_only_prints_a_script_that_runs_exactly_the_documented_command(tmp_path: Path) -> None:
    words = ["--method", "ngram", "--target", "maker/target", "--engine", "trtllm", "--print-only"]
    printed = run(*words, "--", "--tp_size", "2")
    document = json.loads(run(*words, "--json", "--", "--tp_size", "2").stdout)
    assert (printed.exit_code, document["schema"], document["engine"]) == (0, "hiddenstore.serve/1", "trtllm")
    assert document["command"][-2:] == ["--tp_size", "2"]
    (file,) = document["files"]
    fake_program(tmp_path, "trtllm-serve")
    script = tmp_path / "script.sh"
    script.write_text(printed.stdout)
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=path_with(tmp_path), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"argv": document["command"][1:], "env": document["env"]["TRTLLM_ENABLE_PDL"]}
    assert (tmp_path / file).read_text() == document["files"][file]


def test_running_writes_the_file_and_becomes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--method", "ngram", "--target", "maker/target", "--engine", "trtllm", "-o", "serve.yaml", "-q"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = run(*words)
    assert absent.exit_code == 2
    assert "trtllm-serve is not installed here" in absent.stderr
    assert "--form container" in absent.stderr
    assert not (tmp_path / "serve.yaml").exists()
    fake_program(tmp_path, "trtllm-serve")
    command = [sys.executable, "-m", "hiddenstore.cli", "serve", *words, "--", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ran = json.loads(done.stdout.splitlines()[-1])
    assert ran["argv"][-4:] == ["--config", "serve.yaml", "--host", "0.0.0.0"]
    assert yaml.safe_load((tmp_path / "serve.yaml").read_text())["speculative_config"]["decoding_type"] == "NGram"
    (tmp_path / "serve.yaml").write_text("enable_attention_dp: true\n")
    refused = run(*words)
    assert refused.exit_code == 6
    assert "says something else" in refused.stderr


def fake_program(folder: Path, name: str) -> None:
    """A program of that name that prints what it was called with."""
    program = folder / name
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps({'argv': sys.argv[1:], 'env': os.environ.get('TRTLLM_ENABLE_PDL')}))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def path_with(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_printing_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom hiddenstore.cli import main\n"
        "words = ['serve', '--method', 'ngram', '--target', 'T', '--engine', 'trtllm', '--print-only']\n"
        "assert CliRunner().invoke(main, words).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'zarr'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_check_command_answers_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    assert run("--method", "mtp", "--target", "T", "--engine", "trtllm", "--print-only", "-o", str(file)).exit_code == 0
    good = run("--check", str(file), "--json")
    assert json.loads(good.stdout)["decoding_type"] == "MTP"
    file.write_text(file.read_text() + "  num_nextn_predict_layers: 2\n")
    bad = run("--check", str(file))
    assert bad.exit_code == 2
    assert "num_nextn_predict_layers: must match max_draft_len, 3: found 2" in bad.stderr


def test_what_is_left_out_of_the_command_line_is_asked_for() -> None:
    result = run("--method", "ngram")
    assert result.exit_code == 2
    assert "serve needs --target and --engine" in result.stderr


PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
DOCUMENTED = [line.strip() for line in PAGE.read_text().splitlines() if line.strip().startswith("hiddenstore serve ")]


@pytest.mark.parametrize("line", DOCUMENTED)
def test_every_command_of_the_page_prints(
    line: str, exports: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)[2:]
    monkeypatch.chdir(tmp_path)
    if words[0].startswith("drafter"):
        Path(words[0]).symlink_to(exports[f"eagle3 for {words[words.index('--engine') + 1]}"])
    if "--print-only" not in words:
        words.insert(1, "--print-only")
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    assert "Qwen/Qwen3-8B" in result.stdout or "deepseek-ai/DeepSeek-R1" in result.stdout

"""``hiddenstore export``: what a run tells of itself, and which engine takes which drafter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hiddenstore.testing.builders import make_store
from trainer.cli.export import export
from trainer.export.support import ENGINES, words
from trainer.train.loop import train


def answer(*given: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(export, [*given])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_fits_a_terminal_and_gives_the_reason_of_every_no() -> None:
    shown = answer("--list")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    engines = lines[0].split()[1:]
    assert engines[:4] == ["vllm", "sglang", "trtllm", "llamacpp"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2 : 2 + len(words())]}
    assert list(rows) == list(words())
    assert all({"ran", "names"} & {*row} for row in rows.values()), "a drafter that no engine reads"
    llamacpp = [rows[drafter][3] for drafter in ("eagle1", "eagle3", "eagle3.1", "dflash", "medusa")]
    assert llamacpp == ["no", "ran", "no", "ran", "no"]
    trtllm = [rows[drafter][2] for drafter in ("eagle1", "eagle3", "eagle3.1", "dflash", "medusa")]
    assert trtllm == ["no", "names", "no", "no", "no"]
    reasons = [line.split(":")[0] for line in lines if ": " in line]
    assert len(reasons) == sum(row.count("no") for row in rows.values())
    assert "SGLang has no Medusa" in shown


def test_the_same_in_json_and_for_another_version() -> None:
    said = json.loads(answer("--list", "--json"))
    assert said["schema"] == "hiddenstore.export-list/1"
    assert len(said["support"]) == len(ENGINES) * len(words())
    later = json.loads(answer("--list", "--engine", "vllm", "--engine-version", "0.33", "--json"))["support"]
    medusa = next(row for row in later if row["drafter"] == "medusa")
    assert (medusa["ok"], medusa["reason"]) == (False, "vLLM 0.33 removed Medusa")
    assert medusa["nearest"].startswith("--engine-version 0.32")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["."], "--engine and --out missing"),
        (["--engine", "vllm"], "RUN and --out missing"),
        (["--list", "--engine-version", "0.33"], "is of an --engine"),
    ],
)
def test_what_is_missing_is_named(given: list[str], said: str) -> None:
    result = CliRunner().invoke(export, given)
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, trainer.export.support as e; e.matrix(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_says_how_far_it_drafts_and_an_engine_that_cannot_run_it_says_what_can(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6, layers=(1, 3, 5))
    small = ["data.batch_tokens=160", "data.pack_tokens=80", "train.max_steps=1", "train.validate_every=0"]
    run = str(tmp_path / "run")
    train(store.path, run, words=[*small, "loss.steps=2", "drafter.fc_norm=true"])
    out = tmp_path / "out"
    said = json.loads(
        answer(run, "--engine", "speculators", "--target", "ORG/MODEL", "-o", str(out), "--dtype", "float32", "--json")
    )
    assert (said["drafter"], said["draft_len"], said["engine_version"]) == ("eagle3.1", 2, "0.9")
    assert said["serve"] == ["vllm", "serve", str(out)]
    written = json.loads((out / "config.json").read_text())["speculators_config"]
    assert written["verifier"]["name_or_path"] == "ORG/MODEL"
    assert written["proposal_methods"][0]["speculative_tokens"] == 2
    result = CliRunner().invoke(export, [run, "--engine", "trtllm", "-o", str(tmp_path / "no")], standalone_mode=False)
    assert "since 1.3" in str(result.exception)
    assert not (tmp_path / "no").exists()


def test_what_comes_after_speculators_layout_is_a_server_that_reads_it_or_a_layout_that_has_one(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6, layers=(1, 3, 5))
    small = ["data.batch_tokens=160", "data.pack_tokens=80", "train.max_steps=1", "train.validate_every=0"]
    small += ["drafter.mask_token_id=0", "drafter.num_layers=1", "loss.num_anchors=2"]
    for drafter in ("dflash", "xpress"):
        run, out = str(tmp_path / drafter), str(tmp_path / f"{drafter}-out")
        train(store.path, run, drafter=drafter, words=small)
        said = json.loads(answer(run, "--engine", "speculators", "--target", "ORG/MODEL", "-o", out, "--json"))
        reads = {"dflash": ["vllm", "serve", out], "xpress": ["hiddenstore", "export", run, "--engine", "vllm"]}
        assert said["serve"][: len(reads[drafter])] == reads[drafter]

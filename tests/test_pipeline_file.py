"""A pipeline file: the words that its commands get, and every mistake in it named before anything is done."""

from itertools import pairwise
from pathlib import Path

import pytest

from hiddenstore.cli import main
from hiddenstore.cli import run as pipeline
from hiddenstore.errors import ConfigError
from hiddenstore.files.lock import WRITER
from hiddenstore.settings import written
from tests.test_run_pipeline import SMALL, stages_in, write_pipeline
from tests.tiny_world import World, error_of, run

USAGE = 2


def test_a_layer_of_the_target_begins_at_the_target_but_for_a_resume_or_another_start(tmp_path: Path) -> None:
    elsewhere = {"drafter": "mtp", "settings": {"train": {"init_from": "runs/mtp"}}}
    (tmp_path / "mine.yaml").write_text("drafter: {name: mtp}\nloss: {steps: 2}\n")
    file = {"config": str(tmp_path / "mine.yaml")}
    nowhere = {**file, "settings": {"train": {"init_from": None}}}
    drafters = {"a": {"drafter": "mtp"}, "b": {"config": "mtp"}, "c": elsewhere, "d": {"drafter": "eagle3"}}
    drafters |= {"e": file, "f": nowhere, "g": {**file, "drafter": "eagle3"}}
    settings = pipeline.Pipeline(target="T", out=str(tmp_path), inputs=["chats.jsonl"], drafters=drafters)
    with main.make_context("hiddenstore", ["run"]):
        stages = [stage for stage in pipeline._Builder(settings).stages() if stage.command == "train"]
    starts = [("--target", "T") in pairwise(stage.words) for stage in stages]
    assert starts == [True, True, False, False, True, True, False]
    assert all("--target" not in stage.resume for stage in stages)


def test_an_option_that_a_command_does_not_take_is_refused_before_anything_is_done(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_pipeline(world, tmp_path, export={"engin": "vllm"})
    assert run("run", file) == USAGE
    message, fix = error_of(capsys.readouterr().err)
    assert "takes no 'engin' here; did you mean engine?" in message
    assert fix == "hiddenstore export --help"
    assert not (tmp_path / "out").exists()


def test_a_value_that_an_option_does_not_take_is_refused_before_anything_is_done(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", write_pipeline(world, tmp_path, export={"engine": "vllm", "dtype": "fp12"})) == USAGE
    message, fix = error_of(capsys.readouterr().err)
    assert "fp12" in message
    assert fix == "hiddenstore export --help"
    assert not (tmp_path / "out").exists()


def test_an_export_is_for_vllm_where_no_engine_is_named_and_an_unknown_one_is_refused_first(
    world: World, tmp_path: Path
) -> None:
    file = write_pipeline(world, tmp_path, export={"dtype": "float16"})
    stage = next(stage for stage in stages_in(file) if stage.name == "medusa/export")
    assert stage.words[-4:] == ("--dtype", "float16", "--engine", "vllm")
    with pytest.raises(ConfigError, match="export: unknown engine 'vlm'") as caught:
        stages_in(file, "export.engine=vlm")
    assert caught.value.hint == "--engine vllm"


def test_what_is_written_of_an_option_is_what_its_command_gets(world: World, tmp_path: Path) -> None:
    sections = {"export": {"engine": "vllm", "engine-version": 0.10}, "prepare": {"val": "20%", "template": "{{ x }}"}}
    file = Path(write_pipeline(world, tmp_path, **sections, verify={"full": "yes", "meaning": "off"}))
    file.write_text(file.read_text().replace("engine-version: 0.1\n", "engine-version: 0.10\n"))
    stages = {stage.name: stage.words for stage in stages_in(str(file))}
    assert stages["prepare"][-4:] == ("--val", "20%", "--template", "{{ x }}")
    assert stages["medusa/export"][-4:] == ("--engine", "vllm", "--engine-version", "0.10")
    assert stages["verify"][1:] == ("--full",)
    with pytest.raises(ConfigError, match="verify: full is true or false, found 'ture'"):
        stages_in(str(file), "verify.full=ture")


def test_a_section_with_nothing_in_it_is_refused_and_never_left_out(world: World, tmp_path: Path) -> None:
    file = Path(write_pipeline(world, tmp_path))
    whole = file.read_text()
    for section in ("regenerate", "decode", "serve"):
        file.write_text(f"{whole}{section}:\n")
        with pytest.raises(ConfigError, match=rf"{section} \(.*\): write {{}} for no options"):
            stages_in(str(file))
    file.write_text(f"{whole}regenerate: {{}}\n")
    assert stages_in(str(file))[0].name == "regenerate"


@pytest.mark.parametrize("name", ["answers.jsonl", "data", "store", "done", WRITER])
def test_no_drafter_takes_the_name_of_what_lies_beside_it(world: World, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"out/{name} is not a drafter's"):
        stages_in(write_pipeline(world, tmp_path, drafters={name: {"drafter": "medusa"}}))


def test_the_folder_of_a_target_that_is_named_by_dots_has_the_name_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tiny" / "inside")
    outs = [pipeline._pipeline(None, (), target, ("chats.jsonl",), None).out for target in (".", "..", "Qwen/Qwen3-8B")]
    assert outs == ["runs/inside", "runs/tiny", "runs/Qwen3-8B"]


def test_a_file_that_a_stage_writes_is_no_input_of_it(tmp_path: Path) -> None:
    table, questions = tmp_path / "table.md", tmp_path / "questions.jsonl"
    for file in (table, questions):
        file.touch()
    words = ("--markdown", str(table), "--answers", str(table), "--prompts", str(questions))
    stage = pipeline.Stage("medusa/decode", "decode", words)
    assert pipeline._named_files(stage, tmp_path / "out", []) == [str(questions)]


def test_nothing_is_a_value_that_every_setting_of_a_pipeline_can_have() -> None:
    words = list(pipeline.setting_words({"train": {"tracker": None, "patience": None}, "optim": {"clip": None}}))
    assert written(None, words) == {"train.tracker": None, "train.patience": None, "optim.clip": None}


def test_every_mistake_of_a_pipeline_is_named_at_once_before_anything_is_done(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafters = {
        "a": {"drafter": "eagle3", "settings": {"optim": {"lrr": 1}, "loss": {"steps": "many"}}},
        "b": {"config": "eagle3.1", "settings": {**SMALL, "train": {"max_steps": 2}}},
        "c": {"settings": {"train": {"patience": 3, "validate_every": 0}}},
    }
    file = write_pipeline(world, tmp_path, drafters=drafters, collect={"layer": "1,2"}, eval={"draft-len": "x"})
    assert run("run", file) == USAGE
    message = " ".join(error_of(capsys.readouterr().err)[0].split())
    for part in (
        "collect takes no 'layer' here; did you mean layers?",
        "optim.lrr",
        "loss.steps",
        "draft-len",
        "c/train: train",
    ):
        assert part in message
    assert "b/train" not in message
    assert not (tmp_path / "out").exists()


def test_one_mistake_of_a_drafter_keeps_what_fixes_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", write_pipeline(world, tmp_path, drafters={"a": {"config": "eagel3"}})) == USAGE
    message, fix = error_of(capsys.readouterr().err)
    assert message.startswith("a/train: -c eagel3: no file of that name")
    assert fix == "-c eagle3"


def test_words_without_a_file_or_beside_one_are_usage_errors(world: World, tmp_path: Path) -> None:
    assert run("run", "--target", world / "target") == USAGE
    assert run("run", write_pipeline(world, tmp_path), "--target", world / "target") == USAGE

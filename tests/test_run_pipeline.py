"""``hiddenstore run``: a pipeline file through the whole command line, stopped anywhere and gone on with."""

import hashlib
import json
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from safetensors.torch import load_file, save

from hiddenstore.cli import inner, main
from hiddenstore.cli import run as pipeline
from hiddenstore.cli.run import DoneStage
from hiddenstore.errors import CaptureError, Kind
from hiddenstore.files.documents import seal, unseal
from hiddenstore.files.lock import WRITER
from hiddenstore.settings import load as load_settings
from tests.forked import Forked, command
from tests.tiny_world import LAYERS, World, chat, error_of, run, tree, write_rows

USAGE, CORRUPT, CONFLICT = 2, 3, 6
SMALL = {"loss": {"steps": 2}, "data": {"batch_tokens": 512, "pack_tokens": 256}}


def write_pipeline(world: World, folder: Path, **changes: Any) -> str:
    """A pipeline of two drafters over the world's conversations, in ``folder``."""
    settings = {
        "target": world / "target",
        "out": str(folder / "out"),
        "inputs": [world / "chats.jsonl"],
        "prepare": {"val": "20%"},
        "collect": {"layers": LAYERS, "final": "all"},
        "verify": {"full": True},
        "drafters": {
            "eagle3.1": {"config": "eagle3.1", "settings": {**SMALL, "train": {"max_steps": 2}}},
            "medusa": {"drafter": "medusa", "settings": {"train": {"max_steps": 1}, "data": SMALL["data"]}},
        },
        "eval": {"draft-len": 2},
        **changes,
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings)), sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline that ran to its end."""
    folder = tmp_path_factory.mktemp("pipeline")
    assert run("run", write_pipeline(world, folder), "-q") == 0
    return folder


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run("run", *words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def stages_in(file: str, *words: str) -> list[pipeline.Stage]:
    with click.Context(main):
        return list(pipeline.stages_of(load_settings(pipeline.Pipeline, file, words)))


def test_one_file_gives_a_store_and_an_export_of_every_drafter(finished: Path) -> None:
    for name in ("eagle3.1", "medusa"):
        assert (finished / "out" / name / "drafter" / "model.safetensors").is_file()
    assert run("verify", str(finished / "out" / "store"), "--full") == 0


def test_a_finished_pipeline_does_nothing_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(finished / "out")
    again = document(capsys, str(finished / "pipeline.yaml"))
    assert all(stage["was_done"] for stage in again["stages"])
    assert [row["drafter"] for row in again["drafters"]] == ["eagle3.1", "medusa"]
    assert all(row["simulated"] >= 1 for row in again["drafters"])
    assert tree(finished / "out") == before


def test_what_was_removed_is_made_again_and_nothing_else(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(finished / "out" / "medusa" / "drafter")
    shutil.rmtree(finished / "out" / "medusa" / "drafter")
    again = document(capsys, str(finished / "pipeline.yaml"))
    assert [stage["stage"] for stage in again["stages"] if not stage["was_done"]] == ["medusa/export"]
    assert tree(finished / "out" / "medusa" / "drafter") == before


def test_a_stage_that_failed_is_where_the_same_command_goes_on(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_pipeline(world, tmp_path)
    real = inner.do

    def failing(name: str, *words: str, quiet: bool = False) -> Any:
        if name == "train":
            raise CaptureError("the machine went away", kind=Kind.NON_FINITE)
        return real(name, *words, quiet=quiet)

    monkeypatch.setattr(pipeline, "do", failing)
    assert run("run", file, "-q") == CaptureError.exit_code
    monkeypatch.setattr(pipeline, "do", real)
    again = document(capsys, file)
    done = [stage["stage"] for stage in again["stages"] if stage["was_done"]]
    assert done == ["prepare", "collect", "verify"]


def test_a_stage_whose_answer_is_no_is_named_as_the_one_that_is_not_done(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(name: str, *words: str, quiet: bool = False) -> Any:
        raise click.exceptions.Exit(CORRUPT)

    shutil.rmtree(finished / "out" / "medusa" / "drafter")
    monkeypatch.setattr(pipeline, "do", refusing)
    capsys.readouterr()
    assert run("run", str(finished / "pipeline.yaml"), "-q") == CORRUPT
    assert "medusa/export is not done" in capsys.readouterr().err
    monkeypatch.undo()
    assert run("run", str(finished / "pipeline.yaml"), "-q") == 0


def test_a_command_that_fails_on_its_ranks_is_named_with_its_words(tmp_path: Path) -> None:
    words = ["nowhere", "-o", str(tmp_path / "run")]
    with pytest.raises(CaptureError, match="hiddenstore train on 2 ranks stopped with exit code 1") as caught:
        inner.do_on_ranks(2, "train", words)
    assert caught.value.kind == "ranks-failed"
    assert caught.value.hint == f"hiddenstore train nowhere -o {tmp_path / 'run'}"


def test_a_killed_run_trains_on_to_the_drafter_of_an_uninterrupted_one(world: World, tmp_path: Path) -> None:
    settings = {**SMALL, "train": {"max_steps": 10, "checkpoint_every": 1, "validate_every": 0}}
    drafters = {"eagle3": {"drafter": "eagle3", "settings": settings}}
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    killed = write_pipeline(world, tmp_path / "killed", drafters=drafters)
    process = Forked(command, "run", killed, "-q")
    checkpoints = tmp_path / "killed" / "out" / "eagle3" / "run" / "checkpoints"
    while process.poll() is None and not (checkpoints / "step-2").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, "it ended before it could be killed"
    assert run("run", killed, "-q") == 0
    assert run("run", write_pipeline(world, tmp_path / "whole", drafters=drafters), "-q") == 0
    weights = [
        (tmp_path / name / "out" / "eagle3" / "drafter" / "model.safetensors").read_bytes()
        for name in ("killed", "whole")
    ]
    assert weights[0] == weights[1]


def test_a_second_run_in_the_folder_is_told_which_process_has_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"drafters": {"medusa": {"drafter": "medusa", "settings": {"train": {"max_steps": 100_000}}}}}
    file = write_pipeline(world, tmp_path, **long)
    process = Forked(command, "run", file, "-q")
    writer = tmp_path / "out" / WRITER
    while process.poll() is None and not (writer.is_file() and writer.stat().st_size):
        time.sleep(0.01)
    try:
        assert run("run", file, "-q") == CONFLICT
        message, fix = error_of(capsys.readouterr().err)
        assert f"process {process.pid} on {socket.gethostname()}" in message
        assert "[run-in-use]" in message
        assert "out=FOLDER" in fix
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    small = ["drafters.medusa.settings.train.max_steps=1"]
    shutil.rmtree(tmp_path / "out" / "medusa", ignore_errors=True)
    assert run("run", file, *small, "-q") == 0, "a killed process leaves no lock"
    assert not writer.exists()


def test_what_a_changed_pipeline_would_make_otherwise_is_refused_with_both_commands(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(finished / "out")
    assert run("run", str(finished / "pipeline.yaml"), "collect.recipe=lossless") == CONFLICT
    message, fix = error_of(capsys.readouterr().err)
    assert "the pipeline now says" in message
    assert message.endswith("[stage-changed]")
    assert "--recipe lossless" in message
    assert fix == f"rm -r {finished / 'out' / 'store'} {finished / 'out' / 'done' / 'collect.json'}"
    assert tree(finished / "out") == before


def test_other_options_of_an_answer_ask_it_again_and_keep_what_was_made(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, products = str(finished / "pipeline.yaml"), [finished / "out" / name for name in ("store", "medusa")]
    before = [tree(path) for path in products]
    for words in (["verify.full=false", "eval.draft-len=1"], []):
        again = document(capsys, file, *words)
        new = [stage["stage"] for stage in again["stages"] if not stage["was_done"]]
        assert new == ["verify", "eagle3.1/eval", "medusa/eval"]
        assert [tree(path) for path in products] == before


def test_an_export_is_built_on_the_draft_length_that_pays_and_not_on_the_rest_of_the_answer(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = finished / "out" / "done" / "medusa.eval.json"
    whole = record.read_bytes()
    done = unseal(whole, DoneStage, str(record))
    try:
        for speedup, code in ((0.9, 0), (1.2, CONFLICT)):
            answer = json.dumps({**json.loads(done.answer), "best_draft_len": 2, "speedup": speedup})
            record.write_bytes(seal(done.model_copy(update={"answer": answer})))
            assert run("run", str(finished / "pipeline.yaml"), "-q") == code
        assert "medusa/drafter was made from inputs that have changed" in error_of(capsys.readouterr().err)[0]
    finally:
        record.write_bytes(whole)


@pytest.mark.parametrize("counts_answers", [True, False])
def test_a_folder_whose_records_are_of_development_versions_is_finished_too(
    finished: Path, counts_answers: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = finished / "out" / "done", tree(finished / "out")
    stages = {stage.name: stage for stage in stages_in(str(finished / "pipeline.yaml"))}
    records = {name: finished / "out" / stage.record for name, stage in stages.items()}
    whole = {path: path.read_bytes() for path in records.values()}
    sealed: dict[str, bytes] = {}
    for name, path in records.items():
        done = unseal(whole[path], DoneStage, str(path))
        drafter = f"{name.partition('/')[0]}/"
        mine = [one for one in sealed if "/" not in one or one.startswith(drafter)]
        read = b"".join(sealed[one] for one in mine if counts_answers or stages[one].product is not None)
        # Neither the target nor a checkpoint counted.
        digest = hashlib.sha256(read).hexdigest() + done.built_on[64:-64]
        sealed[name] = seal(done.model_copy(update={"built_on": digest}))
        path.write_bytes(sealed[name])
    # A training that was stopped is known by its mark.
    train = records["medusa/train"]
    begun = unseal(sealed["medusa/train"], DoneStage, str(train)).model_copy(update={"answer": "{}", "seconds": 0.0})
    try:
        assert all(stage["was_done"] for stage in document(capsys, str(finished / "pipeline.yaml"))["stages"])
        train.rename(folder / "medusa.train.json.begun")
        (folder / "medusa.train.json.begun").write_bytes(seal(begun))
        assert run("run", str(finished / "pipeline.yaml"), "-q") == CONFLICT
        assert "medusa/drafter was made from inputs" in error_of(capsys.readouterr().err)[0], "the run was taken"
    finally:
        for path, data in whole.items():
            path.write_bytes(data)
    assert tree(finished / "out") == before


def test_changed_inputs_and_settings_files_are_noticed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats, settings = tmp_path / "chats.jsonl", tmp_path / "settings.yaml"
    shutil.copy(world / "chats.jsonl", chats)
    settings.write_text("train: {max_steps: 1}")
    drafters = {"medusa": {"drafter": "medusa", "config": str(settings)}}
    file = write_pipeline(world, tmp_path, inputs=[str(chats)], drafters=drafters)
    assert run("run", file, "-q") == 0
    assert run("run", file, "-q") == 0
    settings.write_text("train: {max_steps: 2}")
    capsys.readouterr()
    assert run("run", file) == CONFLICT
    assert "medusa/run was made from inputs that have changed since" in error_of(capsys.readouterr().err)[0]
    settings.write_text("train: {max_steps: 1}")
    lines = chats.read_text().splitlines(keepends=True)
    chats.write_text("".join(lines[:-1]))
    assert run("run", file) == CONFLICT
    message = error_of(capsys.readouterr().err)[0]
    assert "inputs that have changed since" in message
    assert message.endswith("[stage-changed]")


def test_a_target_that_was_changed_in_its_folder_is_noticed_whatever_else_lies_there(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(Path(world / "target"), target)
    drafters = {"medusa": {"drafter": "medusa", "settings": {"train": {"max_steps": 1}, "data": SMALL["data"]}}}
    file = write_pipeline(world, tmp_path, target=str(target), drafters=drafters, verify={"full": False})
    assert run("run", file, "-q") == 0
    (target / "README.md").write_text("mine")
    (target / "config.json").touch()
    assert all(stage["was_done"] for stage in document(capsys, file)["stages"])
    weights = load_file(target / "model.safetensors")
    name = next(name for name in weights if "layers.2.mlp.down" in name)
    changes = {
        "model.safetensors": save({**weights, name: weights[name] * 1.5}, metadata={"format": "pt"}),
        "chat_template.jinja": b"{{ messages[0].content }}",
    }
    for changed, data in changes.items():
        before = (target / changed).read_bytes() if (target / changed).exists() else None
        (target / changed).write_bytes(data)
        assert run("run", file, "-q") == CONFLICT
        message = error_of(capsys.readouterr().err)[0]
        assert "out/data was made from inputs that have changed since: its files, the target" in message
        if before is None:
            (target / changed).unlink()
        else:
            (target / changed).write_bytes(before)
    assert all(stage["was_done"] for stage in document(capsys, file)["stages"])


def test_what_was_made_of_a_run_is_out_of_date_once_it_was_trained_on_by_hand(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafters = {"medusa": {"drafter": "medusa", "settings": {"train": {"max_steps": 1}, "data": SMALL["data"]}}}
    file = write_pipeline(world, tmp_path, drafters=drafters, verify={"full": False})
    assert run("run", file, "-q") == 0
    out = tmp_path / "out"
    trained = out / "medusa" / "run"
    assert run("train", str(out / "store"), "-o", str(trained), "--resume", "train.max_steps=2", "-q") == 0
    assert run("run", file, "-q") == CONFLICT
    message, fix = error_of(capsys.readouterr().err)
    assert "medusa/drafter was made from inputs that have changed since" in message
    assert json.loads(unseal((out / "done/medusa.eval.json").read_bytes(), DoneStage, "eval").answer)["step"] == 2
    assert fix == f"rm -r {out / 'medusa/drafter'} {out / 'done/medusa.export.json'}"
    shutil.rmtree(out / "medusa" / "drafter")
    again = document(capsys, file)
    assert [stage["stage"] for stage in again["stages"] if not stage["was_done"]] == ["medusa/export"]
    assert json.loads((out / "medusa/drafter/hiddenstore.json").read_text())["step"] == 2


@pytest.mark.parametrize(
    "text",
    [
        *(f"chats 10:00.jsonl{part}" for part in ("", "[:2]", ":[:2]", ":train[:2]")),
        *(f"saved{part}" for part in ("", ":train", ":test[:50%]", ":train+test", "[config]:train[:2]")),
    ],
)
def test_a_file_is_an_input_however_its_rows_are_chosen(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / name for name in ("chats 10:00.jsonl", "saved/data.arrow", "dataset/notes.txt")]
    digests = []
    for content in ("old", "new"):
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
        digests.append([pipeline._digest_of_files([one]) for one in (text, "dataset:gsm8k", "org/name[main]:train")])
    assert digests[0][0] != digests[1][0]
    assert digests[0][1:] == digests[1][1:]


@pytest.mark.parametrize("stage", ["prepare", "medusa.export"])
def test_a_product_that_a_kill_left_without_its_record_is_taken_as_it_is(
    finished: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = finished / "out" / "done" / f"{stage}.json"
    whole, before = record.read_bytes(), tree(finished / "out")
    begun = record.with_name(f"{record.name}.begun")
    done = unseal(whole, DoneStage, str(record))
    record.unlink()
    # What stands there while the command works.
    begun.write_bytes(seal(done.model_copy(update={"answer": "{}", "seconds": 0.0})))
    try:
        if stage == "prepare":
            # What was built on the answer that is gone would be made otherwise now.
            begun.write_bytes(seal(done.model_copy(update={"answer": "{}", "seconds": 0.0, "built_on": "other"})))
            for _ in range(2):
                assert run("run", str(finished / "pipeline.yaml")) == CONFLICT
                assert "output-exists" in capsys.readouterr().err
            return
        again = document(capsys, str(finished / "pipeline.yaml"))
        assert [one["stage"] for one in again["stages"] if not one["was_done"]] == ["medusa/export"]
        assert not begun.exists()
    finally:
        record.write_bytes(whole)
        begun.unlink(missing_ok=True)
    assert tree(finished / "out") == before


def test_checkpoints_of_a_run_whose_first_document_is_missing_stay_and_are_named(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, done = finished / "out" / "medusa" / "run", finished / "out" / "done"
    names = {trained / "run.json", done / "medusa.train.json"}
    aside, before = {path: path.read_bytes() for path in names}, tree(finished / "out")
    for path in names:
        path.unlink()
    left = tree(trained)
    try:
        for _ in ("first", "with the mark of a stage that was begun"):
            assert run("run", str(finished / "pipeline.yaml"), "-q") == CONFLICT
            message, fix = error_of(capsys.readouterr().err)
            assert "of a run whose run.json is missing" in message
            assert fix == f"put run.json back, or mv {trained} {trained}-aside"
            assert tree(trained) == left
    finally:
        for path, data in aside.items():
            path.write_bytes(data)
        (done / "medusa.train.json.begun").unlink(missing_ok=True)
    assert tree(finished / "out") == before


def test_how_long_stages_take_is_said_and_corrected_by_what_the_first_ones_took() -> None:
    stages = [pipeline.Stage(name, name, ()) for name in ("collect", "verify", "a/train")]
    clock = pipeline._Clock({"collect": 10, "train": 20}, stages)
    assert clock.estimate(0) == "  about 10 m 00 s, 30 m 00 s to the end"
    assert clock.estimate(1) == ""
    clock.took(stages[0], 1500)
    # 25 minutes for 10: the pace is (25 + 5) / (10 + 5).
    assert clock.estimate(2) == "  about 40 m 00 s, 40 m 00 s to the end"


def test_a_damaged_record_names_its_file(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = finished / "out" / "done" / "prepare.json"
    whole = record.read_bytes()
    try:
        record.write_bytes(whole.replace(b"prepare", b"prepara", 1))
        assert run("run", str(finished / "pipeline.yaml")) == CORRUPT
        assert str(record) in error_of(capsys.readouterr().err)[0]
    finally:
        record.write_bytes(whole)


def test_a_folder_of_something_else_is_left_alone(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert run("run", write_pipeline(world, tmp_path)) == CONFLICT
    assert "no `hiddenstore run` made" in error_of(capsys.readouterr().err)[0]
    assert list(tree(tmp_path / "out")) == ["thesis.tex"]


def test_a_target_and_its_data_are_all_it_takes(world: World, tmp_path: Path) -> None:
    tiny = ("prepare.val=20%", f"collect.layers=[{LAYERS}]", "verify.meaning=false", "train.max_steps=1")
    words = [f"drafters.eagle3.settings.{word}" if word.startswith("train.") else word for word in tiny]
    small = "drafters.eagle3.settings={loss: {steps: 2}, data: {batch_tokens: 512, pack_tokens: 256}}"
    out = tmp_path / "out"
    target = ("--target", world / "target", "--data", world / "chats.jsonl", "-o", str(out), "-q")
    assert run("run", small, *words, *target) == 0
    assert (out / "eagle3" / "drafter" / "model.safetensors").is_file()


def test_data_that_holds_no_sample_for_eval_is_refused_before_anything_is_captured(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = write_rows(tmp_path / "few.jsonl", [chat(number) for number in range(3)])
    drafters = {"medusa": {"drafter": "medusa", "settings": {"train": {"max_steps": 1}, "data": SMALL["data"]}}}
    file = write_pipeline(world, tmp_path, inputs=[chats], drafters=drafters, prepare={})
    assert run("run", file, "-q") == USAGE
    problem, fix = error_of(capsys.readouterr().err)
    assert "data holds 3 train and 0 validation samples: eval would read none" in problem
    assert not (tmp_path / "out" / "store").exists()
    assert fix.startswith("eval.split=train; ")
    again = document(capsys, file, "eval.split=train")
    assert [stage["stage"] for stage in again["stages"] if stage["was_done"]] == ["prepare"]


def test_data_without_a_sample_to_train_on_is_refused_before_anything_is_captured(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", write_pipeline(world, tmp_path, prepare={"val": "100%"}), "-q") == USAGE
    problem, fix = error_of(capsys.readouterr().err)
    assert "data holds 0 train and 40 validation samples: train would read none" in problem
    assert fix.startswith(f"rm -r {tmp_path / 'out' / 'data'}, then prepare.val=10%")


def test_a_training_file_of_automodel_is_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"train_data_path": "chats.jsonl", "train_split": "train[:5]", "seq_length": 64, "output_dir": "x"}
    file = tmp_path / "eagle3.yaml"
    file.write_text(yaml.safe_dump({"recipe": "TrainEagle3Recipe", "recipe_args": arguments, "optimizer": {"lr": 0.1}}))
    missing = str(tmp_path / "nowhere")
    here = (f"recipe_args.target_model_name_or_path={missing}", f"recipe_args.output_dir={tmp_path / 'out'}")
    assert run("run", str(file), *here) != 0
    said = capsys.readouterr().err
    assert "optimizer.lr" in said
    assert f"hiddenstore prepare 'chats.jsonl:train[:5]' -o {tmp_path / 'out' / 'data'} --target {missing}" in said
    assert "--max-tokens 64" in said

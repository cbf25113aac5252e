"""A read that fails is neither an absent file nor a damaged one (the class of findings A1): the trainer stops."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, HiddenstoreError, StorageError
from hiddenstore.settings import load as load_settings
from hiddenstore.store import Store
from tests.trainer.export_cases import make
from tests.trainer.runs import WORDS, tiny_store
from trainer.export.published import read_published
from trainer.export.support import ENGINES
from trainer.export.write import checkpoint_of, engine_files, export, prove_equal
from trainer.serve.launch import write_files
from trainer.settings import config_class
from trainer.train import checkpoint
from trainer.train.log import read_curves
from trainer.train.loop import train
from trainer.train.run_folder import describe, drafter_name, load_drafter


def unreadable(path: Path) -> None:
    """Put what the system refuses to follow, for any user, in the place of a file or folder."""
    if path.exists():
        path.rename(path.with_name(f"{path.name}-moved"))
    path.symlink_to(path.name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(tiny_store(tmp_path).path, tmp_path / "run", words=WORDS)
    return tmp_path / "run"


def test_a_resume_whose_checkpoints_cannot_be_listed_does_not_start_anew(run: Path, tmp_path: Path) -> None:
    metrics = (run / "metrics.jsonl").read_bytes()
    unreadable(run / checkpoint.FOLDER)
    with pytest.raises(StorageError):
        train(tmp_path / "store", run, words=["train.max_steps=14"], resume=True)
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_resume_whose_checkpoints_lie_on_a_disk_that_is_not_mounted_does_not_start_anew(
    run: Path, tmp_path: Path
) -> None:
    (run / checkpoint.FOLDER).rename(tmp_path / "elsewhere")
    (run / checkpoint.FOLDER).symlink_to(tmp_path / "unmounted")
    with pytest.raises(StorageError, match="is its disk mounted"):
        train(tmp_path / "store", run, words=["train.max_steps=14"], resume=True)


def test_a_resume_whose_checkpoints_were_taken_away_does_not_start_anew(run: Path, tmp_path: Path) -> None:
    for path in checkpoint.checkpoints(run):
        path.rename(tmp_path / path.name)
    with pytest.raises(CorruptionError, match="LATEST names one"):
        train(tmp_path / "store", run, words=["train.max_steps=14"], resume=True)


@pytest.mark.parametrize("file", ["config.yaml", "store"])
def test_an_export_does_not_guess_what_it_cannot_read(run: Path, tmp_path: Path, file: str) -> None:
    store = Store.open(tmp_path / "store")
    loaded = load_drafter(run, head=store.head())
    assert checkpoint_of(loaded, run).draft_len == 3
    unreadable(run / file if file == "config.yaml" else Path(store.path) / "store.json")
    with pytest.raises(StorageError):
        checkpoint_of(loaded, run)


def test_an_export_over_settings_that_are_none_does_not_take_them_for_others(run: Path) -> None:
    loaded = load_drafter(run)
    for damaged in ("", "loss: x\n"):
        (run / "config.yaml").write_text(damaged)
        with pytest.raises(CorruptionError, match="holds no settings"):
            checkpoint_of(loaded, run)


@pytest.mark.parametrize(
    "name",
    ["*a9", "[eagle3]", "", '"\\UFFFFFFFF"', "[" * 5000],
    ids=["aliases", "a list", "nothing", "no character", "lists without end"],
)
def test_a_stranger_s_run_whose_drafter_is_named_by_no_word_is_refused_at_once(run: Path, name: str) -> None:
    loaded, file = load_drafter(run), run / "config.yaml"
    # Unfolds into 10**10 letters.
    bomb = "bomb:\n- &a0 [x]\n" + "".join(f"- &a{i} [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 10))
    settings = file.read_text().replace("  name: eagle3\n", f"  name: {name}\n")
    file.write_text(bomb + settings[: settings.rindex("#")] if name == "*a9" else settings[: settings.rindex("#")])
    with pytest.raises(CorruptionError, match="names no drafter") as caught:
        drafter_name(run)
    assert caught.value.kind == "run-corrupt"
    if name not in ("[eagle3]", ""):
        with pytest.raises(CorruptionError, match="is no YAML"):
            checkpoint_of(loaded, run)


def test_settings_of_a_run_with_a_bit_of_another_value_are_refused_whatever_reads_them(
    run: Path, tmp_path: Path
) -> None:
    loaded, file = load_drafter(run), run / "config.yaml"
    whole = file.read_bytes()
    settings = load_settings(config_class("eagle3"), file)
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with suppress(CorruptionError, ConfigError):
            assert drafter_name(run) == "eagle3"
            assert load_settings(config_class("eagle3"), file) == settings
    file.write_bytes(whole.replace(b"  step_decay: 0.8\n", b"  step_decay: 0.9\n"))
    with pytest.raises(CorruptionError, match="is not what the run wrote"):
        checkpoint_of(loaded, run)
    with pytest.raises(CorruptionError, match="is not what the run wrote"):
        train(tmp_path / "store", run, words=["train.max_steps=14"], resume=True)
    file.write_bytes(file.read_bytes()[: whole.rindex(b"#")])
    train(tmp_path / "store", run, words=["train.max_steps=14"], resume=True)
    assert load_settings(config_class("eagle3"), file).model_dump()["loss"]["step_decay"] == 0.9


def test_an_export_without_its_store_or_settings_is_made_of_what_there_is(run: Path, tmp_path: Path) -> None:
    loaded = load_drafter(run)
    os.rename(tmp_path / "store", tmp_path / "gone")
    (run / "config.yaml").unlink()
    made = checkpoint_of(loaded, run)
    assert (made.draft_len, made.target_config) == (None, {})


@pytest.mark.parametrize("file", ["hiddenstore.json", "model.safetensors"])
def test_a_published_folder_that_cannot_be_read_is_not_guessed_nor_called_damaged(tmp_path: Path, file: str) -> None:
    case = make("eagle3")
    export(case, "vllm", tmp_path / "out", "float32")
    unreadable(tmp_path / "out" / file)
    with pytest.raises(StorageError):
        read_published(tmp_path / "out", case.head, case.identity.num_layers)
    dtype = next(iter(engine_files(case, ENGINES["vllm"], "0.32", "float32").tensors.values())).dtype
    with pytest.raises(StorageError):
        prove_equal(case, tmp_path / "out", dtype)


def test_a_damaged_line_of_the_log_is_named(run: Path, tmp_path: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(b"{}\n" + metrics.read_bytes())
    with pytest.raises(CorruptionError, match="no step"):
        train(tmp_path / "store", run, words=["train.max_steps=14"], resume=True)


@pytest.mark.parametrize("name", ["config.yaml", "snapshot.json", "metrics.jsonl", "vocab.safetensors"])
def test_a_resume_over_a_pipe_in_the_place_of_a_file_of_the_run_ends(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(HiddenstoreError, match=name):
        train(tmp_path / "store", run, words=["train.max_steps=14"], resume=True)


def test_settings_and_vocabulary_on_a_disk_that_is_not_mounted_are_not_missing(run: Path) -> None:
    loaded = load_drafter(run)
    for name in ("config.yaml", "vocab.safetensors"):
        (run / name).unlink()
        (run / name).symlink_to(run / "unmounted")
    with pytest.raises(StorageError, match="is its disk mounted"):
        checkpoint_of(loaded, run)
    with pytest.raises(StorageError, match="is its disk mounted"):
        describe(run).vocab(loaded.head.vocab_size)


def test_a_report_names_the_damaged_line_of_the_log(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    written = metrics.read_bytes()
    for name in (b"lr", b"losses", b"grad_norm", b"tokens_per_s", b"acc", b"step"):
        metrics.write_bytes(written.replace(b'"%s": ' % name, b'"%s": ' % name[:-1].ljust(len(name), b"_"), 1))
        with pytest.raises(CorruptionError, match=r"metrics\.jsonl:1 is no step"):
            read_curves(run)


def test_a_file_that_is_no_text_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConflictError):
        write_files({str(tmp_path / "serve.yaml"): "text\n"})

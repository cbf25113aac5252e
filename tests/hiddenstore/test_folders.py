"""A wrong kind of folder: what it is, what to do with it, and that nothing heavy is imported to say so."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.files.layout import FolderKind, Wanted, kind_of, missing
from hiddenstore.testing.builders import make_store


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``store`` and ``data``, and by their marks a run, an exported drafter, a dump, a model and a text."""
    folder = tmp_path_factory.mktemp("place")
    make_store(folder)
    marks = {
        "run": ("run.json",),
        "drafter": ("config.json", "hiddenstore.json", "model.safetensors"),
        "dump": ("hiddenstore.json",),
        "model": ("config.json", "tokenizer.json"),
    }
    for name, files in marks.items():
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).write_text("{}\n")
    (folder / "chats.jsonl").write_text("{}\n")
    return folder


@pytest.mark.parametrize("kind", ["store", "data", "run", "drafter", "dump", "model"])
def test_a_folder_is_known_by_its_files(kind: FolderKind, place: Path) -> None:
    assert kind_of(place / kind) == kind


def test_a_file_of_conversations_is_known_by_its_name(place: Path) -> None:
    assert kind_of(place / "chats.jsonl") == "text"
    assert kind_of(place) is kind_of(place / "nothing") is None


@pytest.mark.parametrize(
    ("wanted", "there", "what", "command"),
    [
        ("store", "data", "it holds prepared data", "collect {} -o STORE --target TARGET"),
        ("store", "run", "it is a training run", "eval {} STORE"),
        ("store", "drafter", "it is an exported drafter", "serve {} --target TARGET --engine vllm"),
        ("store", "model", "it is a model", "collect DATA -o STORE --target {}"),
        ("store", "dump", "it is a dump for another trainer", "import {} -o STORE --target TARGET --from LAYOUT"),
        ("data", "store", "it is a store", "info {}"),
        ("data", "chats.jsonl", "it is a file of conversations", "prepare {} -o DATA --target TARGET"),
        ("data", "model", "it is a model", "prepare INPUT -o DATA --target {}"),
        ("run", "store", "it is a store", "train {} -o RUN"),
        ("run", "data", "it holds prepared data", "collect {} -o STORE --target TARGET"),
        ("run", "drafter", "it is an exported drafter", "import-drafter {} --store STORE -o RUN"),
    ],
)
def test_the_next_command_follows_from_what_there_is(
    wanted: Wanted, there: str, what: str, command: str, place: Path
) -> None:
    path = str(place / there)
    error = missing(wanted, path)
    assert error.message.endswith(what)
    assert error.hint == f"hiddenstore {command.format(path)}"


def test_a_folder_around_the_one_that_was_meant_names_it(place: Path) -> None:
    assert missing("store", str(place)).hint == f"hiddenstore info {place / 'store'}"
    assert missing("data", place).hint == f"hiddenstore collect {place / 'data'} -o STORE --target TARGET"
    assert missing("run", place).message.endswith(f"{place / 'run'} is one")


def test_a_path_with_nothing_there_says_what_would_make_it(place: Path) -> None:
    nothing = str(place / "no thing")
    assert missing("store", nothing).hint == f"hiddenstore collect DATA -o '{nothing}' --target TARGET"
    assert missing("data", nothing).hint == f"hiddenstore prepare INPUT -o '{nothing}' --target T"
    assert missing("run", nothing).hint == f"hiddenstore train STORE -o '{nothing}'"


@pytest.mark.parametrize(
    "words",
    [
        "info run",
        "verify run",
        "copy run somewhere",
        "copy store somewhere --recipe saef",
        "advise model",
        "diff store data",
        "report nothing",
        "repair nothing",
        "gc nothing",
        "plan store --target model",
        "collect store -o somewhere --target model",
        "collect data -o somewhere --target model --recipe saef",
        "collect data -o somewhere --target model --engine hff",
        "collect data -o somewhere --target model --layers eagl3",
        "plan data --target model --recipe saef",
        "vocab run",
        "export-data run --to specforge -o somewhere",
        "train data -o somewhere",
        "train store -o somewhere --drafter eagel3",
        "train store -o somewhere -c nothing.yaml",
        "train store -o somewhere optim.lrr=3",
        "train store -o somewhere optim.lr=fast",
        "eval store store",
        "export store --engine vllm -o somewhere",
        "export run --engine vlm -o somewhere",
        "decode store --target model --prompts store",
    ],
)
def test_wrong_folders_and_settings_are_refused_before_torch_is_imported(words: str, place: Path) -> None:
    program = (
        "import sys\n"
        "from hiddenstore.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "error: " in done.stderr


def test_an_error_about_a_folder_is_printed_as_any_other(place: Path) -> None:
    result = CliRunner().invoke(main, ["info", str(place / "run")])
    assert result.exit_code == 2
    assert f"error: {place / 'run'} is no store: it is a training run  [store-missing]" in result.stderr


def test_a_checkpoint_that_is_not_there_says_which_are(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    error = missing("run", tmp_path / "run" / "checkpoints" / "step-9")
    assert error.message.endswith(f"{tmp_path}/run/checkpoints holds step-3")
    assert error.hint == f"hiddenstore eval {tmp_path}/run STORE"
    error = missing("run", tmp_path / "other" / "checkpoints" / "LATEST")
    assert error.hint == f"hiddenstore train STORE -o {tmp_path}/other"

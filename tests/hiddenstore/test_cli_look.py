"""info, ls, show, stats and diff as a person and a script meet them."""

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models

from hiddenstore.cli import main
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    capture_spec,
    make_samples,
    make_store,
    random_records,
    target_files,
)
from hiddenstore.writer import create_store, write_unit

INFO_FIELDS = {
    *("samples", "tokens", "supervised_tokens", "units", "segments", "bytes_stored", "bytes_raw", "recipe", "codecs"),
    *("layers", "final", "final_norm", "target", "engine", "rejects"),
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="hiddenstore")


def run_json(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 3), result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == f"hiddenstore.{arguments[0]}/1"
    assert isinstance(document, dict)
    return document


def on_a_terminal(*arguments: str, columns: int = 80) -> bytes:
    """What a command writes when stdout is a terminal."""
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hiddenstore.cli", *arguments], stdout=theirs, stderr=subprocess.PIPE, env=environment
    )
    os.close(theirs)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    return b"".join(chunks)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_store(tmp_path_factory.mktemp("look"), samples=12).path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store whose tokens and target name decode to terminal escapes."""
    words = {f"\x1b[3{i % 8}m\x07w{i}\u202e": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    capture = capture_spec()
    capture = capture.model_copy(update={"target": capture.target.model_copy(update={"name": "bad\x1b]0;x\x07"})})
    files = {**target_files(), "tokenizer.json": tokenizer.to_str().encode()}
    place = tmp_path_factory.mktemp("hostile") / "store"
    made = create_store(place, capture, HEAD, "safe", files)
    write_unit(made, "u-000000", "0" * 64, random_records(make_samples(2), capture), (), ENGINE)
    return str(place)


def test_info_has_every_promised_member_and_fits_one_screen(store: str) -> None:
    document = run_json("info", store)
    assert set(document) >= INFO_FIELDS
    result = run("info", store)
    assert len(result.stdout.splitlines()) <= 24
    assert result.stderr == f"next: hiddenstore show {store} 0\n"


def test_info_of_a_missing_store_says_how_to_make_one(tmp_path: Path) -> None:
    result = run("info", str(tmp_path / "absent"))
    assert result.exit_code == 2
    assert "[store-missing]" in result.stderr
    assert "fix: hiddenstore collect" in result.stderr


def test_info_of_prepared_data_says_how_to_capture_it(tmp_path: Path) -> None:
    make_store(tmp_path, samples=3)
    result = run("info", str(tmp_path / "data"))
    assert result.exit_code == 2
    assert "is no store: it holds prepared data" in result.stderr
    assert f"fix: hiddenstore collect {tmp_path / 'data'} -o STORE" in result.stderr


@pytest.mark.parametrize("words", [("ls", "-n"), ("show", "--tokens"), ("diff", "nowhere", "--samples")])
def test_numbers_of_rows_below_zero_are_refused(store: str, words: tuple[str, ...]) -> None:
    command, *rest = words
    result = run(command, store, *rest, "-3")
    assert result.exit_code == 2
    assert "-3 is not in the range x>=0" in result.stderr


def test_diff_of_stores_of_two_targets_does_not_advise_to_merge_them(tmp_path: Path, store: str) -> None:
    other = make_store(tmp_path, samples=3, width=64).path
    result = run("diff", store, other)
    assert result.exit_code == 3
    assert "different" in result.stdout
    assert "hiddenstore copy" not in result.stderr


def test_info_opens_a_snapshot_after_an_at_sign(tmp_path: Path) -> None:
    made = make_store(tmp_path, samples=4)
    made.save_snapshot("v1")
    assert run_json("info", f"{made.path}@v1")["samples"] == 4
    missing = run("info", f"{made.path}@v2")
    assert missing.exit_code == 2
    assert "it has v1" in missing.stderr


def pasted(result: Result) -> list[str]:
    """The words of the next command that a command printed."""
    assert result.exit_code in (0, 3), result.stderr
    return shlex.split(result.stderr.partition("next: hiddenstore ")[2])


@pytest.mark.parametrize("command", ["info", "ls", "stats", "log", "diff", "advise"])
def test_the_next_command_after_a_look_at_a_snapshot_runs_as_it_is_printed(tmp_path: Path, command: str) -> None:
    store = make_store(tmp_path / "of mine", samples=4, codec="bf16")
    store.save_snapshot("v1")
    frozen = f"{store.path}@v1"
    words = pasted(run(command, frozen, frozen) if command == "diff" else run(command, frozen))
    result = run(*words)
    assert result.exit_code in (0, 3), (words, result.stderr)
    copies = [path.name for path in tmp_path.glob("of mine/*") if path.name not in ("store", "data")]
    assert copies == (["store-safe"] if command == "advise" else [])


def test_an_empty_snapshot_sends_to_a_collect_into_its_store(tmp_path: Path) -> None:
    empty = create_store(tmp_path / "empty", capture_spec(), HEAD, "safe", target_files())
    empty.save_snapshot("v1")
    assert pasted(run("info", f"{empty.path}@v1"))[:4] == ["collect", "DATA", "-o", empty.path]


def test_a_snapshot_where_all_of_a_store_is_meant_is_refused_with_its_path_quoted(tmp_path: Path) -> None:
    store = make_store(tmp_path / "of mine", samples=4)
    store.save_snapshot("v1")
    result = run("verify", f"{store.path}@v1")
    assert result.exit_code == 2
    assert shlex.split(result.stderr.partition("fix: the same command with ")[2]) == [store.path]


def test_a_folder_with_an_at_sign_in_its_name_is_a_folder(tmp_path: Path) -> None:
    made = make_store(tmp_path, samples=2)
    renamed = Path(made.path).rename(tmp_path / "qwen@main")
    assert run_json("info", str(renamed))["samples"] == 2


def test_info_of_a_damaged_store_names_the_file_and_points_to_verify(tmp_path: Path) -> None:
    made = make_store(tmp_path, samples=6)
    victim = sorted(Path(made.path, "commits").iterdir())[1]
    victim.write_bytes(victim.read_bytes().replace(b"train", b"trian", 1))
    result = run("info", made.path)
    assert result.exit_code == 0
    assert victim.name in result.stderr
    assert f"next: hiddenstore verify {made.path}" in result.stderr
    assert run("ls", made.path).exit_code == 3


def test_ls_filters_limits_and_prints_bare_ids_when_quiet(store: str) -> None:
    ids = Store.open(store).sample_ids
    assert run("ls", store, "-q", "-n", "0").stdout.split() == ids
    assert run("ls", store, "-q", "-n", "3").stdout.split() == ids[:3]
    document = run_json("ls", store, "--where", "split=validation")
    assert document["matching"] == 2
    assert [row["split"] for row in document["rows"]] == ["validation"] * 2  # type: ignore[attr-defined]
    assert "2 of 2 samples (12 in the store)" in run("ls", store, "--where", "split=validation").stderr


def test_a_wrong_condition_is_a_usage_error(store: str) -> None:
    result = run("ls", store, "--where", "token>3")
    assert result.exit_code == 2
    assert "did you mean tokens?" in result.stderr


def test_show_takes_an_index_or_the_start_of_an_id(store: str) -> None:
    opened = Store.open(store)
    by_index = run_json("show", store, "2")
    by_prefix = run_json("show", store, opened.sample_ids[2][:9])
    assert by_index == by_prefix
    sample = opened.sample(opened.sample_ids[2])
    assert by_index["input_ids"] == sample.input_ids.tolist()
    assert by_index["loss_mask"] == sample.loss_mask.tolist()
    assert run("show", store).exit_code == 0
    assert run("show", store, "nope").exit_code == 2


def test_show_marks_trained_text_by_colour_on_a_terminal_and_by_brackets_elsewhere(store: str) -> None:
    plain = run("show", store, "0").stdout
    assert "⟦" in plain
    assert "\x1b" not in plain
    coloured = on_a_terminal("show", store, "0").decode()
    assert "\x1b[1;32m" in coloured
    assert "⟦" not in coloured.split("trained text")[0]


def test_show_cuts_long_texts_unless_all_is_asked_for(store: str) -> None:
    short, whole = run("show", store, "0", "--tokens", "4").stdout, run("show", store, "0", "--all").stdout
    assert "more tokens (--all prints them)" in short
    assert len(short) < len(whole)
    assert "--all" not in whole


def test_text_from_a_store_cannot_reprogram_the_terminal(hostile: str) -> None:
    for command in ("show", "info"):
        for arguments in ((command, hostile), (command, hostile, "--json")):
            assert not set("\x1b\x07\u202e") & set(run(*arguments).stdout)
    coloured = on_a_terminal("show", hostile)
    assert b"\x07" not in coloured
    assert "\u202e".encode() not in coloured


def test_stats_print_splits_lengths_norms_and_bytes(store: str) -> None:
    text = run("stats", store).stdout
    for word in ("validation", "tokens per sample", "layer_1", "final", "scales"):
        assert word in text


def test_diff_exits_3_when_stores_differ_and_0_when_they_do_not(tmp_path: Path, store: str) -> None:
    same = run("diff", store, store)
    assert same.exit_code == 0
    assert same.stdout.rstrip().endswith("equal")
    other = make_store(tmp_path, samples=3, codec="bf16").path
    result = run("diff", store, other)
    assert result.exit_code == 3
    assert "capture.codecs.aux" in result.stdout
    document = run_json("diff", store, other)
    assert document["different"] is True
    assert document["coverage"] == {"only_a": 9, "both": 3, "only_b": 0}
    assert f"next: hiddenstore copy {store} {other} merged-store" in result.stderr


def test_diff_with_a_tolerance_exits_0_within_it_and_says_what_goes_beyond(tmp_path: Path, store: str) -> None:
    other = make_store(tmp_path / "raw", samples=12, codec="bf16").path
    within = run("diff", store, other, "--tolerance", "0.1")
    assert within.exit_code == 0, within.stdout
    assert "equal within 0.1" in within.stdout
    beyond = run("diff", store, other, "--tolerance", "0.0001")
    assert beyond.exit_code == 3
    assert "different: layer_" in beyond.stdout
    assert "of its length, more than 0.0001" in beyond.stdout


@pytest.mark.parametrize("columns", ["80", "100", "120"])
@pytest.mark.parametrize("command", ["ls", "stats", "show", "diff"])
def test_every_screen_fits_the_terminal(
    store: str, columns: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    arguments = (command, store, store) if command == "diff" else (command, store)
    lines = run(*arguments).stdout.splitlines()
    # Paths and ids are never cut, so that they can be copied from the screen.
    assert all(len(line) <= int(columns) for line in lines if store not in line)


@pytest.mark.parametrize("command", ["info", "ls", "show", "stats"])
def test_every_success_ends_with_the_next_command(store: str, command: str) -> None:
    result = run(command, store)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1].startswith("next: hiddenstore ")
    assert run(command, store, "-q").stderr == ""

"""verify, copy, repair, gc and doctor as a person and a script meet them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hiddenstore.cli import main
from hiddenstore.cli.care import parse_age
from hiddenstore.errors import ConfigError
from hiddenstore.index.publish import publish_index
from hiddenstore.store import Store
from hiddenstore.testing.builders import HEAD, capture_spec, make_store, target_files
from hiddenstore.writer import create_store


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="hiddenstore")


def damage(store: Store) -> Path:
    record = store.commits()[0]
    victim = Path(store.path, record.segment, next(f.path for f in record.files if f.path.startswith("layer_1/c")))
    data = bytearray(victim.read_bytes())
    data[10] ^= 255
    victim.write_bytes(data)
    return victim


def test_verify_of_a_sound_store_is_one_calm_line(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=4)
    result = run("verify", store.path, "--full")
    assert result.exit_code == 0
    assert result.stdout.startswith("✓ ")
    assert len(result.stdout.splitlines()) == 1
    document = json.loads(run("verify", store.path, "--json").stdout)
    assert (document["schema"], document["ok"], document["findings"]) == ("hiddenstore.verify/1", True, [])


def test_what_is_done_is_one_line_of_a_pipe_however_long_the_path(tmp_path: Path) -> None:
    path = make_store(tmp_path / ("long" * 30), samples=4).path
    copied, pushed, pulled = (str(tmp_path / (name * 20)) for name in ("copied", "pushed", "pulled"))
    for words in (
        ("verify", path),
        ("repair", path),
        ("gc", path),
        ("snapshot", path, "one"),
        ("copy", path, copied, "--container", "webdataset"),
        ("push", copied, pushed),
        ("pull", pushed, pulled),
    ):
        said = run(*words).stdout.splitlines()
        assert len(said) == 1
        assert said[0].startswith("✓ /")
        assert len(said[0]) > 120


@pytest.mark.parametrize("command", ["verify", "repair", "gc"])
def test_what_is_done_to_all_of_a_store_is_not_done_to_a_snapshot(tmp_path: Path, command: str) -> None:
    store = make_store(tmp_path, samples=4)
    store.save_snapshot("one")
    result = run(command, f"{store.path}@one")
    assert result.exit_code == 2
    assert f"fix: the same command with {store.path}\n" in result.stderr


def test_a_share_of_what_is_not_looked_at_is_a_usage_error(tmp_path: Path) -> None:
    result = run("verify", make_store(tmp_path, samples=4).path, "--full", "--share", "0.5")
    assert result.exit_code == 2
    assert "--share is for --meaning" in result.stderr


def test_verify_of_no_samples_looked_at_all_of_them(tmp_path: Path) -> None:
    store = create_store(tmp_path / "store", capture_spec(), HEAD, "safe", target_files())
    assert "the states of 0 samples mean what the store says" in run("verify", store.path, "--meaning").stdout


def test_verify_exits_3_and_names_file_samples_and_remedy(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6)
    victim = damage(store)
    assert run("verify", store.path).exit_code == 0
    result = run("verify", store.path, "--full")
    assert result.exit_code == 3
    assert str(victim.relative_to(store.path)) in result.stdout
    assert f"next: hiddenstore repair {store.path}" in result.stderr
    document = json.loads(run("verify", store.path, "--full", "--json").stdout)
    assert document["ok"] is False
    (finding,) = document["findings"]
    assert set(finding) >= {"kind", "path", "samples", "detail"}
    assert finding["samples"] == [entry.id for entry in store.commits()[0].samples]
    assert run("verify", store.path, "--full", "-q").stdout == ""


def test_samples_without_a_commit_are_counted_apart_from_those_held(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=3)
    for record in Path(store.path, "commits").iterdir():
        record.unlink()
    assert "3 samples affected" in run("verify", store.path).stdout
    assert "of 0" not in run("verify", store.path).stdout


def test_states_that_mean_something_else_are_not_sent_to_repair(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6)
    result = run("verify", store.path, "--meaning")
    assert result.exit_code == 3
    assert result.stderr.startswith(("next: hiddenstore show", "next: hiddenstore info"))


@pytest.mark.parametrize("is_indexed", [True, False])
def test_an_unfinished_store_points_to_collect(is_indexed: bool, tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6)
    if is_indexed:
        publish_index(store.fs, store.catalog.names)
    sorted(Path(store.path, "commits").iterdir())[0].unlink()
    result = run("verify", store.path)
    assert result.exit_code == 3
    assert f"next: hiddenstore collect DATA -o {store.path}" in result.stderr


def test_a_file_of_the_target_that_is_gone_points_to_collect(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    Path(store.path, "target", "head.safetensors").unlink()
    result = run("verify", store.path)
    assert (result.exit_code, "hiddenstore collect DATA -o" in result.stderr) == (3, True)


def test_a_segment_that_is_gone_is_one_finding_on_the_screen(tmp_path: Path) -> None:
    import shutil

    store = make_store(tmp_path, samples=6)
    shutil.rmtree(Path(store.path, store.commits()[0].segment))
    result = run("verify", store.path)
    assert result.exit_code == 3
    assert result.stdout.count("file-missing") == 1
    assert " times" in result.stdout


def test_copy_merges_and_says_what_it_did(tmp_path: Path) -> None:
    one, other = make_store(tmp_path / "1", samples=3, seed=1), make_store(tmp_path / "2", samples=3, seed=2)
    place = str(tmp_path / "whole")
    result = run("copy", one.path, other.path, place)
    assert result.exit_code == 0, result.stderr
    assert "6 samples" in result.stdout
    assert "byte for byte" in result.stdout
    assert f"next: hiddenstore verify {place} --full" in result.stderr
    again = json.loads(run("copy", one.path, other.path, place, "--json").stdout)
    assert again["units"] == 0
    assert again["units_there_already"] == len(one.commits()) + len(other.commits())


def test_copy_states_that_rounding_twice_is_lossy(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=5, codec="q8")
    result = run("copy", store.path, str(tmp_path / "c"), "--split", "train", "--recipe", "compact")
    assert result.exit_code == 0
    assert "warning: aux: q8 → q4 rounds a second time" in result.stderr
    assert "rounds" not in run("copy", store.path, str(tmp_path / "same"), "--split", "train").stderr


def test_copy_with_an_unknown_recipe_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=2)
    result = run("copy", store.path, str(tmp_path / "c"), "--recipe", "lossles")
    assert result.exit_code == 2
    assert "did you mean lossless?" in result.stderr
    assert not (tmp_path / "c").exists()


def test_a_copy_told_to_stop_commits_its_unit_and_exits_75(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=60, codec="bf16")
    place = tmp_path / "copy"
    process = subprocess.Popen(
        [sys.executable, "-m", "hiddenstore.cli", "copy", store.path, str(place), "--recipe", "lossless"],
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + 30
    while not list(place.glob("commits/*.json")) and time.monotonic() < give_up:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    done = len(Store.open(place).commits())
    assert process.returncode == 75, stderr
    assert 0 < done < len(store.commits())
    assert "[interrupted]" in stderr
    assert run("copy", store.path, str(place), "--recipe", "lossless").exit_code == 0
    assert len(Store.open(place)) == 60


def test_repair_prints_a_plan_and_acts_with_y_only(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6)
    damage(store)
    lost = len(store.commits()[0].samples)
    plan = run("repair", store.path)
    assert plan.exit_code == 0
    assert "nothing has changed yet" in plan.stdout
    assert f"next: hiddenstore repair {store.path} -y --accept-loss {lost}" in plan.stderr
    refused = run("repair", store.path, "-y")
    assert refused.exit_code == 2
    assert f"would drop {lost} of 6 samples" in " ".join(refused.stderr.split())
    assert f"--accept-loss {lost}" in refused.stderr
    for other in (lost - 1, lost + 1):
        assert run("repair", store.path, "-y", "--accept-loss", str(other)).exit_code == 2
    assert len(Store.open(store.path)) == 6
    document = json.loads(run("repair", store.path, "-y", "--accept-loss", str(lost), "--json").stdout)
    assert (document["done"], document["dropped"]) == (True, lost)
    assert len(Store.open(store.path)) == 6 - lost
    assert run("verify", store.path, "--full").exit_code == 0
    assert "nothing to repair" in " ".join(run("repair", store.path).stdout.split())


def test_repair_says_why_and_where_in_the_segment_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    store = make_store(tmp_path, samples=2)
    damage(store)
    (line,) = [line for line in run("repair", store.path).stdout.splitlines() if "layer_1/c/0/0" in line]
    assert line.split()[3:6] == ["layer_1/c/0/0", "is", "damaged:"]


def test_repair_names_what_it_sets_aside_and_the_command_that_writes_it_again(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=2)
    head = Path(store.path, "target", "head.safetensors")
    head.write_bytes(head.read_bytes()[:-1])
    plan = run("repair", store.path)
    assert "target/head.safetensors" in plan.stdout
    assert "1 file would be moved to quarantine/; nothing has changed yet" in plan.stdout
    done = run("repair", store.path, "-y")
    assert "1 file moved to quarantine/" in done.stdout
    assert f"next: hiddenstore collect DATA -o {store.path} --target T" in done.stderr
    assert not head.exists()


def test_repair_says_what_brings_back_an_input_without_which_it_knows_nothing_of_a_record(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=2)
    for path in (*Path(store.path, "commits").iterdir(), *Path(store.path, "inputs").iterdir()):
        path.write_bytes(path.read_bytes()[:-9])
    for words, following in ((["-y"], "collect DATA"), ([], "repair")):
        result = run("repair", store.path, *words)
        assert "the same collect brings the input back, and repair then" in " ".join(result.stderr.split())
        assert f"next: hiddenstore {following}" in result.stderr
    assert f"{store.path} -y --accept-loss 2" in result.stderr
    assert len(list(Path(store.path, "commits").iterdir())) == len(store.commits())


def test_gc_sweeps_what_no_commit_names_once_it_is_old_enough(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=2)
    orphan = Path(store.path, "segments", "u-000000-deadbeef")
    orphan.mkdir()
    (orphan / "zarr.json").write_bytes(b"x" * 1000)
    young = run("gc", store.path, "-y")
    assert "--abandoned gives them up" in " ".join(young.stdout.split())
    assert "too young" in run("gc", store.path, "--abandoned", "-y").stdout
    plan = run("gc", store.path, "--older-than", "0", "--abandoned")
    assert plan.exit_code == 0
    assert "u-000000-deadbeef" in plan.stdout
    assert "would be given up" in " ".join(plan.stderr.split())
    assert f"next: hiddenstore gc {store.path} --older-than 0 --abandoned -y" in plan.stderr
    assert orphan.exists()
    words = ("gc", store.path, "--older-than", "0", "--abandoned", "-y", "--json")
    assert json.loads(run(*words).stdout)["done"] is True
    assert not orphan.exists()
    assert run("verify", store.path, "--full").exit_code == 0


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("90s", 90), ("30m", 1800), ("12h", 43200), ("1.5d", 129600)])
def test_ages_are_read_with_their_unit(text: str, expected: float) -> None:
    assert parse_age(text) == expected


@pytest.mark.parametrize("text", ["7", "soon", "-1h", "1w", ""])
def test_an_age_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no age"):
        parse_age(text)


def test_doctor_reports_this_machine_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.doctor.machine.TRIAL_BYTES", 1 << 20)
    document = json.loads(run("doctor", str(tmp_path), "--json").stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert document["ok"] is True
    assert {"python", "hiddenstore", "torch", "zarr", "transformers", "cpu", "folder", "disk speed"} <= set(checks)
    assert "one install location" in checks["hiddenstore"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_exits_5_for_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = run("doctor", str(tmp_path / "absent"))
    assert result.exit_code == 5
    assert "mkdir -p" in result.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_doctor_names_a_folder_it_cannot_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert run("doctor", str(tmp_path)).exit_code == 5

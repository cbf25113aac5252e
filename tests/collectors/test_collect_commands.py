"""collect, plan and regenerate as typed: documents, exit codes, nothing half written."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from collectors.capture.estimate import final_rows
from hiddenstore.cli import main
from hiddenstore.inputs import PreparedInput
from hiddenstore.store import Store
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import TEMPLATE, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(data_for_tiny(tmp_path / "data"))


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


def call_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert call(*words, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_collect_answers_with_what_it_did(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str, target: str
) -> None:
    store = str(tmp_path / "store")
    document = call_json(capsys, "collect", data, "-o", store, "--target", target, "--layers", "0,2")
    assert document["schema"] == "hiddenstore.collect/1"
    assert (document["samples"], document["units_pending"], document["rejects"]) == (12, 0, {})
    again = call_json(capsys, "collect", data, "-o", store, "--target", target, "--layers", "0,2")
    assert (again["units"], again["units_before"]) == (0, 1)
    assert call("collect", data, "-o", store, "--target", target, "--layers", "0,1") == 6
    assert "store-mismatch" in capsys.readouterr().err


def test_collect_prints_the_layers_and_the_next_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str, target: str
) -> None:
    assert call("collect", data, "-o", str(tmp_path / "store"), "--target", target) == 0
    printed = capsys.readouterr()
    assert "a colliding id moves to the next free layer" in printed.err
    assert "next: hiddenstore verify" in printed.err
    assert "12" in printed.out


def test_a_wrong_rank_environment_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert call("collect", data, "-o", str(tmp_path / "store"), "--target", target) == 2
    assert "WORLD_SIZE" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_rank_that_is_done_names_the_ranks_whose_share_is_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 60)
    data, store = str(data_for_tiny(tmp_path / "many", samples=24)), str(tmp_path / "store")
    said = []
    for rank in (0, 2, 1):
        for name, value in {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        assert call("collect", data, "-o", store, "--target", target, "--check", "none") == 0
        said.append(capsys.readouterr().err)
    assert "still pending: the share of rank 1, 2, or run the same command again" in said[0]
    assert "the share of rank 1, or run" in said[1]
    assert "pending" not in said[2]


def test_the_time_at_the_end_says_what_comparing_took(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str, target: str
) -> None:
    shown = []
    for check in ("hf", "none"):
        assert call("collect", data, "-o", str(tmp_path / check), "--target", target, "--check", check) == 0
        shown.append(capsys.readouterr().out)
    assert re.search(r"target \d+ %, comparing \d+ %, waiting for writes \d+ %", shown[0])
    assert "comparing" not in shown[1]
    done = call_json(capsys, "collect", data, "-o", str(tmp_path / "again"), "--target", target, "--check", "hf")
    assert 0 < done["compare_s"] < done["seconds"] - done["forward_s"]


def test_data_prepared_with_another_template_is_collected_with_that_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    from hiddenstore.targets.identity import chat_template_sha256

    own = TEMPLATE + "{# another #}"
    data = str(data_for_tiny(tmp_path / "other", chat_template_sha256=chat_template_sha256(own)))
    store, file = tmp_path / "store", tmp_path / "template.jinja"
    assert call("collect", data, "-o", str(store), "--target", target) == 4
    assert "--template FILE" in capsys.readouterr().err
    file.write_text(own)
    assert call("collect", data, "-o", str(store), "--target", target, "--template", str(file)) == 0
    assert (store / "target" / "chat_template.jinja").read_text() == own
    assert Store.open(store).capture.target.chat_template_sha256 == chat_template_sha256(own)


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_plan_estimates_what_collect_then_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str, container: str
) -> None:
    data = str(data_for_tiny(tmp_path / "many", samples=300))
    plan = call_json(capsys, "plan", data, "--target", target, "--rate", "1000", "--container", container)
    assert plan["hours"] == pytest.approx(plan["tokens"] / 3.6e6)
    for recipe in ("raw", "compact", "tiny"):
        row = next(row for row in plan["recipes"] if row["recipe"] == recipe)
        store = tmp_path / recipe
        asked = ("collect", data, "-o", str(store), "--target", target, "--recipe", recipe, "--container", container)
        done = call_json(capsys, *asked)
        assert Store.open(store).manifest.container == container
        if recipe == "raw":
            info = PreparedInput.open(data).info
            stored = sum(entry.final_rows for _, entry in Store.open(store).entries)
            assert stored == final_rows(info, "supervised")
        assert row["segments"] == done["units"]
        assert row["bytes_stored"] == pytest.approx(done["bytes_stored"], rel=0.08)
        files = sum(path.is_file() for path in (store / "segments").rglob("*"))
        assert row["files"] == pytest.approx(files, rel=0.2)


@pytest.mark.parametrize("budget", [50, 70, 100])
def test_plan_counts_units_that_end_before_the_sample_that_would_not_fit(
    budget: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    data = str(data_for_tiny(tmp_path / "many", samples=100))
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", budget)
    store = tmp_path / "store"
    done = call_json(capsys, "collect", data, "-o", str(store), "--target", target, "--recipe", "safe")
    for read, error in ((1 << 20, 0), (1000, 0.1)):
        monkeypatch.setattr("collectors.capture.estimate._TOKENS_READ", read)
        plan = call_json(capsys, "plan", data, "--target", target)
        (row,) = (row for row in plan["recipes"] if row["recipe"] == "safe")
        assert row["segments"] == pytest.approx(done["units"], rel=error)
    assert done["units"] > 1.1 * plan["tokens"] / budget


def test_plan_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str, target: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert call("plan", data, "--target", target, "-o", str(tmp_path / "store")) == 0
    assert "(chosen)" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_estimates_no_recipe_that_needs_a_layer_where_there_is_none(
    capsys: pytest.CaptureFixture[str], data: str, target: str
) -> None:
    plan = call_json(capsys, "plan", data, "--target", target, "--layers", "eagle1")
    assert [row["recipe"] for row in plan["recipes"]] == ["raw", "lossless", "safe", "compact"]


def test_plan_says_what_fits_where_the_chosen_recipe_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: str, target: str
) -> None:
    needed = {
        row["recipe"]: row["bytes_on_disk"] for row in call_json(capsys, "plan", data, "--target", target)["recipes"]
    }
    for free, said in ((needed["safe"], "what fits: compact, tiny"), (10, "no recipe fits")):
        monkeypatch.setattr("hiddenstore.fs.local.LocalFilesystem.free_bytes", lambda _fs, free=free: free)
        assert call("plan", data, "--target", target) == 0
        told = capsys.readouterr().err
        assert "warning: safe needs " in told
        assert said in told
        assert "next: hiddenstore collect" not in told


def test_the_next_commands_open_the_target_as_the_first_one_did(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    def next_command(**named: str) -> list[str]:
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: hiddenstore ")]
        return [named.get(word, word) for word in shlex.split(line)[2:]]

    template, chats = tmp_path / "my own.jinja", tmp_path / "chats.jsonl"
    template.write_text(TEMPLATE + "{# another one #}")
    rows = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(4)]
    chats.write_text("\n".join(map(json.dumps, rows)))
    opened = ["--target", target, "--template", str(template)]
    assert call("regenerate", str(chats), "-o", str(tmp_path / "a.jsonl"), *opened, "--max-new-tokens", "8") == 0
    prepare = next_command(DATA=str(tmp_path / "data"))
    assert prepare[-4:] == opened
    assert call(*prepare, "--trust-remote-code") == 0
    collect = next_command()
    assert collect[-5:] == [*opened, "--trust-remote-code"]
    assert call("plan", str(tmp_path / "data"), *collect[-5:], "--layers", "0,1") == 0
    assert next_command(STORE=str(tmp_path / "data-store"))[4:] == [*collect[4:], "--recipe", "safe", "--layers", "0,1"]
    assert call(*collect) == 0


def test_collect_says_beforehand_that_the_disk_is_too_small_for_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: str, target: str
) -> None:
    asked = ("collect", data, "-o", str(tmp_path / "store"), "--target", target)
    monkeypatch.setattr("hiddenstore.fs.local.LocalFilesystem.free_bytes", lambda _fs: 10)
    assert call(*asked) == 0
    assert "warning: what is left takes about " in capsys.readouterr().err
    assert call(*asked) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_finished_collect_says_that_nothing_is_left_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str, target: str
) -> None:
    for _ in range(2):
        assert call("collect", data, "-o", str(tmp_path / "store"), "--target", target, "--layers", "0,2") == 0
    assert capsys.readouterr().out.rstrip().endswith("units  1, committed before: nothing to do")


def test_regenerate_writes_messages_and_reports_the_looping_share(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: str
) -> None:
    chats, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]}
    chats.write_text((json.dumps(row) + "\n") * 3)
    asked = ("--max-new-tokens", "8", "--temperature", "1.5")
    document = call_json(capsys, "regenerate", str(chats), "-o", str(out), "--target", target, *asked)
    assert document["written"] + sum(document["dropped"].values()) == 3
    assert 0 <= document["looping_share"] <= 1
    assert call("regenerate", str(chats), "-o", str(out), "--target", target) == 6

"""push and pull of drafters: the card, what a newer one replaces, and names that no pull takes."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hiddenstore.errors import ConfigError
from hiddenstore.files.layout import kind_of
from hiddenstore.share.cards import accepted_length
from hiddenstore.share.hub import open_remote
from hiddenstore.share.remote import CARD, SUMS
from tests.hiddenstore.hub_double import HubDouble, in_place_of_the_hub
from tests.tiny_world import World, run, tree

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:(httpx2|huggingface_hub).*")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    with in_place_of_the_hub(monkeypatch) as double:
        yield double


def test_what_a_newer_drafter_no_longer_has_goes_and_what_others_put_there_stays(
    hub: HubDouble, world: World, tmp_path: Path
) -> None:
    place, older = "hf://me/drafter", tmp_path / "older"
    shutil.copytree(Path(world / "exported"), older)
    (older / "second.safetensors").write_bytes(bytes(4_000))
    assert run("push", str(older), place, "-q") == 0
    history = hub.repos["me/drafter"].history
    history.append({**history[-1], "notes.txt": (b"theirs", False)})
    assert run("push", world / "exported", place, "-q") == 0
    assert set(history[-2]) - set(history[-1]) == {"second.safetensors"}
    assert "notes.txt" in history[-1]


def test_of_an_older_drafter_nothing_stays_beside_the_newer_one_and_half_of_one_is_none(
    hub: HubDouble, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, older, here = "hf://me/drafter", tmp_path / "older", tmp_path / "here"
    shutil.copytree(Path(world / "exported"), older)
    (older / "second.safetensors").write_bytes(bytes(4_000))
    (older / "third.safetensors").write_bytes(bytes(4_000))
    (older / "config.json").write_text((older / "config.json").read_text() + "\n")
    assert run("push", str(older), place, "-q") == 0
    assert run("pull", place, str(here), "-q") == 0
    (here / "third.safetensors").write_bytes(b"mine")
    assert run("push", world / "exported", place, "-q") == 0
    hub.fault = lambda method, path: 404 if path.endswith("/config.json") else None
    assert run("pull", place, str(here), "-q") != 0
    assert kind_of(here) != "drafter"
    hub.fault = lambda method, path: None
    capsys.readouterr()
    assert run("pull", place, str(here)) == 0
    assert kind_of(here) == "drafter"
    exported = tree(Path(world / "exported"))
    assert {name for name in tree(here) if name not in (CARD, SUMS)} == {*exported, "third.safetensors"}
    assert (here / "third.safetensors").read_bytes() == b"mine"


def test_a_drafter_is_pushed_with_its_card_and_comes_back(
    hub: HubDouble, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "hf://me/drafter"
    assert run("push", world / "exported", place, "-q") == 0
    files = hub.repos["me/drafter"].files
    assert run("pull", place, str(tmp_path / "here"), "-q") == 0
    exported = tree(Path(world / "exported"))
    assert {name: data for name, data in tree(tmp_path / "here").items() if name not in (CARD, SUMS)} == exported
    front = yaml.safe_load(files[CARD].decode().split("---\n")[1])
    assert front["tags"][:2] == ["hiddenstore", "speculative-decoding"]
    about = json.loads(exported["hiddenstore.json"] or b"")
    assert f"drafts of {about['draft_len']} tokens" in files[CARD].decode()
    older = f"{place}@{hub.repos['me/drafter'].sha('main')}"
    (tmp_path / "card.md").write_text("---\n---\nMine.\n")
    assert run("push", world / "exported", place, "--card", str(tmp_path / "card.md"), "-q") == 0
    assert run("pull", older, str(tmp_path / "older"), "-q") == 0
    assert "Mine" not in (tmp_path / "older" / CARD).read_text()
    assert "Mine" in hub.repos["me/drafter"].files[CARD].decode()


@pytest.mark.parametrize("more", [("--results", "eval.json"), ("--sample", "2")])
def test_what_a_card_of_ones_own_would_leave_out_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, str]
) -> None:
    source, place = world / ("exported" if more[0] == "--results" else "store"), tmp_path / "place"
    assert run("push", source, str(place), "--card", "card.md", *more) == 2
    assert "--results and --sample are for the card that is made" in capsys.readouterr().err
    assert not place.exists()


def test_a_card_holds_no_markup_and_no_command_of_a_stranger_s_drafter_or_results(
    hub: HubDouble, world: World, tmp_path: Path
) -> None:
    drafter = shutil.copytree(Path(world / "exported"), tmp_path / "drafter")
    about = json.loads((drafter / "hiddenstore.json").read_text())
    about["target"]["name"] = "org/a\n---\n<img src=x onerror=1> [click](javascript:1) `\x1b[2J"
    about["engine"] = "vllm; touch pwned\n```\n# mine"
    results = {"schema": "hiddenstore.eval/1", "run": "ru`n; touch pwned\n```\n<b>", "store": "s", "step": 2}
    about |= {"run": results["run"], "step": results["step"]}
    (drafter / "hiddenstore.json").write_text(json.dumps(about))
    results |= {"accepted_length": 1.5, "draft_len": 3, "split": "<b>"}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert run("push", str(drafter), "hf://me/drafter", "--results", str(tmp_path / "results.json"), "-q") == 0
    _, front, card = hub.repos["me/drafter"].files[CARD].decode().split("---\n", 2)
    assert "base_model" not in yaml.safe_load(front)
    assert card.splitlines()[1].endswith(r" for org/a --- \<img src=x onerror=1> [click]\(javascript:1) \`␛[2J")
    assert not re.search(r"(?<!\\)<|\]\(|\x1b", re.sub("(?sm)^```sh$.*?^```$", "", card))
    assert [line for line in card.splitlines() if line.startswith("```")] == ["```sh", "```"] * 2
    assert "\nhiddenstore serve drafter --target TARGET --engine 'vllm; touch pwned ``` # mine'\n" in card
    assert "\nhiddenstore eval 'ru`n; touch pwned ``` <b>' s --split '<b>' --draft-len 3\n" in card


def test_figures_of_another_run_or_step_than_the_exported_one_are_not_put_on_its_card(
    hub: HubDouble, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, place = tmp_path / "eval.json", "hf://me/drafter"
    capsys.readouterr()
    assert run("eval", world / "run", world / "store", "--json") == 0
    measured = json.loads(capsys.readouterr().out)
    about = json.loads((Path(world / "exported") / "hiddenstore.json").read_text())
    assert (about["run"], about["step"]) == ("run", measured["step"])
    others = ({"step": measured["step"] + 1}, {"run": "/elsewhere/other"}, {"run": "o/checkpoints/step-2"})
    for other in others:
        file.write_text(json.dumps({**measured, **other}))
        assert run("push", world / "exported", place, "--results", str(file)) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"exported is step {measured['step']} of run" in said
        assert hub.repos == {}
    for same in ({}, {"run": f"my/run/checkpoints/step-{measured['step']}"}, {"run": "."}):
        file.write_text(json.dumps({**measured, **same}))
        assert run("push", world / "exported", place, "--results", str(file), "-q") == 0
    older = tmp_path / "older"
    shutil.copytree(Path(world / "exported"), older)
    (older / "hiddenstore.json").write_text(json.dumps({k: v for k, v in about.items() if k not in ("run", "step")}))
    capsys.readouterr()
    assert run("push", str(older), place, "--results", str(file)) == 0
    assert "does not say of which run it is" in " ".join(capsys.readouterr().err.split())


def test_the_command_on_a_card_can_be_pasted(tmp_path: Path) -> None:
    given = {"schema": "hiddenstore.decode/1", "run": "a/my run", "target": "my target", "draft_len": 3, "step": 2}
    (tmp_path / "decode.json").write_text(json.dumps({**given, "accepted_length": 1.5, "temperature": 0.7}))
    command = "hiddenstore decode 'my run' --target 'my target' --draft-len 3 --temperature 0.7"
    assert f"```sh\n{command}\n```" in accepted_length(tmp_path / "decode.json")


def test_a_pulled_drafter_is_served_by_the_engine_it_was_exported_for(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(Path(world / "exported"), drafter)
    about = json.loads((drafter / "hiddenstore.json").read_text()) | {"engine": "sglang"}
    (drafter / "hiddenstore.json").write_text(json.dumps(about))
    (tmp_path / "empty.md").write_text("")
    assert run("push", str(drafter), str(tmp_path / "place"), "--card", str(tmp_path / "empty.md")) == 0
    capsys.readouterr()
    assert run("pull", str(tmp_path / "place"), str(tmp_path / "here")) == 0
    assert "--engine sglang" in capsys.readouterr().err
    assert (tmp_path / "here" / CARD).read_text() == ""


def test_neither_a_store_nor_another_drafter_takes_the_place_of_a_drafter_in_a_bucket(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, place = tmp_path / "drafter", tmp_path / "place"
    shutil.copytree(Path(world / "exported"), drafter)
    (drafter / "draft.safetensors").write_bytes(bytes(100))
    assert run("push", str(drafter), str(place), "-q") == 0
    pushed = tree(place)
    for other in ("store", "exported"):
        capsys.readouterr()
        assert run("push", world / other, str(place), "-q") == 6
        assert "output-exists" in capsys.readouterr().err
        assert tree(place) == pushed


@pytest.mark.parametrize("name", ["draft:8b.gguf", "draft\\8b.gguf", os.fsdecode(b"draft\xff.gguf")])
def test_a_drafter_with_a_name_that_no_pull_takes_is_not_pushed_and_the_name_is_said(
    hub: HubDouble, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(b"weights")
    (tmp_path / "card.md").write_text("---\n---\nMine.\n")
    assert run("push", str(folder), "hf://me/drafter", "--card", str(tmp_path / "card.md"), "--json") == 2
    said = json.loads(capsys.readouterr().err)
    assert said["kind"] == "path-unsafe"
    assert "drafter/draft" in said["message"]
    assert said["fix"].startswith("mv ")
    assert said["fix"].endswith("/drafter/draft-8b.gguf" if "8b" in name else "/drafter/draft-.gguf")
    assert hub.repos == {}


def test_a_folder_without_anything_that_was_pushed_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place").mkdir()
    assert run("pull", str(tmp_path / "place"), str(tmp_path / "here")) == 2
    assert "place holds no SHA256SUMS: nothing was pushed there" in capsys.readouterr().err
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "address", ["hf://datasets/it", "hf://datasets/it@main", "hf://datasets/", "hf://me", "hf:/me/it"]
)
def test_an_address_without_an_owner_is_no_repository_of_another_kind(address: str) -> None:
    with pytest.raises(ConfigError, match="expected hf://datasets/OWNER/NAME") as caught:
        open_remote(address)
    assert caught.value.kind == "address-invalid"

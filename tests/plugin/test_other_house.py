"""A package that is not ours, installed beside us: what it adds works in every command with no line of ours changed."""

import gc
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiddenstore.files.layout import STORE_JSON
from hiddenstore.registry import Registry
from tests.collectors.tiny import save_target
from tests.forked import Forked, command
from tests.tiny_world import chat, error_of, run, write_rows

HOUSE = Path(__file__).parent
TRAIN = ("train.max_steps=2", "data.batch_tokens=512", "data.pack_tokens=256", "train.validate_every=0")


def call(site: Path, *words: str) -> Any:
    """The document of ``hiddenstore WORDS`` in a process of its own, which finds the package in ``site``."""
    process = Forked(with_package, str(site), *words, "--json", PYTHONPATH=str(site))
    printed, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return json.loads(printed)


def with_package(site: str, *words: str) -> None:
    sys.path.insert(0, site)
    command(*words)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the other package is installed."""
    folder = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index")
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", folder, HOUSE], check=True, timeout=200)
    return folder


@pytest.fixture(scope="module")
def world(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a store of it: their engine, their layers, their codec."""
    root = tmp_path_factory.mktemp("world")
    save_target(root / "target")
    write_rows(root / "chats.jsonl", [chat(i) for i in range(30)])
    target, data = str(root / "target"), str(root / "data")
    assert run("prepare", str(root / "chats.jsonl"), "-o", data, "--target", target, "--val", "20%", "-q") == 0
    words = ("--engine", "relay", "--layers", "twin", "--recipe", "aux=fp8,final=bf16", "--check", "hf")
    report = call(site, "collect", data, "-o", str(root / "store"), "--target", target, *words)
    assert report["samples"] == 30
    assert report["samples_compared"] > 0
    return root


@pytest.fixture
def _installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process finds the package too, in every table, and in none of them afterwards."""
    before = {table: dict(vars(table)) for table in tables()}
    monkeypatch.syspath_prepend(site)
    for table in before:
        vars(table).pop("packages", None)
    yield
    # Those too whose modules a test was the first to import.
    for table in tables():
        members = before.get(table, vars(table)) | {"_loaded": {}}
        if table not in before:
            members.pop("packages", None)
        vars(table).clear()
        vars(table).update(members)


def tables() -> list[Registry[Any]]:
    return [table for table in gc.get_objects() if type(table) is Registry]


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """The document of ``hiddenstore WORDS`` in this process."""
    capsys.readouterr()
    assert run(*words, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_its_engine_layers_and_codec_are_what_the_store_holds(site: Path, world: Path) -> None:
    facts = call(site, "info", str(world / "store"))
    assert facts["codecs"] == {"aux": "fp8", "final": "bf16"}
    assert (facts["layers"], facts["final"]) == ([2], "all")
    assert [engine["name"] for engine in facts["engines"]] == ["relay"]
    packages = json.loads((world / "store" / STORE_JSON).read_text())["packages"]
    assert packages == {"aux": {"name": "other-house", "version": "1.5"}}
    assert call(site, "verify", str(world / "store"), "--full")["findings"] == []


def test_its_drafter_is_trained_evaluated_decoded_and_exported(site: Path, world: Path, tmp_path: Path) -> None:
    twin, target, store = str(tmp_path / "run"), str(world / "target"), str(world / "store")
    assert call(site, "train", store, "-o", twin, "--drafter", "twin", *TRAIN)["steps"] == 2
    assert call(site, "eval", twin, store)["accepted_length"] >= 1
    words = ("--target", target, "--prompts", store, "-n", "2", "--max-new-tokens", "8")
    assert call(site, "decode", twin, *words)["schema"] == "hiddenstore.decode/1"
    done = call(site, "export", twin, "--engine", "vllm", "-o", str(tmp_path / "out"))
    assert (done["drafter"], done["verified"]) == ("twin", True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["TwinModel"]
    rows = [row for row in call(site, "export", "--list")["support"] if row["drafter"] == "twin"]
    assert {row["engine"]: row["ok"] for row in rows}["vllm"]
    assert "SGLang 0.5.23 has no loader for twin" in [row["reason"] for row in rows]


@pytest.mark.usefixtures("_installed")
def test_its_loss_is_trained_with(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (*TRAIN, "loss.kind=half_kl", "loss.steps=2", "drafter.vocab_size=60", "drafter.aux_layers=[2]")
    report = answer(capsys, "train", str(world / "store"), "-o", str(tmp_path / "run"), *settings)
    assert math.isfinite(report["loss"])


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_its_codec_lies_in_both_containers_and_is_copied_into_ours(
    world: Path, container: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again, ours = str(tmp_path / "again"), str(tmp_path / "ours")
    answer(capsys, "copy", str(world / "store"), again, "--container", container, "--where", "tokens>0")
    findings = answer(capsys, "verify", again, "--full", "--meaning", code=3)["findings"]
    # Its layers and rows are judged by the codec's own tolerance; the target is untrained indeed.
    assert [finding["kind"] for finding in findings] == ["tokenizer"]
    answer(capsys, "copy", again, ours, "--recipe", "raw")
    assert "packages" not in json.loads((tmp_path / "ours" / STORE_JSON).read_text())


@pytest.mark.usefixtures("_installed")
def test_its_codec_is_measured_beside_the_recipes(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, words = str(tmp_path / "raw"), (str(world / "data"), "--target", str(world / "target"), "--layers", "twin")
    answer(capsys, "collect", *words, "-o", raw, "--recipe", "raw", "--check", "none")
    row = {row["recipe"]: row for row in answer(capsys, "advise", raw)["rows"]}["aux=fp8,final=fp8"]
    assert row["clipped"] == 0
    assert 0.01 < row["channel_error"] < 0.2
    assert "aux=fp8,final=q8" in json.dumps(answer(capsys, "plan", *words, "--recipe", "aux=fp8"))


@pytest.mark.parametrize("command", [("info",), ("show", "0"), ("copy", "into")])
def test_without_the_package_its_store_is_refused_and_says_what_to_install(
    command: tuple[str, ...], world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    assert run(name, str(world / "store"), *(str(tmp_path / word) if word == "into" else word for word in rest)) == 4
    message, fix = error_of(capsys.readouterr().err)
    assert "the codec 'fp8', which is not installed: other-house 1.5 brings it" in " ".join(message.split())
    assert message.endswith("[plugin-missing]")
    assert fix == "pip install other-house==1.5"


@pytest.mark.parametrize("words", [("--engine", "relay"), ("--layers", "twin"), ("--recipe", "aux=fp8")])
def test_without_the_package_its_names_are_unknown(words: tuple[str, str], world: Path, tmp_path: Path) -> None:
    out = tmp_path / "no"
    assert run("collect", str(world / "data"), "-o", str(out), "--target", str(world / "target"), *words) == 2
    assert not out.exists()

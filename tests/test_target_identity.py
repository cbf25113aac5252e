"""Finding A5: a target whose decoder blocks alone differ is refused, by name, wherever two things meet."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collectors.demo import TARGET_DIR
from hiddenstore.files.documents import load, seal
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.store import Store
from hiddenstore.targets.folder import open_target
from schemas.manifest import StoreManifest
from tests.golden.reading import CHATS
from tests.tiny_world import LAYERS, TRAIN, World, run

WEIGHTS = "model.safetensors"
OURS, NO_DIGEST = "checkpoint_sha256", {"checkpoint_sha256": None, "tokenizer_rules_sha256": None}


def rank_4_update(target: Path) -> None:
    """Moves what a block writes by a quarter of its length and more; embeddings, norms, head and config stay."""
    weights = load_file(target / WEIGHTS)
    weight = weights["model.layers.1.mlp.down_proj.weight"]
    dice = torch.Generator().manual_seed(0)
    update = torch.randn(weight.shape[0], 4, generator=dice) @ torch.randn(4, weight.shape[1], generator=dice)
    weight += update * (weight.norm() / update.norm())
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})


def cast(target: Path) -> None:
    weights = {name: weight.bfloat16() for name, weight in load_file(target / WEIGHTS).items()}
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})


def forget_digests(store: Path) -> None:
    """Leaves what a writer before these digests wrote."""
    manifest = load(LocalFilesystem(store), "store.json", StoreManifest)
    target = manifest.capture.target.model_copy(update=NO_DIGEST)
    capture = manifest.capture.model_copy(update={"target": target})
    (store / "store.json").write_bytes(seal(manifest.model_copy(update={"capture": capture})))


@pytest.fixture(scope="module")
def places(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the world's target, one attacked and one cast, and a store of each."""
    root = tmp_path_factory.mktemp("places")
    for name, change in (("attacked", rank_4_update), ("cast", cast)):
        change(shutil.copytree(world / "target", root / name))
        words = ("collect", world / "data", "-o", str(root / f"{name}_store"), "--target", str(root / name))
        assert run(*words, "--layers", LAYERS, "-q") == 0
    return root


def commands(world: World, places: Path, place: Path, name: str) -> dict[str, tuple[str, ...]]:
    """Every command where the world's store or run meets a target called ``name``, or a store of it."""
    target, other = str(places / name), str(places / f"{name}_store")
    ours = str(shutil.copytree(world / "store", place / "ours"))
    collect = ("collect", world / "all_train", "-o", ours, "--target", target, "--layers", LAYERS)
    return {
        "collect": (*collect, "--check", "none"),
        "check": (*collect, "--check", "hf"),
        "merge": ("copy", world / "store", other, str(place / "merged")),
        "copy": ("copy", other, ours),
        "decode": ("decode", world / "run", "--target", target, "--prompts", world / "store", "-n", "1"),
        "eval": ("eval", world / "run", other),
        "init": ("train", other, "-o", str(place / "run"), *TRAIN, f"train.init_from={world / 'run'}"),
    }


COMMANDS = ("collect", "check", "merge", "copy", "decode", "eval", "init")


@pytest.mark.parametrize("command", COMMANDS)
def test_a5_a_rank_4_update_of_a_decoder_block_is_refused_by_name(
    command: str, world: World, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = commands(world, places, tmp_path, "attacked")[command]
    for flag, difference in ([], OURS), (["--same-target"], "states of layer"):
        if flag and command == "init":
            continue
        assert run(*words, *flag) in (2, 4, 6)
        assert difference in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    assert len(Store.open(tmp_path / "ours")) == len(Store.open(world / "store"))


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_a5_a_cast_copy_is_taken_when_that_is_said_and_its_states_agree(
    command: str, world: World, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = commands(world, places, tmp_path, "cast")[command]
    assert run(*words) in (4, 6)
    refused = capsys.readouterr().err
    assert OURS in refused
    assert "fix: --same-target" in refused
    assert run(*words, "--same-target") == 0, capsys.readouterr().err


def test_a5_a_cast_copy_is_not_taken_where_no_layer_profile_speaks_for_it(
    world: World, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = commands(world, places, tmp_path, "cast")
    (tmp_path / "ours" / "calibration" / "profile.json").unlink()
    for command in ("collect", "copy"):
        assert run(*words[command], "--same-target") in (4, 6)
        assert "no layer profile shows" in capsys.readouterr().err


def test_a5_diff_names_the_checkpoint_and_a_tolerance_does_not_excuse_it(
    world: World, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", world / "store", str(places / "cast_store"), "--tolerance", "0.5", "--json") == 3
    document = json.loads(capsys.readouterr().out)
    assert f"capture.target.{OURS}" in [item["field"] for item in document["schema_differences"]]
    assert f"capture.target.{OURS} differs" in document["beyond_tolerance"]


@pytest.mark.parametrize("command", ["collect", "merge", "eval", "init"])
def test_a5_a_store_without_digests_is_compared_by_its_profile_and_that_is_said(
    command: str, world: World, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("attacked", "cast"):
        place = tmp_path / name
        place.mkdir()
        words = commands(world, places, place, name)[command]
        forget_digests(place / "ours")
        old = shutil.copytree(places / f"{name}_store", place / "old")
        forget_digests(old)
        code = run(*(str(old) if word == str(places / f"{name}_store") else word for word in words))
        printed = " ".join(capsys.readouterr().err.split())
        assert (code == 0) == (name == "cast")
        assert ("states of layer" if code else f"without {OURS}") in printed
        if command == "merge" and not code:
            assert Store.open(place / "merged").capture.target.checkpoint_sha256 is None


def test_a18_a_tokenizer_that_lost_one_merge_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, less = (str(shutil.copytree(TARGET_DIR, tmp_path / name)) for name in ("whole", "less"))
    file = Path(less) / "tokenizer.json"
    document = json.loads(file.read_text())
    document["model"]["merges"].pop()
    file.write_text(json.dumps(document))
    assert open_target(less).tokenizer_sha256 == open_target(whole).tokenizer_sha256
    assert run("prepare", str(CHATS), "-o", str(tmp_path / "data"), "--target", whole, "-q") == 0
    words = ("collect", str(tmp_path / "data"), "-o", str(tmp_path / "store"), "--target")
    assert run(*words, less) == 4
    assert "merges and rules of the tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a5_of_three_sources_no_two_may_be_of_different_checkpoints(
    world: World, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that states no digest, and has no profile, lets neither of the others pass as the other."""
    old = shutil.copytree(world / "store", tmp_path / "old")
    forget_digests(old)
    (old / "calibration" / "profile.json").unlink()
    assert run("copy", str(old), str(world / "store"), str(places / "cast_store"), str(tmp_path / "merged")) == 6
    assert OURS in capsys.readouterr().err

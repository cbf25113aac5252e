"""examples/: every recipe's commands run on the tiny target, or parse where an engine is needed; the notebook runs."""

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
import yaml

from hiddenstore.cli import main
from hiddenstore.cli.run import Pipeline, stages_of
from hiddenstore.cli.words import WORDS_ONLY
from tests.tiny_world import TRAIN, World, run

EXAMPLES = Path(__file__).parents[1] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


def commands(recipe: str) -> list[list[str]]:
    """The words of every ``hiddenstore`` line of a README."""
    blocks = re.findall(r"```sh\n(.*?)```", (EXAMPLES / recipe / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("hiddenstore ") for line in lines)
    return [shlex.split(line)[1:] for line in lines]


def test_there_are_three_recipes_with_a_page_and_settings() -> None:
    assert RECIPES == ["import-dump", "own-chats", "vllm-collect-serve"]
    for recipe in RECIPES:
        assert len(commands(recipe)) >= 4
        assert list((EXAMPLES / recipe).glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_of_a_recipe_is_one_that_parses(recipe: str) -> None:
    for words in commands(recipe):
        command = main.get_command(click.Context(main), words[0])
        assert command is not None, words[0]
        parent = click.Context(main)
        parent.meta[WORDS_ONLY] = True
        with command.make_context(words[0], [*words[1:]], parent=parent):
            pass


@pytest.mark.parametrize("recipe", ["own-chats", "vllm-collect-serve"])
def test_the_pipeline_of_a_recipe_names_options_that_its_commands_take(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = yaml.safe_load((EXAMPLES / recipe / "pipeline.yaml").read_text(encoding="utf-8"))
    monkeypatch.chdir(EXAMPLES / recipe)
    with click.Context(main):
        names = [stage.name for stage in stages_of(Pipeline.model_validate(settings))]
    assert names[-1].endswith(("/export", "/serve"))
    assert "collect" in names


def test_own_chats_become_a_drafter(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES / "own-chats", tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    # States of random weights mean nothing, which verify would find.
    settings = yaml.safe_load(Path("pipeline.yaml").read_text(encoding="utf-8"))
    settings["drafters"] = {"small": settings["drafters"]["eagle3.1"]}
    Path("pipeline.yaml").write_text(yaml.safe_dump(settings))
    small = [f"drafters.small.settings.{word}" for word in TRAIN]
    first, *others = commands("own-chats")
    words = [f"target={world / 'target'}", "verify.meaning=false", "regenerate.max-new-tokens=8", "eval.draft-len=2"]
    assert run(*first, *words, "prepare.val=20%", *small, "-q") == 0
    for command in others[:2]:
        assert run(*[word.replace("eagle3.1/", "small/") for word in command], "-q") == 0
    assert Path("runs/own-chats/small/drafter/model.safetensors").is_file()


def test_a_dump_of_a_peer_becomes_a_drafter(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES / "import-dump", tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    layers = ("--layers", "0,1,2")
    assert (
        run("collect", world / "data", "-o", "whole", "--target", world / "target", *layers, "--final", "all", "-q")
        == 0
    )
    assert run("export-data", "whole", "--to", "specforge-eagle3", "-o", "dump", "-q") == 0
    for command in commands("import-dump"):
        here = [world / "target" if word == "Qwen/Qwen3-8B" else word for word in command if word != "--meaning"]
        more = {"train": TRAIN, "import": layers}.get(command[0], ())
        assert run(*here, *more, "-q") == 0, command
    assert Path("drafter/model.safetensors").is_file()


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = json.loads((EXAMPLES / "look_inside.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.chdir(tmp_path)
    Path("store").symlink_to(world / "store")
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102 - the cells of our own notebook
    assert len(names["losses"]) == 3  # type: ignore[arg-type]
    assert Path("store.html").stat().st_size > 10_000


def test_a_recipe_names_no_file_that_is_neither_there_nor_explained() -> None:
    for recipe in RECIPES:
        text = (EXAMPLES / recipe / "README.md").read_text(encoding="utf-8")
        for words in commands(recipe):
            named = [word for word in words if word.endswith((".jsonl", ".yaml"))]
            assert all((EXAMPLES / recipe / word).is_file() or f"`{word}`" in text for word in named), words

"""docs/guides: every command of ours is read by the command line; those that say so run, in the order of the page."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from hiddenstore.cli import main
from hiddenstore.cli.words import WORDS_ONLY
from tests.collectors.tiny import CONFIGS, tiny_tokenizer
from tests.test_peers import AUTOMODEL
from tests.tiny_world import TRAIN, World, chat, run, write_rows

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
ROOT = GUIDES.parents[1]
LONG = ("automodel", "modelopt")
NEEDS = {"hub", "server", "GPU", "TensorRT-LLM"}
# What keeps a command small here; the page shows what a person types.
SMALL = {
    "train": TRAIN,
    # States of random weights mean nothing, which verify would find.
    "run": (
        *(f"drafters.eagle3.settings.{word}" for word in TRAIN),
        *("verify.meaning=false", "decode.count=2", "decode.max-new-tokens=8"),
    ),
    "decode": ("-n", "2", "--max-new-tokens", "8"),
    "regenerate": ("--max-new-tokens", "8", "--max-samples", "6"),
}
OWN_STEPS = {"train store -o run --resume": 3, "train store -o again": 4}


def rows(page: Path) -> list[tuple[str, list[str], str]]:
    """Theirs, the words after ``hiddenstore`` on our side (none where it is no command), and what is said of it."""
    answers = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| ") or line.startswith("| theirs "):
            continue
        theirs, ours, how = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
        match = re.fullmatch(r"`(?:torchrun .*?(?:-m hiddenstore\.cli|hiddenstore)|hiddenstore) (.*)`", ours)
        answers.append((theirs, shlex.split(match[1]) if match else [], how))
    return answers


PAGES = sorted(GUIDES.glob("*.md"))
COMMANDS = [(page.stem, words) for page in PAGES for _, words, _ in rows(page) if words]


def test_there_is_a_page_for_each_guide() -> None:
    assert [page.stem for page in PAGES] == ["automodel", "dgx-spark", "modelopt", "tensorrt-llm"]
    assert min(sum(how == "runs" for *_, how in rows(page)) for page in PAGES) >= 7


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}-{' '.join(words)}" for page, words in COMMANDS])
def test_every_command_of_ours_is_one_that_parses(page: str, words: list[str]) -> None:
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, words[0]
    parent = click.Context(main)
    parent.meta[WORDS_ONLY] = True
    with command.make_context(words[0], [*words[1:]], parent=parent):
        pass


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_that_no_test_runs_says_what_it_needs(page: Path) -> None:
    for theirs, words, how in rows(page):
        if not words:
            assert not how, theirs
        elif how not in {"runs"} | NEEDS:
            files = re.findall(r"tests/[\w/]+\.py", how)
            assert files, how
            assert all((ROOT / name).is_file() for name in files)


def files_of_a_user(folder: Path, with_prompts: bool) -> None:
    """What the pages take for granted: conversations, questions, a training file of AutoModel's."""
    write_rows(folder / "train.jsonl", [chat(number) for number in range(30)])
    questions = [{"question_id": i, "category": "c", "turns": [f"What is {i}?"]} for i in range(4)]
    write_rows(folder / "mt_bench.jsonl", questions)
    if with_prompts:
        write_rows(folder / "prompts.jsonl", [{"prompt": f"What is {i}?"} for i in range(4)])
    settings = json.loads(json.dumps(AUTOMODEL))
    settings["recipe_args"] |= {"draft_vocab_size": 96, "seq_length": 64}
    (folder / "eagle3_llama8b.yaml").write_text(yaml.safe_dump(settings))


def small(words: list[str], target: str) -> list[str]:
    """The words with the tiny target for M, and its size."""
    line, more = " ".join(words), list(SMALL.get(words[0], ()))
    for beginning, steps in OWN_STEPS.items():
        if line.startswith(beginning):
            more = [f"train.max_steps={steps}"]
    if "--drafter" in words:
        more.remove("loss.steps=2")
    own = [target if word == "M" else word for word in words]
    # What follows a bare -- is the engine's.
    end = own.index("--") if "--" in own else len(own)
    return [*own[:end], *more, *own[end:]]


def target_of_eight_layers(folder: Path) -> str:
    """Deep enough for the layers of every drafter, long enough for the pages' samples."""
    config = CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 8, "max_position_embeddings": 4096}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in LONG)) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_the_commands_of_a_page_run_in_its_order(
    page: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NGC_REGISTRY", "registry.example")
    files_of_a_user(tmp_path, with_prompts=page.stem not in LONG)
    for name in () if page.stem in LONG else ("store", *["run"] * (page.stem == "dgx-spark")):
        (tmp_path / name).symlink_to(world / name)
    target = target_of_eight_layers(tmp_path / "target") if page.stem in LONG else world / "target"
    for number, (_, words, how) in enumerate(rows(page)):
        if how == "runs":
            code = run(*small(words, target))
            assert code == 0, f"row {number}: {words}: {capsys.readouterr().err[-2000:]}"

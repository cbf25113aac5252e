"""docs/guides: every command of ours is read by the command line; those that say so run, in the order of the page."""

import json
import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.collectors.chat_double import chat_double
from tests.doc_blocks import require_parses, small, target_of_eight_layers
from tests.test_peers import AUTOMODEL
from tests.tiny_world import World, chat, run, write_rows
from tests.trainer.fake_server import fake_server

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
ROOT = GUIDES.parents[1]
LONG = ("automodel", "modelopt")
NEEDS = {"hub", "GPU", "TensorRT-LLM"}
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


AUDIT = GUIDES / "audit.md"
PAGES = sorted(set(GUIDES.glob("*.md")) - {AUDIT})
COMMANDS = [(page.stem, words) for page in PAGES for _, words, _ in rows(page) if words]


def test_there_is_a_page_for_each_guide() -> None:
    assert [page.stem for page in PAGES] == ["automodel", "dgx-spark", "modelopt", "tensorrt-llm"]
    assert min(sum(how == "runs" for *_, how in rows(page)) for page in PAGES) >= 7


def test_the_audit_names_tests_that_are_there_and_counts_its_rows() -> None:
    text = AUDIT.read_text(encoding="utf-8")
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row) for row, *_ in lines] == list(range(1, len(lines) + 1))
    sources = {path.stem: path for path in Path(__file__).parent.rglob("test_*.py")}
    for row, *_, state, held in lines:
        source, named = "", re.findall(r"(test_\w+)?::(\w+)", held)
        for file, function in named:
            source = sources[file].read_text(encoding="utf-8") if file else source
            assert f"\ndef test_{function}(" in source, (row, function)
        is_outside, same = state.strip().startswith("out of"), re.search(r"row (\d+)", held)
        assert is_outside != bool(named or (same and int(same[1]) < int(row))), row
    stated = {
        name: int(count) for name, count in re.findall(r"^\| (works|does|out)[^|]* \| (\d+) \|$", text, re.MULTILINE)
    }
    lacking, outside = (sum(state.strip().startswith(word) for *_, state, _ in lines) for word in ("**not**", "out of"))
    inside = len(lines) - outside
    assert stated == {"works": inside - lacking, "does": lacking, "out": outside}
    assert f"{len(lines)} rows, {inside} of them in scope" in text


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}-{' '.join(words)}" for page, words in COMMANDS])
def test_every_command_of_ours_is_one_that_parses(page: str, words: list[str]) -> None:
    require_parses(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_that_no_test_runs_says_what_it_needs(page: Path) -> None:
    for theirs, words, how in rows(page):
        if not words:
            assert not how, theirs
        elif how not in {"runs", "double"} | NEEDS:
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


def steps_of(words: list[str]) -> int | None:
    line = " ".join(words)
    return next((steps for beginning, steps in OWN_STEPS.items() if line.startswith(beginning)), None)


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
    with ExitStack() as servers:
        chats = servers.enter_context(chat_double()).url
        for number, (_, words, how) in enumerate(rows(page)):
            if how in ("runs", "double"):
                url = chats
                if words[0] == "eval" and how == "double":
                    engine = words[words.index("--engine") + 1]
                    url = servers.enter_context(fake_server(engine=engine, accepts=(2, 0, 1))).url
                code = run(*small(words, target, url, steps_of(words)))
                assert code == 0, f"row {number}: {words}: {capsys.readouterr().err[-2000:]}"

"""README and docs/: every command is read by the command line, every untagged block is run, what is cited exists."""

import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import pytest

from tests.collectors.chat_double import ChatDouble, chat_double
from tests.collectors.tiny import tiny_tokenizer
from tests.doc_blocks import NEEDS, PAGES, ROOT, Block, blocks, require_parses, small, target_of_eight_layers
from tests.hiddenstore.hub_double import in_place_of_the_hub
from tests.test_guides import GUIDES, rows
from tests.tiny_world import TRAIN, chat, run, write_rows
from tests.trainer.mtp_target import make_mimo, save_mimo

BLOCKS = [block for page in PAGES for block in blocks(page)]
OPEN = sorted({block.page for block in BLOCKS if not block.how}, key=str)
# What pages call the same thing.
ALSO = {"store": ("my-store", "store-captured-with-hf"), "run": ("my-run", "run-a", "run-b")}
AT_LEAST = 0.8


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.how != "run by"], ids=str)
def test_every_command_of_a_block_that_no_other_test_runs_is_one_that_parses(block: Block) -> None:
    for words in block.commands:
        require_parses(words)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.how], ids=str)
def test_a_note_names_what_is_needed_or_a_test_that_reads_the_page(block: Block) -> None:
    if block.how == "needs":
        assert set(block.what.split(", ")) <= NEEDS
    else:
        assert block.page.name in (ROOT / block.what).read_text(encoding="utf-8")


def test_most_commands_and_programs_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    ran = [block.how != "needs" for block in BLOCKS for _ in block.commands or [block]]
    ran += [how not in NEEDS for page in GUIDES.glob("*.md") for _, words, how in rows(page) if words]
    with capsys.disabled():
        sys.stdout.write(f"\n{sum(ran)} of {len(ran)} commands and programs of README and docs are run, all are read\n")
    assert sum(ran) >= AT_LEAST * len(ran)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_cites_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    cited = re.findall(r"`((?:tests|benchmarks|docs)/[\w/.*-]*\w)`", text)
    assert [name for name in cited if not any(ROOT.glob(name))] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets


@pytest.fixture(scope="module")
def double() -> Iterator[ChatDouble]:
    with chat_double() as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted, each under the name that they use."""
    folder = tmp_path_factory.mktemp("pages")
    target = target_of_eight_layers(folder / "target")
    for name in ("chats.jsonl", "answers.jsonl"):
        write_rows(folder / name, [chat(number) for number in range(40)])
    for name in ("questions.jsonl", "prompts.jsonl", "held-out.jsonl", "mt_bench.jsonl"):
        write_rows(folder / name, [{"prompt": f"What is {number}?"} for number in range(4)])
    save_mimo(folder / "MiMo-7B-RL", make_mimo(layers=8))
    tiny_tokenizer().save_pretrained(folder / "MiMo-7B-RL")
    store, made = str(folder / "store"), str(folder / "run")
    for words in (
        ("prepare", folder / "chats.jsonl", "-o", folder / "data", "--target", target, "--val", "20%"),
        ("collect", folder / "data", "-o", store, "--target", target, "--layers", "eagle3", "--final", "all"),
        ("train", store, "-o", made, *TRAIN),
        ("export", made, "--engine", "vllm", "-o", folder / "drafter"),
        ("export-data", store, "--to", "specforge-eagle3", "-o", folder / "dump"),
    ):
        assert run(*map(str, words), "-q") == 0, words
    with (folder / "eval.json").open("w", encoding="utf-8") as file, redirect_stdout(file):
        assert run("eval", made, store, "--json", "-q") == 0
    (folder / "cache").mkdir()
    (folder / "cache" / "hidden_states").symlink_to(folder / "dump")
    for name, others in ALSO.items():
        for other in others:
            (folder / other).symlink_to(folder / name)
    return folder


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(httpx2|huggingface_hub).*")
@pytest.mark.parametrize("page", OPEN, ids=lambda page: page.stem)
def test_the_untagged_blocks_of_a_page_run_in_its_order(
    page: Path,
    shared: Path,
    double: ChatDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    own = [block for block in blocks(page) if not block.how]
    words_of_page = [word.removeprefix("./") for block in own for words in block.commands for word in words]
    for thing in shared.iterdir():
        uses = [index for index, word in enumerate(words_of_page) if word == thing.name]
        # What the page makes itself is not there before.
        if not uses or words_of_page[uses[0] - 1] not in ("-o", "-O"):
            (tmp_path / thing.name).symlink_to(thing)
    with ExitStack() as stack:
        if any(word.startswith("hf://") for word in words_of_page):
            stack.enter_context(in_place_of_the_hub(monkeypatch))
        for block in own:
            if block.language == "python":
                Path("block.py").write_text(block.text, encoding="utf-8")
                runpy.run_path("block.py")
            for words in block.commands:
                code = run(*small(words, str(shared / "target"), double.url))
                assert code == 0, f"{block}: {words}: {capsys.readouterr().err[-2000:]}"

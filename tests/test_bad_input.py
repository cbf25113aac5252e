"""What a person gets wrong, through the whole command line: a clear error, the right exit code, nothing half written.

Each case is one command. Its error names what, where, expected and found; stdout stays empty; and not one byte below
the folders it may touch is another than before.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from hiddenstore.cli import main
from tests.collectors import tiny_templates
from tests.tiny_world import (
    LAYERS,
    TRAIN,
    World,
    chat,
    error_of,
    run,
    target_with_nan,
    target_with_other_tokenizer,
    target_with_template,
    tree,
    write_rows,
)

USAGE, FOUND, MISFIT, STORAGE, CONFLICT = 2, 3, 4, 5, 6

Tree = dict[str, bytes | None]
Words = Callable[[World, Path], tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """``words(world, folder)`` is the command, run in ``folder``; ``says`` must all stand in the error.

    ``fix`` is part of the ``fix:`` line; None where no command can help.
    """

    name: str
    words: Words
    exit_code: int
    kind: str
    says: tuple[str, ...]
    fix: str | None = None


def prepare(make_input: Callable[[Path], str] | None = None, *more: str, target: str | None = None) -> Words:
    """``prepare`` of an input made in the case's folder; the world's conversations without one."""

    def words(world: World, folder: Path) -> tuple[str, ...]:
        given = make_input(folder) if make_input else world / "chats.jsonl"
        return ("prepare", given, "-o", "out", "--target", world / (target or "target"), *more)

    return words


def prepare_for(make_target: Callable[[Path], str]) -> Words:
    return lambda world, folder: ("prepare", world / "chats.jsonl", "-o", "out", "--target", make_target(folder))


def collect(*more: str, store: str = "new", target: str = "target") -> Words:
    return lambda world, _: (
        "collect", world / "data", "-o", world / store, "--target", world / target, "--layers", LAYERS, *more
    )  # fmt: skip


def collect_for(make_target: Callable[[Path], str], *more: str) -> Words:
    return lambda world, folder: ("collect", world / "data", "-o", "new", "--target", make_target(folder), *more)


def collect_data(make_data: Callable[[World, Path], str]) -> Words:
    return lambda world, folder: ("collect", make_data(world, folder), "-o", "new", "--target", world / "target")


def train(*more: str, store: str = "store") -> Words:
    return lambda world, _: ("train", world / store, "-o", "new", *TRAIN, *more)


def on(command: str, *more: str) -> Words:
    """A command whose words are names in the world where such a thing exists, else what they say."""
    return lambda world, _: (command, *world.named(more))


def damaged_store(world: World, folder: Path) -> str:
    """A copy of the store whose largest file is cut in half."""
    shutil.copytree(world / "store", folder / "damaged")
    largest = max((folder / "damaged" / "segments").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return str(folder / "damaged")


def damaged_data(world: World, folder: Path) -> str:
    shutil.copytree(world / "data", folder / "damaged")
    part = folder / "damaged" / "part-00000.parquet"
    changed = bytearray(part.read_bytes())
    changed[len(changed) // 2] ^= 1
    part.write_bytes(changed)
    return str(folder / "damaged")


def damaged_run(world: World, folder: Path) -> str:
    shutil.copytree(world / "run", folder / "damaged")
    file = next((folder / "damaged").rglob("drafter.safetensors"))
    os.truncate(file, file.stat().st_size // 2)
    return str(folder / "damaged")


def without_config(folder: Path) -> str:
    (folder / "empty").mkdir()
    return str(folder / "empty")


def rows(*content: object) -> Callable[[Path], str]:
    return lambda folder: write_rows(folder / "rows.jsonl", list(content))


def text(name: str, content: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_text(content)
        return str(folder / name)

    return write


def with_template(template: str | None) -> Callable[[Path], str]:
    return lambda folder: target_with_template(folder / "target", template)


def thoughts_stripped(world: World, folder: Path) -> tuple[str, ...]:
    turn = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."}
    given = write_rows(folder / "rows.jsonl", [chat(1), {"messages": [*turn, *turn]}])
    target = target_with_template(folder / "target", tiny_templates.STRIPS_THOUGHTS)
    return ("prepare", given, "-o", "out", "--target", target)


CASES = [
    # prepare: inputs
    Case("input missing", prepare(lambda _: "nowhere.jsonl"), USAGE, "input-missing", ("nowhere.jsonl",)),
    Case("input empty", prepare(text("empty.jsonl", "")), USAGE, "input-empty", ("empty.jsonl", "empty")),
    Case("input of blank lines", prepare(text("blank.jsonl", "\n\n")), USAGE, "input-empty", ("blank.jsonl",)),
    Case("folder without conversations", prepare(without_config), USAGE, "input-no-files", ("empty", ".jsonl")),
    Case(
        "invalid JSON", prepare(rows("", '{"messages": [')), USAGE, "nothing-usable", ("rows.jsonl:2", "invalid-json")
    ),
    Case(
        "truncated JSON array", prepare(text("a.json", '[{"messages": []}, {')), USAGE, "input-unreadable", ("a.json",)
    ),
    Case("no messages", prepare(rows({"text": "hi"})), USAGE, "nothing-usable", ("rows.jsonl:1", "messages")),
    Case(
        "wrong roles",
        prepare(rows({"messages": [{"role": "wizard", "content": "x"}]})),
        USAGE,
        "nothing-usable",
        ("rows.jsonl:1", "wizard"),
    ),
    Case("not text", prepare(text("x.parquet", "no parquet")), USAGE, "input-unreadable", ("x.parquet",)),
    Case(
        "DATA exists",
        lambda w, _: ("prepare", w / "chats.jsonl", "-o", w / "data", "--target", w / "target"),
        CONFLICT,
        "output-exists",
        ("data",),
    ),
    Case("share of 101 %", prepare(None, "--val", "101%"), USAGE, "usage", ("101%",), "hiddenstore prepare --help"),
    Case(
        "max tokens beyond the target",
        prepare(None, "--max-tokens", "9999"),
        USAGE,
        "max-tokens-beyond-target",
        ("9,999", "256"),
        "--max-tokens 256",
    ),
    # prepare: targets and templates
    Case("target missing", prepare_for(lambda _: "./nowhere"), USAGE, "target-missing", ("./nowhere",)),
    Case("target a bare word", prepare_for(lambda _: "nowhere"), USAGE, "target-unreadable", ("nowhere",)),
    Case(
        "target without config",
        prepare_for(without_config),
        USAGE,
        "target-without-config",
        ("config.json",),
        "save_pretrained",
    ),
    Case(
        "no chat template",
        prepare_for(with_template(None)),
        USAGE,
        "target-no-chat-template",
        ("chat template",),
        "--template FILE",
    ),
    Case(
        "template without assistant",
        prepare_for(with_template(tiny_templates.USERS_ONLY)),
        USAGE,
        "template-no-assistant",
        ("assistant",),
        "--template FILE",
    ),
    Case(
        "template of an empty mask",
        prepare_for(with_template(tiny_templates.EMPTY_TAGS)),
        USAGE,
        "mask-empty",
        ("generation",),
        "--template FILE",
    ),
    Case(
        "template not prefix-stable",
        thoughts_stripped,
        USAGE,
        "template-not-prefix-stable",
        ("rewrites earlier turns",),
        "--loss-on all",
    ),
    Case("template broken", prepare_for(with_template(tiny_templates.BROKEN)), USAGE, "template-invalid", ("line 1",)),
    Case("template file missing", prepare(None, "--template", "no.jinja"), USAGE, "template-missing", ("no.jinja",)),
    # plan
    Case(
        "plan without DATA",
        on("plan", "nowhere", "--target", "target"),
        USAGE,
        "data-missing",
        ("nowhere",),
        "hiddenstore prepare",
    ),
    # collect
    Case(
        "DATA missing", collect_data(lambda *_: "nowhere"), USAGE, "data-missing", ("nowhere",), "hiddenstore prepare"
    ),
    Case(
        "DATA is a file",
        collect_data(lambda w, _: w / "chats.jsonl"),
        USAGE,
        "data-missing",
        ("chats.jsonl",),
        "hiddenstore prepare",
    ),
    Case(
        "DATA corrupt",
        collect_data(damaged_data),
        FOUND,
        "prepared-corrupt",
        ("part-00000.parquet",),
        "hiddenstore prepare",
    ),
    Case(
        "DATA of another tokenizer",
        collect_for(lambda f: target_with_other_tokenizer(f / "t")),
        MISFIT,
        "tokenizer-mismatch",
        ("tokenizer",),
        "hiddenstore prepare",
    ),
    Case(
        "layer out of range", collect("--layers", "1,9"), USAGE, "layer-out-of-range", ("9", "-1…3"), "--layers eagle3"
    ),
    Case("layers misspelt", collect("--layers", "eagel3"), USAGE, "layers-invalid", ("eagel3",), "--layers eagle3"),
    Case("engine unknown", collect("--engine", "vlm"), USAGE, "engine-unknown", ("vlm", "hf")),
    Case("recipe unknown", collect("--recipe", "save"), USAGE, "recipe-unknown", ("save", "safe")),
    Case("dtype unknown", collect("--dtype", "int3"), USAGE, "dtype-unknown", ("int3", "float32")),
    Case("device unknown", collect("--device", "tpuu"), USAGE, "device-unavailable", ("tpuu",)),
    Case(
        "another capture", collect("--layers", "0,1", store="store"), CONFLICT, "capture-mismatch", ("0, 1, 2", "0, 1")
    ),
    Case(
        "another target",
        collect(store="store", target="other_target"),
        CONFLICT,
        "capture-mismatch",
        ("weights_sha256",),
    ),
    Case("NaN in a layer", collect_for(lambda f: target_with_nan(f / "sick")), MISFIT, "non-finite", ("layer 1",)),
    Case(
        "target without weights",
        collect_for(lambda f: target_with_template(f / "t", tiny_templates.CHATML)),
        MISFIT,
        "tokenizer-mismatch",
        (),
    ),
    Case("STORE is a file", collect(store="chats.jsonl"), STORAGE, "io-error", ("chats.jsonl",)),
    Case("STORE is another folder", collect(store="target"), CONFLICT, "folder-not-empty", ("target",)),
    # regenerate
    Case(
        "regenerate nothing",
        on("regenerate", "nowhere.jsonl", "-o", "o.jsonl", "--target", "target"),
        USAGE,
        "input-missing",
        ("nowhere.jsonl",),
    ),
    Case(
        "regenerate over a file",
        on("regenerate", "chats.jsonl", "-o", "chats.jsonl", "--target", "target"),
        CONFLICT,
        "output-exists",
        ("chats.jsonl",),
    ),
    Case(
        "regenerate invalid JSON",
        lambda w, f: ("regenerate", rows("{nope")(f), "-o", "o.jsonl", "--target", w / "target"),
        USAGE,
        "nothing-usable",
        ("rows.jsonl:1",),
    ),
    # look and care
    *(
        Case(f"{name} nothing", on(name, "nowhere"), USAGE, "store-missing", ("nowhere",))
        for name in ("info", "ls", "show", "stats", "verify", "repair", "gc")
    ),
    *(
        Case(f"{name} no store", on(name, "target"), USAGE, "store-missing", ("target",))
        for name in ("info", "ls", "show", "stats", "verify", "repair", "gc")
    ),
    Case("diff with nothing", on("diff", "store", "nowhere"), USAGE, "store-missing", ("nowhere",)),
    Case("show an unknown sample", on("show", "store", "zzz"), USAGE, "sample-missing", ("zzz",), "hiddenstore ls"),
    Case("show beyond the end", on("show", "store", "99"), USAGE, "sample-missing", ("99", "40"), "hiddenstore ls"),
    Case("an unknown test", on("ls", "store", "--where", "length>3"), USAGE, "where-invalid", ("length",)),
    Case("an unknown snapshot", lambda w, _: ("info", w / "store@v9"), USAGE, "snapshot-missing", ("v9",)),
    Case("copy nothing", on("copy", "nowhere", "dst"), USAGE, "store-missing", ("nowhere",)),
    Case(
        "copy of another target", on("copy", "other_store", "store"), CONFLICT, "capture-mismatch", ("weights_sha256",)
    ),
    Case(
        "copy of two targets",
        on("copy", "store", "other_store", "dst"),
        CONFLICT,
        "capture-mismatch",
        ("weights_sha256",),
    ),
    Case("copy recipe unknown", on("copy", "store", "dst", "--recipe", "q9"), USAGE, "recipe-unknown", ("q9",)),
    Case(
        "gc of no age", on("gc", "store", "--older-than", "soon"), USAGE, "age-invalid", ("soon",), "--older-than 24h"
    ),
    # vocab
    Case(
        "vocab over another file", on("vocab", "store", "-o", "chats.jsonl"), CONFLICT, "file-exists", ("chats.jsonl",)
    ),
    Case("vocab file missing", on("vocab", "store", "--file", "no.pt"), USAGE, "vocab-missing", ("no.pt",)),
    Case(
        "vocab file of another kind",
        on("vocab", "store", "--file", "chats.jsonl"),
        FOUND,
        "vocab-corrupt",
        ("chats.jsonl",),
    ),
    # train
    Case("train nothing", train(store="nowhere"), USAGE, "store-missing", ("nowhere",)),
    Case(
        "key unknown", train("optim.learning_rate=1"), USAGE, "config-unknown-key", ("optim.learning_rate", "optim.lr")
    ),
    Case("value of the wrong type", train("optim.lr=fast"), USAGE, "config-invalid", ("optim.lr", "number", "fast")),
    Case(
        "two values wrong", train("optim.lr=fast", "loss.steps=0"), USAGE, "config-invalid", ("optim.lr", "loss.steps")
    ),
    Case("settings missing", train("-c", "no.yaml"), USAGE, "config-missing", ("no.yaml",)),
    Case(
        "settings no YAML",
        lambda w, f: ("train", w / "store", "-o", "new", "-c", text("c.yaml", "a: [")(f)),
        USAGE,
        "config-unreadable",
        ("c.yaml",),
    ),
    Case("drafter unknown", train("--drafter", "eagle9"), USAGE, "drafter-unknown", ("eagle9", "eagle3")),
    Case(
        "layers not stored",
        train("drafter.aux_layers=0,1,3"),
        USAGE,
        "store-lacks-states",
        ("3",),
        "hiddenstore collect",
    ),
    Case("no final stored", train(store="no_final"), USAGE, "store-lacks-states", ("final",), "hiddenstore collect"),
    Case(
        "train a damaged store",
        lambda w, f: ("train", damaged_store(w, f), "-o", "new", *TRAIN),
        FOUND,
        "file-size",
        ("samples",),
        "hiddenstore repair",
    ),
    Case("run exists", on("train", "store", "-o", "run"), CONFLICT, "run-exists", ("step-2",), "--resume"),
    Case("nothing to resume", train("--resume"), USAGE, "run-missing", ("new",), "hiddenstore train"),
    Case(
        "resume another store",
        on("train", "other_store", "-o", "run", "--resume"),
        CONFLICT,
        "resume-store",
        ("weights_sha256",),
        "hiddenstore train",
    ),
    Case("draft vocabulary missing", train("drafter.vocab_file=no.pt"), USAGE, "vocab-missing", ("no.pt",)),
    Case("device unavailable", train("train.device=cuda:7"), USAGE, "device-unavailable", ("cuda:7",)),
    Case("train: a sample longer than a pack", train("data.pack_tokens=20"), USAGE, "sample-too-long", ("20", "60")),
    # eval
    Case("eval no run", on("eval", "nowhere", "store"), USAGE, "checkpoint-missing", ("nowhere",), "hiddenstore train"),
    Case("eval another target", on("eval", "run", "other_store"), MISFIT, "target-mismatch", ("weights_sha256",)),
    Case(
        "eval an empty split", on("eval", "run", "train_store"), USAGE, "split-empty", ("validation",), "--split train"
    ),
    Case(
        "eval without the layers", on("eval", "run", "no_final"), USAGE, "layers-missing", ("2",), "hiddenstore collect"
    ),
    Case(
        "eval a damaged store",
        lambda w, f: ("eval", w / "run", damaged_store(w, f), "--split", "train"),
        FOUND,
        "file-size",
        ("samples",),
        "hiddenstore repair",
    ),
    Case(
        "eval a damaged run",
        lambda w, f: ("eval", damaged_run(w, f), w / "store"),
        FOUND,
        "checkpoint-corrupt",
        ("drafter.safetensors",),
    ),
    # decode
    Case(
        "decode another target",
        on("decode", "run", "--target", "other_target", "--prompts", "store"),
        MISFIT,
        "target-mismatch",
        ("weights_sha256",),
    ),
    Case(
        "decode no target",
        on("decode", "run", "--target", "./no", "--prompts", "store"),
        USAGE,
        "target-missing",
        ("./no",),
    ),
    Case(
        "decode no run",
        on("decode", "data", "--target", "target", "--prompts", "store"),
        USAGE,
        "checkpoint-missing",
        ("data",),
    ),
    Case(
        "prompts missing",
        on("decode", "run", "--target", "target", "--prompts", "no.jsonl"),
        USAGE,
        "prompts-missing",
        ("no.jsonl",),
    ),
    Case(
        "prompts empty",
        lambda w, f: ("decode", w / "run", "--target", w / "target", "--prompts", text("p.jsonl", "")(f)),
        USAGE,
        "prompts-empty",
        ("p.jsonl",),
    ),
    Case(
        "prompts no JSON",
        lambda w, f: ("decode", w / "run", "--target", w / "target", "--prompts", rows(chat(1), "{")(f)),
        USAGE,
        "prompts-invalid",
        ("rows.jsonl:2",),
    ),
    Case(
        "prompts of an empty split",
        on("decode", "run", "--target", "target", "--prompts", "all_train"),
        USAGE,
        "prompts-empty",
        ("validation",),
    ),
    # export
    Case(
        "export over a folder",
        on("export", "run", "--engine", "vllm", "-o", "exported"),
        CONFLICT,
        "out-exists",
        ("exported",),
    ),
    Case(
        "export engine unknown",
        on("export", "run", "--engine", "vlm", "-o", "out"),
        USAGE,
        "engine-unknown",
        ("vlm", "vllm"),
    ),
    Case(
        "export no run", on("export", "store", "--engine", "vllm", "-o", "out"), USAGE, "checkpoint-missing", ("store",)
    ),
    Case(
        "export a damaged run",
        lambda w, f: ("export", damaged_run(w, f), "--engine", "vllm", "-o", "out"),
        FOUND,
        "checkpoint-corrupt",
        ("drafter.safetensors",),
    ),
    Case(
        "export-data without every final",
        on("export-data", "store", "--to", "speculators", "-o", "out"),
        MISFIT,
        "final-missing",
        ("final",),
        "--final all",
    ),
    Case(
        "export-data over a folder",
        on("export-data", "store", "--to", "speculators", "-o", "exported", "--missing-final", "zeros"),
        CONFLICT,
        "out-exists",
        ("exported",),
    ),
    Case(
        "export-data of layers not held",
        on("export-data", "store", "--to", "speculators", "-o", "out", "--layers", "0,3", "--missing-final", "zeros"),
        USAGE,
        "layers-missing",
        ("3",),
    ),
    Case(
        "export-data of a damaged store",
        lambda w, f: (
            "export-data",
            damaged_store(w, f),
            "--to",
            "speculators",
            "-o",
            "out",
            "--missing-final",
            "zeros",
        ),
        FOUND,
        "file-size",
        ("samples",),
    ),
    Case(
        "export-data format unknown",
        on("export-data", "store", "--to", "arrow", "-o", "out"),
        USAGE,
        "usage",
        ("arrow", "speculators"),
    ),
    # usage
    Case(
        "command unknown", on("colect"), USAGE, "command-unknown", ("colect", "collect"), "hiddenstore collect --help"
    ),
    Case("option unknown", on("info", "store", "--colour"), USAGE, "usage", ("--colour",), "hiddenstore info --help"),
    Case("argument missing", on("train"), USAGE, "usage", ("STORE",), "hiddenstore train --help"),
]


@pytest.fixture(scope="module")
def world_tree(world: World) -> Tree:
    return tree(world.root)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a case runs; it writes what it needs here before the command starts."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_bad_input_is_a_clear_error_and_changes_nothing(
    case: Case, world: World, world_tree: Tree, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = case.words(world, folder)
    before = tree(folder)
    capsys.readouterr()
    assert run(*words) == case.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    message, fix = error_of(printed.err)
    assert f"[{case.kind}]" in message.splitlines()[0]
    assert [part for part in case.says if part not in message] == []
    assert "Traceback" not in printed.err
    if case.fix is not None:
        assert case.fix in fix
    require_runnable(fix)
    assert tree(folder) == before
    assert tree(world.root) == world_tree


def require_runnable(fix: str) -> None:
    """A hint that is a command of ours names a command that exists and options it has."""
    if not fix.startswith("hiddenstore "):
        return
    name, *words = shlex.split(fix.partition(";")[0])[1:]
    with click.Context(main) as context:
        command = main.get_command(context, name)
        assert command is not None, fix
        command.make_parser(click.Context(command)).parse_args(words)


@pytest.mark.parametrize(
    "words",
    [("info", "nowhere"), ("prepare", "no.jsonl", "-o", "out", "--target", "./t"), ("train", "no", "-o", "run")],
)
def test_a_process_ends_with_the_code_and_one_line_of_json_says_the_same(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "hiddenstore.cli", *words]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stdout, told.returncode, told.stdout) == (USAGE, "", USAGE, "")
    document = json.loads(told.stderr)
    assert (document["schema"], document["exit_code"]) == ("hiddenstore.error/1", USAGE)
    assert plain.stderr.startswith(f"error: {document['message']}  [{document['kind']}]\n")
    assert list(tmp_path.iterdir()) == []


def test_one_bad_line_among_good_ones_is_listed_with_its_place_and_the_rest_is_used(
    world: World, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = write_rows(folder / "rows.jsonl", [chat(1), '{"messages": [', chat(2)])
    assert run("prepare", rows_file, "-o", "out", "--target", world / "target", "--json") == 0
    (reject,) = json.loads(capsys.readouterr().out)["rejects"]
    assert (reject["reason"], reject["rows"]) == ("invalid-json", 1)
    assert reject["examples"][0].startswith("rows.jsonl:2: ")


def test_verify_names_the_damaged_file_and_the_command_that_repairs(
    world: World, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = damaged_store(world, folder)
    assert run("verify", damaged) == FOUND
    printed = capsys.readouterr()
    assert "file-size" in printed.out
    assert f"next: hiddenstore repair {damaged}" in printed.err

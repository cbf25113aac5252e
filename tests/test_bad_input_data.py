"""What a person gets wrong on the way to a store: conversations, targets, templates, DATA and what to capture."""

import json
from pathlib import Path

import pytest

from tests.bad_input import (
    CONFLICT,
    FOUND,
    MISFIT,
    USAGE,
    Case,
    check,
    collect,
    collect_data,
    collect_for,
    damaged_data,
    on,
    prepare,
    prepare_for,
    rows,
    text,
    with_template,
    without_config,
)
from tests.collectors import tiny_templates
from tests.tiny_world import (
    World,
    chat,
    run,
    target_with_nan,
    target_with_other_tokenizer,
    target_with_template,
    write_rows,
)


def thoughts_stripped(world: World, folder: Path) -> tuple[str, ...]:
    turn = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."}
    given = write_rows(folder / "rows.jsonl", [chat(1), {"messages": [*turn, *turn]}])
    target = target_with_template(folder / "target", tiny_templates.STRIPS_THOUGHTS)
    return ("prepare", given, "-o", "out", "--target", target)


CASES = [
    # prepare: inputs
    Case("input missing", prepare(lambda _: "nowhere.jsonl"), USAGE, "path-missing", ("nowhere.jsonl",)),
    Case("input empty", prepare(text("empty.jsonl", "")), USAGE, "input-empty", ("empty.jsonl", "empty")),
    Case("input of blank lines", prepare(text("blank.jsonl", "\n\n")), USAGE, "input-empty", ("blank.jsonl",)),
    Case("folder without conversations", prepare(without_config), USAGE, "input-empty", ("empty", ".jsonl")),
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
        "option-invalid",
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
        "target-incomplete",
        ("config.json",),
        "save_pretrained",
    ),
    Case(
        "no chat template",
        prepare_for(with_template(None)),
        USAGE,
        "template-missing",
        ("chat template",),
        "--template FILE",
    ),
    Case(
        "template without assistant",
        prepare_for(with_template(tiny_templates.USERS_ONLY)),
        USAGE,
        "template-invalid",
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
        "template-unstable",
        ("rewrites earlier turns",),
        "--loss-on all",
    ),
    Case("template broken", prepare_for(with_template(tiny_templates.BROKEN)), USAGE, "template-invalid", ("line 1",)),
    Case("template file missing", prepare(None, "--template", "no.jinja"), USAGE, "path-missing", ("no.jinja",)),
    # plan
    Case(
        "plan without DATA",
        on("plan", "nowhere", "--target", "target"),
        USAGE,
        "path-missing",
        ("nowhere",),
        "hiddenstore prepare",
    ),
    # collect
    Case(
        "DATA missing", collect_data(lambda *_: "nowhere"), USAGE, "path-missing", ("nowhere",), "hiddenstore prepare"
    ),
    Case(
        "DATA is a file",
        collect_data(lambda w, _: w / "chats.jsonl"),
        USAGE,
        "path-missing",
        ("chats.jsonl",),
        "hiddenstore prepare",
    ),
    Case(
        "DATA corrupt",
        collect_data(damaged_data),
        FOUND,
        "file-corrupt",
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
    Case("layer out of range", collect("--layers", "1,9"), USAGE, "layers-invalid", ("9", "-1…3"), "--layers eagle3"),
    Case(
        "nothing to capture",
        collect("--layers", "medusa", "--final", "none"),
        USAGE,
        "layers-invalid",
        ("nothing",),
        "--layers medusa --final supervised",
    ),
    Case("layers misspelt", collect("--layers", "eagel3"), USAGE, "layers-invalid", ("eagel3",), "--layers eagle3"),
    Case("engine unknown", collect("--engine", "vlm"), USAGE, "name-unknown", ("vlm", "hf")),
    Case("recipe unknown", collect("--recipe", "save"), USAGE, "name-unknown", ("save", "safe")),
    Case("dtype unknown", collect("--dtype", "int3"), USAGE, "option-invalid", ("int3", "float32")),
    Case("device unknown", collect("--device", "tpuu"), USAGE, "device-unavailable", ("tpuu",)),
    Case("another capture", collect("--layers", "0,1", store="store"), CONFLICT, "store-mismatch", ("0, 1, 2", "0, 1")),
    Case(
        "another target",
        collect(store="store", target="other_target"),
        CONFLICT,
        "store-mismatch",
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
    Case("STORE is a file", collect(store="chats.jsonl"), CONFLICT, "output-exists", ("chats.jsonl",)),
    Case("STORE is another folder", collect(store="target"), CONFLICT, "output-exists", ("target",)),
    # regenerate
    Case(
        "regenerate nothing",
        on("regenerate", "nowhere.jsonl", "-o", "o.jsonl", "--target", "target"),
        USAGE,
        "path-missing",
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
]


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_bad_conversations_targets_and_data_are_clear_errors_that_change_nothing(
    case: Case, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(case, world, tmp_path, monkeypatch, capsys)


def test_one_bad_line_among_good_ones_is_listed_with_its_place_and_the_rest_is_used(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = write_rows(tmp_path / "rows.jsonl", [chat(1), '{"messages": [', chat(2)])
    assert run("prepare", rows_file, "-o", str(tmp_path / "out"), "--target", world / "target", "--json") == 0
    (reject,) = json.loads(capsys.readouterr().out)["rejects"]
    assert (reject["reason"], reject["rows"]) == ("invalid-json", 1)
    assert reject["examples"][0].startswith("rows.jsonl:2: ")

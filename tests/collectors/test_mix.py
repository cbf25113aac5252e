"""Mixes and prompts: caps, weights, seeds, counts per source; prompts, variants and what is left out."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_templates import chat, tiny_target, write_rows

from collectors.conversations.datasets import _select, find_dataset
from collectors.conversations.mix import Mix, mix_names, open_inputs, read_mix
from collectors.conversations.prompts import Augmentation, prompt_of, read_augmentation, write_prompts
from collectors.regenerate.rewrite import Rewrite
from collectors.tokenize.prepare import PrepareOptions, prepare
from hiddenstore.cli import main
from hiddenstore.conversation import Conversation, Problem
from hiddenstore.errors import ConfigError, ConflictError, HiddenstoreError, NotFoundError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, count in (("a", 40), ("b", 10)):
        (tmp_path / name).mkdir()
        rows = [{"messages": chat(f"{name} asks {i}", f"answer {i}")} for i in range(count)]
        write_rows(tmp_path / name / "chats.jsonl", rows)
    return tmp_path


def mix_file(folder: Path, **mix: Any) -> Path:
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(mix))
    return path


def taken(path: Path) -> list[list[str]]:
    return [[row.location for row in mixed.source.rows()] for mixed in open_inputs(read_mix(path))]


def test_a_cap_takes_so_many_rows_by_seed_in_their_order(files: Path) -> None:
    sources = [{"file": "a/chats.jsonl", "cap": 12}, {"file": "b/chats.jsonl"}]
    one, other = (taken(mix_file(files, seed=seed, sources=sources)) for seed in (1, 2))
    assert [len(rows) for rows in one] == [12, 10]
    numbers = [int(place.rpartition(":")[2]) for place in one[0]]
    assert numbers == sorted(numbers) != list(range(1, 13))
    assert one[0] != other[0]
    assert one == taken(mix_file(files, seed=1, sources=sources))
    larger = taken(mix_file(files, seed=1, sources=[{"file": "a/chats.jsonl", "cap": 20}, sources[1]]))
    assert set(one[0]) < set(larger[0]), "a larger cap only adds rows"


@pytest.mark.parametrize(
    ("weights", "rows", "expected"),
    [((1, 1), None, [10, 10]), ((3, 1), None, [30, 10]), ((9, 1), None, [40, 4]), ((3, 1), 8, [6, 2])],
)
def test_weights_are_shares_of_the_mix(
    files: Path, weights: tuple[int, int], rows: int | None, expected: list[int]
) -> None:
    sources = [{"file": f"{name}/chats.jsonl", "weight": w} for name, w in zip("ab", weights, strict=True)]
    more = {} if rows is None else {"rows": rows}
    assert [len(found) for found in taken(mix_file(files, sources=sources, **more))] == expected


@pytest.mark.parametrize(
    ("weights", "rows", "expected"),
    [((1, 2), 10, [3, 7]), ((2, 1), 10, [7, 3]), ((1, 1), 9, [5, 4]), ((0.1, 0.7), 8, [1, 7]), ((3, 2), 11, [7, 4])],
)
def test_a_mix_of_rows_has_exactly_so_many(
    files: Path, weights: tuple[float, float], rows: int, expected: list[int]
) -> None:
    sources = [{"file": f"{name}/chats.jsonl", "weight": w} for name, w in zip("ab", weights, strict=True)]
    assert [len(part) for part in taken(mix_file(files, sources=sources, rows=rows))] == expected


def test_the_cap_of_a_source_holds_for_each_of_its_files(files: Path) -> None:
    assert [len(found) for found in taken(mix_file(files, sources=[{"file": ".", "cap": 4}]))] == [4, 4]


def test_more_rows_than_the_sources_have_are_refused_with_the_most_there_are(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"a mix of 41 rows needs 41 of .* which gives 40") as caught:
        open_inputs(read_mix(mix_file(files, sources=[{"file": "a/chats.jsonl", "weight": 1}], rows=41)))
    assert caught.value.kind == "mix-too-large"
    assert str(caught.value.hint).startswith("rows: 40,")


def test_data_json_says_what_each_source_gave(files: Path, target: str) -> None:
    path = mix_file(files, seed=7, sources=[{"file": "a/chats.jsonl", "cap": 12}, {"file": "b/chats.jsonl"}])
    info = prepare(read_mix(path), files / "data", target, PrepareOptions(workers=1))
    assert [(s.source, s.available, s.rows, s.samples, s.cap) for s in info.sources] == [
        ("a/chats.jsonl", 40, 12, 12, 12),
        ("b/chats.jsonl", None, 10, 10, None),
    ]
    assert sum(source.tokens for source in info.sources) == info.tokens
    stored = json.loads((files / "data" / "data.json").read_text())
    assert stored["mix_seed"] == 7
    assert [source["rows"] for source in stored["sources"]] == [12, 10]


def test_files_whose_share_of_a_mix_is_less_than_a_row_are_shown_with_none(
    files: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "many").mkdir()
    for number in range(10):
        write_rows(files / "many" / f"{number}.jsonl", [{"messages": chat(f"many {number}", "answer")}])
    write_rows(files / "few.jsonl", [{"messages": chat(f"few {number}", "answer")} for number in range(3)])
    sources = [{"file": name, "weight": 1} for name in ("many", "few.jsonl")]
    path = str(mix_file(files, sources=sources))
    with pytest.raises(SystemExit) as caught:
        main(["prepare", "--mix", path, "-o", str(files / "data"), "--target", target, "--workers", "1", "--json"])
    assert caught.value.code == 0
    counts = [(source["available"], source["rows"]) for source in json.loads(capsys.readouterr().out)["sources"]]
    assert (counts.count((1, 0)), counts.count((1, 1)), counts[-1]) == (7, 3, (3, 3))
    report = write_prompts(read_mix(path), files / "prompts.jsonl")
    resolved = yaml.safe_load(Path(report.mix or "").read_text())
    assert [source["rows"] for source in resolved["sources"]] == [rows for _, rows in counts]


def test_a_source_of_a_mix_without_a_row_is_named(files: Path) -> None:
    (files / "blank.jsonl").write_text("\n\n")
    sources = [{"file": name, "weight": 1} for name in ("a/chats.jsonl", "blank.jsonl")]
    with pytest.raises(ConfigError, match=r"blank\.jsonl holds no row") as caught:
        open_inputs(read_mix(mix_file(files, sources=sources)))
    assert caught.value.kind == "input-empty"


EMPTY = {"b.jsonl": "", "c.jsonl": "\n \n", "d.json": "[]", "e.json": "\ufeff", "f.json": " [\n]\n"}


def without_rows(folder: Path) -> Path:
    """A folder of files that hold nothing, as jobs leave them for partitions without rows."""
    folder.mkdir()
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "part-00001.parquet")
    for name, content in EMPTY.items():
        (folder / name).write_text(content)
    return folder


def test_files_of_a_folder_without_a_row_are_shown_with_none(files: Path, target: str) -> None:
    folder = without_rows(files / "parts")
    write_rows(folder / "a.jsonl", [{"messages": chat(f"part asks {number}", "answer")} for number in range(3)])
    info = prepare([str(folder)], files / "data", target, PrepareOptions(workers=1))
    assert [(source.source, source.rows, source.samples) for source in info.sources] == [
        ("parts/a.jsonl", 3, 3),
        *((f"parts/{name}", 0, 0) for name in (*EMPTY, "part-00001.parquet")),
    ]
    empty = [[]] * (len(EMPTY) + 1)
    capped = taken(mix_file(files, sources=[{"file": "parts", "cap": 2}]))
    assert (len(capped[0]), capped[1:]) == (2, empty)
    weights = [{"file": name, "weight": 1} for name in ("parts", "b")]
    weighted = taken(mix_file(files, sources=weights))
    assert ([len(rows) for rows in (weighted[0], weighted[-1])], weighted[1:-1]) == ([3, 3], empty)
    report = write_prompts([str(folder)], files / "p.jsonl")
    assert [source["rows"] for source in report.sources] == [3, *(0 for _ in empty)]


@pytest.mark.parametrize("name", ["", *EMPTY, "part-00001.parquet", "a.jsonl:train[3:]"])
def test_an_input_without_a_row_is_named_before_anything_is_read(files: Path, name: str) -> None:
    folder = without_rows(files / "parts")
    if "[" in name:
        write_rows(folder / "a.jsonl", [{"messages": chat("part asks", "answer")}] * 3)
    inputs = [str(files / "a" / "chats.jsonl"), str(folder / name)]
    with pytest.raises(ConfigError) as caught:
        prepare(inputs, files / "data", str(files / "no target"), PrepareOptions(workers=1))
    assert (caught.value.kind, caught.value.message) == ("input-empty", f"{inputs[1]} holds no row")


def test_files_of_a_folder_that_no_reader_takes_are_counted_and_named_by_kind(
    files: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = files / "mixed"
    (folder / "images").mkdir(parents=True)
    for number, name in enumerate(("a.jsonl", "b.JSONL", "c.Json")):
        write_rows(folder / name, [{"messages": chat(f"{number} asks {i}", "answer")} for i in range(5)])
    (folder / "d.JSON.GZ").write_bytes(gzip.compress(json.dumps([{"messages": chat("zip asks", "answer")}]).encode()))
    for name in ("README.md", "LICENSE", "_SUCCESS", ".gitattributes", "images/1.PNG"):
        (folder / name).write_text("no rows")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"features": {}}}, indent=1))
    # Ten samples and more, of which the usual share holds none out: they are split twice and still said once.
    prepare([str(folder)], files / "data", target, PrepareOptions(workers=1, validation=None))
    assert "warning" not in capsys.readouterr().err
    for name in ("e.txt", "f.jsonl.zst", "g.csv", "h.csv", "x.arrow"):
        (folder / name).write_text("rows, perhaps")
    info = prepare([str(folder)], files / "again", target, PrepareOptions(workers=1, validation=None))
    assert [(one.source, one.rows) for one in info.sources] == [
        *((f"mixed/{name}", 5) for name in ("a.jsonl", "b.JSONL", "c.Json")),
        ("mixed/d.JSON.GZ", 1),
    ]
    assert info.validation_samples
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert f"{folder}: 5 files left out, such as e.txt, f.jsonl.zst, g.csv, x.arrow (" in said


def test_slices_of_one_file_and_the_files_of_one_dataset_are_counted_for_what_they_are(
    files: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", files / "cache")
    split = files / "root" / "HuggingFaceH4" / "ultrachat_200k" / "data"
    split.mkdir(parents=True)
    for number, count in enumerate((3, 4)):
        rows = [{"messages": chat(f"set {number} asks {i}", f"answer {i}")} for i in range(count)]
        write_rows(split / f"train_sft-0000{number}-of-00002.jsonl", rows)
    chats = files / "a" / "chats.jsonl"
    inputs = [f"{chats}:train[:9]", "dataset:ultrachat", f"{chats}:train[35:]"]
    info = prepare(inputs, files / "data", target, PrepareOptions(workers=1, dataset_root=str(files / "root")))
    assert [(source.rows, source.samples) for source in info.sources] == [(9, 9), (7, 7), (5, 5)]
    assert sum(source.tokens for source in info.sources) == info.tokens


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ({"sources": []}, "sources"),
        ({"sources": [{"cap": 3}]}, "one of dataset, file or hub"),
        ({"sources": [{"file": "x", "dataset": "gsm8k"}]}, "dataset and file"),
        ({"sources": [{"file": "x", "weight": 1}, {"file": "y"}]}, "1 of 2 sources"),
        ({"sources": [{"file": "x", "weight": -1}]}, "greater than 0"),
        ({"sources": [{"file": "x", "weight": "inf"}]}, "finite number"),
        ({"sources": [{"file": "x", "caps": 3}]}, "caps"),
        ({"sources": [{"file": "x"}], "rows": 3}, "weight"),
        (
            {"sources": [{"file": "a/chats.jsonl", "weight": 99}, {"file": "b", "weight": 1}], "rows": 4},
            "without a row",
        ),
    ],
)
def test_a_mix_that_cannot_be_is_refused_before_anything_is_written(
    files: Path, mix: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        open_inputs(read_mix(mix_file(files, **mix)))


def conversation(*turns: tuple[str, str], **more: Any) -> Conversation:
    return Conversation("f:1", [{"role": role, "content": text, **more} for role, text in turns])


def test_a_prompt_keeps_system_and_user_turns() -> None:
    found = prompt_of(conversation(("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2")))
    assert found == [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "u1"), ("user", "u2"))]


def test_user_turns_without_an_answer_between_them_stay_one_turn() -> None:
    found = prompt_of(conversation(("user", "u1"), ("user", "u2"), ("assistant", "a")))
    assert found == [{"role": "user", "content": "u1\n\nu2"}]
    questions = prompt_of(conversation(("user", "u1"), ("user", "u2")))
    assert isinstance(questions, list)
    assert len(questions) == 2, "a row of questions alone is a list of turns"


def test_conversations_with_tools_are_left_to_regenerate() -> None:
    found = prompt_of(conversation(("user", "u"), ("assistant", ""), ("tool", "r"), ("assistant", "a")))
    assert isinstance(found, Problem)
    assert found.reason == "tool-turns"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TWO = {"variants": [{"name": "brief", "user_suffix": " Be brief."}, {"name": "kind", "system": "Be kind."}]}


def test_variants_follow_the_seed_and_each_is_counted(files: Path) -> None:
    source = str(files / "a" / "chats.jsonl")
    report = write_prompts([source], files / "p.jsonl", Augmentation(**TWO))
    assert report.variants["plain"] == 40
    assert report.variants["brief"] + report.variants["kind"] == 40
    assert min(report.variants.values()) > 8
    assert report.written == len(lines(files / "p.jsonl")) == 80
    for row in lines(files / "p.jsonl"):
        if row.get("variant") == "brief":
            assert row["messages"][-1]["content"].endswith(" Be brief.")
        elif row.get("variant") == "kind":
            assert row["messages"][0] == {"role": "system", "content": "Be kind."}
    write_prompts([source], files / "again.jsonl", Augmentation(**TWO))
    assert (files / "again.jsonl").read_bytes() == (files / "p.jsonl").read_bytes()
    write_prompts([source], files / "other.jsonl", Augmentation(**TWO, seed=1))
    assert (files / "other.jsonl").read_bytes() != (files / "p.jsonl").read_bytes()


def test_a_suffix_ends_every_user_turn_and_a_system_message_is_never_replaced() -> None:
    brief, kind = Augmentation(**TWO).variants
    asked = [{"role": "system", "content": "s"}, *({"role": "user", "content": text} for text in ("x", "y"))]
    assert [message["content"] for message in brief.apply(asked)] == ["s", "x Be brief.", "y Be brief."]
    assert not kind.fits(asked)
    assert Augmentation(**TWO, copies=2).select(asked) == [brief]


def test_the_no_think_variant_is_there_and_off() -> None:
    default = read_augmentation("default")
    (no_think,) = [variant for variant in default.variants if "/no_think" in (variant.user_suffix or "")]
    assert not no_think.enabled
    asked = [{"role": "user", "content": f"q {i}"} for i in range(1)]
    chosen = {variant.name for i in range(300) for variant in default.select([{**asked[0], "content": f"q {i}"}])}
    assert chosen == {variant.name for variant in default.variants if variant.enabled}


@pytest.mark.parametrize(
    ("augmentation", "said"),
    [
        ({"variants": [{"name": "x"}]}, "neither"),
        ({"variants": [{"name": "X", "system": "s"}]}, "pattern"),
        ({"variants": [*TWO["variants"], {"name": "brief", "system": "s"}]}, "two variants are named brief"),
        ({**TWO, "copies": 3}, "2 variants are enabled"),
    ],
)
def test_variants_that_cannot_be_are_refused(tmp_path: Path, augmentation: dict[str, Any], said: str) -> None:
    (tmp_path / "v.yaml").write_text(yaml.safe_dump(augmentation))
    with pytest.raises(ConfigError, match=said):
        read_augmentation(tmp_path / "v.yaml")


def test_generate_mode_writes_prompts_that_regenerate_takes_and_the_mix_beside_them(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [{"file": "a/chats.jsonl", "cap": 5}, {"file": "b/chats.jsonl", "augment": False}]
    path, out = mix_file(files, sources=sources, seed=3), files / "prompts.jsonl"
    with pytest.raises(SystemExit) as caught:
        main(["prepare", "--mix", str(path), "--mode", "generate", "--augment", "default", "-o", str(out), "--json"])
    assert caught.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompts"] == sum(document["variants"].values()) == 5 * 2 + 10
    assert [(source["rows"], source["prompts"]) for source in document["sources"]] == [(5, 10), (10, 10)]
    resolved = yaml.safe_load((files / "prompts.jsonl.mix.yaml").read_text())
    assert resolved["seed"] == 3
    assert [source["rows"] for source in resolved["sources"]] == [5, None]
    for row in lines(out):
        rewrite = Rewrite.of(0, Conversation("p", row["messages"]), None)
        assert rewrite.advance()
        assert rewrite.done[-1]["role"] == "user"
    with pytest.raises(ConflictError):
        write_prompts(read_mix(path), out)


def test_the_next_command_of_generate_mode_writes_over_neither_the_prompts_nor_other_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_rows(tmp_path / "a.jsonl", [{"messages": chat("q", "a")}])
    for out, answers in (
        ("prompts.jsonl", "answers.jsonl"),
        ("answers.jsonl", "answers-2.jsonl"),
        ("answers-2.jsonl", "answers-3.jsonl"),
    ):
        with pytest.raises(SystemExit):
            main(["prepare", str(source), "--mode", "generate", "-o", out])
        assert f"next: hiddenstore regenerate {out} -o {answers} --server URL" in capsys.readouterr().err


def test_rows_without_a_prompt_are_counted_and_all_of_them_is_an_error(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": chat("q", "a")}, b"{oops", {"messages": [{"role": "system", "content": "s"}]}]
    source = write_rows(tmp_path / "a.jsonl", [*rows, rows[0]])
    report = write_prompts([source], tmp_path / "p.jsonl")
    assert (report.read, report.written, report.duplicates) == (4, 1, 1)
    assert {reason: count for reason, (count, _first) in report.rejects.items()} == {"invalid-json": 1, "no-user": 1}
    bad = write_rows(tmp_path / "bad.jsonl", rows[1:])
    with pytest.raises(HiddenstoreError, match="none of 2 rows"):
        write_prompts([bad], tmp_path / "none.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "bad.jsonl", "p.jsonl"]


def test_questions_alone_are_refused_where_answers_are_learned(tmp_path: Path, target: str) -> None:
    (tmp_path / "mt-bench.jsonl").write_text('{"prompt": ["q"], "prompt_id": 1}\n')
    options = PrepareOptions(workers=1, dataset_root=str(tmp_path))
    with pytest.raises(ConfigError, match="questions without answers") as caught:
        prepare(["dataset:mt-bench"], tmp_path / "data", target, options)
    assert caught.value.kind == "dataset-prompts-only"
    info = prepare(
        ["dataset:mt-bench"], tmp_path / "all", target, PrepareOptions(**{**vars(options), "loss_on": "all"})
    )
    assert info.samples == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a.jsonl", "--mix", "m.yaml"), "--mix names its own sources"),
        (("a.jsonl", "--augment", "default", "--target", "t"), "--augment needs --mode generate"),
        (("a.jsonl", "--mode", "generate", "--target", "t"), "takes no --target"),
        (("a.jsonl", "--mode", "generate", "--val", "3%"), "takes no --val"),
        (("a.jsonl",), "--target"),
        ((), "INPUT"),
    ],
)
def test_words_that_mean_nothing_together_are_usage_errors(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["prepare", *words, "-o", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_mix_model_is_plain_settings() -> None:
    assert Mix(sources=({"dataset": "gsm8k", "split": "test", "cap": 3},)).sources[0].text == "dataset:gsm8k:test"


@pytest.mark.parametrize(("name", "splits", "repositories"), [("nemotron-v2", 9, 1), ("nemotron-v3", 57, 16)])
def test_the_shipped_mixes_name_splits_of_the_table(name: str, splits: int, repositories: int) -> None:
    mix = read_mix(name)
    assert name in mix_names()
    found = []
    for source in mix.sources:
        assert source.dataset is not None
        chosen = _select(find_dataset(source.dataset), source.split)
        assert all(one.split == source.split for one in chosen if source.split)
        found += [(one.name, one.split) for one in chosen]
    assert len(found) == len(set(found)) == splits
    assert len({repository for repository, _ in found}) == repositories
    with pytest.raises(NotFoundError):
        read_mix("nemotron-v9")


def test_the_shipped_variants_speak_twelve_languages() -> None:
    variants = read_augmentation("default").variants
    assert sum(str(one.user_suffix).startswith(" Answer in ") for one in variants) == 12
    assert "step-by-step" in {one.name for one in variants}

"""prepare end to end: DATA that streams back, order, duplicates, rejects, cuts, splits, and nothing written half."""

import errno
import fcntl
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_templates import CHATML, STRIPS_THOUGHTS, chat, tiny_target, write_rows

from collectors.capture.estimate import final_rows
from collectors.tokenize import batches
from collectors.tokenize import write as parts
from collectors.tokenize.batches import batches_of, is_validation, ordered_batches
from collectors.tokenize.prepare import PrepareOptions, prepare
from hiddenstore.conversation import Row
from hiddenstore.errors import ConfigError, ConflictError, HiddenstoreError, InterruptError, NotFoundError, StorageError
from hiddenstore.fs.disk import PosixDisk
from hiddenstore.inputs import PreparedInput
from hiddenstore.records import sample_id
from schemas.prepared import PreparedData

ONE = PrepareOptions(workers=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("target"))


def rows(count: int) -> list[dict[str, Any]]:
    return [{"messages": chat(f"How many apples, number {i}?", f"There are {i} apples.")} for i in range(count)]


def options(**more: Any) -> PrepareOptions:
    return PrepareOptions(**{"workers": 1, **more})


def left_beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if "writing" in path.name or path == out)


def rejects_of(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]


def test_data_streams_back_as_it_was_tokenised(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(150))
    info = prepare([source], tmp_path / "data", target, options(validation=0.2))
    data = PreparedInput.open(tmp_path / "data")
    samples = list(data.samples())
    assert data.info == info
    assert [sample.source for sample in samples] == [f"a.jsonl:{line}" for line in range(1, 151)]
    assert all(sample.id == sample_id(sample.input_ids, sample.loss_mask) for sample in samples)
    assert sum(sample.tokens for sample in samples) == info.tokens
    assert sum(sample.supervised for sample in samples) == info.supervised_tokens
    assert max(sample.tokens for sample in samples) == info.longest
    assert sum(sample.split == "validation" for sample in samples) == info.validation_samples > 0
    assert samples[0].input_ids.dtype == samples[0].spans.dtype == np.int32
    assert samples[0].spans[:, 0].tolist() == [1, 2]
    assert (info.mask_from, info.max_tokens, info.target) == ("generation-tags", 256, Path(target).name)
    assert not (tmp_path / "data" / "rejects.jsonl").exists()
    data.registration(4096)


def test_final_rows_are_counted_two_beside_every_answer_and_not_every_conversation(tmp_path: Path, target: str) -> None:
    turns = [text for i in range(4) for text in (f"How many apples, number {i}?", f"There are {i} apples.")]
    source = write_rows(tmp_path / "a.jsonl", [*rows(3), {"messages": chat(*turns)}])
    info = prepare([source], tmp_path / "data", target, ONE)
    masks = [sample.loss_mask.tolist() for sample in PreparedInput.open(tmp_path / "data").samples()]
    stored = sum(any(mask[max(0, i - 1) : i + 2]) for mask in masks for i in range(len(mask)))
    assert final_rows(info, "supervised") == info.final_rows == stored
    of_older = info.model_copy(update={"final_rows": None})
    assert final_rows(of_older, "supervised") == info.supervised_tokens + 2 * 4 < stored
    assert "final_rows" not in of_older.model_dump()
    assert (final_rows(info, "all"), final_rows(info, "none")) == (info.tokens, 0)


def test_equal_inputs_give_equal_bytes(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(80))
    for name in ("one", "two"):
        prepare([source], tmp_path / name, target, ONE)
    for file in ("data.json", "part-00000.parquet"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_workers_change_nothing_in_the_bytes(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    mixed: list[Any] = rows(400)
    mixed[7], mixed[133] = b"{broken", mixed[5]
    source = write_rows(tmp_path / "a.jsonl", mixed)
    monkeypatch.setattr(batches, "BATCH_ROWS", 4)
    prepare([source], tmp_path / "one", target, ONE)
    here: list[int] = []
    make = batches.make_batch

    def slow_in_this_process(*args: Any) -> Any:
        time.sleep(0.5)
        here.append(1)
        return make(*args)

    monkeypatch.setattr(batches, "make_batch", slow_in_this_process)
    prepare([source], tmp_path / "two", target, options(workers=2))
    assert len(here) < 100, "the workers did nothing"
    for file in ("data.json", "part-00000.parquet", "rejects.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_worker_that_dies_is_an_error_and_leaves_nothing(tmp_path: Path, target: str) -> None:
    import multiprocessing

    source = write_rows(tmp_path / "a.jsonl", rows(300))

    def kill_one() -> bool:
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        return False

    with pytest.raises(StorageError) as caught:
        prepare([source], tmp_path / "data", target, options(workers=2), stopping=kill_one)
    assert caught.value.kind == "worker-died"
    assert left_beside(tmp_path / "data") == []


def test_exact_duplicates_are_dropped_and_counted(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [*rows(5), *rows(7)])
    info = prepare([source, source], tmp_path / "data", target, ONE)
    assert (info.rows_read, info.samples, info.duplicates) == (24, 7, 17)
    assert [sample.source for sample in PreparedInput.open(tmp_path / "data").samples()][-1] == "a.jsonl:12"


def test_unusable_rows_are_counted_by_reason_and_all_listed(tmp_path: Path, target: str) -> None:
    bad: list[Any] = [b"{oops"] * 5 + [{"messages": chat("only a question")}, {"messages": [{"role": "x"}]}]
    source = write_rows(tmp_path / "a.jsonl", [rows(1)[0], *bad, *rows(3)])
    info = prepare([source], tmp_path / "data", target, ONE)
    assert [(reject.reason, reject.rows) for reject in info.rejects] == [
        ("invalid-json", 5),
        ("no-assistant", 1),
        ("unknown-role", 1),
    ]
    assert len(info.rejects[0].examples) == 3
    assert info.rejects[0].examples[0].startswith("a.jsonl:2: ")
    assert info.rows_read == info.samples + info.duplicates + sum(reject.rows for reject in info.rejects) == 11
    listed = rejects_of(tmp_path / "data")
    assert [line["place"] for line in listed] == [f"a.jsonl:{line}" for line in range(2, 9)]
    assert listed[-2]["reason"] == "no-assistant"


def test_half_a_surrogate_pair_in_the_name_of_a_member_costs_its_row_alone(tmp_path: Path, target: str) -> None:
    bad = [{"\ud800": 1}, {**rows(1)[0], "chat_template_kwargs": {"\ud800": 1}}]
    source = write_rows(tmp_path / "a.jsonl", [*rows(3), *bad])
    info = prepare([source], tmp_path / "data", target, ONE)
    assert {reject.reason for reject in info.rejects} == {"no-messages", "template-kwargs-invalid"}
    assert all("\\ud800" in reject.examples[0] for reject in info.rejects)
    assert info.samples == 3


def test_a_question_without_answer_is_a_sample_when_all_is_supervised(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"messages": chat("only a question")}])
    info = prepare([source], tmp_path / "data", target, options(loss_on="all"))
    assert info.supervised_tokens == info.tokens
    assert info.mask_from == "all"


LONG = {"messages": chat("Count.", "one two three four five six seven eight nine ten")}
LATE = {"messages": chat("Count to ten, slowly, and only then tell me how that went, please.", "Fine.")}


def test_overlong_conversations_are_cut_and_counted(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}, LONG, LATE])
    info = prepare([source], tmp_path / "data", target, options(max_tokens=30))
    assert (info.samples, info.cut, info.longest, info.max_tokens) == (2, 1, 30, 30)
    assert [(reject.reason, reject.rows) for reject in info.rejects] == [("nothing-supervised-after-cut", 1)]
    long = list(PreparedInput.open(tmp_path / "data").samples())[1]
    assert long.tokens == 30
    assert long.spans[-1, 2] == 30
    assert long.supervised > 0


def test_overlong_conversations_are_dropped_when_asked(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}, LONG, LATE])
    info = prepare([source], tmp_path / "data", target, options(max_tokens=30, overlong="drop"))
    assert (info.samples, info.cut) == (1, 0)
    assert [(reject.reason, reject.rows) for reject in info.rejects] == [("overlong", 2)]


def test_the_targets_context_is_the_limit(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "short", max_position_embeddings=30)
    source = write_rows(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}, LONG])
    assert prepare([source], tmp_path / "data", target, ONE).max_tokens == 30
    with pytest.raises(ConfigError, match="30 positions") as caught:
        prepare([source], tmp_path / "more", target, options(max_tokens=31))
    assert caught.value.kind == "option-invalid"


def test_a_sample_keeps_its_split_whatever_else_is_prepared(tmp_path: Path, target: str) -> None:
    few = write_rows(tmp_path / "few.jsonl", rows(40))
    many = write_rows(tmp_path / "many.jsonl", list(reversed(rows(120))))
    splits = []
    for name, source in (("a", few), ("b", many)):
        prepare([source], tmp_path / name, target, options(validation=0.3))
        splits.append({sample.id: sample.split for sample in PreparedInput.open(tmp_path / name).samples()})
    assert splits[0].items() <= splits[1].items()
    assert set(splits[0].values()) == {"train", "validation"}


def test_everything_can_be_held_out(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(20))
    info = prepare([source], tmp_path / "data", target, options(validation=1.0))
    assert info.validation_samples == info.samples == 20
    assert {sample.split for sample in PreparedInput.open(tmp_path / "data").samples()} == {"validation"}


@pytest.mark.parametrize("count", [9, 12])
def test_of_ten_samples_or_more_some_are_held_out_where_no_share_is_named(
    tmp_path: Path, target: str, count: int
) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(count))
    assert prepare([source], tmp_path / "usual", target, ONE).validation_samples == 0
    info = prepare([source], tmp_path / "data", target, options(validation=None))
    held_out = sorted(s.id for s in PreparedInput.open(tmp_path / "data").samples() if s.split == "validation")
    lowest = sorted(s.id for s in PreparedInput.open(tmp_path / "usual").samples())[: len(held_out)]
    assert held_out == lowest
    assert info.validation_samples == len(held_out)
    assert (len(held_out) > 0) == (count >= 10)
    assert info.validation_share == 0.01 if count < 10 else info.validation_share >= 0.1


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=16, max_size=16), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_validation_share_only_adds_samples(name: bytes, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert not is_validation(name.hex(), low) or is_validation(name.hex(), high)
    assert not is_validation(name.hex(), 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 700_000), max_size=200))
def test_batches_hold_every_row_once_within_bounds(sizes: list[int]) -> None:
    found = list(batches_of(Row(str(i), b"", size) for i, size in enumerate(sizes)))
    assert [row.location for batch in found for row in batch] == [str(i) for i in range(len(sizes))]
    for batch in found:
        assert 0 < len(batch) <= batches.BATCH_ROWS
        assert sum(row.size for row in batch[:-1]) < batches.BATCH_BYTES
    by_text = list(batches_of(Row(str(i), b"", 1, text_size=size) for i, size in enumerate(sizes)))
    assert list(map(len, by_text)) == list(map(len, found))


def fails(out: Path, *args: Any, **more: Any) -> HiddenstoreError:
    with pytest.raises(HiddenstoreError) as caught:
        prepare(args[0], out, args[1], options(**more))
    assert left_beside(out) == []
    return caught.value


def test_questions_without_answers_are_sent_to_regenerate(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"messages": chat("q")}, {"messages": chat("r")}])
    error = fails(tmp_path / "data", [source], target)
    assert error.kind == "nothing-usable"
    assert (error.hint or "").startswith("hiddenstore regenerate INPUT -o ")


def test_nothing_usable_is_an_error_with_the_reasons_and_leaves_nothing(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [b"{oops", {"messages": chat("q")}, b"]"])
    error = fails(tmp_path / "data", [source], target)
    assert (error.kind, error.exit_code) == ("nothing-usable", 2)
    assert "invalid-json: 2 rows, first a.jsonl:1" in error.message
    assert "no-assistant: 1 row," in error.message


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("missing", "path-missing"),
        ("empty", "input-empty"),
        ("blank", "input-empty"),
        ("array-breaks", "input-unreadable"),
        ("no-target", "target-missing"),
        ("no-template-file", "path-missing"),
        ("share", "option-invalid"),
        ("foreign-tokenizer", "tokenizer-mismatch"),
        ("thoughts", "template-unstable"),
    ],
)
def test_bad_input_is_an_error_and_nothing_is_written(tmp_path: Path, target: str, case: str, kind: str) -> None:
    source, more = write_rows(tmp_path / "a.jsonl", rows(200)), {}
    if case == "missing":
        source = str(tmp_path / "none.jsonl")
    elif case == "empty":
        Path(source).write_bytes(b"")
    elif case == "blank":
        Path(source).write_bytes(b"\n \n")
    elif case == "array-breaks":
        source = str(tmp_path / "a.json")
        Path(source).write_text(json.dumps(rows(200))[:-20])
    elif case == "no-target":
        target = str(tmp_path / "no-target")
    elif case == "no-template-file":
        more = {"template": str(tmp_path / "none.jinja")}
    elif case == "share":
        more = {"validation": 1.5}
    elif case == "foreign-tokenizer":
        target = tiny_target(tmp_path / "small", vocab_size=100)
    elif case == "thoughts":
        target = tiny_target(tmp_path / "thinker", STRIPS_THOUGHTS)
        thinking = {"messages": chat("a", "<think>x</think>b", "c", "d")}
        source = write_rows(tmp_path / "b.jsonl", [*rows(3), thinking])
    error = fails(tmp_path / "data", [source], target, **more)
    assert error.kind == kind


def test_a_given_template_stands_in_for_the_targets_own(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "bare", None)
    source = write_rows(tmp_path / "a.jsonl", rows(3))
    assert fails(tmp_path / "data", [source], target).kind == "template-missing"
    (tmp_path / "t.jinja").write_text(CHATML)
    info = prepare([source], tmp_path / "data", target, options(template=str(tmp_path / "t.jinja")))
    assert info.mask_from == "prefixes"


def test_existing_output_is_never_touched(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(2))
    (tmp_path / "empty").mkdir()
    prepare([source], tmp_path / "empty", target, ONE)
    before = (tmp_path / "empty" / "data.json").read_bytes()
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(ConflictError) as caught:
            prepare([source], tmp_path / name, target, ONE)
        assert (caught.value.kind, caught.value.exit_code) == ("output-exists", 6)
    assert (tmp_path / "empty" / "data.json").read_bytes() == before


def test_output_that_appears_meanwhile_is_kept(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(100))
    out = tmp_path / "data"

    def somebody_else() -> bool:
        out.mkdir(exist_ok=True)
        (out / "mine.txt").write_text("mine")
        return False

    with pytest.raises(ConflictError):
        prepare([source], out, target, ONE, stopping=somebody_else)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_a_stop_in_the_middle_leaves_nothing(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(300))
    asked: Iterator[bool] = iter([False, False, True])
    with pytest.raises(InterruptError) as caught:
        prepare([source], tmp_path / "data", target, ONE, stopping=lambda: next(asked))
    assert caught.value.exit_code == 75
    assert left_beside(tmp_path / "data") == []


@pytest.mark.parametrize("full_after", [0, 1, 3])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, full_after: int
) -> None:
    source = write_rows(tmp_path / "a.jsonl", [b"{oops", *rows(100)])
    monkeypatch.setattr(parts, "GROUP_ROWS", 10)
    written: list[int] = []
    write = PosixDisk.write

    def write_until_full(self: PosixDisk, handle: int, data: memoryview) -> None:
        written.append(len(data))
        if len(written) > full_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, handle, data)

    monkeypatch.setattr(PosixDisk, "write", write_until_full)
    error = fails(tmp_path / "data", [source], target)
    assert (error.kind, error.exit_code) == ("disk-full", 5)


def test_large_data_is_written_in_several_parts_and_row_groups(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "GROUP_ROWS", 64)
    monkeypatch.setattr(parts, "PART_TOKENS", 8000)
    source = write_rows(tmp_path / "a.jsonl", rows(600))
    info = prepare([source], tmp_path / "data", target, ONE)
    assert [file.path for file in info.files] == [f"part-{i:05d}.parquet" for i in range(len(info.files))]
    assert len(info.files) > 1
    sources = [sample.source for sample in PreparedInput.open(tmp_path / "data").samples()]
    assert sources == [f"a.jsonl:{line}" for line in range(1, 601)]


def test_what_a_killed_run_left_is_swept_and_a_living_one_is_not(tmp_path: Path, target: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(2))
    dead, living = tmp_path / ".data.writing-00000000", tmp_path / ".data.writing-11111111"
    for folder in (dead, living):
        folder.mkdir()
        (folder / "part-00000.parquet").write_bytes(b"half")
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        prepare([source], tmp_path / "data", target, ONE)
    finally:
        os.close(handle)
    assert left_beside(tmp_path / "data") == [".data.writing-11111111", "data"]


def test_small_inputs_start_no_worker(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Iterator[Any]:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(batches, "_pooled", never)
    source = write_rows(tmp_path / "a.jsonl", rows(20))
    assert prepare([source], tmp_path / "data", target).samples == 20


def test_a_source_is_read_only_a_little_ahead(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "make_batch", lambda _recipe, batch: batch)
    taken: list[int] = []

    def endless() -> Iterator[list[Row]]:
        for number in range(10_000):
            taken.append(number)
            yield [Row(f"f:{number}", b"", 1 << 20)]

    results = ordered_batches(None, endless(), None, lambda: False)  # type: ignore[arg-type]
    monkeypatch.setattr(batches, "MOST_WORKERS", 1)
    next(results)
    assert len(taken) <= 10


@pytest.mark.parametrize(("megabytes", "workers"), [(4, []), (12, [2]), (40, [5]), (4000, [16])])
def test_workers_are_as_many_as_the_rows_are_worth(
    megabytes: int, workers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(batches, "make_batch", lambda _recipe, batch: batch)
    monkeypatch.setattr(batches, "usable_cores", lambda: 16)
    monkeypatch.setattr(batches, "_pooled", lambda _recipe, _rows, count, _stop: started.append(count) or [])
    rows = ([Row(f"f:{number}", b"", 1 << 20)] for number in range(min(megabytes, 20)))
    list(ordered_batches(None, rows, None, lambda: False, megabytes << 20))  # type: ignore[arg-type]
    assert started == workers


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="ru_maxrss is in kB on Linux")
def test_ten_times_the_rows_take_no_more_memory(tmp_path: Path, target: str) -> None:
    few = write_rows(tmp_path / "few.jsonl", rows(2_000))
    many = write_rows(tmp_path / "many.jsonl", rows(20_000))
    prepare([few], tmp_path / "warm", target, ONE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    info: PreparedData = prepare([many], tmp_path / "data", target, ONE)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert info.samples == 20_000
    assert grown_mb < 40, f"{grown_mb:.0f} MB more for 18,000 more rows"


def test_a_missing_target_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        prepare([write_rows(tmp_path / "a.jsonl", rows(1))], tmp_path / "data", str(tmp_path / "nobody"), ONE)

"""Merge, subset and re-encode: what a copy holds, and that it resumes."""

import gc
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenstore.care import stored_unit
from hiddenstore.care.copy import CopyReport, open_copy, run_copy
from hiddenstore.commit import engine_of, publish_commit
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, FormatError, NotFoundError
from hiddenstore.files import layout
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.index import catalog
from hiddenstore.inputs import RegisteredInput
from hiddenstore.inspect.facts import info
from hiddenstore.inspect.history import _records
from hiddenstore.inspect.samples import parse_where, view
from hiddenstore.segments import CONTAINERS, encode
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    capture_spec,
    make_samples,
    make_store,
    memory_input,
    random_records,
    target_files,
)
from hiddenstore.verify import verify
from hiddenstore.writer import create_store, register_input, write_unit
from schemas.manifest import CommitRecord, Container, Engine, Recapture, Reject


def copy(sources: list[Store], place: Path, recipe: str | None = None, where: str | None = None) -> Store:
    run_copy(open_copy(sources, place, recipe, parse_where([where]) if where else None))
    return Store.open(place)


def segment_bytes(store: Store) -> dict[str, dict[str, bytes]]:
    return {
        record.unit: {file.path: Path(store.path, record.segment, file.path).read_bytes() for file in record.files}
        for record in store.commits()
    }


def assert_same_states(one: Store, other: Store, sample_ids: list[str]) -> None:
    for sample_id in sample_ids:
        a, b = one[sample_id], other[sample_id]
        assert torch.equal(a.aux.view(torch.int16), b.aux.view(torch.int16))
        assert torch.equal(a.final.view(torch.int16), b.final.view(torch.int16))
        assert a.sample.input_ids.tolist() == b.sample.input_ids.tolist()
        assert a.sample.loss_mask.tolist() == b.sample.loss_mask.tolist()
        assert a.sample.spans.tolist() == b.sample.spans.tolist()
        assert a.final_rows.tolist() == b.final_rows.tolist()


def test_a_whole_copy_has_the_same_units_and_bytes(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=6)
    found = copy([source], tmp_path / "copy")
    assert segment_bytes(found) == segment_bytes(source)
    assert found.sample_ids == source.sample_ids
    assert found.manifest == source.manifest
    assert set(found.inputs()) == set(source.inputs())
    assert verify(found.path, "bytes").ok


def test_neither_a_copy_nor_a_log_keeps_the_records_that_they_go_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_store(tmp_path, samples=40).path
    monkeypatch.setattr(catalog, "KEPT_ENTRIES", 1)
    monkeypatch.setattr(catalog, "BATCH", 1)

    def most_records(work: Callable[[], Iterable[Any]]) -> int:
        gc.collect()
        before = sum(type(one) is CommitRecord for one in gc.get_objects())
        return max(sum(type(one) is CommitRecord for one in gc.get_objects()) for _ in work()) - before

    store = Store.open(path)
    assert len(store.commits()) > 12
    assert most_records(lambda: [open_copy([store], tmp_path / "copy")]) < 6
    assert most_records(lambda: _records(store, [])) < 6


@pytest.mark.parametrize("layers", [[], [3]])
def test_a_copy_of_some_layers_or_of_none_is_what_stock_readers_read(tmp_path: Path, layers: list[int]) -> None:
    source = make_store(tmp_path, codec="q8")
    run_copy(open_copy([source], tmp_path / "copy", layers=layers))
    report = verify(str(tmp_path / "copy"), "bytes", also_stock=True)
    assert (report.findings, report.stock_samples) == ([], len(source.sample_ids))


def test_a_merge_holds_the_samples_of_every_source(tmp_path: Path) -> None:
    one = make_store(tmp_path / "1", samples=4, seed=1)
    other = make_store(tmp_path / "2", samples=5, seed=2)
    found = copy([one, other], tmp_path / "whole")
    assert set(found.sample_ids) == {*one.sample_ids, *other.sample_ids}
    assert_same_states(one, found, one.sample_ids)
    assert_same_states(other, found, other.sample_ids)
    assert verify(found.path, "bytes").ok


def test_re_encoding_keeps_units_inputs_and_rejects_and_decodes_exactly_where_the_codec_is_exact(
    tmp_path: Path,
) -> None:
    source = make_store(tmp_path, samples=6, codec="bf16")
    reject = Reject(id="f" * 32, tokens=9, reason="too-long", detail="9 > 8")
    write_unit(source, "u-000000", "0" * 64, (), [reject], ENGINE)
    source = Store.open(source.fs)
    plan = open_copy([source], tmp_path / "copy", "lossless")
    assert (plan.verbatim, plan.notes) == (0, [])
    run_copy(plan)
    found = Store.open(tmp_path / "copy")
    assert found.capture.codecs.aux == "lossless"
    assert_same_states(source, found, source.sample_ids)
    assert [record.unit for record in found.commits()] == [record.unit for record in source.commits()]
    assert [record.rejects for record in found.commits()] == [record.rejects for record in source.commits()]
    assert verify(found.path, "bytes").ok


@pytest.mark.parametrize(
    ("codec", "recipe", "where", "words"),
    [
        ("bf16", "safe", None, "rounds once"),
        ("q8", "lossless", None, "keeps the error of q8"),
        ("q8", "compact", "tokens>12", "rounds a second time"),
        ("q8", None, "tokens>12", None),
        ("bf16", None, "tokens>12", None),
        ("q8", None, None, None),
    ],
)
def test_rounding_is_stated(
    tmp_path: Path, codec: str, recipe: str | None, where: str | None, words: str | None
) -> None:
    source = make_store(tmp_path, samples=3, codec=codec)
    plan = open_copy([source], tmp_path / "copy", recipe, parse_where([where]) if where else None)
    if words is None:
        assert plan.notes == []
    else:
        assert len(plan.notes) == 2
        assert all(words in note for note in plan.notes)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("recipe", ["safe", "compact", "aux=q4q3,final=q8", "aux=q3,final=q4"])
def test_chosen_samples_keep_their_codes_in_any_container(tmp_path: Path, recipe: str, container: Container) -> None:
    sources = [make_store(tmp_path / name, samples=9, seed=seed, codec=recipe) for seed, name in enumerate("ab")]
    plan = open_copy(sources, tmp_path / "copy", keep=parse_where(["tokens>20"]), container=container)
    assert not any("rounds" in note for note in plan.notes)
    run_copy(plan)
    found = Store.open(tmp_path / "copy")
    for source in sources:
        chosen = [entry.id for _, entry in source.entries if entry.tokens > 20]
        assert 0 < len(chosen) < 9
        assert_same_states(source, found, chosen)
    assert verify(found.path, "bytes").ok


def test_pieces_of_very_many_units_are_cut_and_rounded_anew_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [make_store(tmp_path / name, samples=3, seed=seed, codec="q8") for seed, name in enumerate("ab")]
    monkeypatch.setattr(stored_unit, "FEW_PIECES", 1)
    plan = open_copy(sources, tmp_path / "copy", keep=parse_where(["tokens>0"]))
    assert sum("rounds a second time" in note for note in plan.notes) == 2
    run_copy(plan)
    assert [len(record.samples) for record in Store.open(tmp_path / "copy").commits()] == [6]


def test_a_subset_holds_exactly_the_samples_chosen_as_a_new_input(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=12, codec="bf16")
    found = copy([source], tmp_path / "copy", where="tokens>20,split=train")
    expected = [entry.id for _, entry in source.entries if entry.tokens > 20 and entry.split == "train"]
    assert found.sample_ids == expected
    assert_same_states(source, found, expected)
    (registered,) = found.inputs().values()
    assert registered.samples == len(expected)
    assert registered.units == [record.unit for record in found.commits()]
    assert verify(found.path, "bytes").ok


def test_a_subset_of_two_engines_never_mixes_them_in_one_unit(tmp_path: Path) -> None:
    capture = capture_spec(codec="bf16")
    source = create_store(tmp_path / "s", capture, HEAD, "raw", target_files())
    samples = make_samples(6)
    engines = [Engine(name="hf", version="5"), Engine(name="vllm", version="1")]
    for index, engine in enumerate(engines):
        records = random_records(samples[3 * index : 3 * index + 3], capture)
        write_unit(source, f"u-{index:06d}", "0" * 64, records, (), engine)
    found = copy([Store.open(source.fs)], tmp_path / "copy", where="tokens>1")
    by_engine = {record.engine.name: [entry.id for entry in record.samples] for record in found.commits()}
    assert by_engine == {"hf": [s.id for s in samples[:3]], "vllm": [s.id for s in samples[3:]]}


def two_engines(place: Path) -> tuple[Store, dict[str, str]]:
    """A store of which another engine captured one sample again, and the engine of every sample."""
    source = make_store(place, samples=6, codec="bf16")
    record = source.commits()[0]
    again = record.samples[0].id
    segment = layout.segment_path(record.unit, "0badf00d", 1)
    shutil.copytree(Path(source.path, record.segment), Path(source.path, segment))
    recaptured = (Recapture(engine=Engine(name="vllm", version="9"), samples=(again,)),)
    changes = {"segment": segment, "recaptured": recaptured}
    assert publish_commit(source.fs, record.model_copy(update=changes), 1)
    return Store.open(source.fs), dict.fromkeys(source.sample_ids, ENGINE.name) | {again: "vllm"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"container": "webdataset"},
        {"recipe": "compact"},
        {"layers": (1,)},
        {"keep": parse_where(["tokens>0"])},
        {"keep": parse_where(["tokens>0"]), "recipe": "raw", "container": "webdataset"},
    ],
)
def test_a_copy_names_the_engine_that_captured_each_sample(tmp_path: Path, options: dict[str, Any]) -> None:
    source, engines = two_engines(tmp_path)
    run_copy(open_copy([source], tmp_path / "copy", **options))
    found = Store.open(tmp_path / "copy")
    assert {sample_id: view(found, sample_id)["engine"]["name"] for sample_id in found.sample_ids} == engines
    assert {engine["name"] for engine in info(found)["engines"]} == set(engines.values())
    assert verify(found.path, "bytes").ok


def test_a_unit_that_stores_of_two_engines_fill_says_who_captured_what(tmp_path: Path) -> None:
    destination = make_store(tmp_path, samples=6, codec="bf16")
    record = destination.commits()[0]
    stores, engines = [], {}
    for number, entry in enumerate(record.samples):
        engine = Engine(name="hf" if number % 2 else "vllm", version="1")
        part = create_store(tmp_path / f"part{number}", destination.capture, HEAD, "raw", target_files())
        write_unit(part, "u-000000", "0" * 64, [destination[entry.id]], (), engine)
        stores.append(Store.open(part.fs))
        engines[entry.id] = engine.name
    assert len(engines) > 1
    Path(destination.path, layout.commit_path(record.unit)).unlink()
    run_copy(open_copy(stores, destination.path, keep=parse_where(["tokens>0"])))
    found = Store.open(destination.path)
    assert {name: engine_of(found.locate(name)[0], name).name for name in engines} == engines


@pytest.mark.parametrize("where", [None, "tokens>5"])
def test_an_interrupted_copy_continues_and_ends_like_an_uninterrupted_one(tmp_path: Path, where: str | None) -> None:
    source = make_store(tmp_path, samples=12, codec="bf16")
    keep = parse_where([where]) if where else None
    straight = copy([source], tmp_path / "straight", where=where)
    place = tmp_path / "resumed"
    for _ in range(30):
        plan = open_copy([source], place, None, keep)
        if not plan.units:
            break
        run_copy(plan, advance=lambda _report: False)
    resumed = Store.open(place)
    assert segment_bytes(resumed) == segment_bytes(straight)
    assert plan.present == len(straight.commits()) if where is None else len(straight)
    assert verify(place, "bytes").ok


def test_a_filtered_copy_that_was_stopped_counts_as_present_what_is_there(tmp_path: Path) -> None:
    source, keep = make_store(tmp_path, samples=12), parse_where(["tokens>5"])
    run_copy(open_copy([source], tmp_path / "copy", None, keep), advance=lambda _report: False)
    there = len(Store.open(tmp_path / "copy"))
    again = open_copy([source], tmp_path / "copy", None, keep)
    assert (again.present, again.samples) == (there, 12 - there)


def test_a_source_that_grew_adds_to_the_copy_and_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    small, large = make_store(tmp_path / "1", samples=5), make_store(tmp_path / "2", samples=9)
    place = tmp_path / "copy"
    before = segment_bytes(copy([small], place, where="tokens>10"))
    found = copy([large], place, where="tokens>10")
    assert set(found.sample_ids) == {entry.id for _, entry in large.entries if entry.tokens > 10}
    assert found.duplicates == 0
    assert before.items() <= segment_bytes(found).items()


def test_a_copy_of_a_snapshot_is_whole_and_knows_nothing_of_what_was_added_later(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=5)
    first = source.sample_ids
    source.save_snapshot("v1")
    later = memory_input(4, seed=1)
    register_input(source, later)
    for unit in later.units():
        records = random_records(unit.samples, source.capture, 1)
        write_unit(source, unit.name, later.info.digest, records, (), ENGINE)
    plan = open_copy([Store.open(source.fs, "v1")], tmp_path / "copy")
    run_copy(plan)
    assert plan.unavailable == 0
    assert verify(tmp_path / "copy", "bytes").ok
    assert Store.open(tmp_path / "copy").sample_ids == first
    assert set(Store.open(tmp_path / "copy").inputs()) == {record.input for record in source.commits()} - {
        later.info.digest
    }
    assert len(copy([Store.open(source.fs)], tmp_path / "copy")) == 9


def test_a_unit_in_two_sources_is_copied_once(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=4)
    plan = open_copy([source, source], tmp_path / "copy")
    assert len(plan.units) == len(source.commits())


def replicas(place: Path) -> list[Store]:
    """Two stores of one input: the one rejected the first sample of each unit, the other the last of the longest."""
    data, capture, stores = memory_input(14), capture_spec(), []
    units = list(data.units())
    longest = max(units, key=lambda unit: len(unit.samples))
    refused = {unit.samples[0].id for unit in units}, {longest.samples[-1].id}
    for number, names in enumerate(refused):
        store = create_store(place / str(number), capture, HEAD, "safe", target_files(), "zarr")
        register_input(store, data)
        for unit in units:
            stored = random_records([sample for sample in unit.samples if sample.id not in names], capture)
            lost = [sample for sample in unit.samples if sample.id in names]
            rejects = [Reject(id=sample.id, tokens=sample.tokens, reason="zeros", detail="sick") for sample in lost]
            write_unit(store, unit.name, data.info.digest, stored, rejects, ENGINE)
        stores.append(Store.open(store.fs))
    return stores


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_records_of_a_unit_the_fuller_is_copied_and_what_only_the_other_holds_is_said(
    order: int, tmp_path: Path
) -> None:
    sources = replicas(tmp_path)[::order]
    place = tmp_path / "copy"
    for _ in range(2):
        opened = open_copy(sources, place)
        assert any(note.startswith("1 sample left behind") for note in opened.notes)
        run_copy(opened)
        assert len(Store.open(place)) == 13
    assert len(copy(sources, place, where="tokens>0")) == 14
    assert not any("left behind" in note for note in open_copy(sources, place).notes)


def test_units_no_source_holds_are_counted(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=6)
    (registered,) = source.inputs().values()
    Path(source.path, "commits", f"{registered.units[0]}.json").unlink()
    plan = open_copy([Store.open(source.fs)], tmp_path / "copy")
    assert plan.unavailable == 1
    assert len(plan.units) == len(registered.units) - 1


def test_without_a_recipe_the_destination_decides_when_it_exists(tmp_path: Path) -> None:
    raw = make_store(tmp_path / "1", samples=3, codec="bf16")
    q8 = make_store(tmp_path / "2", samples=5, codec="q8")
    found = copy([raw], Path(q8.path))
    assert found.manifest.recipe == "safe"
    with pytest.raises(ConflictError, match="codecs") as caught:
        open_copy([raw], q8.path, "raw")
    assert caught.value.kind == "store-mismatch"


def test_sources_with_other_layers_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    one = make_store(tmp_path / "1", layers=(1, 3), samples=2)
    other = make_store(tmp_path / "2", layers=(1, 4), samples=2)
    with pytest.raises(ConflictError, match="aux_layers") as caught:
        open_copy([one, other], tmp_path / "copy")
    assert caught.value.kind == "store-mismatch"
    assert caught.value.exit_code == 6
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("inside", [".", "copy", "commits/copy"])
def test_a_store_cannot_be_copied_onto_or_into_itself(tmp_path: Path, inside: str) -> None:
    source = make_store(tmp_path, samples=2)
    with pytest.raises(ConflictError, match="copied") as caught:
        open_copy([source], Path(source.path) / inside)
    assert caught.value.kind == "output-exists"
    beside = f"{source.path}-copy"
    assert len(open_copy([source], beside).units) == 1


def test_a_copy_does_not_hide_a_snapshot_behind_a_folder_of_its_name(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=2)
    source.save_snapshot("v1")
    with pytest.raises(ConfigError, match="snapshot v1 of the store") as caught:
        open_copy([source], f"{source.path}@v1", "raw")
    assert caught.value.kind == "usage"
    assert not Path(f"{source.path}@v1").exists()


def test_an_empty_choice_is_an_error(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=2)
    with pytest.raises(ConfigError, match="no sample") as caught:
        open_copy([source], tmp_path / "copy", None, parse_where(["tokens>1e9"]))
    assert caught.value.kind == "selection-empty"
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("recipe", [None, "raw"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_source_stops_the_copy_and_leaves_whole_units_only(
    tmp_path: Path, damage: str, recipe: str | None
) -> None:
    source = make_store(tmp_path, samples=8)
    record = source.commits()[2]
    victim = Path(source.path, record.segment, next(f.path for f in record.files if f.path.startswith("layer_1/c")))
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[len(data) // 3] ^= 1
        victim.write_bytes(data)
    elif damage == "cut":
        victim.write_bytes(data[:-1])
    else:
        victim.unlink()
    with pytest.raises((CorruptionError, NotFoundError)) as caught:
        copy([Store.open(source.fs)], tmp_path / "copy", recipe)
    assert isinstance(caught.value, CorruptionError)
    assert set(caught.value.samples) == {entry.id for entry in record.samples}
    found = Store.open(tmp_path / "copy")
    assert len(found.commits()) == 2
    assert {finding.kind for finding in verify(found.path, "bytes").findings} == {"incomplete"}
    assert len(list(Path(found.path, "segments").iterdir())) == 2


@pytest.mark.parametrize("where", [None, "tokens>5"])
def test_final_rows_that_another_writer_chose_are_copied_as_they_are_and_encoded_again_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | None
) -> None:
    capture = capture_spec()
    source = create_store(tmp_path / "source", capture, HEAD, "safe", target_files())
    with monkeypatch.context() as other_writer:
        other_writer.setattr(encode, "_sample_fault", lambda record, capture: None)
        (record,) = random_records(make_samples(1), capture)
        fewer = replace(record, final_rows=record.final_rows[:-1], final=record.final[:-1])
        write_unit(source, "u-000000", "0" * 64, [fewer], (), ENGINE)
    source = Store.open(source.fs)
    assert copy([source], tmp_path / "copy", where=where).read(record.sample.id).final_rows.tolist() == (
        fewer.final_rows.tolist()
    )
    with pytest.raises(FormatError, match=f"{source.path} .*{record.sample.id}: final_rows is ") as caught:
        copy([source], tmp_path / "raw", "raw", where)
    assert (caught.value.kind, caught.value.hint) == (
        "array-invalid",
        f"hiddenstore verify {source.path} --meaning",
    )
    assert "final-rows" in {finding.kind for finding in verify(source.path, "meaning").findings}
    assert len(Store.open(tmp_path / "raw")) == 0


def test_the_report_counts_what_was_written(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=6)
    seen: list[CopyReport] = []
    plan = open_copy([source], tmp_path / "copy")
    report = run_copy(plan, advance=lambda r: seen.append(r) or True)
    assert report == CopyReport(
        units=len(source.commits()),
        samples=6,
        tokens=sum(record.tokens for record in source.commits()),
        bytes_written=sum(record.bytes_stored for record in source.commits()),
    )
    assert len(seen) == report.units
    assert isinstance(next(iter(plan.destination.inputs().values())), RegisteredInput)


@pytest.mark.parametrize(
    ("recipe", "where", "container"),
    [(None, None, None), ("tiny", None, None), ("raw", None, "webdataset"), ("compact", "tokens>10", None)],
)
def test_a_copy_says_beforehand_that_the_disk_is_too_small_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str | None, where: str | None, container: Any
) -> None:
    source = make_store(tmp_path, samples=40, width=256)
    keep = parse_where([where]) if where else None
    whole = open_copy([source], tmp_path / "whole", recipe, keep, container)
    expected, written = whole.bytes_to_write(), run_copy(whole).bytes_written
    # Of samples as short as these what lies beside the values is not small.
    assert 0.5 * written < expected <= written
    for free, is_said in ((expected - 1, True), (expected, False)):
        monkeypatch.setattr(LocalFilesystem, "free_bytes", lambda _fs, free=free: free)
        opened = open_copy([source], tmp_path / f"copy-{is_said}", recipe, keep, container)
        said = [note for note in opened.notes if "are free at" in note]
        assert len(said) == is_said
        assert all(str(tmp_path / "copy-True") in note and "hiddenstore advise" in note for note in said)
    run_copy(opened)
    monkeypatch.setattr(LocalFilesystem, "free_bytes", lambda _fs: 0)
    again = open_copy([source], tmp_path / "copy-False", recipe, keep, container)
    assert not [note for note in again.notes if "are free at" in note]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_of_two_sources_the_one_in_which_a_sample_passes_gives_it(tmp_path: Path, is_stopped: bool) -> None:
    capture, samples = capture_spec(), make_samples(8)
    for seed, split in enumerate(("train", "validation")):
        store = create_store(tmp_path / split, capture, HEAD, "safe", target_files())
        for number, sample in enumerate(samples):
            records = random_records([replace(sample, split=split)], capture, seed)
            write_unit(store, f"u-{number:06}", "0" * 64, records, (), ENGINE)
    sources = [Store.open(tmp_path / split) for split in ("train", "validation")]
    for _ in range(2):
        plan = open_copy(sources, tmp_path / "copy", keep=parse_where((), "validation"))
        run_copy(plan, (lambda _: False) if is_stopped else None)
    run_copy(open_copy(sources, tmp_path / "copy", keep=parse_where((), "validation")))
    found = Store.open(tmp_path / "copy")
    assert {entry.split for _, entry in found.entries} == {"validation"}
    assert_same_states(sources[1], found, [sample.id for sample in samples])

"""The storage benchmark runs from end to end in a tiny form, and its rows read what was written."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.storage.__main__ import Bench, against, group_lines, judged
from benchmarks.storage.cases import CHECKED, CHECKS, GROUPS, WRITERS, checks_cost
from benchmarks.storage.formats import Format
from benchmarks.storage.ours import FORMATS, recipe_sizes, write_store
from benchmarks.storage.states import PT_BF16, peer_sizes, synthetic_bits
from benchmarks.storage.worker import Worker
from benchmarks.workers import ROOT, Row, Timing
from hiddenstore.codecs import CODECS
from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.errors import CorruptionError
from hiddenstore.segments import zarr_arrays
from hiddenstore.store import Store

ALONE = ("Preadv", "TorchFiles", "Ours", "OursUnchecked", "StockZarr", "SafePacked", "SafeDecoded")
"""Kinds that need no peer."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), 0.001, 1, 64)
    bench.raw.write()
    return bench


def test_sizes_name_every_recipe_and_dropping_rows_never_costs(bench: Bench) -> None:
    rows = recipe_sizes(bench.raw, bench.root / "sizes", 2)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    assert all(row["supervised"] < row["all"] for row in rows)
    assert peer_sizes(bench.raw, bench.root)[PT_BF16] > 4 * 64 * 2


@pytest.fixture(scope="module")
def timings(bench: Bench) -> list[Timing]:
    """What the rows without peers measure, in this process instead of one each."""
    folders, timings = {"raw"}, []
    for row in GROUPS["read"]:
        if row.kind not in ALONE:
            continue
        if row.folder not in folders:
            Worker(WRITERS.get(row.folder, row.kind), bench.root / row.folder, bench.raw).write(keep=True)
            folders.add(row.folder)
        worker, timing = Worker(row.kind, bench.root / row.folder, bench.raw), Timing(row)
        worker.open()
        assert worker.check()["same"] == (row.folder != "safe-store")
        for measure in row.measures:
            options = {} if measure == "sequential" else {"seed": 0}
            timing.add(measure, getattr(worker, measure)(**options), bench.raw.logical_bytes / 1e9)
        timings.append(timing)
    zarr_arrays.CHECK_CHUNKS = True
    return timings


def test_rows_give_back_what_was_written_and_are_reported(bench: Bench, timings: list[Timing]) -> None:
    assert [timing.failed for timing in timings] == [None] * len(ALONE)
    facts = {
        "sizes": [{"recipe": recipe, "all": 1.0, "supervised": 1.0} for recipe in RECIPES],
        "peer_sizes": {PT_BF16: 1.0},
        "first_batch": {},
        "memory": {},
        "logical_bytes": bench.raw.logical_bytes,
    }
    lines = {claim: met for claim, _, _, met in judged(facts, {"read": timings})}
    assert lines["one layer of four, against reading all"] != "–"
    assert lines["lossless read, against MDS zstd"] == "–"


def test_the_cost_of_checks_is_told_of_reads_and_writes(bench: Bench, timings: list[Timing]) -> None:
    writes = []
    for row in GROUPS["write"]:
        if row.kind in FORMATS:
            timing, is_bare = Timing(row), row.kind.endswith("WithoutChecks")
            answer = Worker(row.kind, bench.root / row.folder, bench.quarter).write(keep=True)
            timing.add("write", answer, bench.quarter.logical_bytes / 1e9)
            writes.append(timing)
            store = Store.open(bench.root / row.folder / "store")
            with pytest.raises(CorruptionError) if is_bare else nullcontext():
                store.read(store.sample_ids[0])
    rows = checks_cost({"read": timings, "write": writes})
    assert [row[0] for row in rows] == [what for what, *_ in CHECKS]
    assert all(row[3].endswith("%") for row in rows)


@pytest.mark.parametrize("kind", sorted({row.kind for rows in GROUPS.values() for row in rows} | {*WRITERS.values()}))
def test_every_kind_of_the_tables_that_is_no_codec_has_a_format_of_its_own(bench: Bench, kind: str) -> None:
    assert (type(Worker(kind, bench.root, bench.quarter).format) is Format) == (kind in CODECS)


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_alone_is_timed_both_ways(bench: Bench, codec: str) -> None:
    worker = Worker(codec, bench.root, bench.quarter)
    worker.load("cpu")
    assert all(getattr(worker, way)()["cpu"] > 0 for way in ("encode", "decode"))


@pytest.mark.parametrize("row", GROUPS["copy"], ids=lambda row: row.kind)
def test_a_copy_with_the_bundled_head_is_timed(bench: Bench, row: Row) -> None:
    worker = Worker(row.kind, bench.root / row.folder, replace(bench.bundled, lengths=bench.bundled.lengths[:2]))
    worker.open()
    assert worker.copy()["cpu"] > 0


def test_a_worker_that_cannot_do_its_work_says_why(bench: Bench) -> None:
    answer = bench.ask_alone(Row("nothing", CHECKED.kind, folder="nowhere"), "open")
    assert "store-missing" in answer["failed"] or "is no store" in answer["failed"]


@pytest.mark.slow
def test_two_checkouts_read_the_same_files_in_turn(tmp_path: Path) -> None:
    document, page = against(Bench(tmp_path, 0.0005, 2, 64), ROOT)
    assert [row["failed"] for row in document["rows"]] == [None] * len(document["rows"])
    assert "here / there" in page[-1]


def test_the_states_of_a_store_take_the_place_of_synthetic_ones(bench: Bench, tmp_path: Path) -> None:
    lengths = bench.raw.lengths
    store = write_store(tmp_path / "written", "raw", synthetic_bits(lengths, 64), lengths, 64)
    of_store = Bench(tmp_path / "of-store", 0.0005, 1, store)
    of_store.raw.write()
    count = len(of_store.raw.lengths)
    assert 0 < count < len(lengths)
    assert of_store.raw.lengths == lengths[:count]
    assert of_store.raw.path.read_bytes() == bench.raw.path.read_bytes()[: of_store.raw.logical_bytes]
    supervised = write_store(
        tmp_path / "supervised", "raw", synthetic_bits(lengths[:2], 64), lengths[:2], 64, "supervised"
    )
    with pytest.raises(ValueError, match="expected 3 aux layers and the final hidden of every token"):
        Bench(tmp_path / "other", 0.001, 1, supervised)


def test_cold_reads_come_from_the_disk_and_fetch_what_is_stored(bench: Bench) -> None:
    rows, timings = GROUPS["cold"], []
    for row in rows:
        if row.folder != "raw" and not (bench.root / row.folder / "store").exists():
            Worker(WRITERS[row.folder], bench.root / row.folder, bench.raw).write(keep=True)
        worker = Worker(row.kind, bench.root / row.folder, bench.raw)
        worker.open()
        timings.append(Timing(row))
        timings[-1].add("cold", worker.cold(0), bench.raw.logical_bytes / 1e9)
    lines = "\n".join(group_lines("cold", timings, bench.raw.logical_bytes))
    assert all(f"| {row.label} |" in lines for row in rows)
    # A filesystem in memory fetches nothing.
    assert all(0 <= timing.facts["fetched_bytes"] <= 2 * timing.facts["stored_bytes"] + (1 << 20) for timing in timings)

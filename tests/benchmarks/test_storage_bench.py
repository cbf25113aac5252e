"""The storage benchmark runs from end to end in a tiny form, and its rows read what was written."""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.storage import gpu, report, sizes
from benchmarks.storage.__main__ import genuine_stores
from benchmarks.storage.run import GROUPS, MAKERS, Bench, Found
from benchmarks.storage.worker import Worker
from hiddenstore import zarr_read
from hiddenstore.codecs import RECIPES
from hiddenstore.testing.builders import make_store


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), 0.001, 1, 64)
    bench.generate()
    return bench


def test_sizes_name_every_recipe_and_dropping_rows_never_costs(bench: Bench) -> None:
    rows = sizes.recipe_sizes(bench.raw, bench.root / "sizes", 2)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    assert all(row["final_supervised"] < row["final_all"] for row in rows)
    assert sizes.peer_sizes(bench.raw, bench.root)["pt bf16 per sample"] > 4 * 64 * 2


@pytest.fixture(scope="module")
def rows(bench: Bench) -> list[Found]:
    """What the rows without peers measure, in this process instead of one each."""
    folders: set[str] = set()
    found = []
    for row in GROUPS["read"]:
        if row.kind not in ("Preadv", "TorchFiles", "Ours", "OursUnchecked", "StockZarr", "SafePacked", "SafeDecoded"):
            continue
        if row.folder not in {*folders, "raw"}:
            Worker(MAKERS.get(row.folder, row.kind), bench.root / row.folder, bench.raw).write(keep=True)
            folders.add(row.folder)
        worker, one = Worker(row.kind, bench.root / row.folder, bench.raw), Found(row)
        worker.open()
        assert worker.check()["same"] == (row.folder != "safe-store")
        for measure in row.measures:
            options = {} if measure == "sequential" else {"seed": 0}
            one.take(measure, getattr(worker, measure)(**options), bench.raw.logical_bytes / 1e9)
        found.append(one)
    zarr_read.CHECK_CHUNKS = True
    return found


def test_rows_give_back_what_was_written_and_are_reported(bench: Bench, rows: list[Found]) -> None:
    assert [one.failed for one in rows] == [None] * 7
    facts = {
        "sizes": [],
        "peer_sizes": {report.PT: 1.0},
        "first_batch": {},
        "memory": {},
        "logical_bytes": bench.raw.logical_bytes,
    }
    claims = {claim: met for claim, _, _, met in report.bars(facts, {"read": rows})}
    assert claims["one layer of four, against reading all"] in ("yes", "no")
    assert claims["lossless read, against MDS zstd"] == "–"


def test_stores_of_genuine_states_are_reported_by_target_and_recipe(tmp_path: Path) -> None:
    for recipe, codec in (("raw", "bf16"), ("safe", "q8")):
        made = make_store(tmp_path / recipe, codec=codec, width=192, samples=20)
        Path(made.path).rename(tmp_path / f"mine-{recipe}")
    found = [sizes.store_sizes(path) for path in genuine_stores(tmp_path)]
    assert [(one["target"], one["recipe"]) for one in found] == [("mine", "raw"), ("mine", "safe")]
    lines = report.genuine_table(found)
    assert [line.split(" | ")[3] for line in lines[2:]] == ["raw", "safe"]
    assert found[1]["bytes_per_token"] < found[0]["bytes_per_token"]


def test_a_worker_that_cannot_do_its_work_says_why(bench: Bench) -> None:
    answer = bench.ask_alone("Ours", "nowhere", "open")
    assert "store-missing" in answer["failed"] or "is no store" in answer["failed"]


def test_the_gpu_script_runs_in_a_tiny_form_on_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = argparse.Namespace(
        width=64, tokens=128, samples=8, steps=1, rounds=1, device="cpu", folder=str(tmp_path)
    )
    found = gpu.measure(arguments)
    assert [name for name in found if name != "device"] == list(gpu.STATES)
    for name in gpu.STATES:
        row = found[name]
        assert isinstance(row, dict)
        assert row["dequantise_gb_per_s"] > 0
        assert 0 <= row["data_wait_fraction"] <= 1

"""The storage benchmark runs from end to end in a tiny form, and its rows read what was written."""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.storage import gpu, report, sizes
from benchmarks.storage.run import Bench
from hiddenstore.codecs import RECIPES


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


def test_rows_that_need_no_peer_are_measured_and_reported(bench: Bench) -> None:
    peers = ["StockZarr", "StockZarrs", "StockTensorstore", "Safetensors", "TorchFilesDropped"]
    found = bench.group("read", skip=[*peers, "CompactPacked", "CompactDecoded", "SafeDecoded"])
    assert [one.failed for one in found] == [None] * len(found)
    assert {one.row.kind for one in found} == {"Preadv", "TorchFiles", "OursUnchecked", "Ours", "SafePacked"}
    assert all(len(one.cpu[measure]) == 1 for one in found for measure in one.row.measures)
    claims = {
        claim: met
        for claim, _, _, met in report.bars(
            {
                "sizes": [],
                "peer_sizes": {report.PT: 1.0},
                "first_batch": {},
                "memory": {},
                "logical_bytes": bench.raw.logical_bytes,
            },
            {"read": found},
        )
    }
    assert claims["one layer of four, against reading all"] in ("yes", "no")
    assert claims["lossless read, against MDS zstd"] == "–"


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

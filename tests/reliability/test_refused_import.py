"""Reads that fail for a moment under import, of the dump and of the store: said as an error of the storage, never
counted as a sample that cannot be used, and the same command finishes the job."""

import shutil
from pathlib import Path

import pytest
import torch

from collectors.capture.import_job import ImportOptions, import_dump
from hiddenstore.errors import StorageError
from hiddenstore.store import Store
from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from tests.collectors import peer_dumps
from tests.collectors.tiny import save_target
from tests.reliability.figures import Figures
from tests.reliability.refused_reads import Reads, errors_at

SAMPLES = 4
POINTS = 2


def refuse(peer_name: str, folder: Path, points: int | None, patch: pytest.MonkeyPatch, figures: Figures) -> None:
    """New stores, while importing into each of which one read fails."""
    reads = Reads((folder / "dump", folder / "store"), patch)

    def bring(store: Path) -> dict[str, str]:
        words = {"layers": "0,1,2", "check": "none", "container": "webdataset", "recipe": "raw", "max_rejects": 0.5}
        options = ImportOptions(folder / "dump", peer_name, store, str(folder / "target"), **words)  # type: ignore[arg-type]
        report = import_dump(options, note=lambda _: None)
        assert (dict(report.rejects), dict(report.skipped)) == ({}, {})
        return contents(Store.open(store))

    expected = bring(folder / "store")
    total = reads.count
    assert len(expected) == SAMPLES
    assert total > 10
    tally, step = Tally(), 1 if points is None else max(1, total // points)
    for at in range(step // 2, total, step):
        for error in errors_at(at, points is not None):
            store = folder / f"store-{at}-{error}"
            reads.begin(at, error)
            tally.points += 1
            try:
                bring(store)
            except StorageError:
                reads.begin()
                assert bring(store) == expected, f"read {at}"
            reads.begin()
            assert contents(Store.open(store)) == expected, f"read {at}"
            assert verify(store, "bytes").findings == [], f"read {at}"
            shutil.rmtree(store)
    figures.add("refused reads", f"import of {peer_name}", tally)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    save_target(folder / "target", dtype=torch.bfloat16)
    spoken = peer_dumps.speak(SAMPLES)
    peer_dumps.modelopt(folder / "modelopt-hf" / "dump", spoken, (0, 1, 2))
    peer_dumps.speculators(folder / "speculators" / "dump", spoken, (0, 1, 2))
    for name in ("modelopt-hf", "speculators"):
        (folder / name / "target").symlink_to(folder / "target")
    return folder


def test_a_read_that_fails_rejects_no_sample_of_an_import(
    made: Path, monkeypatch: pytest.MonkeyPatch, figures: Figures
) -> None:
    refuse("modelopt-hf", made / "modelopt-hf", POINTS, monkeypatch, figures)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modelopt-hf", "speculators"])
def test_no_read_that_fails_rejects_a_sample_of_an_import(
    made: Path, name: str, monkeypatch: pytest.MonkeyPatch, figures: Figures
) -> None:
    for store in (made / name).glob("store*"):
        store.rename(made / f"{store.name}-{len(list(made.iterdir()))}")
    refuse(name, made / name, None, monkeypatch, figures)

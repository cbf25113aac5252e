"""Reads that fail for a moment under import, of the dump and of the store: said as an error of the storage, never
counted as a sample that cannot be used, and the same command finishes the job."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from collectors.capture.import_job import ImportOptions, import_dump
from collectors.engines.dump import peer
from hiddenstore.errors import StorageError
from hiddenstore.fs.disk import PosixDisk
from hiddenstore.store import Store
from hiddenstore.testing.invariants import contents
from hiddenstore.testing.suite import Tally
from hiddenstore.verify import verify
from tests.collectors import peer_dumps
from tests.collectors.tiny import save_target
from tests.reliability.figures import Figures

ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM)
SAMPLES = 4
POINTS = 5


class Reads:
    """Counts the reads below some folders, and refuses one of them as the system or a library says it."""

    def __init__(self, folders: tuple[Path, ...], patch: pytest.MonkeyPatch) -> None:
        self._folders = tuple(map(str, folders))
        self.count, self.at, self.number = 0, -1, 0
        for owner, name, place in (
            (PosixDisk, "read", 1),
            (PosixDisk, "read_into", 1),
            (PosixDisk, "list", 1),
            (Path, "open", 0),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name), place, "{reason}"))
        said = "unable to open file <{path}> in read-only mode: {reason} ({number})"
        patch.setattr(torch, "load", self._counted(torch.load, 0, said))
        patch.setattr(peer, "safe_open", self._counted(safe_open, 0, "{reason} (os error {number})"))

    def begin(self, at: int = -1, number: int = 0) -> None:
        """Count anew; the read ``at`` is refused by an error number."""
        self.count, self.at, self.number = 0, at, number

    def _counted(self, read: Callable[..., Any], place: int, says: str) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            if str(args[place]).startswith(self._folders):
                self.count += 1
                if self.count == self.at + 1:
                    reason = os.strerror(self.number)
                    if says == "{reason}":
                        raise OSError(self.number, reason)
                    says_so = SafetensorError if "os error" in says else RuntimeError
                    raise says_so(says.format(path=args[place], reason=reason, number=self.number))
            return read(*args, **more)

        return counted


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
        store = folder / f"store-{at}"
        reads.begin(at, ERRORS[at % len(ERRORS)])
        tally.points += 1
        try:
            bring(store)
        except StorageError:
            reads.begin()
            assert bring(store) == expected, f"read {at}"
        reads.begin()
        assert contents(Store.open(store)) == expected, f"read {at}"
        assert verify(store, "bytes").findings == [], f"read {at}"
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

"""The raw slice of a capture: what goes in, how it is published, and that verify, gc and copy know it."""

import os
import time
from pathlib import Path

import pytest
import torch

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.care.gc import gc
from hiddenstore.errors import CorruptionError
from hiddenstore.files.layout import slice_path
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.targets import calibration
from hiddenstore.targets.calibration import (
    SLICE_PATH,
    read_slice,
    slice_document,
    slice_tokens,
    take_slice,
    write_slice,
)
from hiddenstore.testing.builders import capture_spec, make_samples, make_store, random_records
from hiddenstore.verify import verify
from schemas.capture import CaptureSpec

CAPTURE = capture_spec(codec="raw")


def some_records(count: int = 5, capture: CaptureSpec = CAPTURE) -> list[Record]:
    return random_records(make_samples(count), capture)


def states_path(store: Store) -> Path:
    document = slice_document(store.fs)
    assert document is not None
    return Path(store.path) / slice_path(document.file_sha256)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A q8 store with the slice that its capture kept."""
    made = make_store(tmp_path)
    taken = take_slice(some_records(), CAPTURE)
    assert taken is not None
    assert write_slice(made.fs, taken, made.capture)
    return made


def test_whole_samples_go_in_from_the_first_on_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    records, fs = some_records(), LocalFilesystem(tmp_path)
    taken = take_slice(records, CAPTURE)
    assert taken is not None
    assert write_slice(fs, taken, CAPTURE)
    found = read_slice(fs, CAPTURE)
    assert found is not None
    assert [sample.id for sample in found.samples] == [record.sample.id for record in records]
    assert torch.equal(found.aux.view(torch.int16), torch.cat([r.aux for r in records], 1).view(torch.int16))
    assert torch.equal(found.final.view(torch.int16), torch.cat([r.final for r in records]).view(torch.int16))


def test_the_sample_that_does_not_fit_gives_what_room_is_left_up_to_its_last_final_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = some_records(2)
    first, second = (record.sample.tokens for record in records)
    monkeypatch.setattr(calibration, "MOST_TOKENS", first + 5)
    taken = take_slice(records, CAPTURE)
    assert taken is not None
    assert (taken.tokens, taken.aux.shape[1]) == (first + 5, first + 5)
    last = taken.samples[-1]
    assert (last.start, last.tokens) == (second - 5, 5)
    rows = [row for row in records[1].final_rows.tolist() if row >= second - 5]
    assert last.final_rows == len(rows)
    assert torch.equal(taken.final[-len(rows) :], records[1].final[-len(rows) :])
    assert torch.equal(taken.aux[:, first:], records[1].aux[:, second - 5 :])


def test_a_wide_target_has_a_shorter_slice_of_at_most_64_mb() -> None:
    wide = capture_spec(layers=(1, 2, 3), width=4096, codec="raw")
    assert slice_tokens(CAPTURE) == 4096
    assert 63_900_000 < slice_tokens(wide) * 2 * 4096 * 4 <= 64_000_000


def test_the_first_slice_stays(store: Store) -> None:
    before = states_path(store).read_bytes(), (Path(store.path) / SLICE_PATH).read_bytes()
    other = take_slice(some_records(2), CAPTURE)
    assert other is not None
    assert not write_slice(store.fs, other, store.capture)
    assert (states_path(store).read_bytes(), (Path(store.path) / SLICE_PATH).read_bytes()) == before


@pytest.mark.parametrize(("place", "depth"), [(100, "bytes"), (None, "structure")])
def test_verify_names_a_damaged_or_missing_slice(store: Store, place: int | None, depth: str) -> None:
    assert verify(store.path, "bytes").ok
    path = states_path(store)
    data = bytearray(path.read_bytes())
    path.unlink()
    if place is not None:
        data[-place] ^= 1
        path.write_bytes(data)
    report = verify(store.path, depth)  # type: ignore[arg-type]
    assert [finding.path for finding in report.findings] == [str(path.relative_to(store.path))]
    with pytest.raises(CorruptionError, match="slice-") as caught:
        read_slice(store.fs, store.capture)
    assert caught.value.kind == "calibration-corrupt"


def test_verify_names_a_damaged_slice_document(store: Store) -> None:
    path = Path(store.path) / SLICE_PATH
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.unlink()
    path.write_bytes(data)
    report = verify(store.path)
    assert [finding.path for finding in report.findings if finding.kind == "document-corrupt"] == [str(path)]
    assert not [item.path for item in gc(store.path, older_than_s=0).remove if "slice" in item.path]


def test_gc_sweeps_states_that_lost_the_race_and_keeps_the_others(store: Store) -> None:
    kept, lost = states_path(store), Path(store.path) / slice_path("0" * 64)
    lost.write_bytes(b"states of a writer that came second")
    old = time.time() - 100
    os.utime(lost, (old, old))
    assert [note.path for note in verify(store.path).notes] == [str(lost.relative_to(store.path))]
    gc(store.path, dry_run=False, older_than_s=50)
    assert kept.exists()
    assert not lost.exists()


def test_a_copy_brings_the_slice(store: Store, tmp_path: Path) -> None:
    run_copy(open_copy([store], tmp_path / "copy", "compact"))
    copied = Store.open(tmp_path / "copy")
    ours, theirs = read_slice(store.fs, store.capture), read_slice(copied.fs, copied.capture)
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours.aux.view(torch.int16), theirs.aux.view(torch.int16))
    assert verify(copied.path, "bytes").ok


def test_gc_keeps_states_whose_document_a_stopped_writer_may_still_publish_a4(store: Store) -> None:
    document, folder = Path(store.path) / SLICE_PATH, Path(store.path) / "calibration"
    data = document.read_bytes()
    document.unlink()
    (states,) = folder.glob("slice-*.safetensors")
    sweep = gc(store.path, dry_run=False, older_than_s=0)
    assert [item.path for item in sweep.unfinished] == [str(states.relative_to(store.path))]
    document.write_bytes(data)
    assert verify(store.path, "bytes").findings == []

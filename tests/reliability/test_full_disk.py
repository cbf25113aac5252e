"""A real disk that is full: a tmpfs of one MiB."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddenstore.errors import StorageError
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.workload import contents, garbage, problems
from tests.tmpfs import mounted

SIZE_BYTES = 1 << 20


@pytest.fixture(params=[f"size={SIZE_BYTES}"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", request.param)


def test_a_full_disk_stops_cleanly_and_the_job_finishes_once_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    expected = contents(make_store(tmp_path / "roomy", samples=8, codec="bf16"))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(SIZE_BYTES - (200 << 10)))
    with pytest.raises(StorageError, match=r"disk full while writing .*: .*bytes free") as error:
        make_store(small_disk, samples=8, codec="bf16")
    assert (error.value.kind, error.value.exit_code) == ("disk-full", 5)
    left = Store.open(small_disk / "store")
    assert problems(left) == []
    assert garbage(left.fs) == []
    assert contents(left).items() < expected.items()
    ballast.unlink()
    finished = make_store(small_disk, samples=8, codec="bf16")
    assert problems(finished, finished=True) == []
    assert contents(finished) == expected


@pytest.mark.parametrize("small_disk", [f"size={SIZE_BYTES},nr_inodes=60"], indirect=True)
def test_inodes_that_are_used_up_are_named_as_such_a18(small_disk: Path) -> None:
    with pytest.raises(StorageError, match="all inodes of its disk are used") as error:
        make_store(small_disk, samples=8, codec="bf16")
    assert (error.value.kind, error.value.exit_code) == ("inodes-used-up", 5)
    assert problems(Store.open(small_disk / "store")) == []

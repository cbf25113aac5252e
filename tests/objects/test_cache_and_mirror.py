"""The local cache of training, and the mirror of its checkpoints."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.files.layout import SEGMENTS_DIR
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.cache import BLOCK_BYTES, LEAST_BYTES, CachedFilesystem
from hiddenstore.fs.objects import ObjectFilesystem
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from tests.objects.proxy import FaultProxy
from tests.tiny_world import TRAIN, World, run, tree

pytestmark = pytest.mark.objects

READER = """
import sys
from hiddenstore.fs.cache import CachedFilesystem
fs = CachedFilesystem(sys.argv[1], sys.argv[2], int(sys.argv[3]), "segments")
print("started", flush=True)
while True:
    for number in range(30):
        fs.read_range("segments/big", number << 20, 1 << 20)
"""


def cached(place: str, folder: Path, most_bytes: int = LEAST_BYTES) -> CachedFilesystem:
    return CachedFilesystem(place, folder, most_bytes, SEGMENTS_DIR)


def kept_bytes(folder: Path) -> int:
    return sum(len(data) for data in tree(folder).values() if data is not None)


def gets(proxy: FaultProxy) -> int:
    return sum(request.method == "GET" and "/segments/" in request.key for request in proxy.requests)


def test_what_one_process_read_no_other_asks_for_again(place: str, proxy: FaultProxy, tmp_path: Path) -> None:
    expected = contents(make_store(ObjectFilesystem(place), container="webdataset"))
    assert contents(Store.open(cached(place, tmp_path / "cache"))) == expected
    proxy.set_plan(None)
    assert contents(Store.open(cached(place, tmp_path / "cache"))) == expected
    assert gets(proxy) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_cache_that_somebody_else_filled_is_read_by_whoever_may_not_write_to_it(
    place: str, proxy: FaultProxy
) -> None:
    # Its parents are open to all, which those of ``tmp_path`` are not.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        fs = cached(place, Path(folder))
        assert fs.put_if_absent("segments/a", bytes(BLOCK_BYTES))
        fs.read("segments/a")
        proxy.set_plan(None)
        os.seteuid(65_534)
        try:
            assert fs.read("segments/a") == bytes(BLOCK_BYTES)
        finally:
            os.seteuid(0)
        assert gets(proxy) == 0


def test_torn_blocks_are_fetched_again_and_damage_is_looked_at_past_the_cache(
    place: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    expected = contents(make_store(ObjectFilesystem(place), container="webdataset"))
    contents(Store.open(cached(place, tmp_path / "cache")))
    blocks = [path for path in (tmp_path / "cache").glob("*/*") if path.is_file()]
    for number, path in enumerate(blocks):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if number % 2 else data[:-9] + bytes(9))
    proxy.set_plan(None)
    assert contents(Store.open(cached(place, tmp_path / "cache"))) == expected
    assert gets(proxy) == len(blocks)
    # A block that fits its own checksum and is another's: found damaged, then read past the cache.
    first, second = sorted(blocks, key=lambda path: path.stat().st_size)[-2:]
    if first.stat().st_size == second.stat().st_size:
        shutil.copy(first, second)
    assert verify(cached(place, tmp_path / "cache"), "bytes").findings == []


def test_the_cache_stays_below_its_bound_over_processes_and_kills(
    place: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    size = 32 * BLOCK_BYTES
    file = ObjectFilesystem(place).create("segments/big")
    pattern = os.urandom(BLOCK_BYTES)
    for number in range(32):
        file.write(number.to_bytes(8, "little") + pattern[8:])
    file.close()
    folder = tmp_path / "cache"
    words = [sys.executable, "-c", READER, place, str(folder), str(LEAST_BYTES)]
    readers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline()
    while len(list(folder.glob("*/*"))) < 12:
        time.sleep(0.01)
    readers[0].send_signal(signal.SIGKILL)
    readers[0].communicate()
    fs = cached(place, folder)
    for number in range(32):
        assert fs.read_range("segments/big", number * BLOCK_BYTES, 8) == number.to_bytes(8, "little")
    readers[1].send_signal(signal.SIGKILL)
    readers[1].communicate()
    assert fs.size("segments/big") == size
    # Each process looks after every block here, unless another is looking.
    assert kept_bytes(folder) <= LEAST_BYTES * 0.9 + 4 * BLOCK_BYTES


def test_a_cache_is_for_object_storage_and_of_some_size(tmp_path: Path) -> None:
    for address, most_bytes in ((str(tmp_path), LEAST_BYTES), ("s3://bucket/store", LEAST_BYTES - 1)):
        with pytest.raises(ConfigError) as refused:
            cached(address, tmp_path / "cache", most_bytes)
        assert refused.value.kind == "option-invalid"


def test_what_an_evaluation_read_the_next_one_does_not_ask_for_again(
    place: str, proxy: FaultProxy, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run("copy", world / "store", f"{place}/store") == 0

    def evaluated(*words: str) -> tuple[object, int]:
        """What it answers, and how often it asked for a part of a segment."""
        capsys.readouterr()
        proxy.set_plan(None)
        assert run("eval", world / "run", f"{place}/store", *words, "--json") == 0
        return json.loads(capsys.readouterr().out), gets(proxy)

    expected, straight = evaluated()
    words = ("--cache", "cache", "--cache-bytes", str(LEAST_BYTES))
    first, again = evaluated(*words), evaluated(*words)
    assert first[0] == again[0] == expected
    assert (0 < first[1] <= straight, again[1]) == (True, 0)
    assert 0 < kept_bytes(tmp_path / "cache") <= LEAST_BYTES
    # What a kill in the middle of writing a block would leave, had the block its name by then.
    torn = next(path for path in (tmp_path / "cache").glob("*/*") if path.is_file())
    torn.write_bytes(torn.read_bytes()[:-9])
    assert evaluated(*words) == (expected, 1)


def test_a_run_that_is_gone_goes_on_from_its_mirror(
    place: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("copy", world / "store", f"{place}/store") == 0
    train = ("train", f"{place}/store", "-o", "run", "--cache", "cache", "--mirror", f"{place}/mirror")
    assert run(*train, *TRAIN) == 0
    assert run("train", f"{place}/store", "-o", "straight", *TRAIN, "train.max_steps=3") == 0
    with open_filesystem(f"{place}/mirror").local_copy("checkpoints/step-2") as copy:
        assert tree(copy) == tree(tmp_path / "run" / "checkpoints" / "step-2")
    shutil.rmtree(tmp_path / "run")
    assert run(*train, "--resume", "train.max_steps=3") == 0
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()
    assert "step-3" in open_filesystem(f"{place}/mirror").list("checkpoints")


def test_a_mirror_that_stays_away_does_not_stop_the_run_and_is_said(
    place: str, proxy: FaultProxy, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hiddenstore.fs.objects.DEADLINE_S", 0.2)
    proxy.set_plan(lambda request: "503" if request.method == "PUT" and "step-" in request.key else None)
    train = ("train", world / "store", "-o", "run", "--mirror", f"{place}/mirror")
    assert run(*train, *TRAIN, "train.checkpoint_every=1") == 5
    printed = capsys.readouterr().err
    assert printed.count("lacks this checkpoint") == 2
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()
    with pytest.raises(NotFoundError):
        open_filesystem(f"{place}/mirror").read("checkpoints/step-2/state.json")
    proxy.set_plan(None)
    assert run(*train, "--resume", "train.max_steps=3") == 0
    assert set(open_filesystem(f"{place}/mirror").list("checkpoints")) >= {"step-2", "step-3"}

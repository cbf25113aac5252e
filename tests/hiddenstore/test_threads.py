"""Finding A18: where the system starts no more threads, work goes on with those there are, down to the caller's own."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from hiddenstore.testing.builders import make_store
from hiddenstore.threads import _LOCKS, MOST_LOCAL, Threads, reading_threads, usable_cores, use_all_cores

# The limit counts the threads of a real user on this machine, and holds for nobody who may exceed or set limits.
_USER = 54_321
_PR_CAPBSET_DROP, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 24, 21, 24

_READ = """
import json, sys, threading
import torch
from hiddenstore.data.batches import TokenBatches
from hiddenstore.store import Store
from hiddenstore.verify import verify

refused = []
try:
    threading.Thread(target=int).start()
except RuntimeError as error:
    refused.append(str(error))
store = Store.open(sys.argv[1])
report = verify(sys.argv[1], "bytes")
batches = TokenBatches(store, batch_tokens=64, epochs=1, threads=8)
tokens = sum(int(pack.input_ids.sum()) for batch in batches for pack in batch.packs)
print(json.dumps([refused, report.ok, report.samples_checked, tokens]))
"""


def limited(most_threads: int) -> None:
    """In a new process of root's: it keeps root's files and has this many threads."""
    for power in (_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE):
        if ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, power, 0, 0, 0):
            raise OSError
    resource.setrlimit(resource.RLIMIT_NPROC, (most_threads, most_threads))
    os.setresuid(_USER, 0, 0)


def read(store: Path, most_threads: int | None) -> tuple[list[str], bool, int, int]:
    limit = None if most_threads is None else partial(limited, most_threads)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-c", _READ, str(store)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_store(tmp_path_factory.mktemp("limited"), samples=12).path)


@pytest.mark.parametrize("most_threads", [1, 3])
def test_a_store_is_verified_and_read_where_no_thread_can_be_started(store: Path, most_threads: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("a limit of threads for this test alone needs another user, and that needs root")
    try:
        refused, *found = read(store, most_threads)
    except subprocess.SubprocessError as error:
        pytest.skip(f"such a limit cannot be set here: {error}")
    freely, *expected = read(store, None)
    assert (freely, refused) == ([], ["can't start new thread"] if most_threads == 1 else [])
    assert found == expected
    assert expected[:2] == [True, 12]
    assert expected[2] > 0


def test_work_is_done_by_the_caller_once_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start, alive = threading.Thread.start, []

    def starts_two(thread: threading.Thread) -> None:
        if len(alive) == 2:
            raise RuntimeError("can't start new thread")
        alive.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts_two)
    with Threads(8) as pool:
        assert list(pool.map(lambda number: number**2, range(500))) == [number**2 for number in range(500)]
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()
    assert len(alive) == 2
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int)


def test_as_many_threads_read_as_the_process_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, near, far in ((1, 2, 8), (4, 4, 8), (64, MOST_LOCAL, 64)):
        monkeypatch.setattr("hiddenstore.threads.usable_cores", lambda cores=cores: cores)
        assert (reading_threads(False), reading_threads(True)) == (near, far)


def test_a_container_quota_lowers_the_cores(tmp_path: Path) -> None:
    everything = usable_cores(tmp_path / "absent")
    (tmp_path / "none").write_text("max 100000\n")
    (tmp_path / "one").write_text("100000 100000\n")
    assert usable_cores(tmp_path / "none") == everything
    assert usable_cores(tmp_path / "one") == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 6),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"}, 2),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "9", "TORCHELASTIC_RUN_ID": "none"}, 1),
        ({"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"}, 4),
    ],
)
def test_ranks_share_the_cores_unless_a_person_says_how_many_threads(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    monkeypatch.setattr("hiddenstore.threads.usable_cores", lambda: 6)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "8")))
    try:
        assert use_all_cores() == torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_worker_forked_while_another_thread_reads_finds_every_lock_free(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    expected = store[0].aux.sum()
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as locks:
            for lock in list(_LOCKS):
                locks.enter_context(lock)
            entered.set()
            go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        store.close()
        os._exit(0 if store[0].aux.sum() == expected else 1)
    go.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0

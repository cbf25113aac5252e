"""The filesystem seam on a real disk and on its fault-injecting twin."""

import errno
import os
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError, StorageError
from hiddenstore.fs import disk, open_filesystem
from hiddenstore.fs.cache import LEAST_BYTES, CachedFilesystem
from hiddenstore.fs.disk import OPEN_FILES, PosixDisk
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import Filesystem, is_inside, is_temporary
from hiddenstore.testing.builders import make_store
from tests.faults import Fault, FaultFilesystem, SimulatedCrash


@pytest.fixture(params=["posix", "memory"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    return LocalFilesystem(tmp_path / "store") if request.param == "posix" else FaultFilesystem()


def write(fs: Filesystem, path: str, data: bytes) -> None:
    file = fs.create(path)
    file.write(data)
    file.close()


def test_a_created_file_reads_back_whole_and_in_ranges(fs: Filesystem) -> None:
    file = fs.create("segments/unit/c/0")
    file.write(b"hello ")
    file.write(memoryview(b"world"))
    file.close()
    fs.sync_folder("segments/unit")
    buffer = bytearray(5)
    fs.read_into("segments/unit/c/0", 6, memoryview(buffer))
    assert fs.read("segments/unit/c/0") == b"hello world"
    assert fs.read_range("segments/unit/c/0", 2, 3) == b"llo"
    assert bytes(buffer) == b"world"
    assert fs.size("segments/unit/c/0") == 11
    assert fs.list("segments") == ["unit"]


def test_create_never_replaces_a_file(fs: Filesystem) -> None:
    write(fs, "a", b"first")
    with pytest.raises(ConflictError) as error:
        fs.create("a")
    assert error.value.kind == "file-exists"
    assert fs.read("a") == b"first"


def test_put_if_absent_keeps_the_first_and_leaves_no_temporary_file(fs: Filesystem) -> None:
    assert fs.put_if_absent("commits/u.json", b"one")
    assert not fs.put_if_absent("commits/u.json", b"two")
    assert fs.read("commits/u.json") == b"one"
    assert fs.list("commits") == ["u.json"]


def test_of_many_racing_puts_exactly_one_wins(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    wins: list[int] = []

    def put(number: int) -> None:
        if fs.put_if_absent("commits/u.json", str(number).encode() * 1000):
            wins.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert fs.read("commits/u.json") == str(wins[0]).encode() * 1000


def test_a_short_file_is_corruption_and_an_absent_one_is_not_found(fs: Filesystem) -> None:
    write(fs, "a", b"12345")
    with pytest.raises(CorruptionError, match="expected 8 bytes, found 5") as short:
        fs.read_range("a", 4, 4)
    with pytest.raises(CorruptionError):
        fs.read_into("a", 4, memoryview(bytearray(4)))
    with pytest.raises(NotFoundError):
        fs.read("b")
    with pytest.raises(NotFoundError):
        fs.read_range("b", 0, 1)
    assert short.value.kind == "file-short"
    assert fs.size("b") is None
    assert fs.list("b") == []


def test_an_absurd_range_is_refused_without_allocating(fs: Filesystem) -> None:
    write(fs, "a", b"12345")
    with pytest.raises(CorruptionError):
        fs.read_range("a", 0, 1 << 60)


def test_pieces_are_appended_in_their_order(fs: Filesystem) -> None:
    file = fs.create("segments/u/a")
    file.write(b"head ")
    for piece in (memoryview(b"one "), b"", b"two"):
        file.append(piece)
    file.write(b" tail")
    file.append(b" end")
    file.close()
    assert fs.read("segments/u/a") == b"head one two tail end"


def test_abort_removes_the_file_and_remove_tree_everything_below(fs: Filesystem) -> None:
    file = fs.create("segments/u/a")
    file.write(b"x")
    file.abort()
    assert fs.list("segments/u") == []
    write(fs, "segments/u/b/c", b"x")
    fs.remove_tree("segments/u")
    fs.remove_tree("segments/u")
    assert fs.list("segments") == []


def test_remove_tree_does_not_follow_links_out_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep")
    fs = LocalFilesystem(tmp_path / "store")
    write(fs, "segments/u/a", b"x")
    (tmp_path / "store" / "segments" / "u" / "link").symlink_to(tmp_path / "precious")
    fs.remove_tree("segments/u")
    assert (tmp_path / "precious" / "file").read_text() == "keep"
    assert not (tmp_path / "store" / "segments" / "u").exists()


@pytest.mark.parametrize("place", ["", "segments", "segments/u", "segments/u/a"])
def test_what_lies_behind_a_link_to_nowhere_is_out_of_reach_and_not_absent(tmp_path: Path, place: str) -> None:
    fs = LocalFilesystem(tmp_path / "store")
    write(fs, "segments/u/a", b"x")
    link = tmp_path / "store" / place
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "unmounted")
    folder = "segments/u" if place != "segments/u/a" else place
    for look in (
        lambda: fs.list(folder),
        lambda: fs.size("segments/u/a"),
        lambda: fs.read("segments/u/a"),
        lambda: fs.read_range("segments/u/a", 0, 1),
        lambda: fs.read_into("segments/u/a", 0, memoryview(bytearray(1))),
        lambda: fs.drop_cache("segments/u/a"),
    ):
        with pytest.raises(StorageError, match=f"{link} is a link to {tmp_path}/unmounted") as error:
            look()
        assert error.value.kind == "absence-unknown"
    with pytest.raises(StorageError):
        fs.put_if_absent(f"{folder}/b", b"x")
    link.unlink()
    assert fs.list(folder) == []
    assert fs.size("segments/u/a") is None


@pytest.mark.parametrize("path", ["/etc/passwd", "../a", "a/../../b", "a\\b", "c:/x", "a\x00b", "a\nb", "..", "a/.."])
def test_paths_that_leave_the_store_are_refused(fs: Filesystem, path: str) -> None:
    assert not is_inside(path)
    with pytest.raises(ConfigError, match="leaves") as error:
        fs.read(path)
    assert error.value.kind == "path-unsafe"


@pytest.mark.parametrize("url", ["ftp://bucket/store", "https://host/store", "hf://datasets/a/b"])
def test_urls_are_refused_with_the_scheme_named(url: str) -> None:
    with pytest.raises(ConfigError, match=url.split(":", 1)[0]) as error:
        open_filesystem(url)
    assert error.value.kind == "scheme-unsupported"


@pytest.mark.parametrize("location", [Path("s3://bucket/store"), "s3:/bucket/store", "gs:/bucket", "az:/container/a"])
def test_an_address_with_one_slash_is_no_local_folder(location: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"(s3|gs|az)://… is no address of a bucket: expected") as error:
        open_filesystem(location)
    assert error.value.kind == "address-invalid"


def test_a_filesystem_pickles_as_its_root(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    write(fs, "a", b"12345")
    assert pickle.loads(pickle.dumps(fs)).read_range("a", 1, 2) == b"23"


def test_read_handles_stay_few_whatever_is_read(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    for number in range(200):
        write(fs, f"f{number}", b"x")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        assert fs.read_range(f"f{number}", 0, 1) == b"x"
    assert len(os.listdir("/proc/self/fd")) - before <= OPEN_FILES + 1
    del fs
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_filesystem_that_let_go_holds_no_handle_and_reads_on(tmp_path: Path) -> None:
    fs, other = LocalFilesystem(tmp_path), LocalFilesystem(tmp_path)
    for number in range(20):
        write(fs, f"f{number}", b"x")
    before = len(os.listdir("/proc/self/fd"))
    assert other.read_range("f0", 0, 1) == b"x"
    for _ in range(2):
        assert all(fs.read_range(f"f{number}", 0, 1) == b"x" for number in range(20))
        assert len(os.listdir("/proc/self/fd")) == before + 21
        fs.let_go()
        assert len(os.listdir("/proc/self/fd")) == before + 1


def test_many_threads_read_one_file(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    names = [f"f{number}" for number in range(100)]
    for number, name in enumerate(names):
        write(fs, name, bytes([number]) * 100)
    wrong: list[str] = []

    def read() -> None:
        for number, name in enumerate(names):
            if fs.read_range(name, 50, 10) != bytes([number]) * 10:
                wrong.append(name)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class NoLinkDisk(PosixDisk):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")


def test_a_filesystem_without_hard_links_is_refused_clearly(tmp_path: Path) -> None:
    fs = LocalFilesystem(str(tmp_path), NoLinkDisk())
    with pytest.raises(StorageError, match="no hard links") as error:
        fs.put_if_absent("commits/u.json", b"x")
    assert error.value.kind == "no-hard-links"
    assert fs.list("commits") == []


def test_a_link_whose_first_reply_was_lost_counts_as_won() -> None:
    plain = FaultFilesystem()
    plain.put_if_absent("commits/u.json", b"x")
    link = next(n for n, name in enumerate(plain.disk.operations) if name.startswith("link"))
    fs = FaultFilesystem(Fault(at=link, kind="exists"))
    assert fs.put_if_absent("commits/u.json", b"x")
    assert fs.list("commits") == ["u.json"]


def test_a_full_disk_says_what_was_needed_and_what_is_free() -> None:
    fs = FaultFilesystem(capacity=1000)
    with pytest.raises(StorageError, match="needs 5,000 more bytes, 1,000 bytes free") as error:
        fs.put_if_absent("commits/u.json", b"x" * 5000)
    assert (error.value.kind, error.value.exit_code) == ("disk-full", 5)
    assert fs.list("commits") == []


def test_every_point_of_put_if_absent_leaves_nothing_or_everything() -> None:
    data = bytes(range(256)) * 16
    whole = FaultFilesystem()
    assert whole.put_if_absent("commits/u.json", data)
    operations = len(whole.disk.operations)
    for at in range(operations):
        for moment in ("before", "half", "after"):
            fs = FaultFilesystem(Fault(at, "crash", moment))  # type: ignore[arg-type]
            with pytest.raises(SimulatedCrash):
                fs.put_if_absent("commits/u.json", data)
            with pytest.raises(SimulatedCrash):
                fs.read("commits/u.json")
            for content in ("kept", "dropped", "torn"):
                for names in ("kept", "dropped"):
                    after = fs.after_crash(content, names)  # type: ignore[arg-type]
                    if after.size("commits/u.json") is not None:
                        assert after.read("commits/u.json") == data
                    strangers = [name for name in after.list("commits") if name != "u.json"]
                    assert all(is_temporary(name) for name in strangers)
    after = whole.after_crash("dropped", "dropped")
    assert after.read("commits/u.json") == data


def test_an_io_error_at_any_point_of_put_if_absent_is_a_storage_error() -> None:
    whole = FaultFilesystem()
    whole.put_if_absent("commits/u.json", b"x" * 100)
    for at, name in enumerate(whole.disk.operations):
        fs = FaultFilesystem(Fault(at, "eio", "half"))
        if name.startswith("unlink"):
            assert fs.put_if_absent("commits/u.json", b"x" * 100)
            continue
        with pytest.raises(StorageError) as error:
            fs.put_if_absent("commits/u.json", b"x" * 100)
        assert error.value.kind == "io-error"
        if fs.size("commits/u.json") is not None:
            assert fs.read("commits/u.json") == b"x" * 100


def test_permission_denied_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class DeniedDisk(PosixDisk):
        def create(self, path: str) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with pytest.raises(StorageError, match="Permission denied") as error:
        LocalFilesystem(str(tmp_path), DeniedDisk()).create("a")
    assert error.value.kind == "permission-denied"


class DirectDisk(PosixDisk):
    """Where appended pages go to the disk past the page cache, whatever filesystem it is; ``calls`` are the bytes of
    each write of the system and whether it was such a one. The first such write is a short one where it is told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shortens: bool = False) -> None:
        super().__init__()
        self.calls: list[tuple[int, bool]] = []
        self._direct_handle: int | None = None
        self._shortens = shortens
        monkeypatch.setattr(disk, "_is_direct", lambda handle: handle == self._direct_handle)
        monkeypatch.setattr(os, "write", self._take)

    def begin_direct(self, handle: int) -> bool:
        self._direct_handle = handle
        return True

    def end_direct(self, handle: int) -> bool:
        was_direct, self._direct_handle = handle == self._direct_handle, None
        return was_direct

    def _take(self, handle: int, data: memoryview) -> int:
        is_direct = handle == self._direct_handle
        self.calls.append((len(data), is_direct))
        if is_direct:
            place = os.lseek(handle, 0, os.SEEK_CUR)
            if any(number % 4096 for number in (len(data), np.frombuffer(data, np.uint8).ctypes.data, place)):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            data, self._shortens = data[:1000] if self._shortens else data, False
        return os.writev(handle, [data])


BLOCK, CACHED = 1 << 21, 1 << 19


@pytest.mark.parametrize("shortens", [False, True])
def test_what_is_appended_goes_past_the_page_cache_in_whole_blocks_and_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortens: bool
) -> None:
    direct, piece = DirectDisk(monkeypatch, shortens), os.urandom(700_001)
    file = LocalFilesystem(str(tmp_path), direct).create("large")
    for _ in range(9):
        file.append(piece)
    file.close()
    assert (tmp_path / "large").read_bytes() == 9 * piece
    if shortens:
        # The rest of the first block is no whole number of sectors: from there on all goes through the cache.
        assert direct.calls[:2] == [(BLOCK, True), (BLOCK - 1000, True)]
        assert {(size <= CACHED, is_direct) for size, is_direct in direct.calls[2:]} == {(True, False)}
    else:
        assert direct.calls == [(BLOCK, True)] * 3 + [(9 * len(piece) - 3 * BLOCK, False)]


def test_behind_a_write_everything_goes_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, data = DirectDisk(monkeypatch), os.urandom(2 * BLOCK)
    file = LocalFilesystem(str(tmp_path), direct).create("large")
    file.append(data)
    file.write(b"odd")
    file.append(data)
    file.close()
    assert (tmp_path / "large").read_bytes() == data + b"odd" + data
    assert direct.calls == [(BLOCK, True)] * 2 + [(3, False)] + [(CACHED, False)] * 8


def test_a_small_file_waits_in_memory_until_it_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = DirectDisk(monkeypatch)
    file = LocalFilesystem(str(tmp_path), direct).create("small")
    for _ in range(1000):
        file.append(b"x" * 300)
    assert direct.calls == []
    file.close()
    assert direct.calls == [(300_000, False)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_ext4_and_xfs_take_blocks_past_the_page_cache_and_no_other_filesystem_is_asked_to(tmp_path: Path) -> None:
    posix = PosixDisk()
    kind = subprocess.run(["stat", "-f", "-c", "%t", tmp_path], capture_output=True, text=True, check=True).stdout
    is_one = kind.strip() in {"ef53", "58465342"}
    handle = posix.create(str(tmp_path / "a"))
    try:
        assert posix.begin_direct(handle) == is_one
        assert posix.end_direct(handle) == is_one
        assert not posix.end_direct(handle)
    finally:
        posix.close(handle)


@pytest.mark.parametrize("size", [9999, BLOCK])
def test_nothing_follows_a_write_that_failed(tmp_path: Path, size: int) -> None:
    class FailingDisk(PosixDisk):
        def write(self, handle: int, data: memoryview) -> None:
            if bytes(data[:1]) == b"x":
                super().write(handle, data[:1000])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(handle, data)

    fs = LocalFilesystem(str(tmp_path), FailingDisk())
    file = fs.create("large")
    file.write(bytes(3 << 20))
    with pytest.raises(StorageError, match=f"needs {size:,} more bytes"):
        file.write(b"x" * size) if size == 9999 else file.append(b"x" * size)
    for after in (partial(file.write, b"y"), partial(file.append, b"y"), file.close):
        with pytest.raises(StorageError, match="not whole: a write before this one failed"):
            after()
    assert (tmp_path / "large").stat().st_size == (3 << 20) + 1000
    file.abort()
    assert fs.list("") == []


def test_files_that_are_written_side_by_side_share_no_memory(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    one = fs.create("one")
    one.append(b"1" * 5000)
    one.write(b"1")
    other = fs.create("other")
    other.append(b"2" * 5000)
    one.append(b"1" * 5000)
    other.close()
    one.close()
    assert (fs.read("one"), fs.read("other")) == (b"1" * 10_001, b"2" * 5000)


def test_a_child_process_writes_in_memory_of_its_own(tmp_path: Path) -> None:
    fs, (ready, tell) = LocalFilesystem(tmp_path), os.pipe()
    write_pieces(fs, "before", [b"b"])
    file = fs.create("parent")
    child = os.fork()
    if child == 0:
        try:
            os.read(ready, 1)
            write_pieces(fs, "child", [b"c" * 5000])
            os._exit(0)
        finally:
            os._exit(1)
    file.append(b"p" * 5000)
    os.write(tell, b"!")
    assert os.waitpid(child, 0)[1] == 0
    file.close()
    assert (fs.read("parent"), fs.read("child")) == (b"p" * 5000, b"c" * 5000)
    os.close(ready)
    os.close(tell)


def write_pieces(fs: Filesystem, path: str, pieces: list[bytes]) -> None:
    file = fs.create(path)
    for piece in pieces:
        file.append(piece)
    file.close()


def test_sixty_open_stores_share_the_descriptors_of_the_process_a15(tmp_path: Path) -> None:
    stores = [LocalFilesystem(tmp_path / str(number)) for number in range(60)]
    for fs in stores:
        for number in range(10):
            write(fs, f"f{number}", b"x")
    before = len(os.listdir("/proc/self/fd"))
    for fs in stores:
        for number in range(10):
            assert fs.read_range(f"f{number}", 0, 1) == b"x"
    assert len(os.listdir("/proc/self/fd")) - before <= OPEN_FILES + 1


def test_a_store_is_verified_under_a_small_limit_of_open_files_a15(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=20, codec="q8")
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64,) * 2);"
        "from hiddenstore.verify import verify; sys.exit(len(verify(sys.argv[1], 'bytes').findings))"
    )
    command = [sys.executable, "-c", f"import sys; {program}", store.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_was_removed_and_made_anew_is_read_anew(tmp_path: Path) -> None:
    old, new = LocalFilesystem(tmp_path / "store"), LocalFilesystem(tmp_path / "store")
    write(old, "a", b"old")
    assert old.read_range("a", 0, 3) == b"old"
    old.remove_tree("a")
    write(new, "a", b"new")
    assert new.read_range("a", 0, 3) == b"new"


def test_a_cache_whose_folder_cannot_be_looked_after_still_reads(tmp_path: Path) -> None:
    fs = CachedFilesystem("s3://bucket/store", tmp_path, LEAST_BYTES, "segments")
    fs._known["segments/a"] = 4, "tag"
    # A folder in the place of the lock refuses as a full disk does, or the file of another user.
    (tmp_path / ".lock").mkdir()
    fs._keep("segments/a", 0, b"four")
    assert fs._cached("segments/a", 0, 4) == b"four"

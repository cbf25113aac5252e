"""What files and folders of a local disk look like to others while they are written, after a kill, and to a second."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hiddenstore.errors import ConflictError, CorruptionError, Kind, StorageError
from hiddenstore.fs.cache import _only_one
from hiddenstore.fs.disk import PosixDisk
from hiddenstore.fs.publish import make_folder, new_file, new_folder, replace_file, sweep_killed, tree_files
from hiddenstore.share.pull import _writing

WRITER = """
import sys, time
from pathlib import Path
from hiddenstore.fs.publish import new_file, new_folder
out = Path(sys.argv[2])
if sys.argv[1] == "folder":
    with new_folder(out) as folder:
        (folder / "half").write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(60)
else:
    with new_file(out) as file:
        file.write(b"half")
        print("writing", flush=True)
        time.sleep(60)
"""


@contextmanager
def writing(kind: str, out: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in the middle of writing ``out``, killed at the end at the latest."""
    with subprocess.Popen([sys.executable, "-c", WRITER, kind, str(out)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


def write(kind: str, out: Path) -> None:
    if kind == "folder":
        with new_folder(out) as folder:
            (folder / "all").write_bytes(b"all")
    else:
        with new_file(out) as file:
            file.write(b"all")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_killed_writer_leaves_no_name_and_the_next_one_sweeps_it(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    with writing(kind, out) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name.startswith(".out.writing-") for path in tmp_path.iterdir()] == [True]
    write(kind, out)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_second_writer_of_a_name_leaves_the_living_first_alone(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    with writing(kind, out):
        write(kind, out)
        sweep_killed(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_of_two_writers_of_a_name_one_is_refused_and_nothing_is_mixed(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConflictError, match="exists already") as caught:  # noqa: PT012
        if kind == "folder":
            with new_folder(out) as folder:
                (folder / "late").write_bytes(b"late")
                write(kind, out)
        else:
            with new_file(out) as file:
                file.write(b"late")
                write(kind, out)
    assert caught.value.kind == "output-exists"
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "all" if kind == "folder" else out).read_bytes() == b"all"


def test_a_name_that_was_taken_and_is_free_again_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(_hidden: Path, out: Path) -> None:
        raise FileExistsError(errno.EEXIST, "taken", str(out))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConflictError, match="somebody else") as caught:
        write("file", tmp_path / "out")
    assert caught.value.kind == "output-exists"
    assert list(tmp_path.iterdir()) == []


def test_what_fails_inside_keeps_its_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    for error in (CorruptionError("torn", kind=Kind.FILE_SHORT), StorageError("gone", kind=Kind.SERVER_TIMEOUT)):
        with pytest.raises(type(error)) as caught, new_folder(tmp_path / "out"):
            raise error
        assert caught.value is error
    with pytest.raises(StorageError) as full, new_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "no room")
    assert full.value.kind == "disk-full"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_place_no_other_can_take_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, link, dangling = tmp_path / "empty", tmp_path / "link", tmp_path / "dangling"
    empty.mkdir()
    link.symlink_to(empty)
    monkeypatch.chdir(empty)
    dangling.symlink_to(tmp_path / "nowhere")
    for out in (Path(), Path(".."), link, dangling):
        with pytest.raises(ConflictError) as caught, new_folder(out, lambda _: None):
            pytest.fail("the work began")
        assert caught.value.kind == "output-exists"
    assert sorted(tmp_path.rglob("*")) == [dangling, empty, link]


def test_everything_is_durable_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}").rpartition("/")[2].partition(".writing-")[0])
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda self, out: synced.append("rename") or os.rename(self, out))
    with new_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"a")
    assert synced == ["a", "inner", ".out", "rename", tmp_path.name]


@pytest.mark.parametrize("make", [make_folder, lambda path: write("folder", path)], ids=["folder", "new folder"])
def test_folders_that_were_made_above_a_folder_are_durable_from_the_top(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = list[str](), PosixDisk.sync_folder
    monkeypatch.setattr(PosixDisk, "sync_folder", lambda disk, path: synced.append(path) or real(disk, path))
    monkeypatch.chdir(tmp_path)
    make(Path("a", "b", "c"))
    above = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert [path for path in synced if path in above] == above
    synced.clear()
    make_folder(Path("a", "b", "c"))
    assert synced == []


def test_a_link_to_a_folder_elsewhere_is_followed_and_no_file_named_twice(tmp_path: Path) -> None:
    folder, disk = tmp_path / "data", tmp_path / "disk"
    for name in (folder / "run-1" / "x", disk / "more" / "y"):
        name.parent.mkdir(parents=True)
        name.write_bytes(b"")
    for name, to in {"latest": folder / "run-1", "part-2": disk, "part-3": disk / "more", "above": tmp_path}.items():
        (folder / name).symlink_to(to)
    (disk / "back").symlink_to(folder)
    assert sorted(tree_files(folder)) == [folder / "part-2/more/y", folder / "run-1/x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not list a folder")
def test_a_folder_that_may_not_be_listed_is_an_error_and_not_empty() -> None:
    # Its parents are open to all, which those of ``tmp_path`` are not.
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        folder.chmod(0o755)
        (folder / "a" / "closed").mkdir(parents=True)
        for name in ("a/x", "a/closed/y"):
            (folder / name).write_bytes(b"")
        (folder / "a" / "link").symlink_to(folder / "a")
        assert sorted(tree_files(folder)) == [folder / "a/closed/y", folder / "a/x"]
        (folder / "a" / "closed").chmod(0o700)
        os.seteuid(65_534)
        try:
            with pytest.raises(StorageError, match="closed") as caught:
                list(tree_files(folder))
        finally:
            os.seteuid(0)
        assert caught.value.kind == Kind.PERMISSION_DENIED
    assert list(tree_files(folder)) == []


def test_a_folder_that_cannot_be_made_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        make_folder(tmp_path / "file" / "inner")
    assert caught.value.kind == "path-invalid"
    assert str(tmp_path / "file" / "inner") in caught.value.message


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "LATEST"
    replace_file(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "io")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError) as caught:
            replace_file(path, b"new")
    assert caught.value.kind == "io-error"
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_filesystem_without_locks_takes_replaced_files_caches_and_pulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    replace_file(tmp_path / "LATEST", b"new")
    assert (tmp_path / "LATEST").read_bytes() == b"new"
    with _only_one(tmp_path / ".lock") as is_mine:
        assert is_mine
    with _writing(tmp_path / "pulled"):
        assert (tmp_path / "pulled").is_dir()
    assert f"{tmp_path / 'pulled'} lies on a filesystem without locks" in capsys.readouterr().err
    half = tmp_path / ".out.writing-01234567"
    half.touch()
    write("file", tmp_path / "out")
    assert half.exists(), "its writer may live"

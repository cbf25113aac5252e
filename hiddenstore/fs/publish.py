"""Files and folders of a local disk that appear under their name whole and durable, or not at all.

A writer killed half-way leaves a hidden neighbour ``.NAME.writing-`` and eight digits; the next writer of that name
removes it, unless the process that holds its lock still lives. What a store publishes goes through
``Filesystem.put_if_absent``.
"""

import errno
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hiddenstore.errors import ConflictError, HiddenstoreError, Kind, StorageError
from hiddenstore.fs.disk import PosixDisk, lock
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import Filesystem, WritableFile, storage_error, storage_errors

_PIECE_BYTES = 1 << 20
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}


def make_folder(path: Path) -> None:
    """A folder with those above it; the names that were not there survive a power loss. Raises StorageError:
    ``path-invalid``, a file is in the way or a name too long; as ``storage_error``, the disk refused."""
    try:
        made = [folder.absolute() for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(made):
            PosixDisk().sync_folder(str(folder.parent))
    except OSError as error:
        if error.errno in _NO_FOLDER:
            raise StorageError(f"{path}: {os.strerror(error.errno)}", kind=Kind.PATH_INVALID) from error
        raise storage_error(error, str(path)) from error


def refuse_existing_file(out: Path) -> None:
    """ConflictError ``output-exists`` when the name is taken."""
    if out.exists() or out.is_symlink():
        raise ConflictError(
            f"{out} exists already",
            kind=Kind.OUTPUT_EXISTS,
            hint=f"rm {shlex.quote(str(out))}, or name another file with -o",
        )


def refuse_existing_folder(out: Path) -> None:
    """ConflictError ``output-exists`` unless the name is free or an empty folder."""
    if (out.exists() or out.is_symlink()) and not (out.is_dir() and not any(out.iterdir())):
        raise ConflictError(
            f"{out} exists already and is not empty", kind=Kind.OUTPUT_EXISTS, hint="name another folder with -o"
        )
    _refuse_irreplaceable(out)


@contextmanager
def new_file(out: Path) -> Iterator[WritableFile]:
    """A file that becomes ``out`` when the block ends well and vanishes when it does not. Raises ConflictError:
    ``output-exists``; StorageError: the disk refused."""
    refuse_existing_file(out)
    sweep_killed(out.parent, out.name)
    fs = LocalFilesystem(out.parent)
    name = _hidden_name(out)
    file = fs.create(name)
    with _locked(Path(fs.root) / name):
        try:
            yield file
            file.close()
            _link(Path(fs.root) / name, out)
            PosixDisk().sync_folder(fs.root)
        except BaseException:
            file.abort()
            raise
        finally:
            with suppress(OSError):
                (Path(fs.root) / name).unlink()


@contextmanager
def new_folder(out: Path, refuse: Callable[[Path], None] = refuse_existing_folder) -> Iterator[Path]:
    """A folder to write into, which becomes ``out`` when the block ends well and vanishes when it does not.

    ``refuse`` raises where ``out`` is somebody's work already. Raises ConflictError: ``output-exists``; StorageError:
    the disk refused."""
    refuse(out)
    _refuse_irreplaceable(out)
    with room_beside(out) as hidden:
        try:
            yield hidden
            _sync_tree(hidden)
            # rename replaces an empty folder and nothing else.
            hidden.rename(out)
            PosixDisk().sync_folder(str(out.parent.absolute()))
        except HiddenstoreError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                refuse(out)
            raise storage_error(error, str(out)) from error


def _refuse_irreplaceable(out: Path) -> None:
    """What is said of an empty folder that no other can take the place of: before the work, not behind it."""
    if out.is_symlink() or (out.is_dir() and (out.name in ("", "..") or out.is_mount())):
        raise ConflictError(
            f"{out} is the working folder, a link or a mounted disk, whose place a finished folder cannot take",
            kind=Kind.OUTPUT_EXISTS,
            hint=f"-o {out / 'NAME'}",
        )


@contextmanager
def room_beside(out: Path) -> Iterator[Path]:
    """A folder on the disk of ``out`` that is gone when the block ends; a killed process's goes with the next writer of
    ``out``. Raises StorageError: it cannot be made."""
    hidden = out.parent / _hidden_name(out)
    with storage_errors(out):
        make_folder(out.parent)
        sweep_killed(out.parent, out.name)
        hidden.mkdir()
    with _locked(hidden):
        try:
            yield hidden
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def place_file(whole: Path, out: Path) -> None:
    """Give a finished file of the same disk its name. Raises ConflictError: ``output-exists``; StorageError: the disk
    refused."""
    refuse_existing_file(out)
    with storage_errors(out):
        _sync_file(whole)
        _link(whole, out)
        PosixDisk().sync_folder(str(out.parent.absolute()))


def upload(folder: Path, fs: Filesystem, last: str) -> None:
    """Copy the files of a folder to storage, ``last`` behind the others; what holds the same bytes already stays.
    Raises ConflictError: ``file-exists``, a name holds other bytes; StorageError: disk or storage refused."""
    names = [path.relative_to(folder).as_posix() for path in tree_files(folder)]
    for name in sorted(names, key=lambda name: (name == last, name)):
        file = fs.create(name)
        try:
            with (folder / name).open("rb") as source:
                while data := source.read(_PIECE_BYTES):
                    file.append(data)
            file.close()
        except BaseException:
            file.abort()
            raise


def tree_files(folder: Path) -> Iterator[Path]:
    """Every file below a folder, none where it is absent. A link to a folder elsewhere is followed; one to a folder of
    the tree, or to one that the tree lies in, names no more files. Raises StorageError: one of its folders cannot be
    listed, which ``rglob`` would pass over."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise storage_error(error, str(error.filename)) from error

    places = [folder.resolve()]
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        for path in [Path(root) / name for name in sorted(folders) if (Path(root) / name).is_symlink()]:
            place = path.resolve()
            if any(place.is_relative_to(known) or known.is_relative_to(place) for known in places):
                folders.remove(path.name)
            else:
                places.append(place)
        yield from (path for name in names if (path := Path(root) / name).is_file())


def existing_part(text: str) -> str | None:
    """The longest path that ``text`` begins with and ``[config]:split[slice]`` may follow; None: there is none."""
    ends = [match.start() for match in re.finditer(r"[\[:]|\Z", text)]
    return next(filter(os.path.exists, (text[:end] for end in reversed(ends))), None)


def replace_file(path: Path, data: bytes) -> None:
    """Give ``path`` new bytes in one step: a reader sees the old ones or the new ones. Raises StorageError: the disk
    refused; the old bytes stay."""
    hidden = path.with_name(_hidden_name(path))
    try:
        with hidden.open("xb") as file:
            lock(file.fileno(), waits=True)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            hidden.replace(path)
        PosixDisk().sync_folder(str(path.parent.absolute()))
    except OSError as error:
        raise storage_error(error, str(path)) from error
    finally:
        # A disk that cannot be written refuses this too, of what is not there, and is told by the error above.
        with suppress(OSError):
            hidden.unlink()


def sweep_killed(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers of ``name`` (default: of any name) left in a folder; a living writer's stays."""
    hidden = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.writing-[0-9a-f]{{8}}")
    for path in [path for path in folder.glob(".*.writing-*") if hidden.fullmatch(path.name)]:
        with suppress(FileNotFoundError), _locked(path) as is_dead:
            if is_dead:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _hidden_name(out: Path) -> str:
    return f".{out.name}.writing-{secrets.token_hex(4)}"


def _link(hidden: Path, out: Path) -> None:
    try:
        os.link(hidden, out)
    except FileExistsError as error:
        refuse_existing_file(out)
        # The name is free again; who waits for these bytes must hear that they are not there.
        raise ConflictError(f"{out} was written by somebody else, too", kind=Kind.OUTPUT_EXISTS) from error
    except OSError as error:
        # Some filesystems know no hard links; between the question and the rename somebody could come first.
        refuse_existing_file(out)
        try:
            hidden.rename(out)
        except OSError:
            raise storage_error(error, str(out)) from error


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_file(Path(root) / name)
        PosixDisk().sync_folder(root)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process could lock a file or folder: a lock says that its writer lives, and ends with it."""
    handle = os.open(path, os.O_RDONLY)
    is_locked = False
    try:
        with suppress(OSError):
            is_locked = lock(handle)
        yield is_locked
    finally:
        os.close(handle)

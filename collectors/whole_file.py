"""A file that appears under its name whole or not at all, however large it is."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hiddenstore.disk import PosixDisk
from hiddenstore.errors import ConflictError
from hiddenstore.fs import WritableFile, storage_error
from hiddenstore.fs_local import LocalFilesystem


@contextmanager
def new_file(out: Path) -> Iterator[WritableFile]:
    """A file that becomes ``out`` when the block ends well and vanishes when it does not.

    Raises:
        ConflictError: ``output-exists``.
        StorageError: the disk refused.
    """
    refuse_existing_file(out)
    fs = LocalFilesystem(out.parent)
    name = f".{out.name}.writing-{secrets.token_hex(4)}"
    file = fs.create(name)
    try:
        yield file
        file.close()
        _publish(Path(fs.root) / name, out)
        PosixDisk().sync_folder(fs.root)
    except BaseException:
        file.abort()
        raise
    finally:
        with suppress(OSError):
            (Path(fs.root) / name).unlink()


def _publish(temp: Path, out: Path) -> None:
    try:
        os.link(temp, out)
    except FileExistsError:
        refuse_existing_file(out)
    except OSError as error:
        # Some filesystems know no hard links; between the question and the rename somebody could come first.
        refuse_existing_file(out)
        try:
            temp.rename(out)
        except OSError:
            raise storage_error(error, str(out)) from error


def refuse_existing_file(out: Path) -> None:
    """ConflictError ``output-exists`` when the name is taken."""
    if out.exists() or out.is_symlink():
        raise ConflictError(
            f"{out} exists already", kind="output-exists", hint=f"rm {out}, or name another file with -o"
        )

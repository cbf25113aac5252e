"""What of other software's errors is the operating system's: that is raised, and the rest is the caller's."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hiddenstore.errors import ConfigError, Kind, StorageError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.targets.folder import open_adapter


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "x"), "io-error"),
        (OSError(errno.ESTALE, "x"), "io-error"),
        (PermissionError(errno.EACCES, "x"), "permission-denied"),
        (SafetensorError("Error: I/O (os error 5)"), "io-error"),
        (RuntimeError("unable to mmap 64 bytes from file <x>: Cannot allocate memory (12)"), "io-error"),
        (StorageError("late", kind=Kind.SERVER_TIMEOUT), "server-timeout"),
    ],
)
def test_what_the_system_refused_is_raised_as_that(error: Exception, kind: str) -> None:
    with pytest.raises(StorageError) as caught:
        raise_refusal(error, "place")
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "error",
    [
        OSError("no tokenizer here"),
        FileNotFoundError(errno.ENOENT, "x"),
        IsADirectoryError(errno.EISDIR, "x"),
        SafetensorError("header too small"),
        ConfigError("x", kind=Kind.USAGE),
    ],
)
def test_what_speaks_of_the_file_is_left_to_the_caller(error: Exception) -> None:
    raise_refusal(error, "place")


def test_an_adapter_that_the_disk_refuses_is_not_called_unfit(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").symlink_to("/proc/self/mem")
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)) as caught:
        open_adapter(str(tmp_path))
    assert caught.value.kind == "io-error"

"""Logging of a command: stdlib logging to stderr, and the file a bug leaves behind."""

import logging
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from hiddenstore.console.text import clean

_NOISY = (
    *("datasets", "transformers", "urllib3", "httpx2", "httpcore2", "filelock", "fsspec", "numcodecs", "zarr"),
    "py.warnings",
)


class _CurrentStderr(logging.Handler):
    """Writes to the stderr of the moment, so that a redirected or replaced stream is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(clean(self.format(record)) + "\n")


def set_up(verbose: int) -> None:
    """Warnings by default; ``-v`` shows our info messages; ``-vv`` everything, of every library."""
    root = logging.getLogger()
    if not any(isinstance(handler, _CurrentStderr) for handler in root.handlers):
        handler = _CurrentStderr()
        # It has a handler of its own: without this every line of it would be printed twice.
        handler.addFilter(lambda record: not record.name.startswith("huggingface_hub"))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(level if verbose > 1 else logging.ERROR)


def write_crash_log(error: BaseException, arguments: Sequence[str]) -> Path:
    """Write the traceback and the versions of this machine to a new file in the temporary folder; its path."""
    versions = [f"{name} {_version(name)}" for name in ("hiddenstore", "torch", "transformers", "zarr", "numpy")]
    lines = [
        f"hiddenstore {' '.join(arguments)}",
        f"python {platform.python_version()} on {platform.platform()}; {', '.join(versions)}",
        "",
        *traceback.format_exception(error),
    ]
    descriptor, path = tempfile.mkstemp(prefix="hiddenstore-error-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as log:
        log.write("\n".join(lines))
    return Path(path)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"

"""A small disk of its own in memory."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs at ``folder``, where this machine lets us mount one."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    # Lazily: a store keeps its read handles while a test's frame is alive.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)

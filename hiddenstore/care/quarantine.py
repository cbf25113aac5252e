"""``quarantine/``: where damaged files go, so that nothing is ever removed that exists nowhere else."""

from itertools import count

from hiddenstore import layout
from hiddenstore.fs.seam import Filesystem


def set_aside(fs: Filesystem, path: str) -> str:
    """Move a file to ``quarantine/`` under its own path, or with ``.2``, ``.3`` … behind it; the new path.

    Raises:
        StorageError: the disk refused; the file stays where it was.
    """
    data = fs.read(path)
    for number in count(1):
        new_path = f"{layout.QUARANTINE_DIR}/{path}{f'.{number}' if number > 1 else ''}"
        if fs.put_if_absent(new_path, data) or fs.read(new_path) == data:
            fs.remove_tree(path)
            return new_path
    raise AssertionError("numbers do not end")

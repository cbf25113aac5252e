"""Do the headers of a tar call its members what the index calls them: others read by the headers, we by the index.

Both have their digest, so that only a program which wrote one of them wrong makes them differ.
"""

import json
from bisect import bisect_left

from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.files import SegmentFiles
from hiddenstore.segments.tar import BLOCK_BYTES, INDEX, TAR, UNIT_PREFIX
from schemas.manifest import CommitRecord

_NAME, _SIZE = slice(0, 100), slice(124, 136)


class TarHeaders:
    """What the index of a tar says of its headers. ``fault`` says in words where the first one differs.

    Raises:
        CorruptionError, FormatError: the index cannot be read.
    """

    def __init__(self, fs: Filesystem, record: CommitRecord) -> None:
        files = SegmentFiles(fs, record.segment, record)
        self.fault: str | None = None
        try:
            index = json.loads(files.read(INDEX))
            members = [(f"{UNIT_PREFIX}{name}", row[0], row[1]) for name, row in index["unit"].items()]
            for name, field in index["fields"].items():
                for sample, offset, size in zip(record.samples, field["offset"], field["size"], strict=True):
                    members.append((f"{sample.id}.{name}", offset, size))
            self._headers = sorted(
                (int(offset) - BLOCK_BYTES, name.encode(), int(size)) for name, offset, size in members
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise files.misfit(INDEX, f"it is no index of {TAR} ({error})") from error

    def look(self, start: int, data: bytes | memoryview) -> None:
        """Compare the headers in whole blocks of the tar, from byte ``start`` on."""
        for offset, name, size in self._headers[bisect_left(self._headers, (start,)) :]:
            place = offset - start
            if place >= len(data) or self.fault is not None:
                return
            block = bytes(data[place : place + BLOCK_BYTES])
            if block[_NAME].rstrip(b"\0") != name or _octal(block[_SIZE]) != size:
                stored = block[_NAME].rstrip(b"\0").decode("ascii", "replace")
                self.fault = (
                    f"{INDEX} calls what lies behind the header at byte {offset:,} {name.decode()} of {size:,} bytes, "
                    f"the header {stored!r} of {_octal(block[_SIZE]):,}"
                )


def _octal(text: bytes) -> int:
    try:
        return int(text.strip(b" \0"), 8)
    except ValueError:
        return -1

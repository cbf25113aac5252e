"""Storage as a store asks for it: the seam, its POSIX disk, publication."""

from pathlib import Path

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import Filesystem


def open_filesystem(location: "str | Path | Filesystem") -> Filesystem:
    """The filesystem at a location; a Filesystem is returned as it is.

    Raises:
        ConfigError: ``scheme-unsupported`` for a URL.
    """
    if not isinstance(location, str | Path):
        return location
    text = str(location)
    scheme, separator, _ = text.partition("://")
    if separator and scheme.isalnum():
        raise ConfigError(
            f"{text}: stores open from local paths only, not from {scheme}://",
            kind=Kind.SCHEME_UNSUPPORTED,
            hint="copy the store to a local folder first",
        )
    return LocalFilesystem(text)

"""Storage as a store asks for it: the seam, its POSIX disk and its object storage, publication."""

from pathlib import Path

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import Filesystem, is_address, parse_address


def open_filesystem(location: "str | Path | Filesystem") -> Filesystem:
    """The filesystem at a local path or an address of object storage; a Filesystem is returned as it is. Raises
    ConfigError: ``scheme-unsupported``, ``address-invalid``."""
    if not isinstance(location, str | Path):
        return location
    if is_address(location):
        from hiddenstore.fs.objects import ObjectFilesystem

        return ObjectFilesystem(str(location))
    return LocalFilesystem(location)


def require_local(location: str | Path, what: str) -> Path:
    """A location of what is kept on a local disk only. Raises ConfigError: ``scheme-unsupported`` for an address of
    object storage."""
    if is_address(location):
        scheme, bucket, _ = parse_address(str(location))
        raise ConfigError(f"{what} lies on a local disk, not at {scheme}://{bucket}/…", kind=Kind.SCHEME_UNSUPPORTED)
    return Path(location)

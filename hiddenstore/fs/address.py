"""Addresses of object storage, read without what opens them: most stores lie on a disk."""

import re

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.fs.seam import is_inside

CREDENTIALS = "credentials come from the environment or the provider's own chain, see docs/object-storage.md"

_ADDRESS = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{1,254})((?:/[^/?#]+)*)/*")


def is_address(location: object) -> bool:
    """Whether a location is written as a URL, of whatever scheme."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(location)) is not None


def parse_address(text: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix of an address. Raises ConfigError: ``scheme-unsupported``; ``address-invalid``: user,
    password or query, or no bucket. Neither is quoted: it may be a secret."""
    scheme = text.partition("://")[0]
    if scheme not in ("s3", "gs", "az"):
        raise ConfigError(
            f"{scheme}:// cannot be opened: expected a local path, s3://, gs:// or az://", kind=Kind.SCHEME_UNSUPPORTED
        )
    match = _ADDRESS.fullmatch(text)
    if match is None or not is_inside(match[3][1:] or "x"):
        raise ConfigError(
            f"{scheme}://… is no address of a bucket: expected {scheme}://BUCKET/PATH without user, password or query",
            kind=Kind.ADDRESS_INVALID,
            hint=CREDENTIALS,
        )
    return scheme, match[2], match[3][1:]

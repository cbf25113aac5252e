"""A server's key: read from the environment, sent in one header, written nowhere."""

import os

from hiddenstore.errors import ConfigError


def from_environment(name: str | None) -> str | None:
    """The key in the environment variable ``name``; None where no variable is named.

    Raises:
        ConfigError: ``api-key-missing``: the variable is not set, or holds nothing that fits into a header.
    """
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key or key != key.strip() or not key.isascii():
        raise ConfigError(
            f"the environment variable {name} holds no key", kind="api-key-missing", hint=f"export {name}=…"
        )
    return key

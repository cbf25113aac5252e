"""Versions of engines: ``0.32.1``, ``1.3.0rc12``, ``1.2`` compared as their projects number them."""

import re

from hiddenstore.errors import ConfigError

Version = tuple[int, int, int, int]
"""Major, minor, patch, release candidate; a release itself counts as candidate 10^6."""

_FORM = re.compile(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:\.?(?:rc|a|b|dev)(\d+))?(?:[.+-].*)?")
_RELEASE = 10**6


def parse(text: str) -> Version:
    """The version that ``text`` writes; what is left out is 0.

    Raises:
        ConfigError: no version.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no version", kind="engine-version", hint="--engine-version 1.3.0rc12")
    major, minor, patch, candidate = match.groups()
    return (int(major), int(minor or 0), int(patch or 0), _RELEASE if candidate is None else int(candidate))


def is_within(version: str, since: str | None, before: str | None) -> bool:
    """Whether ``since <= version < before``; None leaves a side open. A candidate counts to its release.

    ``1.3.0rc12`` has what came with 1.3.
    """
    release = parse(version)[:3]
    return (since is None or release >= parse(since)[:3]) and (before is None or release < parse(before)[:3])

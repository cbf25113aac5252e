"""Torch files of strangers, which are pickles: only a torch whose reader runs no code of theirs opens them."""

from packaging.version import Version

from hiddenstore.errors import ConfigError, Kind

SAFE_TORCH = Version("2.10")


def require_safe_torch() -> None:
    """ConfigError ``pickle-refused`` for a torch whose ``weights_only`` can be talked into running code."""
    import torch

    if Version(torch.__version__) < SAFE_TORCH:
        raise ConfigError(
            f"torch {torch.__version__} cannot read torch files of strangers safely (CVE-2026-24747), {SAFE_TORCH} can",
            kind=Kind.PICKLE_REFUSED,
            hint=f"pip install 'torch>={SAFE_TORCH}'",
        )

"""Advice in a store: numbered sealed documents under ``advice/``, of which the latest is shown."""

from hiddenstore import layout
from hiddenstore.documents import load, seal
from hiddenstore.fs import Filesystem
from schemas.advice import Advice


def advice_numbers(fs: Filesystem) -> list[int]:
    """The numbers of the advice a store holds, ascending."""
    return sorted(number for name in fs.list(layout.ADVICE_DIR) if (number := layout.parse_advice(name)) is not None)


def read_advice(fs: Filesystem, number: int | None = None) -> Advice | None:
    """One advice, the latest unless told; None when a store has none; CorruptionError when it is damaged."""
    if number is None:
        number = max(advice_numbers(fs), default=0)
    return None if number == 0 else load(fs, layout.advice_path(number), Advice)


def write_advice(fs: Filesystem, advice: Advice) -> str:
    """Publish advice under the next number, unless the latest says the same; the path of the document that holds it."""
    number = max(advice_numbers(fs), default=0)
    if number and fs.read(layout.advice_path(number)) == seal(advice):
        return layout.advice_path(number)
    while not fs.put_if_absent(layout.advice_path(number + 1), seal(advice)):
        number += 1
    return layout.advice_path(number + 1)

"""Codecs that are fitted to a store: fitting one to states, and the file of ``target/`` that it reads.

The file's name holds its digest, as the codec's does: two ranks that fit to slightly other states publish two files,
and whoever makes the store first names its own.

Shapes: L stored layers, t tokens of a sample.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from hiddenstore.codecs import CODECS, FITTED, kind_of
from hiddenstore.codecs.recipes import recipe_name
from hiddenstore.errors import ConfigError, HiddenstoreError, Kind
from hiddenstore.files.documents import sha256_hex
from hiddenstore.files.layout import fitted_name
from schemas.capture import CaptureSpec

if TYPE_CHECKING:
    from torch import Tensor

_DIGEST_CHARACTERS = 16
# By name and by where they lie, the store opened last behind the others: any of them gives the same file.
_READERS: dict[str, dict[str, Callable[[str], bytes]]] = {}


def bind(name: str, where: str, read: Callable[[str], bytes]) -> None:
    """Make a codec that was fitted known by its name; ``read`` gives a file of ``target/`` of the store at an address,
    when it is first needed. One whole file is enough for every store that was opened and names the same codec."""
    if (kind := kind_of(name)) != name:
        readers = _READERS.setdefault(name, {})
        readers.pop(where, None)
        readers[where] = read
        CODECS.bind(name, lambda: FITTED[kind].of(name, partial(_file, name)))


def _file(name: str) -> bytes:
    """Of the store that was opened last, or of another where it cannot be read there; raises as that one does."""
    last, *others = reversed(list(_READERS[name].values()))
    try:
        return last(fitted_name(name))
    except HiddenstoreError:
        for read in others:
            with suppress(HiddenstoreError):
                return read(fitted_name(name))
        raise


def is_unfitted(capture: CaptureSpec) -> bool:
    """Whether the codec of the aux layers has yet to be fitted."""
    return capture.codecs.aux in FITTED


def encodes(capture: CaptureSpec) -> bool:
    """Whether units can be encoded anew. Where a copy left out layers they cannot be: their fitted codec is of all."""
    kind, codec = kind_of(capture.codecs.aux), capture.codecs.aux
    return kind == codec or FITTED[kind].layers_of(CODECS[codec]) == len(capture.stored_layers)


def require_encodes(capture: CaptureSpec, path: str) -> None:
    """Refuse a store that no unit can be encoded for: ConfigError ``codec-unfit``."""
    if not encodes(capture):
        recipe = recipe_name(capture.codecs.model_copy(update={"aux": kind_of(capture.codecs.aux)}))
        raise ConfigError(
            f"{capture.codecs.aux} of {path} is fitted to more layers than the store holds: it takes units that are "
            "coded by the same one, and no others",
            kind=Kind.CODEC_UNFIT,
            hint=shlex.join(["hiddenstore", "copy", path, f"{path}-anew", "--recipe", recipe]),
        )


def require_fitted(capture: CaptureSpec) -> None:
    """Refuse a capture that no unit could be written by: ConfigError ``codec-unfit``."""
    if is_unfitted(capture):
        raise ConfigError(
            f"{capture.codecs.aux} is fitted to states of the store's own mix, and was not",
            kind=Kind.CODEC_UNFIT,
            hint=f"--recipe safe, then: hiddenstore copy STORE NEW --recipe {recipe_name(capture.codecs)}",
        )


def fit(capture: CaptureSpec, states: Iterable["Tensor"]) -> tuple[CaptureSpec, dict[str, bytes]]:
    """A capture whose aux codec has yet to be fitted, with the codec that fits ``states``, bfloat16 [L, t, D] of
    samples of the whole mix, and the file that it reads. No more of them are taken than it wants. Raises ConfigError:
    ``codec-unfit``: there are none, or nothing fits them."""
    import torch

    kind = FITTED[capture.codecs.aux]
    samples = list(_enough(states, kind.fit_tokens(capture.target.hidden_size)))
    if not samples:
        problem = f"{capture.codecs.aux} is fitted to states of the store's own samples, and there is none"
        raise ConfigError(problem, kind=Kind.CODEC_UNFIT, hint="--recipe rebuilt")
    data = kind.fit(torch.cat([sample[slot] for sample in samples]) for slot in range(len(capture.stored_layers)))
    name = f"{capture.codecs.aux}-{sha256_hex(data)[:_DIGEST_CHARACTERS]}"
    bind(name, "", lambda _path: data)
    codecs = capture.codecs.model_copy(update={"aux": name})
    return capture.model_copy(update={"codecs": codecs}), {fitted_name(name): data}


def spread(tokens: int, samples: int, capture: CaptureSpec) -> int:
    """Every how many of so many samples, of so many tokens in all, one is taken to fit a codec to."""
    enough = FITTED[kind_of(capture.codecs.aux)].fit_tokens(capture.target.hidden_size)
    return max(1, min(samples, tokens // enough))


def _enough(states: Iterable["Tensor"], tokens: int) -> Iterator["Tensor"]:
    for sample in states:
        yield sample
        tokens -= sample.shape[1]
        if tokens <= 0:
            return

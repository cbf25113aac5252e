"""Which layer each column of a dump is: from the format, the dump, or the person who made it.

Shapes: T tokens, C columns of the dump, L aux layers of the store, D target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from collectors.importers import PeerFormat
from collectors.importers.peer import Unusable
from hiddenstore.errors import ConfigError
from schemas.layers import DrafterName, field_name, from_convention, published_aux_layers, to_convention


@dataclass(frozen=True)
class Columns:
    """``layers``: our number of every column, in the dump's order, None for one that repeats the final hidden."""

    layers: tuple[int | None, ...]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What the store will hold: each layer once, ascending."""
        return tuple(sorted({layer for layer in self.layers if layer is not None}))

    @property
    def repeated(self) -> int:
        """Columns that are stored once although the dump holds them twice."""
        return len(self.layers) - len(self.aux_layers)

    def explained(self, peer: PeerFormat, num_layers: int) -> str:
        """One line for people: our numbers and the peer's."""
        if not self.aux_layers:
            return "no aux layers: the dump holds the final hidden only"
        ours = ", ".join(map(str, self.aux_layers))
        theirs = ", ".join(map(str, to_convention(self.aux_layers, peer.numbering)))
        named = f" ({theirs} as {peer.name} counts)" if peer.numbering != "output" else ""
        twice = (
            f"; {self.repeated} repeated column{'s' if self.repeated > 1 else ''} stored once" if self.repeated else ""
        )
        return f"aux layers {ours} of {num_layers}{named}{twice}"

    def take(self, columns: Tensor | None, final: Tensor | None, out: Tensor) -> None:
        """Columns [T, C, D] into ``out`` bf16 [L, T, D].

        Raises:
            Unusable: ``layers-differ``: two columns of one layer, or a repeated final hidden, are not equal.
        """
        if columns is None:
            return
        if columns.shape[1] != len(self.layers):
            raise Unusable(
                "wrong-width", f"it holds {columns.shape[1]} layers, the samples before it {len(self.layers)}"
            )
        slots = {layer: slot for slot, layer in enumerate(self.aux_layers)}
        taken: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            column = columns[:, index]
            if layer is None:
                if final is None or not _same(column, final):
                    raise Unusable("layers-differ", f"column {index} is not the final hidden that it should repeat")
            elif layer in taken:
                if not _same(column, taken[layer]):
                    raise Unusable("layers-differ", f"two columns are both {field_name(layer)} and differ")
            else:
                taken[layer] = column
                out[slots[layer]] = column


@dataclass(frozen=True)
class LayersAsked:
    """What a person said of the columns: ``layers`` in our numbers or a drafter's name, or ``peer_layers``."""

    layers: str | None = None
    peer_layers: str | None = None

    def resolve(self, peer: PeerFormat, num_layers: int) -> tuple[int, ...] | None:
        """Our numbers in the dump's order; None when nothing was said."""
        if self.layers is not None and self.peer_layers is not None:
            raise ConfigError("give --layers or --peer-layers, not both", kind="layers-invalid")
        if self.peer_layers is not None:
            ids = _numbers(self.peer_layers, "--peer-layers")
            # vLLM hands columns out ascending and once each, in whatever order they were asked for.
            ids = sorted(set(ids)) if peer.numbering == "vllm" else ids
            found = tuple(from_convention(ids, peer.numbering))
        elif self.layers is None:
            return None
        elif self.layers in get_args(DrafterName):
            # As published: a dump of a shallow target repeats what collides.
            return tuple(published_aux_layers(self.layers, num_layers))  # type: ignore[arg-type]
        else:
            found = tuple(_numbers(self.layers, "--layers"))
        outside = [layer for layer in found if not -1 <= layer < num_layers]
        if outside:
            raise ConfigError(
                f"layers {', '.join(map(str, outside))} are outside -1…{num_layers - 1}: the target has {num_layers} "
                "layers, counted from 0 by their output, and -1 is the embedding output",
                kind="layer-out-of-range",
                hint="--peer-layers takes the numbers as the peer's own command named them",
            )
        return found


def choose_columns(
    peer: PeerFormat,
    asked: LayersAsked,
    stated: Sequence[int] | None,
    count: int,
    num_layers: int,
) -> Columns:
    """The layer of each of ``count`` columns; ``stated`` are ids in the dump itself, in the peer's numbering.

    Raises:
        ConfigError: ``layers-needed``: nobody says which they are; ``layers-count``; ``layers-differ``: the person and
            the dump disagree.
    """
    named = asked.resolve(peer, num_layers)
    if count == 0:
        return Columns(())
    if stated is not None:
        own = tuple(from_convention(stated, peer.numbering))
        if named is not None and named != own:
            raise ConfigError(
                f"the dump says its layers are {_listed(own)}, not {_listed(named)}",
                kind="layers-differ",
                hint="leave --layers out",
            )
        return _fitted(peer, own, count, num_layers, "the dump names")
    if named is not None:
        return _fitted(peer, named, count, num_layers, "you named")
    for candidate in _defaults(peer, num_layers):
        if len(candidate) == count:
            return Columns(candidate)
    raise _needed(peer, count, num_layers)


def _defaults(peer: PeerFormat, num_layers: int) -> list[tuple[int, ...]]:
    """What the format's own tool captures unasked: as published, and with what collides taken once."""
    if peer.layers is None:
        return []
    published = published_aux_layers(peer.layers, num_layers)
    if any(layer < 0 for layer in published):
        return []
    return [tuple(published), tuple(sorted(set(published)))]


def _fitted(peer: PeerFormat, layers: tuple[int, ...], count: int, num_layers: int, who: str) -> Columns:
    last = num_layers - 1
    if len(layers) == count:
        # Automodel's DSpark takes the last layer after the final norm: it is the final hidden once more.
        post = peer.name == "automodel-dspark"
        return Columns(tuple(None if post and layer == last else layer for layer in layers))
    if peer.final is not None and len(layers) + 1 == count:
        return Columns((*layers, None))
    if peer.numbering == "vllm" and len(layers) == count + 1 and layers[-1] == last:
        return Columns(layers[:-1])  # vLLM's own list ends in the id of the final hidden
    raise ConfigError(
        f"the dump holds {count} layers, {who} {len(layers)}: {_listed(layers)}",
        kind="layers-count",
        hint=f"name {count} layers, in the order of the dump: --layers {','.join(map(str, range(count)))}",
    )


def _needed(peer: PeerFormat, count: int, num_layers: int) -> ConfigError:
    guesses = []
    names: tuple[DrafterName, ...] = ("eagle3", "dflash")
    for name in names:
        layers = published_aux_layers(name, num_layers)
        if len(layers) == count and min(layers) >= 0:
            guesses.append(f"--layers {name} means {_listed(layers)}")
    numbers = "by their output, from 0" if peer.numbering == "output" else "as vLLM does, one more than by their output"
    text = (
        f"nothing in {peer.name} files says which layers their {count} columns are. --layers 1,15,28 names them by the "
        f"block whose output they are, from 0 (-1 = embeddings); --peer-layers takes the ids the dump was made with, "
        f"which {peer.name} counts {numbers}"
    )
    if guesses:
        text += f". {'; '.join(guesses)}"
    if peer.name == "modelopt-vllm":
        text += (
            ". ModelOpt hands its ids to vLLM unchanged, so the same --aux-layers mean one block earlier than in its "
            "other dumps"
        )
    option = "--peer-layers" if peer.numbering == "vllm" else "--layers"
    example = published_aux_layers("dflash", num_layers, count) if num_layers > count > 1 else list(range(count))
    return ConfigError(text, kind="layers-needed", hint=f"{option} {','.join(map(str, example))}")


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(" ", ",").split(",") if word]
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no list of numbers such as 1,15,28", kind="layers-invalid") from None


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(str(layer) for layer in layers)


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, or NaN at the same places: what is not finite is refused elsewhere, by its own name."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())

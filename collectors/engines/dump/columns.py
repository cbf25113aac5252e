"""Which layer each column of a dump is: from the format, the dump, or the person who made it.

Shapes: T tokens, C columns of the dump, L aux layers of the store, D target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectors.engines.dump.peer import PeerSource, Unusable
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.targets.layer_rules import LAYER_RULES
from schemas.capture import NormState
from schemas.layers import field_name, from_convention, published_aux_layers, to_convention


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

    def explained(self, source: PeerSource, num_layers: int) -> str:
        """One line for people: our numbers and the peer's."""
        if not self.aux_layers:
            return "no aux layers: the dump holds the final hidden only"
        peers = _listed(to_convention(self.aux_layers, source.numbering))
        text = f"aux layers {_listed(self.aux_layers)} of {num_layers}"
        if source.numbering != "output":
            text += f" ({peers} as {source.name} counts)"
        if self.repeated:
            text += f"; {self.repeated} repeated column{'s' if self.repeated > 1 else ''} stored once"
        return text

    def copy(self, columns: Tensor | None, final: Tensor | None, out: Tensor) -> None:
        """Columns [T, C, D] into ``out`` bf16 [L, T, D].

        Raises:
            Unusable: ``layers-differ``: two columns of one layer, or a repeated final hidden, are not equal.
        """
        if columns is None:
            return
        count = columns.shape[1]
        if count != len(self.layers):
            raise Unusable("wrong-width", f"it holds {count} layers, the samples before it {len(self.layers)}")
        first: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            column = columns[:, index]
            if layer is None:
                if final is None or not _same(column, final):
                    raise Unusable("layers-differ", f"column {index} is not the final hidden that it should repeat")
            elif layer not in first:
                first[layer] = column
                out[self.aux_layers.index(layer)] = column
            elif not _same(column, first[layer]):
                raise Unusable("layers-differ", f"two columns are both {field_name(layer)} and differ")


@dataclass(frozen=True)
class Claims:
    """What a person says of a dump; None where nothing is said.

    ``layers`` names its columns in our numbers or is a drafter's name, ``peer_layers`` in the peer's numbers; ``norm``
    is the norm state of its final hidden.
    """

    layers: str | None = None
    peer_layers: str | None = None
    norm: NormState | None = None

    def columns(self, source: PeerSource, num_layers: int) -> tuple[int, ...] | None:
        """Our number of each column, in the dump's order; None when nothing was said."""
        if self.layers is not None and self.peer_layers is not None:
            raise ConfigError("give --layers or --peer-layers, not both", kind=Kind.LAYERS_INVALID)
        if self.peer_layers is not None:
            ids = _numbers(self.peer_layers, "--peer-layers")
            # vLLM hands columns out ascending and once each, in whatever order they were asked for.
            ids = sorted(set(ids)) if source.numbering == "vllm" else ids
            layers = from_convention(ids, source.numbering)
        elif self.layers is None:
            return None
        elif self.layers in LAYER_RULES:
            # As published: a dump of a shallow target repeats what collides.
            layers = list(LAYER_RULES[self.layers].published(num_layers, None))
        else:
            layers = _numbers(self.layers, "--layers")
        outside = [layer for layer in layers if not -1 <= layer < num_layers]
        if outside:
            raise ConfigError(
                f"layers {_listed(outside)} are outside -1…{num_layers - 1}: the target has {num_layers} layers, "
                "counted from 0 by their output, and -1 is the embedding output",
                kind=Kind.LAYERS_INVALID,
                hint="--peer-layers takes the numbers as the peer's own command named them",
            )
        return tuple(layers)


def choose_columns(
    source: PeerSource, claims: Claims, stated: Sequence[int] | None, count: int, num_layers: int
) -> Columns:
    """The layer of each of ``count`` columns; ``stated`` are ids in the dump itself, in the peer's numbering.

    Raises:
        ConfigError: ``dump-unclear``: nobody says which they are; ``layers-invalid``; ``layers-differ``: the person and
            the dump disagree.
    """
    claimed = claims.columns(source, num_layers)
    if count == 0:
        return Columns(())
    if stated is not None:
        layers = tuple(from_convention(stated, source.numbering))
        if claimed not in (None, layers):
            raise FormatError(
                f"the dump says its layers are {_listed(layers)}, not {_listed(claimed or ())}",
                kind=Kind.LAYERS_DIFFER,
                hint="leave --layers out",
            )
        return _fitted(source, layers, count, num_layers, "the dump names")
    if claimed is not None:
        return _fitted(source, claimed, count, num_layers, "you named")
    if source.default_layers is not None:
        # What the format's own tool captures unasked: as published, or with what collides taken once.
        published = published_aux_layers(source.default_layers, num_layers)
        for candidate in (published, sorted(set(published))):
            if len(candidate) == count and min(candidate) >= 0:
                return Columns(tuple(candidate))
    raise _needed(source, count, num_layers)


def _fitted(source: PeerSource, layers: tuple[int, ...], count: int, num_layers: int, who: str) -> Columns:
    last = num_layers - 1
    if len(layers) == count:
        return Columns(tuple(None if source.last_is_final and layer == last else layer for layer in layers))
    if source.final is not None and len(layers) + 1 == count:
        return Columns((*layers, None))
    if source.numbering == "vllm" and len(layers) == count + 1 and layers[-1] == last:
        return Columns(layers[:-1])  # vLLM's own list ends in the id of the final hidden
    raise ConfigError(
        f"the dump holds {count} layers, {who} {len(layers)}: {_listed(layers)}",
        kind=Kind.LAYERS_INVALID,
        hint=f"name {count} layers, in the order of the dump: --layers {','.join(map(str, range(count)))}",
    )


def _needed(source: PeerSource, count: int, num_layers: int) -> ConfigError:
    guesses = []
    for name in ("eagle3", "dflash"):
        layers = published_aux_layers(name, num_layers)
        if len(layers) == count and min(layers) >= 0:
            guesses.append(f"--layers {name} means {_listed(layers)}")
    is_vllm = source.numbering == "vllm"
    numbers = "as vLLM does, one more than by their output" if is_vllm else "by their output, from 0"
    text = (
        f"nothing in {source.name} files says which layers their {count} columns are. --layers 1,15,28 names them by "
        f"the block whose output they are, from 0 (-1 = embeddings); --peer-layers takes the ids the dump was made "
        f"with, which {source.name} counts {numbers}"
    )
    if guesses:
        text += f". {'; '.join(guesses)}"
    text += source.layers_note
    option = "--peer-layers" if is_vllm else "--layers"
    example = published_aux_layers("dflash", num_layers, count) if num_layers > count > 1 else list(range(count))
    return ConfigError(text, kind=Kind.DUMP_UNCLEAR, hint=f"{option} {','.join(map(str, example))}")


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(" ", ",").split(",") if word]
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is no list of numbers such as 1,15,28", kind=Kind.LAYERS_INVALID
        ) from None


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(str(layer) for layer in layers)


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, or NaN at the same places: what is not finite is refused elsewhere, by its own name."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())

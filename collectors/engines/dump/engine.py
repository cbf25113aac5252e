"""A dump as an engine: which layer each column is, and states looked up where a sample was read.

Shapes: N tokens of the unit, R final rows, L aux layers, C columns of the dump, D target width, T tokens of a sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured, CaptureRequest, Done, Refusal, nobody, raise_if_stopped
from collectors.engines.dump.matching import rows_of
from collectors.engines.dump.peer import PeerSample, PeerSource, Unusable
from collectors.targets.layers import listed, require_inside
from collectors.targets.load import EngineTarget
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.targets import LAYER_RULES
from schemas.capture import NormState
from schemas.layers import field_name, from_convention, published_aux_layers, to_convention
from schemas.manifest import Engine


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
        peers = listed(to_convention(self.aux_layers, source.numbering))
        text = f"aux layers {listed(self.aux_layers)} of {num_layers}"
        if source.numbering != "output":
            text += f" ({peers} as {source.name} counts)"
        if self.repeated:
            text += f"; {self.repeated} repeated column{'s' if self.repeated > 1 else ''} stored once"
        return text

    def copy(self, columns: Tensor | None, final: Tensor | None, out: Tensor) -> None:
        """Columns [T, C, D] into ``out`` bf16 [L, T, D]; Unusable ``layers-differ`` where a repeated one differs."""
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
    """What a person says of a dump: its columns in our numbers or the peer's, the norm state of its final hidden."""

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
            layers = source.usual_layers(self.layers, num_layers)
        else:
            layers = _numbers(self.layers, "--layers")
        require_inside(layers, num_layers, "--peer-layers takes the numbers as the peer's own command named them")
        return tuple(layers)


def choose_columns(
    source: PeerSource, claims: Claims, stated: Sequence[int] | None, count: int, num_layers: int
) -> Columns:
    """The layer of each of ``count`` columns; ``stated`` are ids in the dump itself, in the peer's numbering. Raises
    ConfigError: ``dump-unclear``, ``layers-invalid``, or ``layers-differ``: the person and the dump disagree."""
    claimed = claims.columns(source, num_layers)
    if count == 0:
        return Columns(())
    if stated is not None:
        layers = tuple(from_convention(stated, source.numbering))
        if claimed not in (None, layers):
            problem = f"the dump says its layers are {listed(layers)}, not {listed(claimed or ())}"
            raise FormatError(problem, kind=Kind.LAYERS_DIFFER, hint="leave --layers out")
        require_inside(layers, num_layers, "check that --target is the dump's own: these are the layers that it names")
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
        f"the dump holds {count} layers, {who} {len(layers)}: {listed(layers)}",
        kind=Kind.LAYERS_INVALID,
        hint=f"name {count} layers, in the order of the dump: --layers {','.join(map(str, range(count)))}",
    )


def _needed(source: PeerSource, count: int, num_layers: int) -> ConfigError:
    guesses = []
    for name in ("eagle3", "dflash"):
        layers = source.usual_layers(name, num_layers)
        if len(layers) == count and min(layers) >= 0:
            guesses.append(f"--layers {name} means {listed(layers)}")
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
    usual = source.usual_layers("dflash", num_layers, count) if num_layers > count > 1 else range(count)
    example = to_convention(usual, source.numbering)
    return ConfigError(text, kind=Kind.DUMP_UNCLEAR, hint=f"{option} {','.join(map(str, example))}")


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(" ", ",").split(",") if word]
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is no list of numbers such as 1,15,28", kind=Kind.LAYERS_INVALID
        ) from None


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, or NaN at the same places: what is not finite is refused elsewhere, by its own name."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


@dataclass
class DumpEngine:
    """Hands out states of ``source``, by location in it; ``rounded`` counts samples that were wider than bf16."""

    target: EngineTarget
    source: PeerSource
    columns: Columns
    final_norm: NormState | None
    rounded: int = field(default=0, init=False)

    def describe(self) -> Engine:
        stated = self.source.stated
        return Engine(name=f"import:{self.source.name}", version=stated.version, settings=dict(stated.facts))

    def close(self) -> None:
        """Nothing outlives the process."""

    def capture(
        self, requests: Sequence[CaptureRequest], stop: Callable[[], bool] = lambda: False, done: Done = nobody
    ) -> Captured:
        """States of one unit; a sample that cannot be read, or whose tokens have changed, is refused."""
        width = self.target.head.hidden_size
        tokens = sum(len(request.input_ids) for request in requests)
        aux = torch.empty((len(self.columns.aux_layers), tokens, width), dtype=torch.bfloat16)
        final = torch.empty((sum(len(request.final_rows) for request in requests), width), dtype=torch.bfloat16)
        token_ids, refusals = [np.zeros(0, np.int32)], []
        end = final_end = 0
        for index, request in enumerate(requests):
            raise_if_stopped(stop)
            rows = slice(end, end + len(request.input_ids))
            try:
                sample = self.source.read(request.source, states=True)
                states = states_of_tokens(request.input_ids, sample, self.columns, aux[:, rows])
            except Unusable as unusable:
                refusals.append(Refusal(index, unusable.reason, f"{request.source}: {unusable.detail}"))
                continue
            if states is not None:
                final_rows = slice(final_end, final_end + len(request.final_rows))
                final[final_rows] = states[torch.from_numpy(request.final_rows)]
                final_end = final_rows.stop
            token_ids.append(request.input_ids)
            end = rows.stop
            done(len(request.input_ids))
            tensors = [tensor for tensor in (sample.columns, sample.final) if tensor is not None]
            self.rounded += any(tensor.dtype != torch.bfloat16 for tensor in tensors)
        nothing = torch.zeros(0, dtype=torch.long)
        return Captured(np.concatenate(token_ids), aux[:, :end], final[:final_end], nothing, nothing, tuple(refusals))


def states_of_tokens(input_ids: np.ndarray, sample: PeerSample, columns: Columns, aux: Tensor) -> Tensor | None:
    """Layers of some tokens into ``aux`` bf16 [L, T, D]; returns the final hidden [T, D] in bf16. Raises Unusable."""
    rows = rows_of(sample, input_ids)
    final = None if sample.final is None else sample.final[rows]
    columns.copy(None if sample.columns is None else sample.columns[rows], final, aux)
    return None if final is None else final.to(torch.bfloat16)

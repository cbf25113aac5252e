"""The layer profile: what every layer of the target looked like on a few tokens, written once at capture.

A store holds three layers of thirty; nothing in it says what the neighbours looked like, so a layer one off would be
invisible. The profile keeps, for the first tokens of one sample, the norm and a few random projections of every layer.
States of a causal target depend on the tokens up to their own only, so every sample that begins with the same tokens
must show the same rows there: the profile names the layer of any sample that shares a chat template's first tokens.
Whether what is at hand is the target of a store is told by digests where both sides state them, and by states on the
profile's tokens.

Shapes: N decoder layers, P profiled tokens, D target width, S projections, n tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from hiddenstore.data.order import splitmix64
from hiddenstore.errors import FormatError, Kind
from hiddenstore.files.documents import load, seal
from hiddenstore.files.layout import CALIBRATION_DIR
from hiddenstore.fs.seam import Filesystem
from hiddenstore.store import Store
from hiddenstore.targets.identity import CHECKPOINT, captured_from, identity_differences, unstated_digests
from schemas.base import FORMAT_VERSION, Document, Format
from schemas.capture import TargetIdentity

PROFILE_PATH = f"{CALIBRATION_DIR}/profile.json"
PROFILE_TOKENS = 64
PROJECTIONS = 8
NORMED = "normed"
SAME_LAYER = 1e-2
"""Distance (`match_layer`) up to which states are a layer's own: rounding to half precision makes 1e-3 of it, an update
of the weights that moves states by a quarter of their length 3e-2."""

_DIGITS = 5


class RowSketches(Document):
    """Rows of one layer: root mean square per token [P], and projections per token [P, S] of the row at unit length."""

    rms: tuple[float, ...]
    projections: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _one_of_each_per_token(self) -> "RowSketches":
        if len(self.rms) != len(self.projections) or any(len(row) != PROJECTIONS for row in self.projections):
            raise ValueError(f"expected {len(self.rms)} rows of {PROJECTIONS} projections")
        return self


class LayerProfile(Document):
    """``calibration/profile.json``: some positions of sample ``sample_id`` in every layer, the first ones among them.

    ``layers`` start at layer -1 (embeddings) and end at the last decoder block, before the final norm; ``normed`` is
    the last one after it.
    """

    format: Format = FORMAT_VERSION
    sample_id: str
    positions: tuple[int, ...] = Field(min_length=1)
    tokens: tuple[int, ...]
    layers: tuple[RowSketches, ...]
    normed: RowSketches | None = None

    @model_validator(mode="after")
    def _every_layer_has_every_token(self) -> "LayerProfile":
        sketches = [*self.layers, *([self.normed] if self.normed is not None else [])]
        if {len(self.tokens), *(len(sketch.rms) for sketch in sketches)} != {len(self.positions)}:
            raise ValueError(f"tokens or a layer do not have {len(self.positions)} positions")
        if list(self.positions) != sorted(set(self.positions)) or self.positions[0] < 0:
            raise ValueError("positions must be ascending")
        return self

    @property
    def names(self) -> list[int | str]:
        """What can be matched: layer numbers -1 … N-1, then ``normed``."""
        return [*range(-1, len(self.layers) - 1), *([NORMED] if self.normed is not None else [])]

    @property
    def leading(self) -> int:
        """How many of its positions are the first tokens of the sample."""
        return first_true(np.arange(len(self.positions)) != np.asarray(self.positions))

    def common_prefix(self, input_ids: np.ndarray) -> int:
        """How many first tokens of a sample are the profile's, as far as the profile has every position."""
        count = min(self.leading, len(input_ids))
        return first_true(np.asarray(self.tokens[:count]) != input_ids[:count])


def make_profile(
    sample_id: str,
    input_ids: np.ndarray,
    states: Tensor,
    normed: Tensor | None = None,
    final_rows: np.ndarray | None = None,
) -> LayerProfile:
    """Sketch every layer of one sample.

    input_ids int [T]; states [N+1, T, D] of layers -1, 0, … N-1, the last before the final norm; normed [T, D] the last
    after the final norm; final_rows int [R] the positions a store holds the final hidden at. Any float dtype: rows are
    rounded to bf16 first, as a store holds them. Kept are the first tokens and as many of ``final_rows``. Take the
    states from one plain forward over the whole sample, by another way than the capture itself
    (``output_hidden_states``), so that a mistake in one does not repeat in the other.
    """
    candidates = np.arange(len(input_ids)) if final_rows is None else np.asarray(final_rows, dtype=np.int64)
    most = min(PROFILE_TOKENS // 2, len(candidates))
    spread = candidates[np.linspace(0, len(candidates) - 1, most).astype(np.int64)]
    positions = np.union1d(np.arange(min(PROFILE_TOKENS // 2, len(input_ids))), spread).astype(np.int64)
    rows = torch.from_numpy(positions).to(states.device)
    return LayerProfile(
        sample_id=sample_id,
        positions=tuple(positions.tolist()),
        tokens=tuple(int(token) for token in np.asarray(input_ids)[positions]),
        layers=tuple(_sketches(layer[rows]) for layer in states),
        normed=None if normed is None else _sketches(normed[rows]),
    )


def write_profile(fs: Filesystem, profile: LayerProfile) -> bool:
    """Publish a profile; False when the store has one already."""
    return fs.put_if_absent(PROFILE_PATH, seal(profile))


def read_profile(fs: Filesystem) -> LayerProfile | None:
    """The profile of a store, None when it has none; CorruptionError when it is damaged."""
    return None if fs.size(PROFILE_PATH) is None else load(fs, PROFILE_PATH, LayerProfile)


def first_true(flags: np.ndarray) -> int:
    """Index of the first True of bool [n], n where there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)


def match_layer(profile: LayerProfile, rows: Tensor, indices: Sequence[int] | np.ndarray) -> dict[int | str, float]:
    """Distance of stored rows [n, D] to every layer of the profile; ``indices`` [n] are those of its ``positions``.

    About 0.5 |a - b|² for rows of unit length (1 - cosine) plus the squared log ratio of their norms, averaged over
    rows: 1e-4 for an 8-bit codec, 1e-2 and more for a neighbouring layer, about 1 for an unrelated one.
    """
    row_rms, row_projections = sketch(rows)
    picked = np.asarray(indices, dtype=np.int64)
    distances: dict[int | str, float] = {}
    candidates = [*profile.layers, *([profile.normed] if profile.normed is not None else [])]
    for name, candidate in zip(profile.names, candidates, strict=True):
        rms = np.asarray(candidate.rms)[picked]
        projections = np.asarray(candidate.projections)[picked]
        angle = np.square(projections - row_projections).mean(axis=1) / 2
        scale = np.square(np.log(np.maximum(rms, 1e-12) / np.maximum(row_rms, 1e-12)))
        distances[name] = float(np.mean(angle + scale))
    return distances


def states_apart(profile: LayerProfile, states: Mapping[int | str, Tensor]) -> list[str]:
    """Which states are not those of the profile's first tokens: rows [n, D] of the first n, by name of the layer."""
    lines = []
    for name, rows in states.items():
        distance = match_layer(profile, rows, range(len(rows)))[name] if name in profile.names else 0.0
        # A distance that is no number is not small either.
        if not distance <= SAME_LAYER:
            layer = name if name == NORMED else f"of layer {name}"
            apart = f"{distance:.3g} from the stored layer profile's, expected at most {SAME_LAYER:g}"
            lines.append(f"states {layer}: {apart}")
    return lines


def profiles_apart(one: LayerProfile | None, other: LayerProfile | None) -> list[str] | None:
    """The first layer that looks otherwise on the first tokens that two profiles share; None where they share none."""
    if one is None or other is None or len(one.layers) != len(other.layers):
        return None
    count = min(one.common_prefix(np.asarray(other.tokens)), other.leading)
    for layer, (expected, actual) in enumerate(zip(one.layers, other.layers, strict=True) if count else (), -1):
        angle = np.square(np.subtract(expected.projections[:count], actual.projections[:count])).mean() / 2
        sizes = (np.maximum(sketches.rms[:count], 1e-12) for sketches in (expected, actual))
        scale = np.square(np.log(np.divide(*sizes))).mean()
        if not angle + scale <= SAME_LAYER:
            apart = f"{angle + scale:.3g} apart in the stored layer profiles, expected at most {SAME_LAYER:g}"
            return [f"states of layer {layer}: {apart}"]
    return [] if count else None


def sketch(rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Root mean square [n] and projections [n, S] of rows [n, D], both float64; a projection has variance about 1."""
    x = rows.detach().to(torch.bfloat16).cpu().double().numpy()
    rms = np.sqrt(np.square(x).mean(axis=1))
    unit = x / np.maximum(rms, 1e-300)[:, None] / np.sqrt(x.shape[1])
    return rms, unit @ signs(x.shape[1])


@lru_cache(maxsize=4)
def signs(width: int, count: int = PROJECTIONS) -> np.ndarray:
    """±1 [D, S], the same for ever: bit 63 of splitmix64 of (projection, channel)."""
    channel = np.arange(width, dtype=np.uint64)[:, None]
    projection = np.arange(count, dtype=np.uint64)[None, :] << np.uint64(40)
    return 1.0 - 2.0 * (splitmix64(channel | projection) >> np.uint64(63)).astype(np.float64)


def _sketches(rows: Tensor) -> RowSketches:
    rms, projections = sketch(rows)
    return RowSketches(
        rms=tuple(float(f"{value:.{_DIGITS}g}") for value in rms),
        projections=tuple(tuple(round(float(value), _DIGITS) for value in row) for row in projections),
    )


NO_PROFILE = f"{CHECKPOINT} differs, and no layer profile shows that it is a cast copy of the same target"

StatesOf = Callable[[Sequence[int]], Mapping[int | str, Tensor]]
"""States [n, D] of tokens by layer number or ``normed``; nothing where they cannot be had."""


def require_states(store: Store, target: TargetIdentity, states_of: StatesOf) -> bool:
    """Refuse a target that gives other states on the first tokens of a store's layer profile than are stored there.

    False where there is nothing to compare with: the store has no profile, or ``states_of`` gives none. Raises
    FormatError: ``target-mismatch``, naming the layers; or digests of the checkpoint differ and nothing can be
    compared."""
    profile = read_profile(store.fs)
    states = states_of(profile.tokens[: profile.leading]) if profile is not None and profile.leading else {}
    apart = states_apart(profile, states) if profile is not None else []
    if not states and is_another_checkpoint(store.capture.target, target):
        apart = [NO_PROFILE]
    if apart:
        problem = f"target {target.name} is not the target {store.path} was captured from"
        raise FormatError(
            "\n".join([f"{problem}: config, tokenizer, embeddings and head agree, but", *apart]),
            kind=Kind.TARGET_MISMATCH,
            hint=captured_from(store.capture.target),
        )
    return bool(states)


def target_differences(
    expected: TargetIdentity, store: Store, stored_in: Store | None, same_target: bool = False
) -> list[str]:
    """What tells the target of a store from another: digests, and layers that look otherwise on the first tokens that
    the layer profiles of ``store`` and ``stored_in`` share, where both have one.

    ``same_target`` takes another checkpoint where the profiles agree.
    """
    differences = identity_differences(expected, store.capture.target, same_target)
    if differences:
        return differences
    apart = _profiles_apart(stored_in, store)
    if apart is None and is_another_checkpoint(expected, store.capture.target):
        return [NO_PROFILE]
    return apart or []


def share_profile(one: Store | None, other: Store) -> bool:
    """Whether the layer profiles of two stores begin alike, so that ``target_differences`` compares them."""
    return _profiles_apart(one, other) is not None


def _profiles_apart(one: Store | None, other: Store) -> list[str] | None:
    return None if one is None else profiles_apart(read_profile(one.fs), read_profile(other.fs))


def is_another_checkpoint(one: TargetIdentity, other: TargetIdentity) -> bool:
    """Whether both state the digest of their tensors, and another one."""
    digests = (one.checkpoint_sha256, other.checkpoint_sha256)
    return None not in digests and digests[0] != digests[1]


def unstated_warning(one: TargetIdentity, other: TargetIdentity, by_profile: bool) -> str | None:
    """What was not compared because a digest is unknown, as by stores of older writers; None where all are known.
    ``by_profile``: states were compared too."""
    unstated = unstated_digests(one, other)
    if not unstated:
        return None
    rest = "and the layer profile" if by_profile else "alone: without a common layer profile other blocks go unseen"
    return (
        f"target {one.name} was compared without {' and '.join(unstated)}, which not both sides state: by config, "
        f"vocabulary, embeddings and head {rest}"
    )

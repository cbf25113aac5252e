"""Is what is at hand the target of a store? Digests where both sides state them, and states on the profile's tokens.

Shapes: n tokens, D target width.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hiddenstore.errors import FormatError, Kind
from hiddenstore.store import Store
from hiddenstore.targets.identity import CHECKPOINT, captured_from, identity_differences, unstated_digests
from hiddenstore.verify.profile import profiles_apart, read_profile, states_apart
from schemas.capture import TargetIdentity

NO_PROFILE = f"{CHECKPOINT} differs, and no layer profile shows that it is a cast copy of the same target"

StatesOf = Callable[[Sequence[int]], Mapping[int | str, Tensor]]
"""States [n, D] of tokens by layer number or ``normed``; nothing where they cannot be had."""


def require_states(store: Store, target: TargetIdentity, states_of: StatesOf) -> bool:
    """Refuse a target that gives other states on the first tokens of a store's layer profile than are stored there.

    False where there is nothing to compare with: the store has no profile, or ``states_of`` gives none.

    Raises:
        FormatError: ``target-mismatch``, naming the layers; or digests of the checkpoint differ and nothing can be
            compared.
    """
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

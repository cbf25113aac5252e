"""Does what runs here give the states that a store already holds? Asked of every job on a store that has a profile.

Shapes: n tokens, D target width.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from collectors.engines import CaptureEngine, CaptureRequest
from collectors.targets.load import LoadedTarget
from collectors.targets.probe import probe_states
from hiddenstore.store import Store
from hiddenstore.verify.profile import NORMED, LayerProfile, write_profile
from hiddenstore.verify.same_target import StatesOf, require_states, unstated_warning
from schemas.capture import TargetIdentity


def compare_with_store(
    store: Store,
    target: TargetIdentity,
    states_of: StatesOf,
    profile: LayerProfile | None,
    note: Callable[[str], None],
) -> None:
    """Refuse a target that gives other states than the profile of ``store``; a store without one gets ``profile``.

    Raises:
        FormatError: as ``require_states``.
    """
    is_compared = require_states(store, target, states_of)
    if profile is not None:
        write_profile(store.fs, profile)
    if warning := unstated_warning(store.capture.target, target, is_compared or profile is not None):
        note(f"warning: {warning}")


def engine_states(engine: CaptureEngine, aux_layers: Sequence[int], longest: int, stop: Callable[[], bool]) -> StatesOf:
    """What an engine captures of at most ``longest`` tokens: the aux layers and the final hidden."""
    last = NORMED if engine.final_norm == "post_norm" else engine.target.folder.num_layers - 1

    def states_of(tokens: Sequence[int]) -> dict[int | str, Tensor]:
        ids = np.array(tokens[:longest], dtype=np.int32)
        captured = engine.capture([CaptureRequest(ids, np.arange(len(ids), dtype=np.int32))], stop)
        if captured.refusals:
            return {}
        final = {} if engine.final_norm is None else {last: captured.final}
        return {**dict(zip(aux_layers, captured.aux, strict=True)), **final}

    return states_of


def reference_states(target: LoadedTarget | None) -> StatesOf:
    """Every layer of a target that transformers runs; nothing without one."""

    def states_of(tokens: Sequence[int]) -> dict[int | str, Tensor]:
        if target is None:
            return {}
        ids = torch.tensor([list(tokens)], device=target.device)
        probe = probe_states(target.parts, ids, target.identity.model_type)
        return {**dict(enumerate(probe.states, -1)), NORMED: probe.normed}

    return states_of

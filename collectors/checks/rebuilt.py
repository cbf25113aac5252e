"""Do the target's blocks give back what the engine computed? Asked of the first samples, before any is committed."""

from collections.abc import Sequence

from hiddenstore.errors import CaptureError, Kind
from hiddenstore.records import Sample
from hiddenstore.store import Store
from hiddenstore.targets.calibration import Slice
from hiddenstore.targets.rebuild import TOLERANCE


def require_rebuilt(store: Store, states: Slice, samples: Sequence[Sample]) -> None:
    """Refuse an engine whose states the store's blocks do not bring back: CaptureError ``cross-check``.

    ``samples`` begin with those of the slice. Nothing is asked of a store that holds all states.
    """
    rebuilder = store.rebuilder()
    if rebuilder is None:
        return
    errors, _ = rebuilder.errors(states, samples[: len(states.samples)])
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise CaptureError(
                f"{name} as the target's blocks rebuild it is {error:.1%} off what the engine computed, at most "
                f"{TOLERANCE:.0%} is allowed: a store of rebuilt states would hold others than were captured",
                kind=Kind.CROSS_CHECK,
                hint="--recipe compact, which stores every layer",
            )

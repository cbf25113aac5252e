"""Does this machine bring back the states that a store does not hold? Compared with the calibration slice."""

from hiddenstore import layout
from hiddenstore.damage import DAMAGE, twice
from hiddenstore.errors import ConfigError
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE
from hiddenstore.targets.calibration import SLICE_PATH, read_slice
from hiddenstore.targets.rebuild import TOLERANCE
from hiddenstore.verify.report import Finding, Report


def can_rebuild(store: Store, report: Report) -> bool:
    """Add to ``report`` how far rebuilt states are from the captured ones; False where none can be rebuilt."""
    if not store.capture.states:
        return True
    path = f"{layout.TARGET_DIR}/{BLOCKS_FILE}"
    try:
        rebuilder = twice(store.fs, store.rebuilder, path)
    except (ConfigError, *DAMAGE) as error:
        report.findings.append(Finding.of(error, path))
        return False
    assert rebuilder is not None
    try:
        states = twice(store.fs, lambda: read_slice(store.fs, store.capture), SLICE_PATH)
        known = [] if states is None else [entry for entry in states.samples if entry.id in store]
        samples = [store.sample(entry.id) for entry in known]
    except DAMAGE as error:
        report.findings.append(Finding.of(error, SLICE_PATH))
        return True
    errors, count = ({}, 0) if states is None or len(known) < len(states.samples) else rebuilder.errors(states, samples)
    if not count:
        detail = "no captured states of whole samples are at hand: whether rebuilt ones equal them was not decided"
        report.notes.append(Finding("rebuilt-undecided", SLICE_PATH, (), detail))
    for name, distance in errors.items():
        report.measures[f"rebuilt_error_{name}"] = distance
        if not distance <= TOLERANCE:
            detail = f"{name} comes back {distance:.1%} off what was captured, at most {TOLERANCE:.0%} is allowed"
            report.findings.append(Finding("rebuilt-differs", path, (), detail))
    return True

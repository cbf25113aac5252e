"""Every byte of a small store flipped, every file truncated, deleted, emptied, swapped or replayed: exact data or an
error; ``hiddenstore.testing.workload`` says what counts as one.
"""

from collections.abc import Callable
from functools import partial

import pytest

from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import Changes, Sweep
from hiddenstore.verify import verify
from tests.faults import memory_backend
from tests.reliability.figures import Figures

STORE_BYTES = 64 << 10
# Tar headers are no business of the reader, so each of their bytes asks for a whole verify.
EXHAUSTIVE = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("bf16", 11), id="bf16-every-11th"),
        pytest.param(("q8", 13), id="q8-every-13th"),
        pytest.param(("lossless", 13), id="lossless-every-13th"),
        pytest.param(("q8", 61, "webdataset"), id="q8-webdataset-every-61st"),
        pytest.param(("q8", 1, "webdataset"), id="q8-webdataset", marks=EXHAUSTIVE),
        pytest.param(("lossless", 1, "webdataset"), id="lossless-webdataset", marks=EXHAUSTIVE),
        pytest.param(("bf16", 1), id="bf16", marks=pytest.mark.slow),
        pytest.param(("q8", 1), id="q8", marks=pytest.mark.slow),
        pytest.param(("lossless", 1), id="lossless", marks=pytest.mark.slow),
        pytest.param(("q4", 7), id="q4-every-7th", marks=pytest.mark.slow),
        pytest.param(("tiny", 7), id="tiny-every-7th", marks=pytest.mark.slow),
    ],
)
def sweep(request: pytest.FixtureRequest) -> Sweep:
    return Sweep(memory_backend(), *request.param)


def test_the_store_of_the_sweep_is_small_and_whole(sweep: Sweep) -> None:
    assert sum(map(len, sweep.files.values())) <= STORE_BYTES
    assert len(sweep.units) >= 1
    assert verify(sweep.fs, depth="bytes").findings == []


@pytest.mark.parametrize("damages", [Sweep.flips, Sweep.cuts, Sweep.swaps, Sweep.replays])
def test_every_damage_is_exact_data_or_an_error(
    sweep: Sweep, damages: Callable[[Sweep], list[tuple[str, Changes]]], figures: Figures
) -> None:
    tally = Tally()
    for name, changes in damages(sweep):
        tally.check(name, partial(sweep.check, changes))
    manifest = sweep.store.manifest
    figures.add(f"damage: {damages.__name__}", f"{manifest.container}, {manifest.recipe}", tally)
    assert tally.points
    assert tally.failures == []

"""Networks that fail: nothing is lost, nothing is believed twice, and an error of the storage is never damage."""

import random
from contextlib import suppress

import pytest

from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.commit import latest_names
from hiddenstore.data import TokenBatches
from hiddenstore.errors import HiddenstoreError, StorageError
from hiddenstore.fs.objects import ObjectFilesystem
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.workload import contents, fingerprint, garbage, problems
from hiddenstore.verify import verify
from tests.objects.conftest import every_scheme
from tests.objects.proxy import Fault, FaultProxy, Plan, Request

pytestmark = pytest.mark.objects

STORM: tuple[Fault, ...] = ("503", "429", "refused", "cut", "slow", "lost")


def some(faults: tuple[Fault, ...], seed: int, share: float = 0.2) -> Plan:
    dice = random.Random(seed)
    return lambda _request: dice.choice(faults) if dice.random() < share else None


@pytest.fixture
def calm(place: str) -> Store:
    return make_store(ObjectFilesystem(f"{place}-calm"), container="webdataset")


@pytest.mark.parametrize(
    "faults",
    [
        *(pytest.param((fault,), id=fault, marks=pytest.mark.slow) for fault in ("503", "429", "slow", "refused")),
        pytest.param(("cut",), id="cut"),
        pytest.param(("lost",), id="lost"),
        pytest.param(STORM, id="all"),
    ],
)
@every_scheme
def test_what_is_written_and_read_in_a_storm_is_what_is_written_in_calm(
    faults: tuple[Fault, ...], calm: Store, place: str, proxy: FaultProxy
) -> None:
    proxy.set_plan(some(faults, seed=7))
    stormy = make_store(ObjectFilesystem(place), container="webdataset")
    assert problems(stormy, finished=True) == []
    assert contents(Store.open(place)) == contents(calm)
    batches = TokenBatches(Store.open(place), batch_tokens=128, epochs=1)
    assert len({name for batch in batches for name in batch.all_sample_ids}) == 5
    assert proxy.faults > 5
    proxy.set_plan(None)
    assert fingerprint(ObjectFilesystem(place)) == fingerprint(calm.fs)
    assert garbage(stormy.fs) == []


@every_scheme
def test_every_lost_reply_of_a_put_is_read_back(calm: Store, place: str, proxy: FaultProxy) -> None:
    seen: set[str] = set()

    def lose_the_first(request: Request) -> Fault | None:
        if not request.is_write or request.key in seen:
            return None
        seen.add(request.key)
        return "lost"

    proxy.set_plan(lose_the_first)
    store = make_store(ObjectFilesystem(place), container="webdataset")
    assert proxy.faults > 10
    assert fingerprint(store.fs) == fingerprint(calm.fs)
    assert garbage(store.fs) == []


@every_scheme
def test_storage_that_stays_away_is_no_damage_and_nothing_is_repaired(
    calm: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(calm.fs)
    monkeypatch.setattr("hiddenstore.fs.objects.DEADLINE_S", 0.3)
    for fault in ("503", "refused", "cut"):
        proxy.set_plan(
            lambda request, fault=fault: fault if request.method == "GET" and request.key.endswith(".tar") else None
        )
        for look in (lambda fs: verify(fs, "bytes"), lambda fs: repair(fs, dry_run=False, accept_loss=100)):
            with pytest.raises(StorageError) as away:
                look(ObjectFilesystem(calm.path))
            assert away.value.kind == "io-error"
            assert "run it again" in (away.value.hint or "")
        with pytest.raises(StorageError):
            contents(Store.open(calm.path))
    proxy.set_plan(None)
    assert fingerprint(calm.fs) == before


@every_scheme
def test_a_put_that_is_never_answered_says_that_it_may_be_done(
    place: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = ObjectFilesystem(place)
    fs.require_atomic_put()
    monkeypatch.setattr("hiddenstore.fs.objects.DEADLINE_S", 0.3)
    proxy.set_plan(lambda request: "lost" if request.method in ("PUT", "GET") else None)
    with pytest.raises(StorageError) as lost:
        fs.put_if_absent("a", b"1")
    assert lost.value.kind in ("reply-lost", "io-error")
    proxy.set_plan(None)
    assert fs.put_if_absent("a", b"1")


@pytest.mark.parametrize("lie", ["short", "range", "other", "tag"])
def test_a_server_that_lies_once_is_contradicted_or_believed_in_nothing(
    lie: Fault, calm: Store, proxy: FaultProxy
) -> None:
    expected, before = contents(calm), fingerprint(calm.fs)
    proxy.set_plan(None)
    assert contents(Store.open(calm.path)) == expected
    total, told = len(proxy.requests), 0
    for at in range(0, total, 1 + total // 12):
        proxy.set_plan(lambda request, at=at: lie if request.number == at and request.method == "GET" else None)
        with suppress(HiddenstoreError):
            assert contents(Store.open(calm.path)) == expected, f"request {at}"
        proxy.set_plan(lambda request, at=at: lie if request.number == at and request.method == "GET" else None)
        with suppress(HiddenstoreError):
            assert verify(ObjectFilesystem(calm.path), "bytes").findings == [], f"request {at}"
        proxy.set_plan(lambda request, at=at: lie if request.number == at and request.method == "GET" else None)
        with suppress(HiddenstoreError):
            assert repair(ObjectFilesystem(calm.path), dry_run=False, accept_loss=100).units == [], f"request {at}"
        told += proxy.faults
    assert told > 2
    proxy.set_plan(None)
    assert fingerprint(calm.fs) == before


def test_a_late_listing_costs_work_and_never_a_sample(calm: Store, proxy: FaultProxy) -> None:
    before = contents(calm)
    names = latest_names(calm.fs)
    proxy.set_plan(lambda request: "late" if request.is_listing else None)
    fs = ObjectFilesystem(calm.path)
    assert latest_names(fs) == names[:-1]
    # Whoever believes the listing captures the last unit again and loses the race for its record.
    again = make_store(fs, container="webdataset")
    assert len(again) < len(before)
    proxy.set_plan(None)
    store = Store.open(calm.path)
    assert contents(store) == before
    assert problems(store, finished=True) == []
    gc(store.fs, dry_run=False, older_than_s=0)
    assert garbage(store.fs) == []
    assert contents(Store.open(calm.path)) == before

"""Reading ahead: in order, inside the byte budget, without keeping the first batch waiting."""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from hiddenstore.data.packed import PAGE_BYTES, Buffers, Members, apart, room_bytes
from hiddenstore.data.read import STARTED_AT_ONCE, Job, PackedSample, Prefetch, SampleSlot

BYTES = 4096


class Counting:
    """Packs of 4 KiB; ``alive`` lists the bytes of every pack at the time each one was made."""

    def __init__(self) -> None:
        self.made = 0

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        return {"values": ((BYTES,), torch.uint8)}

    def empty(self, slots: Sequence[SampleSlot], buffers: Buffers) -> SimpleNamespace:
        self.made += 1
        members = self.members(slots)
        return SimpleNamespace(values=apart(buffers.take(room_bytes(members)), members)["values"])

    def fill(self, pack: SimpleNamespace, place: PackedSample) -> None:
        pack.values.fill_(int(place.slot.id) % 251)

    def fill_many(self, pack: SimpleNamespace, places: Sequence[PackedSample]) -> None:
        for place in places:
            self.fill(pack, place)


def jobs(count: int) -> Iterator[Job[int]]:
    return (Job(number, ((SampleSlot(str(number), 1, 1),),)) for number in range(count))


@pytest.mark.parametrize("packs_in_budget", [1, 2, 3, 5, 40])
def test_packs_that_wait_and_the_one_handed_out_stay_inside_the_budget(packs_in_budget: int) -> None:
    filler, done = Counting(), 0
    for key, packs in Prefetch[int](filler, packs_in_budget * BYTES, 3).run(jobs(60)):
        assert key == done
        assert (packs[0].values == key % 251).all()
        done += 1
        # Made and not yet handed out, plus the one in our hands; one of each is always allowed.
        assert filler.made - done + 1 <= max(2, packs_in_budget)
    assert done == 60


def test_the_first_batch_does_not_wait_for_a_full_queue() -> None:
    filler = Counting()
    running = Prefetch[int](filler, 1 << 30, 2).run(jobs(60))
    next(running)
    assert filler.made == STARTED_AT_ONCE
    for _ in range(10):
        next(running)
    assert filler.made > 11 + STARTED_AT_ONCE
    running.close()


def test_buffers_are_used_again_from_batch_to_batch() -> None:
    addresses = [packs[0].values.data_ptr() for _, packs in Prefetch[int](Counting(), 3 * BYTES, 2).run(jobs(40))]
    assert len(set(addresses)) <= 5


class Uneven(Counting):
    """Packs of as many pages as their sample has tokens."""

    def members(self, slots: Sequence[SampleSlot]) -> Members:
        return {"values": ((PAGE_BYTES * slots[0].tokens,), torch.uint8)}


def test_the_memory_of_packs_of_any_lengths_stays_inside_the_budget() -> None:
    generator, longest, budget = random.Random(0), 400, 1000 * PAGE_BYTES
    tokens = [generator.choice([generator.randint(1, 20), generator.randint(200, longest)]) for _ in range(300)]
    some = (Job(number, ((SampleSlot(str(number), count, 1),),)) for number, count in enumerate(tokens))
    prefetch = Prefetch[int](Uneven(), budget, 2)
    for number, packs in prefetch.run(some):
        assert (packs[0].values == number % 251).all()
        # A pack that begins in memory larger than itself is known once it has begun.
        assert prefetch._buffers._total <= budget + PAGE_BYTES * longest

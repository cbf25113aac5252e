"""The order of samples is arithmetic on (which samples, seed, epoch), and stays so for every release."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstore.data.order import Order, permutation, splitmix64


def ids_of(count: int) -> list[str]:
    return [hashlib.blake2b(str(i).encode(), digest_size=16).hexdigest() for i in range(count)]


def test_splitmix64_gives_the_published_values() -> None:
    found = splitmix64(np.array([0, 1234567], dtype=np.uint64))
    assert [int(x) for x in found] == [0xE220A8397B1DCDAF, 0x599ED017FB08FC85]


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [0, 5, 7, 4, 8, 1, 9, 2, 3, 6]),
        (1, 0, [2, 0, 8, 6, 5, 4, 3, 7, 9, 1]),
        (0, 1, [5, 8, 6, 9, 3, 7, 4, 2, 1, 0]),
    ],
)
def test_orders_of_format_1_never_change(seed: int, epoch: int, expected: list[int]) -> None:
    assert permutation(ids_of(10), seed, epoch).tolist() == expected


def test_golden_digest_of_a_large_order() -> None:
    order = Order(ids_of(10_000))
    assert order.digest == GOLDEN_IDS
    assert hashlib.sha256(order.permutation(7, 3).astype("<i8").tobytes()).hexdigest() == GOLDEN_ORDER


GOLDEN_IDS = "532d4850cc2cc58fb7cdf12527573401"
GOLDEN_ORDER = "a8f1f08e34b09ec408bb42c0a6e4afb996d7e472922fd69a5828860e804c1951"


@pytest.mark.parametrize("high", [64, 44, 20, 0])
def test_an_order_is_that_of_the_whole_hashes_however_many_of_their_bits_are_alike(
    high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes that keep ``high`` of their first bits beside those that tell them apart."""
    kept = np.uint64((1 << 64) - (1 << (64 - high)))

    def hashed(ranks: np.ndarray) -> np.ndarray:
        return splitmix64(ranks) & kept | ranks * np.uint64(2_654_435_761) % np.uint64(1 << 16)

    monkeypatch.setattr("hiddenstore.data.order._hash", lambda ranks, key: hashed(ranks))
    for count in (0, 1, 2, 3, 4096, 50_000):
        expected = np.argsort(hashed(np.arange(count, dtype=np.uint64)))
        assert np.array_equal(Order(ids_of(count)).permutation(0, 0), np.argsort(ranks_of(count))[expected])


def ranks_of(count: int) -> np.ndarray:
    """Where each id comes when they are sorted."""
    return np.argsort(np.argsort(np.array(ids_of(count), dtype=np.bytes_)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("0123456789abcdef", min_size=1, max_size=8), unique=True), st.integers(), st.integers(0, 9))
def test_an_order_is_a_permutation_that_ignores_how_the_ids_were_given(ids: list[str], seed: int, epoch: int) -> None:
    order = permutation(ids, seed, epoch)
    assert sorted(order.tolist()) == list(range(len(ids)))
    backwards = ids[::-1]
    assert [ids[i] for i in order] == [backwards[i] for i in permutation(backwards, seed, epoch)]


def test_seeds_epochs_and_sample_sets_give_unrelated_orders() -> None:
    ids = ids_of(1000)
    orders = [permutation(ids, 0, 0), permutation(ids, 1, 0), permutation(ids, 0, 1), np.arange(1000)]
    ranks = [np.argsort(order) for order in orders]
    for i in range(len(ranks)):
        for j in range(i):
            assert abs(np.corrcoef(ranks[i], ranks[j])[0, 1]) < 0.12
    fewer = permutation(ids[:-1], 0, 0)
    assert [i for i in orders[0].tolist() if i != 999] != fewer.tolist()


def test_equal_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        Order(["a", "b", "a"])


def test_a_hundred_thousand_samples_each_have_one_place() -> None:
    order = Order(ids_of(100_000)).permutation(0, 0)
    assert np.array_equal(np.sort(order), np.arange(100_000))

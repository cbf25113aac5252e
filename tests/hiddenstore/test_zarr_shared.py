"""Which rows samples of a unit share: those of equal tokens whose states agree, before the first image."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstore.codecs import get_codec, get_layout
from hiddenstore.codecs.base import Encoded, rows_at
from hiddenstore.records import Record, Sample, sample_id
from hiddenstore.segments.base import EncodedUnit, groups_of
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.prefixes import BLOCK, PrefixTree, key_of
from hiddenstore.segments.rows import SharedRows
from hiddenstore.segments.zarr_shared import equal_prefixes
from hiddenstore.testing.builders import VOCAB, capture_spec, random_records
from schemas.capture import CaptureSpec
from schemas.manifest import ImageEntry

CAPTURE = capture_spec((1, 3), 32, "q8", "supervised")
COMMON = 200


def conversation(input_ids: np.ndarray, supervised: int, images: tuple[ImageEntry, ...] = ()) -> Sample:
    tokens = len(input_ids)
    mask = (np.arange(tokens) >= tokens - supervised).astype(np.uint8)
    spans = np.array([[1, 0, tokens - supervised], [2, tokens - supervised, tokens]], np.int32)
    return Sample(sample_id(input_ids, mask, images), input_ids, mask, spans, "train", images=images)


def records(count: int = 2, images: tuple[ImageEntry, ...] = (), common: int = COMMON) -> list[Record]:
    """Conversations that begin alike, with states of their own."""
    rng = np.random.default_rng(0)
    opening, samples = rng.integers(0, VOCAB, common), []
    for number in range(count):
        input_ids = np.concatenate([opening, (np.arange(10) + number) % VOCAB]).astype(np.int32)
        samples.append(conversation(input_ids, 5, images))
    return random_records(samples, CAPTURE)


def alike(some: list[Record], rows: slice = slice(0, COMMON), noise: float = 0.0) -> list[Record]:
    """With the states of the first in all, each off by noise of its own."""
    made = [some[0]]
    for number, record in enumerate(some[1:]):
        aux, first = record.aux.clone(), some[0].aux[:, rows].float()
        generator = torch.Generator().manual_seed(number)
        aux[:, rows] = (first * (1 + noise * torch.randn(first.shape, generator=generator))).bfloat16()
        made.append(replace(record, aux=aux))
    return made


def stored(some: list[Record], capture: CaptureSpec = CAPTURE) -> tuple[EncodedUnit, list[tuple[int, int]]]:
    """A unit as the container takes it, and the owner and rows of each sample in it."""
    unit = encode_records("unit", some, capture, one_prefix=True)
    return unit, [tuple(row) for row in equal_prefixes(unit, groups_of(capture)[0]).array.tolist()]


@pytest.mark.parametrize(("noise", "rows"), [(0.0, COMMON), (0.02, COMMON), (0.5, 0)])
def test_equal_tokens_are_shared_where_their_states_differ_by_rounding_alone(noise: float, rows: int) -> None:
    assert stored(alike(records(), noise=noise))[1] == [(0, 0), (0, rows)]


def test_states_that_depend_on_what_follows_stay_with_their_samples() -> None:
    assert stored(records())[1] == [(0, 0), (0, 0)]
    # In one layer alone.
    pair, own = alike(records()), records()
    pair[1].aux[1, :COMMON] = own[1].aux[1, :COMMON]
    assert stored(pair)[1] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("reach", [1, 3, BLOCK, BLOCK + 3])
def test_a_target_that_looks_ahead_a_little_does_not_share_the_rows_that_saw_it(reach: int) -> None:
    pair, own = alike(records()), records()
    pair[1].aux[:, COMMON - reach : COMMON] = own[1].aux[:, COMMON - reach : COMMON]
    unit, shared = stored(pair)
    assert shared == [(0, 0), (0, COMMON - reach)]
    # The rows that both have were equal to the bit, so that every sample has what was captured with it.
    plain = encode_records("unit", pair, CAPTURE)
    assert all(map(torch.equal, unit.aux.joined().codes, plain.aux.joined().codes))


def test_what_is_not_finite_in_one_sample_stays_in_it() -> None:
    some = alike(records(3))
    some[0].aux[0, 140] = float("nan")
    some[2].aux[1, 60, 3] = float("inf")
    unit, shared = stored(some)
    assert shared == [(0, 0), (0, 140), (0, 60)]
    back = get_codec("q8").decode(unit.aux.joined()).view(2, 3, COMMON + 10, 32)
    finite = torch.isfinite(back).all(dim=3)
    assert torch.nonzero(~finite).tolist() == [[0, 0, 140], [1, 2, 60]]


def test_an_expert_that_is_chosen_otherwise_now_and_then_keeps_no_prefix_apart() -> None:
    pair, own = alike(records(), noise=0.02), records()
    rows = [30, 77, 78, 150]
    pair[1].aux[:, rows] = own[1].aux[:, rows]
    assert stored(pair)[1] == [(0, 0), (0, COMMON)]


def test_one_sample_that_is_odd_keeps_the_others_from_nothing() -> None:
    some = alike(records(6))
    some[0] = replace(some[0], aux=some[0].aux.flip(1))
    assert stored(some)[1] == [(0, 0), (0, 0), *[(1, COMMON)] * 4]


@pytest.mark.parametrize(("start", "rows"), [(20, 20), (BLOCK, BLOCK), (BLOCK - 1, 0)])
def test_a_prefix_ends_before_an_image(start: int, rows: int) -> None:
    image = ImageEntry(sha256="0" * 64, start=start, height=1, width=4)
    assert stored(alike(records(images=(image,))))[1] == [(0, 0), (0, rows)]


def test_classes_of_rows_decide_with_whom_a_sample_shares() -> None:
    """The first has its question so near that it stores the end of the prompt in more bits."""
    capture = capture_spec((1, 3), 32, "q4q3", "supervised")
    opening = np.random.default_rng(1).integers(0, VOCAB, 24)
    tails = [np.full(9, 3), *(np.full(60, number) for number in (4, 5, 6))]
    samples = [conversation(np.concatenate([opening, tail]).astype(np.int32), 5) for tail in tails]
    some = alike(random_records(samples, capture), slice(0, 24))
    assert stored(some, capture)[1] == [(0, 0), (0, 0), (1, 24), (1, 24)]


def test_a_store_of_the_final_hidden_alone_shares_nothing() -> None:
    capture = capture_spec((), 32, "q8", "all")
    some = random_records([record.sample for record in records()], capture)
    assert stored(some, capture)[1] == [(0, 0), (0, 0)]


def test_codes_that_were_made_apart_are_shared_as_far_as_they_are_equal() -> None:
    some = alike(records(3), noise=0.0)
    some[2] = alike(records(3), noise=0.02)[2]
    unit = encode_records("unit", some, CAPTURE)
    shared = equal_prefixes(unit, groups_of(CAPTURE)[0])
    assert shared.rows.tolist() == [0, COMMON, 0]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1, max_size=12), st.data())
def test_a_sample_has_the_longest_prefix_of_any_before_it_and_reads_through_its_owners(
    drawn: list[list[int]], data: st.DataObject
) -> None:
    # Few prefixes come up by chance: samples begin with parts of those before.
    tokens: list[np.ndarray] = []
    for ids in drawn:
        other = data.draw(st.sampled_from(tokens)) if tokens else np.zeros(0, np.int32)
        tokens.append(np.concatenate([other[: data.draw(st.integers(0, len(other)))], ids]).astype(np.int32))
    tree, layout = PrefixTree(), get_layout("q8")
    owners, rows = np.array([tree.add(key_of(ids, np.zeros(len(ids)), (), layout)) for ids in tokens]).T
    for number, ids in enumerate(tokens):
        common = [
            next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
            for other in tokens[:number]
        ]
        longest = max(common, default=0)
        # Whole blocks decide between the samples before; of equals the first is taken.
        assert longest // BLOCK * BLOCK <= rows[number] <= longest or rows[number] == 0 == longest // BLOCK
        assert not rows[number] or common[owners[number]] == rows[number]
    lengths = np.array([len(ids) for ids in tokens])
    shared = SharedRows.read(SharedRows(lengths, owners, rows).array, lengths)
    standing = np.concatenate(tokens)[shared.stands]
    for number, ids in enumerate(tokens):
        runs = shared.runs(number)
        assert np.concatenate([standing[run.start : run.stop] for run in runs]).tolist() == ids.tolist()
        assert all(one.stop < other.start for one, other in pairwise(runs))
    assert shared.unequal(np.concatenate(tokens)) is None


def test_rows_of_a_part_are_picked_in_any_order_with_what_is_kept_raw() -> None:
    pair = records()
    pair[0].aux[0, 5] = float("nan")
    unit = encode_records("unit", pair, CAPTURE)
    codec = get_codec("q8")
    whole = Encoded(unit.aux.joined().codes, unit.aux.small)
    states, rows = codec.decode(whole), np.array([241, 5, 5, 0, 79, 40])
    picked = codec.decode(rows_at(codec.small, whole, rows))
    assert torch.equal(picked.view(torch.int16), states[:, torch.from_numpy(rows)].view(torch.int16))

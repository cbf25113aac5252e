"""Which rows samples of a unit share: those of equal tokens whose states agree, before the first image."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.base import Encoded, rows_at
from hiddenstore.records import Record, Sample, sample_id
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.rows import SharedRows
from hiddenstore.segments.zarr_shared import BLOCK, prefixes, shared_rows
from hiddenstore.testing.builders import VOCAB, capture_spec, random_records
from schemas.manifest import ImageEntry

CAPTURE = capture_spec((1, 3), 32, "q8", "supervised")
COMMON = 30


def records(images: tuple[ImageEntry, ...] = ()) -> list[Record]:
    """Two conversations of 40 tokens, the first 30 of them alike, with states of their own."""
    rng = np.random.default_rng(0)
    common, samples = rng.integers(0, VOCAB, COMMON), []
    for number in range(2):
        input_ids = np.concatenate([common, (np.arange(10) + number) % VOCAB]).astype(np.int32)
        mask = (np.arange(40) >= 35).astype(np.uint8)
        spans = np.array([[1, 0, 35], [2, 35, 40]], np.int32)
        name = sample_id(input_ids, mask, images)
        samples.append(Sample(name, input_ids, mask, spans, "train", images=images))
    return random_records(samples, CAPTURE)


def with_states_of_the_first(pair: list[Record], rows: int, noise: float = 0.0) -> list[Record]:
    aux = pair[1].aux.clone()
    aux[:, :rows] = pair[0].aux[:, :rows] * (1 + noise * torch.randn(2, rows, 32, generator=torch.Generator()))
    return [pair[0], replace(pair[1], aux=aux.bfloat16())]


def shared(pair: list[Record]) -> list[int]:
    return prefixes(encode_records("unit", pair, CAPTURE), CAPTURE).rows.tolist()


@pytest.mark.parametrize(("noise", "rows"), [(0.0, COMMON), (0.02, COMMON), (0.5, 0)])
def test_equal_tokens_are_shared_where_their_states_differ_by_rounding_alone(noise: float, rows: int) -> None:
    assert shared(with_states_of_the_first(records(), COMMON, noise)) == [0, rows]


def test_states_that_depend_on_what_follows_stay_with_their_samples() -> None:
    assert shared(records()) == [0, 0]
    # As where attention reaches forward from one layer alone.
    pair = with_states_of_the_first(records(), COMMON)
    aux = pair[1].aux.clone()
    aux[1, :COMMON] = records()[1].aux[1, :COMMON]
    assert shared([pair[0], replace(pair[1], aux=aux)]) == [0, 0]


@pytest.mark.parametrize(("start", "rows"), [(20, 20), (BLOCK, BLOCK), (BLOCK - 1, 0)])
def test_a_prefix_ends_before_an_image(start: int, rows: int) -> None:
    image = ImageEntry(sha256="0" * 64, start=start, height=1, width=4)
    assert shared(with_states_of_the_first(records((image,)), COMMON)) == [0, rows]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1, max_size=12), st.data())
def test_a_sample_has_the_longest_prefix_of_any_before_it_and_reads_through_its_owners(
    drawn: list[list[int]], data: st.DataObject
) -> None:
    # Few prefixes come up by chance: samples begin with parts of those before.
    tokens = []
    for ids in drawn:
        other = data.draw(st.sampled_from(tokens)) if tokens else np.zeros(0, np.int32)
        tokens.append(np.concatenate([other[: data.draw(st.integers(0, len(other)))], ids]).astype(np.int32))
    rows = shared_rows(tokens, lambda _sample, _owner, common: common)
    for number, ids in enumerate(tokens):
        common = [
            next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
            for other in tokens[:number]
        ]
        longest = max(common, default=0)
        # Whole blocks decide between the samples before; of equals the first is taken.
        assert longest // BLOCK * BLOCK <= rows.rows[number] <= longest or rows.rows[number] == 0 == longest // BLOCK
        assert not rows.rows[number] or common[rows.owners[number]] == rows.rows[number]
    again = SharedRows.read(rows.array, rows.lengths)
    standing = np.concatenate(tokens)[rows.stands]
    for number, ids in enumerate(tokens):
        runs = again.runs(number)
        assert np.concatenate([standing[run.start : run.stop] for run in runs]).tolist() == ids.tolist()
        assert all(one.stop < other.start for one, other in pairwise(runs))
    assert again.unequal(np.concatenate(tokens)) is None


def test_rows_of_a_part_are_picked_in_any_order_with_what_is_kept_raw() -> None:
    pair = records()
    pair[0].aux[0, 5] = float("nan")
    unit = encode_records("unit", pair, CAPTURE)
    codec = get_codec("q8")
    whole = Encoded(unit.aux.joined().codes, unit.aux.small)
    states, rows = codec.decode(whole), np.array([41, 5, 5, 0, 79, 40])
    picked = codec.decode(rows_at(codec.small, whole, rows))
    assert torch.equal(picked.view(torch.int16), states[:, torch.from_numpy(rows)].view(torch.int16))

"""What `plan` and `train` quote of the drafters that were measured."""

from itertools import pairwise
from pathlib import Path

import pytest

from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.inspect.forecast import LENGTHS, NGRAM_FLOOR, Counts, expectation, room_for
from hiddenstore.segments import CONTAINERS
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.segment import write_encoded
from hiddenstore.testing.builders import capture_spec, make_samples, random_records


@pytest.mark.parametrize("codec", ["bf16", "q8", "q4", "q3"])
def test_what_a_recipe_takes_is_foretold_though_first_tokens_are_stored_as_they_are(codec: str, tmp_path: Path) -> None:
    capture, samples = capture_spec((1, 3), 512, codec), make_samples(300)
    records = random_records(samples, capture)
    files = write_encoded(LocalFilesystem(tmp_path), "u", encode_records("u", records, capture), capture)
    rows = sum(len(record.final_rows) for record in records)
    counts = Counts(len(samples), sum(s.tokens for s in samples), sum(s.supervised for s in samples), rows)
    room = room_for(counts, capture, CONTAINERS["zarr"])
    assert room.segments == 1
    assert room.size_bytes == pytest.approx(sum(file.size for file in files), rel=0.03)


def test_a_number_of_tokens_is_told_what_the_measured_sizes_on_both_sides_of_it_reached() -> None:
    (small, low, _), (large, high, _) = LENGTHS[1:3]
    line = expectation((small + large) // 2)
    assert f"{low:.2f}" in line
    assert f"{high:.2f}" in line
    assert line.count("tokens") == 2
    assert f"floor {NGRAM_FLOOR:.2f}" in line


def test_fewer_or_more_tokens_than_any_measured_are_told_of_the_nearest_size_alone() -> None:
    for tokens, (_, length, _how) in ((1, LENGTHS[0]), (10**12, LENGTHS[-1])):
        line = expectation(tokens)
        assert f"{length:.2f}" in line
        assert " and " not in line


def test_the_measured_sizes_ascend_and_so_do_their_lengths() -> None:
    assert all(small < large and low < high for (small, low, _), (large, high, _how) in pairwise(LENGTHS))

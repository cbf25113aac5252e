"""Prepared inputs: streaming, unit borders, registration."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError
from hiddenstore.inputs import UNIT_TOKENS, PreparedInput, parse_registered, registered_inputs
from hiddenstore.records import sample_id
from hiddenstore.segments.base import unit_tokens
from hiddenstore.testing.builders import HEAD, capture_spec, make_data, make_samples, memory_input, target_files
from hiddenstore.writer import create_store, pending_units, register_input
from tests.faults import FaultFilesystem


def test_samples_stream_back_as_they_were_prepared(tmp_path: Path) -> None:
    prepared = PreparedInput.open(make_data(tmp_path, samples=11))
    for found, expected in zip(prepared.samples(), make_samples(11), strict=True):
        assert found.id == expected.id == sample_id(found.input_ids, found.loss_mask)
        assert (found.split, found.source) == (expected.split, expected.source)
        for name in ("input_ids", "loss_mask", "spans"):
            one, other = getattr(found, name), getattr(expected, name)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 12), limit=st.integers(1, 200), seed=st.integers(0, 3))
def test_units_hold_consecutive_samples_up_to_the_budget(count: int, limit: int, seed: int) -> None:
    samples = make_samples(count, seed)
    prepared = memory_input(count, seed)
    units = list(PreparedInput.units(prepared, limit))
    assert [sample.id for unit in units for sample in unit.samples] == [sample.id for sample in samples]
    assert [unit.index for unit in units] == list(range(len(units)))
    assert [unit.name for unit in units] == [f"{prepared.info.digest[:12]}-{unit.index:06d}" for unit in units]
    assert all(unit.tokens <= limit or len(unit.samples) == 1 for unit in units)
    assert all(unit.tokens + following.samples[0].tokens > limit for unit, following in pairwise(units))


def test_registration_names_the_units_that_streaming_gives(tmp_path: Path) -> None:
    prepared = PreparedInput.open(make_data(tmp_path, samples=9))
    for limit in (1, 50, 64, 10_000):
        table = parse_registered(prepared.registration(limit), prepared.info.digest, "x")
        expected = [(s.id, unit.name, s.tokens, s.split) for unit in prepared.units(limit) for s in unit.samples]
        assert list(zip(*(table[name].to_pylist() for name in table.column_names), strict=True)) == expected


def test_the_token_budget_shrinks_where_a_unit_would_exceed_its_bytes() -> None:
    assert unit_tokens(capture_spec(width=32)) == UNIT_TOKENS
    wide = unit_tokens(capture_spec(layers=(1, 3, 5), width=8192, codec="bf16"))
    assert wide == 512_000_000 * 8 // (4 * 16 * 8192)
    assert unit_tokens(capture_spec(layers=(1, 3, 5), width=8192, codec="q8")) > wide


def test_registering_twice_changes_nothing_and_pending_units_shrink(tmp_path: Path) -> None:
    fs = FaultFilesystem()
    store = create_store(fs, capture_spec(), HEAD, "safe", target_files())
    prepared = memory_input(6)
    digest = register_input(store, prepared)
    before = fs.disk.files()
    assert register_input(store, prepared) == digest
    assert fs.disk.files() == before
    assert list(pending_units(store, digest)) == [unit.name for unit in prepared.units()]
    registered = registered_inputs(fs)[digest]
    assert (registered.samples, registered.tokens) == (6, prepared.info.tokens)
    assert registered.units == list(pending_units(store, digest))


def test_the_same_input_cut_otherwise_is_a_conflict() -> None:
    store = create_store(FaultFilesystem(), capture_spec(), HEAD, "safe", target_files())
    prepared = memory_input(6)
    register_input(store, prepared)
    other = PreparedInput.__new__(PreparedInput)
    other.__dict__.update(prepared.__dict__)
    other._batches = prepared._batches  # type: ignore[method-assign]
    with pytest.raises(ConflictError) as error:
        register_input(store, other)
    assert error.value.kind == "input-units-differ"


def test_a_missing_folder_says_how_to_prepare(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"data\.json is missing") as error:
        PreparedInput.open(tmp_path / "nowhere")
    assert "hiddenstore prepare" in (error.value.hint or "")


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "other"])
def test_a_damaged_part_is_refused_before_its_first_row(tmp_path: Path, damage: str) -> None:
    folder = make_data(tmp_path, samples=6)
    part = folder / "part-00001.parquet"
    data = bytearray(part.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    if damage == "cut":
        data = data[:-1]
    part.write_bytes(data)
    if damage == "delete":
        part.unlink()
    if damage == "other":
        (folder / "data.json").write_bytes((folder / "data.json").read_bytes().replace(b'"samples":6', b'"samples":7'))
    with pytest.raises(CorruptionError) as error:
        list(PreparedInput.open(folder).samples())
    assert error.value.kind in ("file-corrupt", "document-corrupt")
    assert error.value.hint == "hiddenstore prepare INPUT -o DATA --target T"
    assert (damage == "delete") == error.value.message.endswith("found no file")


def test_a_part_that_was_replaced_since_it_was_verified_is_refused(tmp_path: Path) -> None:
    folder, other = make_data(tmp_path, samples=9), make_data(tmp_path / "other", samples=9, seed=1)
    prepared = PreparedInput.open(folder)
    assert len(list(prepared.samples())) == 9
    part = prepared.info.files[0].path
    (other / part).replace(folder / part)
    with pytest.raises(CorruptionError, match="expected sha256"):
        next(prepared.samples())


def test_data_that_names_another_digest_is_refused_at_registration() -> None:
    prepared = memory_input(3)
    prepared.info = prepared.info.model_copy(update={"digest": "0" * 64})
    with pytest.raises(CorruptionError) as error:
        prepared.registration(64)
    assert error.value.kind == "file-corrupt"


def test_a_unit_of_no_tokens_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError):
        list(PreparedInput.units(memory_input(3), 0))


def test_only_one_batch_of_rows_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row batches are asked for one by one, and a unit comes out before the next part is opened."""
    folder = make_data(tmp_path, samples=12)
    opened: list[str] = []
    original = pq.ParquetFile.__init__

    def watch(self: pq.ParquetFile, source: Path, **options: object) -> None:
        opened.append(Path(source).name)
        original(self, source, **options)

    monkeypatch.setattr(pq.ParquetFile, "__init__", watch)
    units = PreparedInput.open(folder).units(1)
    next(units)
    assert opened == ["part-00000.parquet"]
    units.close()

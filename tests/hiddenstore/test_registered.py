"""What a store remembers of an input: rows, and a digest that sees every damaged byte."""

import hashlib
import io

import numpy as np
import pyarrow.parquet as pq
import pytest

from hiddenstore.errors import CorruptionError
from hiddenstore.files import layout
from hiddenstore.inputs import RegisteredInput, parse_registered
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store, memory_input
from hiddenstore.verify import verify
from hiddenstore.writer import register_input
from tests.faults import FaultFilesystem

PREPARED = memory_input(3)
DATA = PREPARED.registration(64)


def without_file_digest() -> bytes:
    """The same rows in a file that names the digest of its rows alone, as the format allows."""
    table = pq.read_table(io.BytesIO(DATA))
    rows = "".join("\t".join(map(str, row.values())) + "\n" for row in table.to_pylist())
    sink = io.BytesIO()
    named = {"hiddenstore.sha256": hashlib.sha256(rows.encode()).hexdigest()}
    pq.write_table(table.replace_schema_metadata(named), sink)
    return sink.getvalue()


def test_a_flipped_bit_in_any_byte_of_the_file_is_an_error_that_names_it() -> None:
    for place in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptionError, match="inputs/one is damaged") as caught:
            parse_registered(bytes(damaged), PREPARED.info.digest, "/s/inputs/one")
        assert caught.value.hint == "hiddenstore repair /s"


def test_the_file_digest_is_that_of_the_file_with_zeros_in_its_place() -> None:
    named = pq.read_metadata(io.BytesIO(DATA)).metadata[b"hiddenstore.sha256"]
    digest = named[-64:]
    assert DATA.count(named) == 1
    assert hashlib.sha256(DATA.replace(digest, b"0" * 64)).hexdigest().encode() == digest


def test_a_file_without_its_own_digest_reads_and_registers_again() -> None:
    data = without_file_digest()
    rows = parse_registered(DATA, PREPARED.info.digest, "x")
    assert parse_registered(data, PREPARED.info.digest, "x").equals(rows)
    fs = FaultFilesystem()
    store = make_store(fs, samples=3)
    path = layout.input_path(next(iter(store.inputs())))
    fs.disk.overwrite(f"{fs.root}/{path}", data)
    assert register_input(Store.open(fs), memory_input(3)) == PREPARED.info.digest
    assert fs.read(path) == data


def test_a_file_whose_rows_share_their_bytes_is_damage_before_they_are_memory() -> None:
    sink, row = io.BytesIO(), pq.read_table(io.BytesIO(DATA)).slice(0, 1)
    pq.write_table(row.take(np.zeros(1_000_000, np.int64)), sink)
    fs = FaultFilesystem()
    digest = next(iter(make_store(fs, samples=3).inputs()))
    fs.disk.overwrite(f"{fs.root}/{layout.input_path(digest)}", sink.getvalue())
    with pytest.raises(CorruptionError, match="its rows take more than 32 times its size"):
        _ = RegisteredInput(fs, digest).units


def test_verify_notes_which_input_is_gone_and_registering_brings_it_back() -> None:
    fs = FaultFilesystem()
    store = make_store(fs, samples=3)
    (digest,) = store.inputs()
    path = layout.input_path(digest)
    kept = fs.read(path)
    fs.remove_tree(path)
    report = verify(fs)
    assert report.ok
    assert [(note.kind, note.path) for note in report.notes] == [("input-missing", path)]
    register_input(store, memory_input(3))
    assert fs.read(path) == kept
    assert verify(fs).notes == []


def holding(data: bytes, digest: str = PREPARED.info.digest) -> RegisteredInput:
    fs = FaultFilesystem()
    fs.put_if_absent(layout.input_path(digest), data)
    return RegisteredInput(fs, digest)


def test_the_units_of_an_input_are_read_without_its_ids_and_are_those_of_its_rows() -> None:
    alone = holding(DATA)
    assert alone.units == list(dict.fromkeys(parse_registered(DATA, PREPARED.info.digest, "x")["unit"].to_pylist()))
    assert "table" not in vars(alone)
    assert holding(without_file_digest()).units == alone.units


def test_units_are_not_taken_from_a_file_with_a_flipped_bit_or_of_another_input() -> None:
    for place in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptionError, match=r"\.parquet is damaged"):
            _ = holding(bytes(damaged)).units
    with pytest.raises(CorruptionError, match="it holds input"):
        _ = holding(DATA, "ab" * 32).units

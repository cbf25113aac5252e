"""The shard writer and reader against each other, against stock Zarr readers and against damage."""

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstore.errors import CorruptionError, FormatError
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.segments.files import HashedFile
from hiddenstore.segments.zarr_arrays import (
    ArraySpec,
    ShardReader,
    parse_metadata,
    read_small,
    write_array,
    write_group,
    write_sharded,
)
from tests.hiddenstore.test_digests import tree_of


def random_values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def shard_spec(rows: int, width: int, chunk_rows: int, dtype: str = "uint16", compressed: bool = False) -> ArraySpec:
    return ArraySpec((rows, width), dtype, ("token", "channel"), chunk_rows, compressed)


def open_shard(fs: LocalFilesystem, folder: str = "g/x") -> ShardReader:
    return ShardReader(fs, folder, parse_metadata(fs.read(f"{folder}/zarr.json"), folder))


def stock_readers(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The array as zarr-python, zarrs and tensorstore read it."""
    found = {"zarr-python": np.asarray(zarr.open_group(folder, mode="r")[name][...])}
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        found["zarrs"] = np.asarray(zarr.open_group(folder, mode="r")[name][...])
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / name)}}
    found["tensorstore"] = tensorstore.open(spec, read=True, open=True).result().read().result()
    return found


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("rows", "chunk_rows"), [(0, 4), (1, 1), (1, 4), (4, 4), (9, 4), (130, 64)])
def test_stock_readers_open_every_shard_bit_exactly(
    tmp_path: Path, rows: int, chunk_rows: int, compressed: bool
) -> None:
    fs = LocalFilesystem(tmp_path)
    write_group(fs, "g", {"unit": "u"})
    for dtype in ("uint16", "int8"):
        values = random_values((rows, 7), dtype)
        write_array(fs, "g", dtype, shard_spec(rows, 7, chunk_rows, dtype, compressed and dtype == "uint16"), values)
        for reader, found in stock_readers(tmp_path / "g", dtype).items():
            assert found.dtype == values.dtype, reader
            assert np.array_equal(found, values), reader


@pytest.mark.parametrize("shape", [(0,), (5,), (0, 4), (3, 2), (2, 0)])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint16"])
def test_stock_readers_open_every_small_array_bit_exactly(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    fs = LocalFilesystem(tmp_path)
    write_group(fs, "g", {})
    values = random_values(shape, dtype)
    spec = ArraySpec(shape, dtype, tuple("ab"[: len(shape)]))
    write_array(fs, "g", "x", spec, values)
    assert np.array_equal(read_small(fs, "g/x", spec), values)
    for reader, found in stock_readers(tmp_path / "g", "x").items():
        assert np.array_equal(found, values), reader


@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 9),
    chunk_rows=st.integers(1, 17),
    compressed=st.booleans(),
    cut=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
@settings(max_examples=60, deadline=None)
def test_any_rows_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    width: int,
    chunk_rows: int,
    compressed: bool,
    cut: tuple[int, int],
) -> None:
    fs = LocalFilesystem(tmp_path_factory.mktemp("shard"))
    values = random_values((rows, width), "uint16", seed=rows)
    spec = shard_spec(rows, width, chunk_rows, "uint16", compressed)
    write_array(fs, "g", "x", spec, values)
    stored = parse_metadata(fs.read("g/x/zarr.json"), "x")
    assert replace(stored, attributes={}) == spec
    low, high = sorted(min(place, rows) for place in cut)
    reader = open_shard(fs)
    out = np.zeros((high - low, width), dtype=np.uint16)
    reader.read_rows(low, high, out)
    assert np.array_equal(out, values[low:high])
    pieces = [(start, piece.copy()) for start, piece in reader.blocks(low, high)]
    assert [start for start, _ in pieces] == np.cumsum([0, *(len(piece) for _, piece in pieces)])[:-1].tolist()
    assert np.array_equal(np.concatenate([np.zeros((0, width), np.uint16), *(p for _, p in pieces)]), values[low:high])


def test_reads_longer_than_one_request_come_back_whole(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    values = random_values((1000, 4096), "uint16")
    spec = shard_spec(1000, 4096, 64)
    write_array(fs, "g", "x", spec, values)
    reader = open_shard(fs)
    out = np.empty((900, 4096), dtype=np.uint16)
    reader.read_rows(50, 950, out)
    assert np.array_equal(out, values[50:950])
    assert np.array_equal(np.concatenate([piece.copy() for _, piece in reader.blocks(50, 950)]), out)


def test_bytes_do_not_depend_on_how_the_rows_arrive(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    values = random_values((50, 8), "uint16")
    digests = set()
    for name, pieces in {
        "whole": [values],
        "single": np.split(values, 50),
        "odd": np.split(values, [3, 20, 21]),
    }.items():
        spec = shard_spec(50, 8, 8)
        entries = write_sharded(fs, "g", name, spec, pieces)
        digests.add(tuple((entry.size, entry.digest) for entry in entries))
    assert len(digests) == 1


def test_entries_name_size_and_digest_of_what_is_on_disk(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    entries = write_array(fs, "g", "x", shard_spec(10, 4, 4), random_values((10, 4), "uint16"))
    assert {entry.path for entry in entries} == {"x/zarr.json", "x/c/0/0"}
    for entry in entries:
        data = (tmp_path / "g" / entry.path).read_bytes()
        whole = entry.path == "x/c/0/0"
        assert (entry.size, entry.digest) == (len(data), tree_of(data) if whole else hashlib.sha256(data).hexdigest())
        assert (entry.tree is not None) == whole


@pytest.mark.parametrize("width", [8192, 4096, 2880, 8256])
def test_a_digest_is_that_of_the_file_where_chunks_end_at_whole_pieces(tmp_path: Path, width: int) -> None:
    fs, values = LocalFilesystem(tmp_path), random_values((65 + 128, width), "uint16")
    entries = write_sharded(fs, "g", "x", shard_spec(193, width, 64), np.split(values, [3, 70, 128]))
    for entry in entries:
        data = (tmp_path / "g" / entry.path).read_bytes()
        assert entry.size == len(data)
        assert entry.tree == tree_of(data) if entry.tree else entry.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("sizes", [[5_000_000, 3, 70_000, 1 << 19], [300] * 4000, [10] * 5, []])
def test_a_hashed_file_holds_its_pieces_and_knows_their_digest(tmp_path: Path, sizes: list[int]) -> None:
    pieces = [random_values((size,), "uint8", seed).tobytes() for seed, size in enumerate(sizes)]
    file = HashedFile(LocalFilesystem(tmp_path), "g", "x")
    for piece in pieces:
        file.write(piece)
    entry, whole = file.close(), b"".join(pieces)
    assert (tmp_path / "g/x").read_bytes() == whole
    assert (entry.size, entry.tree) == (len(whole), tree_of(whole))


def test_a_part_of_another_type_or_width_is_refused(tmp_path: Path) -> None:
    for wrong in (random_values((3, 4), "int8"), random_values((3, 5), "uint16")):
        with pytest.raises(ValueError, match=r"x: expected uint16 \[n, 4\]"):
            write_sharded(LocalFilesystem(tmp_path), "g", "x", shard_spec(3, 4, 4), [wrong])


def test_a_shard_with_missing_rows_is_refused_and_leaves_no_data_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="10 rows announced, 3 written"):
        write_sharded(LocalFilesystem(tmp_path), "g", "x", shard_spec(10, 4, 4), [random_values((3, 4), "uint16")])
    assert not (tmp_path / "g/x/c/0/0").exists()


@pytest.mark.parametrize("compressed", [False, True])
def test_every_flipped_byte_of_a_shard_is_exact_data_or_an_error_naming_the_file(
    tmp_path: Path, compressed: bool
) -> None:
    fs = LocalFilesystem(tmp_path)
    values = random_values((10, 4), "uint16")
    spec = shard_spec(10, 4, 4, "uint16", compressed)
    write_array(fs, "g", "x", spec, values)
    path = tmp_path / "g/x/c/0/0"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(CorruptionError, match="g/x/c/0/0") as error:
            open_shard(LocalFilesystem(tmp_path)).read_rows(0, 10, np.empty((10, 4), np.uint16))
        is_index = place >= len(whole) - spec.index_bytes
        assert error.value.kind == ("shard-index" if is_index else "chunk-corrupt")
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptionError, match="g/x/c/0/0"):
            open_shard(LocalFilesystem(tmp_path)).read_rows(0, 10, np.empty((10, 4), np.uint16))


def test_damage_in_one_chunk_leaves_the_other_rows_readable(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    values = random_values((12, 4), "uint16")
    spec = shard_spec(12, 4, 4)
    write_array(fs, "g", "x", spec, values)
    path = tmp_path / "g/x/c/0/0"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    reader = open_shard(LocalFilesystem(tmp_path))
    out = np.empty((4, 4), np.uint16)
    for start in (0, 8):
        reader.read_rows(start, start + 4, out)
        assert np.array_equal(out, values[start : start + 4])
    with pytest.raises(CorruptionError, match="chunk 1") as error:
        reader.read_rows(5, 6, out[:1])
    assert error.value.kind == "chunk-corrupt"
    assert error.value.path == "g/x/c/0/0"


def test_a_whole_shard_in_the_place_of_another_is_an_error(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    spec = shard_spec(12, 4, 4)
    for name, seed in (("x", 0), ("y", 1)):
        write_array(fs, "g", name, spec, random_values((12, 4), "uint16", seed))
    (tmp_path / "g/x/c/0/0").write_bytes((tmp_path / "g/y/c/0/0").read_bytes())
    with pytest.raises(CorruptionError, match=r"by zarr\.json"):
        open_shard(fs).read_rows(0, 4, np.empty((4, 4), np.uint16))


def test_a_shard_whose_metadata_names_no_checksums_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="checksum of every chunk") as error:
        ShardReader(LocalFilesystem(tmp_path), "g/x", shard_spec(12, 4, 4))
    assert error.value.kind == "array-invalid"


def test_a_hostile_blosc_header_is_an_error_and_not_a_buffer_overrun(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    spec = shard_spec(4, 64, 4, "uint16", compressed=True)
    write_array(fs, "g", "x", spec, np.zeros((4, 64), np.uint16))
    path = tmp_path / "g/x/c/0/0"
    data = bytearray(path.read_bytes())
    data[4:8] = (1 << 30).to_bytes(4, "little")
    body = len(data) - 4 - spec.index_bytes
    crc = google_crc32c.value(bytes(data[:body]))
    data[body : body + 4] = crc.to_bytes(4, "little")
    path.write_bytes(data)
    hostile = replace(spec, attributes={"chunk_crc32c": [crc]})
    with pytest.raises(CorruptionError, match="blosc header"):
        ShardReader(fs, "g/x", hostile).read_rows(0, 4, np.empty((4, 64), np.uint16))


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("shape", [10, -4]),
        ("shape", [True, 4]),
        ("data_type", "float64x"),
        ("fill_value", 1),
        ("codecs", []),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [4, 4]}}),
        ("dimension_names", None),
        ("zarr_format", 2),
    ],
)
def test_metadata_that_format_1_does_not_have_is_refused(member: str, value: object) -> None:
    document = shard_spec(10, 4, 4).metadata()
    document[member] = value
    with pytest.raises(FormatError, match=r"x/zarr\.json") as error:
        parse_metadata(json.dumps(document).encode(), "x/zarr.json")
    assert error.value.kind == "array-invalid"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"codecs":{}}'])
def test_text_that_is_not_array_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="not the metadata"):
        parse_metadata(data, "x/zarr.json")


def test_many_threads_may_read_one_shard(tmp_path: Path) -> None:
    fs = LocalFilesystem(tmp_path)
    values = random_values((300, 16), "uint16")
    spec = shard_spec(300, 16, 7, "uint16", compressed=True)
    write_array(fs, "g", "x", spec, values)
    reader = open_shard(fs)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            low, high = sorted(rng.integers(0, 301, 2).tolist())
            out = np.empty((high - low, 16), np.uint16)
            reader.read_rows(low, high, out)
            if not np.array_equal(out, values[low:high]):
                wrong.append(low)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
